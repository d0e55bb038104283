"""Output sanity: a few fixed prompts that every launch answers before its load, judged by likelihood.

A server can start, answer with HTTP 200, report every setting as asked, and write garbage. Labels cannot show that; its
text can. Scores of a *prompt* cannot either: they come from prefill, which never reads the stored KV cache. So the
probes are answered greedily, and everything but the first generated token comes through decode, over the KV cache as
it is really stored. The prompts ask to repeat what they say, which no model can do from its weights alone.

With a reference (the answers of the same weights with an unquantised KV cache) the comparison is teacher-forced: up to
and including the first token that differs, both engines have the same text before them, so the logprob that this launch
gives the reference's next token is a likelihood through the decode path. The loss is the mean difference in nats per
token. Where the token is not among the most likely ``TOP``, the last of these stands for it, so a loss is never
exaggerated. Text itself may differ: other kernels break near-ties otherwise, and cost next to nothing here.

Without a reference (see :func:`judge_answers`) the known continuations of the prompts stand in for it.

``python -m workers.probes record --url http://127.0.0.1:8000 --model NAME --folder MODEL_FOLDER --output FILE``
records a reference from a server that runs with an unquantised KV cache.
"""

import argparse
import asyncio
import hashlib
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from conf.schema import Config
from workers.cache import read_json, write_json
from workers.engines import UNQUANTISED
from workers.families import family
from workers.http_call import Answer, Target, call
from workers.model import PreparedModel, folder_sha256

VERSION = 1  # of the prompts and of how they are asked; references of another version do not count
NUM_TOKENS = 16
TOP = 5  # the most that every engine version returns
TIMEOUT_S = 120.0
SHIPPED = Path(__file__).with_name("references")
HTTP_OK = 200

# Bounds of the judgement without a reference. A working model, of any size, stays far inside of them.
MIN_MEAN_LOGPROB = -3.0  # of greedy tokens, nats
MAX_REPEATED_SHARE = 0.9  # of an answer's tokens that are one and the same
MAX_UNPRINTABLE_SHARE = 0.2  # of an answer's characters
ENOUGH_KNOWN = 2  # continuations, of three


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A prompt, and the words that any model continues it with."""

    prompt: str
    expected: str


PROBES = (
    Probe(
        prompt="One two three four five six seven eight nine ten. One two three four",
        expected="five six",
    ),
    Probe(
        prompt="The small red boat crossed the quiet lake at dawn. The small red boat crossed",
        expected="the quiet",
    ),
    Probe(
        prompt="The password is green river stone. Again, the password is green",
        expected="river stone",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A greedy answer: its text, its tokens, their logprobs (nats), and the most likely tokens at each place."""

    text: str
    tokens: tuple[str, ...]
    logprobs: tuple[float, ...]
    top: tuple[Mapping[str, float], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """What the same weights answered with an unquantised KV cache. ``source`` says where it was read."""

    replies: tuple[Reply, ...]
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Teacher-forced likelihood against a reference.

    Attributes:
        lost_nats: mean over the scored tokens of (logprob in the reference - logprob here).
        scored_tokens: tokens of the reference that both engines saw in the same context, through decode.
        agreement: leading tokens that are the reference's, by probe.
    """

    lost_nats: float
    scored_tokens: int
    agreement: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The answers of one launch; ``unknown`` says why there are none."""

    replies: tuple[Reply, ...] = ()
    reference: Reference | None = None
    unquantised: bool = False
    unknown: str | None = None

    @property
    def comparison(self) -> Comparison | None:
        """None without a reference."""
        return compare(self.replies, self.reference.replies) if self.replies and self.reference else None

    def metrics(self) -> dict[str, float | None]:
        """The numbers of ``result.json``; None = not known."""
        compared, reference = self.comparison, self.reference
        return {
            "probe/mean_logprob": decoded_mean(self.replies),
            "probe/reference_logprob": decoded_mean(reference.replies) if reference else None,
            "probe/lost_nats": compared.lost_nats if compared else None,
            "probe/agreement_tokens": sum(compared.agreement) / len(compared.agreement) if compared else None,
        }

    def to_json(self) -> str:
        """``probes.json``: everything that was asked, answered and compared."""
        compared, reference = self.comparison, self.reference
        value = {
            "version": VERSION,
            "unknown": self.unknown,
            "unquantised": self.unquantised,
            "prompts": [probe.prompt for probe in PROBES],
            "replies": [asdict(reply) for reply in self.replies],
            "reference": None if reference is None else asdict(reference),
            "comparison": None if compared is None else asdict(compared),
            "metrics": self.metrics(),
        }
        return json.dumps(value, indent=1, allow_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """``problem``: the output is not that of a working model. ``unknown``: nobody can say. Both None: it is."""

    problem: str | None = None
    unknown: str | None = None


# --- judging, pure ---


def compare(replies: Sequence[Reply], reference: Sequence[Reply]) -> Comparison:
    """See :class:`Comparison`; probe by probe, tokens pooled."""
    agreement, losses = [], []
    for reply, known in zip(replies, reference, strict=True):
        same = _agreement(reply, known)
        agreement.append(same)
        # The first token comes from prefill. It is scored only where it differs: then nothing after it can be.
        last = min(same, len(known.tokens) - 1, len(reply.tokens) - 1)
        places = range(1, last + 1) if same else range(1)
        losses += [known.logprobs[place] - _logprob(reply, place, known.tokens[place]) for place in places]
    mean = sum(losses) / len(losses) if losses else 0.0
    return Comparison(lost_nats=mean, scored_tokens=len(losses), agreement=tuple(agreement))


def _agreement(reply: Reply, known: Reply) -> int:
    pairs = list(zip(reply.tokens, known.tokens, strict=False))
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(pairs))


def _logprob(reply: Reply, place: int, token: str) -> float:
    """Of ``token`` at a place; the smallest that was returned, where it was not: never too pessimistic."""
    if reply.tokens[place] == token:
        return reply.logprobs[place]
    top = reply.top[place]
    return top.get(token, min([*top.values(), reply.logprobs[place]]))


def decoded_mean(replies: Sequence[Reply]) -> float | None:
    """Mean logprob of the tokens that came through decode: all but each answer's first."""
    values = [value for reply in replies for value in reply.logprobs[1:]]
    return sum(values) / len(values) if values else None


def judge_answers(probed: Probed, *, limit_nats: float) -> Judgement:
    """Whether this is the output of a working model.

    With a reference: the loss must not exceed ``limit_nats``. Without one, a launch passes when most of the known
    continuations came back and no answer is degenerate; none of them is garbage; something between counts for an
    unquantised KV cache (a weak model) and is undecided for a quantised one. An infinite limit judges nothing.
    """
    if limit_nats == math.inf:
        return Judgement()
    if probed.unknown is not None:
        return Judgement(unknown=f"output: {probed.unknown}")
    compared = probed.comparison
    if compared is None:
        return _without_reference(probed)
    if compared.lost_nats <= limit_nats:
        return Judgement()
    assert probed.reference is not None  # noqa: S101 - there is a comparison
    return Judgement(
        problem=(
            f"probes lose {compared.lost_nats:.2f} nats per token against the reference of this model "
            f"(limit {limit_nats:g}, {compared.scored_tokens} tokens scored, agreement "
            f"{'/'.join(str(count) for count in compared.agreement)} of {NUM_TOKENS} tokens); "
            f"{_shown(probed.replies)}; expected {_shown(probed.reference.replies)}"
        )
    )


def _without_reference(probed: Probed) -> Judgement:
    degenerate = degeneration(probed.replies)
    known = sum(continues(reply, probe) for reply, probe in zip(probed.replies, PROBES, strict=True))
    if degenerate is not None or known == 0:
        what = degenerate or f"none of {len(PROBES)} probes was continued as any model does"
        return Judgement(problem=f"{what}; {_shown(probed.replies)}")
    if known >= ENOUGH_KNOWN or probed.unquantised:
        return Judgement()
    return Judgement(
        unknown=(
            f"output: no reference of this model, and only {known} of {len(PROBES)} probes continued as expected; "
            f"run one cell with kv.dtype=auto first: its answers become the reference; {_shown(probed.replies)}"
        )
    )


def degeneration(replies: Sequence[Reply]) -> str | None:
    """What no working model does on these prompts, or None."""
    mean = decoded_mean(replies)
    if mean is not None and mean < MIN_MEAN_LOGPROB:
        return f"greedy tokens have a mean logprob of {mean:.2f} nats (a working model: over {MIN_MEAN_LOGPROB:g})"
    repeated = [max(Counter(reply.tokens).values()) / len(reply.tokens) for reply in replies if reply.tokens]
    if repeated and min(repeated) > MAX_REPEATED_SHARE:
        return "every answer repeats a single token"
    text = "".join(reply.text for reply in replies)
    odd = sum(
        not (char.isprintable() or char.isspace()) or char == "\N{REPLACEMENT CHARACTER}" for char in text
    )
    if text and odd / len(text) > MAX_UNPRINTABLE_SHARE:
        return f"{odd / len(text):.0%} of the characters cannot be printed"
    return None


def continues(reply: Reply, probe: Probe) -> bool:
    """Whether an answer starts with the expected words, whatever their case and the marks between them."""
    expected = _words(probe.expected)
    return _words(reply.text)[: len(expected)] == expected


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.casefold())


def _shown(replies: Sequence[Reply]) -> str:
    return " | ".join(repr(reply.text[:40]) for reply in replies)


# --- references ---


def reference_key(config: Config, model: PreparedModel) -> str:
    """What a reference belongs to: the hash of the weights, or of the name where the engine fetches them."""
    if model.sha256 is not None:
        return model.sha256
    return hashlib.sha256(f"hub {model.path}@{config.model.revision or 'main'}".encode()).hexdigest()


def is_unquantised(config: Config) -> bool:
    """Whether a launch's answers may become the reference: full KV cache, full attention."""
    return config.kv.dtype in UNQUANTISED and config.sparsity.method == "dense"


def find_reference(key: str, *, cache: Path) -> Reference | None:
    """The one recorded on this installation, else the one shipped with this package, else None."""
    own = _read(_own_path(cache, key), key=key)
    if own is not None:
        return own
    found = (_read(path, key=key) for path in sorted(SHIPPED.glob("*.json")))
    return next((reference for reference in found if reference is not None), None)


def _own_path(cache: Path, key: str) -> Path:
    return cache / "references" / f"{key}.json"


def _read(path: Path, *, key: str) -> Reference | None:
    stored = read_json(path)
    if stored is None or stored.get("version") != VERSION or stored.get("model") != key:
        return None
    return Reference(replies=tuple(_stored(reply) for reply in stored["replies"]), source=str(path))


def _stored(reply: Mapping[str, Any]) -> Reply:
    return Reply(
        text=reply["text"],
        tokens=tuple(reply["tokens"]),
        logprobs=tuple(reply["logprobs"]),
        top=tuple(reply["top"]),
    )


def write_reference(path: Path, *, key: str, replies: Sequence[Reply], recorded_from: str) -> None:
    """Store answers as the reference of a model."""
    value = {
        "version": VERSION,
        "model": key,
        "recorded_from": recorded_from,
        "replies": [asdict(reply) for reply in replies],
    }
    write_json(path, value)


# --- asking ---


async def probe_launch(config: Config, *, base_url: str, model: PreparedModel, cache: Path) -> Probed:
    """Ask a server that is ready, and find what to compare with.

    The first sane answers of an unquantised launch are kept as this installation's reference. Nothing raises for a
    server that answers badly: that is ``unknown``.
    """
    key, unquantised = reference_key(config, model), is_unquantised(config)
    reference = await asyncio.to_thread(find_reference, key, cache=cache)
    try:
        replies = await ask(
            base_url, route=family(config.engine).routes["completions"], model=config.model.name
        )
    except (OSError, ValueError) as error:
        text = str(error) or f"no answer within {TIMEOUT_S:g} s"
        return Probed(unknown=f"the probes were not answered: {text}", unquantised=unquantised)
    probed = Probed(replies=replies, reference=reference, unquantised=unquantised)
    sane = judge_answers(probed, limit_nats=min(config.load.limits.output_nats, sys.float_info.max))
    own = _own_path(cache, key)
    if unquantised and sane == Judgement() and (reference is None or reference.source != str(own)):
        engine = f"{config.engine.name} {config.engine.version}, kv.dtype={config.kv.dtype}"
        await asyncio.to_thread(write_reference, own, key=key, replies=replies, recorded_from=engine)
    return probed


async def ask(base_url: str, *, route: str, model: str) -> tuple[Reply, ...]:
    """All probes at once.

    Raises:
        OSError: no answer, or too late.
        ValueError: an answer that is not a completion with logprobs.
    """
    url = urlsplit(base_url)
    target = Target(host=url.hostname or "127.0.0.1", port=url.port or 80, method="POST", path=route)
    bodies = [
        {
            "model": model,
            "prompt": probe.prompt,
            "max_tokens": NUM_TOKENS,
            "temperature": 0,
            "logprobs": TOP,
            "ignore_eos": True,
        }
        for probe in PROBES
    ]
    answers = await asyncio.gather(*(call(target, json_body=body, timeout_s=TIMEOUT_S) for body in bodies))
    return tuple(parse(answer) for answer in answers)


def parse(answer: Answer) -> Reply:
    """A completion with logprobs, in the form that vLLM gives it.

    Raises:
        ValueError: another status or another form.
    """
    if answer.status != HTTP_OK:
        raise ValueError(f"HTTP {answer.status}: {answer.text[:200]}")
    try:
        choice = json.loads(answer.text)["choices"][0]
        logprobs = choice["logprobs"]
        reply = Reply(
            text=str(choice["text"]),
            tokens=tuple(logprobs["tokens"]),
            logprobs=tuple(float(value) for value in logprobs["token_logprobs"]),
            top=tuple(dict(top or {}) for top in logprobs["top_logprobs"]),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"not a completion with logprobs ({error!r}): {answer.text[:200]}") from error
    if not reply.tokens or not len(reply.tokens) == len(reply.logprobs) == len(reply.top):
        raise ValueError(f"a completion whose logprobs do not fit its tokens: {answer.text[:200]}")
    numbers = [*reply.logprobs, *(value for top in reply.top for value in top.values())]
    if not all(math.isfinite(value) for value in numbers):
        raise ValueError(f"a completion whose logprobs are not numbers: {answer.text[:200]}")
    return reply


# --- recording by hand ---


def main(argv: Sequence[str] | None = None) -> int:
    """``record``: ask a running server and store its answers as the reference of a model folder."""
    parser = argparse.ArgumentParser(prog="python -m workers.probes")
    record = parser.add_subparsers(required=True).add_parser("record")
    record.add_argument("--url", required=True, help="of a server that runs with an unquantised KV cache")
    record.add_argument("--model", required=True, help="its served model name")
    record.add_argument("--folder", required=True, type=Path, help="the folder that it serves")
    record.add_argument("--engine", required=True, help="which engine and KV dtype that is, in words")
    record.add_argument("--output", required=True, type=Path)
    arguments = parser.parse_args(argv)
    replies = asyncio.run(ask(arguments.url, route="/v1/completions", model=arguments.model))
    problem = judge_answers(Probed(replies=replies, unquantised=True), limit_nats=sys.float_info.max).problem
    if problem is not None:
        print(f"not recorded: {problem}", file=sys.stderr)
        return 1
    key = folder_sha256(arguments.folder)
    write_reference(arguments.output, key=key, replies=replies, recorded_from=arguments.engine)
    for reply in replies:
        print(repr(reply.text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
