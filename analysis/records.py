"""One request's row: the stamps from which every latency is computed, and how rows live in Parquet.

All stamps are integer nanoseconds on one monotonic clock, counted from the start of the run; ``None`` = did not
happen. Rows with ``phase == "warmup"`` are stored but enter no statistic.
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One request: what was asked, when what happened, what came back."""

    index: int  # position in the arrival order; the pairing key between compared runs
    phase: str  # "warmup" | "measured"
    due_ns: int  # planned arrival
    queued_ns: int | None = None  # start of client queueing under max_concurrency; None without a cap
    sent_ns: int | None = None  # first byte handed to the socket
    first_token_ns: int | None = None  # first token event of any channel
    first_answer_ns: int | None = None  # first token event that is not reasoning
    last_token_ns: int | None = None
    done_ns: int | None = None  # stream closed
    token_ns: tuple[int, ...] = ()  # every token event
    num_prompt_tokens_requested: int | None = None
    num_prompt_tokens: int | None = None  # server's usage
    num_output_tokens_requested: int | None = None
    num_output_tokens: int | None = None  # n of the metrics
    num_output_tokens_source: str | None = None  # "server" | "client"
    num_output_tokens_client: int | None = None  # counted by the client; differs from n → flagged
    finish_reason: str | None = None
    http_status: int | None = None
    error: str | None = None  # one sentence; a failed request has one
    text: str = ""

    @property
    def failed(self) -> bool:
        """True if the request has no usable answer."""
        return self.error is not None


SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("phase", pa.string(), nullable=False),
        pa.field("due_ns", pa.int64(), nullable=False),
        pa.field("queued_ns", pa.int64()),
        pa.field("sent_ns", pa.int64()),
        pa.field("first_token_ns", pa.int64()),
        pa.field("first_answer_ns", pa.int64()),
        pa.field("last_token_ns", pa.int64()),
        pa.field("done_ns", pa.int64()),
        pa.field("token_ns", pa.list_(pa.int64()), nullable=False),
        pa.field("num_prompt_tokens_requested", pa.int64()),
        pa.field("num_prompt_tokens", pa.int64()),
        pa.field("num_output_tokens_requested", pa.int64()),
        pa.field("num_output_tokens", pa.int64()),
        pa.field("num_output_tokens_source", pa.string()),
        pa.field("num_output_tokens_client", pa.int64()),
        pa.field("finish_reason", pa.string()),
        pa.field("http_status", pa.int64()),
        pa.field("error", pa.string()),
        pa.field("text", pa.string(), nullable=False),
    ],
)


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write rows to a Parquet file (zstd)."""
    rows = [{name: getattr(record, name) for name in SCHEMA.names} for record in records]
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, compression="zstd")


def read_records(path: Path) -> list[Record]:
    """Read rows back; unknown columns of a newer version are ignored."""
    names = {field.name for field in fields(Record)}
    return [_record(row, names) for row in pq.read_table(path).to_pylist()]


def _record(row: dict[str, Any], names: set[str]) -> Record:
    kept = {key: value for key, value in row.items() if key in names}
    return Record(**(kept | {"token_ns": tuple(kept["token_ns"])}))
