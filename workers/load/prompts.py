"""What is asked: random token ids, texts written for this project, or a file of conversations.

No two prompts of a run are equal, and which prompt has which index depends on nothing but the run's random stream:
compared cells ask the same questions.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

# Lower ids are padding, start and end tokens in most vocabularies.
FIRST_ORDINARY_ID = 3
# Draws of one random prompt before its vocabulary or length is called too small for unique prompts.
MAX_DRAWS = 100

WRITTEN_FOLDER = Path(__file__).parent.parent / "prompts"
# A line of its own between two texts of a file in ``WRITTEN_FOLDER``.
SEPARATOR = "\n---\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt, as ids or as text; ``num_tokens`` is ``None`` where only the server's tokenizer knows."""

    token_ids: tuple[int, ...] | None = None
    text: str | None = None
    num_tokens: int | None = None


def random_prompts(
    lengths: Sequence[int],
    *,
    stream: np.random.SeedSequence,
    vocab_size: int | None,
    shared_prefix_tokens: int = 0,
    avoid: Iterable[tuple[int, ...]] = (),
) -> list[Prompt]:
    """Draw one prompt of ordinary token ids (3 to ``vocab_size`` - 1) per length; sent as ids, lengths are exact.

    Prompt i comes from its own child of ``stream``, so it does not depend on the prompts before it (except to
    differ from them, and from those in ``avoid``). The first ``shared_prefix_tokens`` of all prompts are the same.

    Raises:
        ValueError: unknown or empty vocabulary, a length within the shared prefix, or too few possible prompts.
    """
    if vocab_size is None or vocab_size <= FIRST_ORDINARY_ID:
        raise ValueError(
            f"workload.prompts=random needs a model with a known vocabulary of more than {FIRST_ORDINARY_ID} ids, "
            f"got vocab_size={vocab_size}"
        )
    if lengths and min(lengths) <= shared_prefix_tokens:
        raise ValueError(
            f"workload.shared_prefix_tokens must be < every prompt length, got {shared_prefix_tokens} "
            f"and a prompt of {min(lengths)} tokens"
        )
    prefix_stream, *streams = stream.spawn(1 + len(lengths))
    prefix = _ids(np.random.default_rng(prefix_stream), count=shared_prefix_tokens, vocab_size=vocab_size)
    seen = set(avoid)
    return [
        _random_prompt(
            length, prefix=prefix, rng=np.random.default_rng(child), vocab_size=vocab_size, seen=seen
        )
        for length, child in zip(lengths, streams, strict=True)
    ]


def _random_prompt(
    length: int,
    *,
    prefix: tuple[int, ...],
    rng: np.random.Generator,
    vocab_size: int,
    seen: set[tuple[int, ...]],
) -> Prompt:
    for _ in range(MAX_DRAWS):
        ids = prefix + _ids(rng, count=length - len(prefix), vocab_size=vocab_size)
        if ids not in seen:
            seen.add(ids)
            return Prompt(token_ids=ids, num_tokens=length)
    raise ValueError(
        f"workload.input: no unused prompt of {length} tokens after {MAX_DRAWS} draws "
        f"(vocab_size={vocab_size}, shared_prefix_tokens={len(prefix)}, {len(seen)} prompts used); use longer prompts"
    )


def _ids(rng: np.random.Generator, *, count: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(FIRST_ORDINARY_ID, vocab_size, size=count).tolist())


def written_prompts(count: int, *, stream: np.random.SeedSequence) -> list[Prompt]:
    """Combine texts of this project into ``count`` prompts: a reference line, a situation, a question.

    Questions and situations are taken in shuffled rounds, so that each is used equally often. The reference, a
    nine-digit number, comes first and differs in every prompt, so that no two prompts begin alike.
    """
    reference_rng, question_rng, situation_rng = map(np.random.default_rng, stream.spawn(3))
    questions = _shuffled_rounds(written_texts("questions.txt"), count=count, rng=question_rng)
    situations = _shuffled_rounds(written_texts("situations.txt"), count=count, rng=situation_rng)
    first_reference = int(reference_rng.integers(10**8, 10**9))
    return [
        Prompt(text=f"{first_reference + index}: {situation}\n\n{question}")
        for index, (situation, question) in enumerate(zip(situations, questions, strict=True))
    ]


def written_texts(name: str) -> list[str]:
    """Read the texts of one file in ``workers/prompts``."""
    return [text.strip() for text in (WRITTEN_FOLDER / name).read_text(encoding="utf-8").split(SEPARATOR)]


def file_prompts(path: Path, *, count: int, stream: np.random.SeedSequence) -> list[Prompt]:
    """Take ``count`` prompts of a file in shuffled rounds.

    The first round is the file's own text, unchanged; a prompt of round k > 1 is led by the line ``Variant k.``,
    so that none is asked twice in the same words. The texts are the file's, so repeats share them.
    """
    texts = list(dict.fromkeys(read_prompts(path)))
    chosen = _shuffled_rounds(texts, count=count, rng=np.random.default_rng(stream))
    rounds = [1 + i // len(texts) for i in range(count)]
    return [
        Prompt(text=text if turn == 1 else f"Variant {turn}.\n{text}")
        for turn, text in zip(rounds, chosen, strict=True)
    ]


def _shuffled_rounds(texts: Sequence[str], *, count: int, rng: np.random.Generator) -> list[str]:
    chosen: list[str] = []
    while len(chosen) < count:
        chosen += [texts[place] for place in rng.permutation(len(texts))]
    return chosen[:count]


def read_prompts(path: Path) -> list[str]:
    """Read the first user turn of every row of a prompt file, in the file's order.

    The file is a JSON array or JSON lines; the kind of a row shows in its keys: ``conversations`` (ShareGPT-like:
    ``from`` "human" or "user", ``value``), ``conversation`` (LMSYS-like: ``role`` "user", ``content``), ``turns``
    (MT-bench: texts) or ``instruction`` (with the ``input`` of its first instance, if it has one). A conversation
    in which no user says anything is passed over.

    Raises:
        ValueError: no such file, no JSON, a row of another kind (its keys are named), or no prompt at all.
    """
    if not path.is_file():
        raise ValueError(f"workload.path: no such file: {path}")
    texts = [_first_turn(row, at=at) for at, row in _rows(path)]
    prompts = [text for text in texts if text]
    if not prompts:
        raise ValueError(f"{path}: no row holds a prompt ({len(texts)} rows)")
    return prompts


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    text = path.read_text(encoding="utf-8-sig")
    if text.lstrip().startswith("["):
        for place, row in enumerate(_json(text, at=str(path))):
            yield f"{path}: row {place}", row
        return
    # Not str.splitlines: JSON strings may hold other line separators.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", _json(line, at=f"{path}:{number}")


def _json(text: str, *, at: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at}: not JSON: {error}") from error


def _first_turn(row: Any, *, at: str) -> str:
    kinds = [kind for kind in _KINDS if isinstance(row, dict) and kind in row]
    if not kinds:
        found = (
            f"the keys {', '.join(map(repr, row))}" if isinstance(row, dict) else f"a {type(row).__name__}"
        )
        raise ValueError(f"{at}: expected a row with one of the keys {', '.join(_KINDS)}, got {found}")
    kind = kinds[0]
    try:
        return _KINDS[kind](row).strip()
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(f"{at}: {kind!r} is not built as expected: {json.dumps(row[kind])[:120]}") from error


def _sharegpt(row: Mapping[str, Any]) -> str:
    return next(
        (str(turn["value"]) for turn in row["conversations"] if turn["from"] in {"human", "user"}), ""
    )


def _lmsys(row: Mapping[str, Any]) -> str:
    return next((str(turn["content"]) for turn in row["conversation"] if turn["role"] == "user"), "")


def _mt_bench(row: Mapping[str, Any]) -> str:
    turn: str = row["turns"][0]
    return turn


def _instruction(row: Mapping[str, Any]) -> str:
    instances = row.get("instances") or [{}]
    given = row.get("input") or instances[0].get("input") or ""
    return f"{row['instruction']}\n\n{given}"


_KINDS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "conversations": _sharegpt,
    "conversation": _lmsys,
    "turns": _mt_bench,
    "instruction": _instruction,
}
