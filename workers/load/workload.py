"""The requests of a run, all computed before it: a pure function of the workload, the load and the seed."""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from conf.schema import ArrivalKind, Endpoint, Length, LengthKind, Load, PromptSource, Workload
from workers.load.arrivals import arrival_offsets_ns
from workers.load.lengths import draw_lengths
from workers.load.prompts import Prompt, file_prompts, random_prompts, written_prompts
from workers.load.trace import TraceRow, read_trace

# Random streams of a run, in the order in which they are spawned from (seed, repeat); append only.
STREAMS = ("arrivals", "input_lengths", "output_lengths", "prompts", "warmup")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request and its due time (ns from the start of the run); exactly one of ids and text is set."""

    index: int
    due_ns: int
    prompt_token_ids: tuple[int, ...] | None = None
    prompt_text: str | None = None
    num_prompt_tokens: int | None = None  # None: known to the server's tokenizer only
    num_output_tokens: int


SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("due_ns", pa.int64(), nullable=False),
        pa.field("prompt_token_ids", pa.list_(pa.int32())),
        pa.field("prompt_text", pa.string()),
        pa.field("num_prompt_tokens", pa.int64()),
        pa.field("num_output_tokens", pa.int64(), nullable=False),
    ],
)


def stream_of(name: str, *, seed: int, repeat: int) -> np.random.SeedSequence:
    """Spawn one named random stream of a run; streams do not depend on each other's use."""
    return np.random.SeedSequence([seed, repeat]).spawn(len(STREAMS))[STREAMS.index(name)]


def build_requests(
    workload: Workload,
    load: Load,
    *,
    seed: int,
    repeat: int,
    vocab_size: int | None,
    max_model_len: int | None = None,
) -> list[Request]:
    """Compute every request of a run, in order of its due time.

    Depends on the arguments and on the bytes of the files they name, on nothing else: cells that differ in the
    engine, or in the rate, ask the same prompts.

    Raises:
        ValueError: settings that contradict each other, an unreadable file, or requests that do not fit
            ``max_model_len`` (they are named; nothing is clipped or dropped).
    """
    _check(workload, load)
    rows = read_trace(load.trace) if _uses_trace(workload, load) else None
    dues = arrival_offsets_ns(load, rng=_rng("arrivals", seed, repeat), trace_offsets_ns=_offsets(rows))
    outputs = draw_lengths(
        workload.output,
        count=len(dues),
        rng=_rng("output_lengths", seed, repeat),
        where="workload.output",
        trace_lengths=None if rows is None else [row.num_output_tokens for row in rows],
    )
    prompts = _prompts(workload, count=len(dues), rows=rows, seed=seed, repeat=repeat, vocab_size=vocab_size)
    requests = [
        _request(index, due_ns=due, prompt=prompt, num_output_tokens=output)
        for index, (due, prompt, output) in enumerate(zip(dues, prompts, outputs, strict=True))
    ]
    check_fit(requests, max_model_len=max_model_len)
    return requests


def check_fit(requests: Sequence[Request], *, max_model_len: int | None) -> None:
    """Refuse requests whose prompt and output together exceed ``max_model_len``; unknown prompt lengths count as 1.

    Raises:
        ValueError: names the first such request, and how many there are.
    """
    if max_model_len is None:
        return
    over = [r for r in requests if (r.num_prompt_tokens or 1) + r.num_output_tokens > max_model_len]
    if not over:
        return
    first = over[0]
    raise ValueError(
        f"{len(over)} of {len(requests)} requests do not fit engine.max_model_len={max_model_len}; the first is "
        f"request {first.index}: {first.num_prompt_tokens} prompt + {first.num_output_tokens} output tokens. "
        "Raise engine.max_model_len, or change workload.input, workload.output or the trace"
    )


def arrivals_sha256(requests: Iterable[Request]) -> str:
    """Hash everything that is sent and when; equal for equal requests, on every platform."""
    digest = hashlib.sha256()
    for request in requests:
        numbers = (request.index, request.due_ns, request.num_prompt_tokens, request.num_output_tokens)
        digest.update(repr(numbers).encode())
        digest.update(repr(request.prompt_text).encode())
        ids = request.prompt_token_ids
        digest.update(b"-" if ids is None else np.asarray(ids, dtype="<i8").tobytes())
        digest.update(b"\n")
    return digest.hexdigest()


def write_arrivals(path: Path, requests: Iterable[Request]) -> None:
    """Write requests to a Parquet file (zstd)."""
    rows = list(requests)
    columns = {name: [getattr(request, name) for request in rows] for name in SCHEMA.names}
    pq.write_table(pa.table(columns, schema=SCHEMA), path, compression="zstd")


def read_arrivals(path: Path) -> list[Request]:
    """Read requests back, equal to those written."""
    rows = pq.read_table(path, schema=SCHEMA).to_pylist()
    return [
        Request(
            **(row | {"prompt_token_ids": ids if (ids := row["prompt_token_ids"]) is None else tuple(ids)})
        )
        for row in rows
    ]


def _check(workload: Workload, load: Load) -> None:
    is_random = workload.prompts is PromptSource.random
    if is_random and workload.endpoint is Endpoint.chat:
        raise ValueError(
            "workload.prompts=random sends token ids, which the chat route does not take; "
            "use workload.endpoint=completions or other prompts"
        )
    if workload.shared_prefix_tokens and not is_random:
        raise ValueError(
            f"workload.shared_prefix_tokens={workload.shared_prefix_tokens} needs workload.prompts=random, "
            f"got {workload.prompts.value}"
        )
    if workload.prompts is PromptSource.file and workload.path is None:
        raise ValueError("workload.path must be set for workload.prompts=file")
    if load.trace.path is None and _uses_trace(workload, load):
        raise ValueError("load.trace.path must be set: load.arrival or a workload length has kind trace")


def _uses_trace(workload: Workload, load: Load) -> bool:
    lengths: list[Length] = [workload.output]
    if workload.prompts is PromptSource.random:
        lengths.append(workload.input)
    return load.arrival is ArrivalKind.trace or any(length.kind is LengthKind.trace for length in lengths)


def _offsets(rows: Sequence[TraceRow] | None) -> list[int] | None:
    return None if rows is None else [row.offset_ns for row in rows]


def _rng(name: str, seed: int, repeat: int) -> np.random.Generator:
    return np.random.default_rng(stream_of(name, seed=seed, repeat=repeat))


def _prompts(
    workload: Workload,
    *,
    count: int,
    rows: Sequence[TraceRow] | None,
    seed: int,
    repeat: int,
    vocab_size: int | None,
) -> list[Prompt]:
    stream = stream_of("prompts", seed=seed, repeat=repeat)
    if workload.prompts is PromptSource.written:
        return written_prompts(count, stream=stream)
    if workload.prompts is PromptSource.file:
        return file_prompts(Path(workload.path or ""), count=count, stream=stream)
    lengths = draw_lengths(
        workload.input,
        count=count,
        rng=_rng("input_lengths", seed, repeat),
        where="workload.input",
        trace_lengths=None if rows is None else [row.num_input_tokens for row in rows],
    )
    return random_prompts(
        lengths, stream=stream, vocab_size=vocab_size, shared_prefix_tokens=workload.shared_prefix_tokens
    )


def _request(index: int, *, due_ns: int, prompt: Prompt, num_output_tokens: int) -> Request:
    return Request(
        index=index,
        due_ns=due_ns,
        prompt_token_ids=prompt.token_ids,
        prompt_text=prompt.text,
        num_prompt_tokens=prompt.num_tokens,
        num_output_tokens=num_output_tokens,
    )
