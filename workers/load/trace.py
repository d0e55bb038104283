"""Arrival traces of other people's services: when requests came and how long they were."""

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from conf.schema import Trace, TraceFormat

NS_PER_S = 1_000_000_000
NS_PER_MS = 1_000_000

_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE_KEYS = ("timestamp", "input_length", "output_length")
_AZURE_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(?:\+00:00)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace; ``offset_ns`` counts from the first row's time, after scaling."""

    offset_ns: int
    num_input_tokens: int
    num_output_tokens: int


def read_trace(trace: Trace) -> list[TraceRow]:
    """Read a trace file, in its own order, with gaps multiplied by ``time_scale``.

    ``azure``: CSV with the columns ``TIMESTAMP`` (UTC, up to nine decimals), ``ContextTokens``,
    ``GeneratedTokens``. ``mooncake``: JSON lines with ``timestamp`` (ms), ``input_length``, ``output_length``.
    Other columns and keys are ignored; so are empty lines.

    Raises:
        ValueError: no path, no file, no rows, or a line that does not say what it should, with file and line.
    """
    if trace.path is None:
        raise ValueError("load.trace.path must be set to use a trace")
    path = Path(trace.path)
    if not path.is_file():
        raise ValueError(f"load.trace.path: no such file: {path}")
    read = {TraceFormat.azure: _azure_rows, TraceFormat.mooncake: _mooncake_rows}[trace.format]
    rows = _ordered(path, read(path), time_scale=trace.time_scale)
    if not rows:
        raise ValueError(f"{path}: the trace holds no requests")
    return rows


_Raw = tuple[int, int, int, int]  # line, time in ns, input tokens, output tokens


def _ordered(path: Path, raw: Iterator[_Raw], *, time_scale: float) -> list[TraceRow]:
    rows: list[TraceRow] = []
    first_ns = previous_ns = None
    for line, time_ns, num_input, num_output in raw:
        first_ns = time_ns if first_ns is None else first_ns
        if previous_ns is not None and time_ns < previous_ns:
            raise ValueError(
                f"{path}:{line}: the time is before that of the row above; sort the trace by time"
            )
        previous_ns = time_ns
        offset_ns = round((time_ns - first_ns) * time_scale)
        rows.append(TraceRow(offset_ns=offset_ns, num_input_tokens=num_input, num_output_tokens=num_output))
    return rows


def _azure_rows(path: Path) -> Iterator[_Raw]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        header = next(reader, [])
        missing = [name for name in _AZURE_COLUMNS if name not in header]
        if missing:
            raise ValueError(
                f"{path}:1: expected a header with {', '.join(_AZURE_COLUMNS)}, got {','.join(header)!r}"
            )
        places = [header.index(name) for name in _AZURE_COLUMNS]
        for row in reader:
            if row:
                yield _azure_row(row, places, at=f"{path}:{reader.line_num}", line=reader.line_num)


def _azure_row(row: list[str], places: list[int], *, at: str, line: int) -> _Raw:
    if len(row) <= max(places):
        raise ValueError(
            f"{at}: expected {max(places) + 1} columns or more, got {len(row)}: {','.join(row)!r}"
        )
    stamp, num_input, num_output = (row[place] for place in places)
    return (
        line,
        _azure_time_ns(stamp, at=at),
        _tokens(num_input, at=at, name="ContextTokens"),
        _tokens(num_output, at=at, name="GeneratedTokens"),
    )


def _azure_time_ns(text: str, *, at: str) -> int:
    match = _AZURE_TIME.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{at}: TIMESTAMP must look like 2023-11-16 18:15:46.6805900, got {text!r}")
    try:
        seconds = int(datetime.fromisoformat(f"{match[1]}+00:00").timestamp())
    except ValueError as error:
        raise ValueError(f"{at}: TIMESTAMP is no date and time: {text!r}") from error
    return seconds * NS_PER_S + int((match[2] or "0").ljust(9, "0"))


def _mooncake_rows(path: Path) -> Iterator[_Raw]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield _mooncake_row(line, at=f"{path}:{number}", line=number)


def _mooncake_row(text: str, *, at: str, line: int) -> _Raw:
    try:
        row = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{at}: not a line of JSON: {error}") from error
    if not isinstance(row, dict) or any(key not in row for key in _MOONCAKE_KEYS):
        raise ValueError(f"{at}: expected the keys {', '.join(_MOONCAKE_KEYS)}, got {text.strip()[:80]!r}")
    stamp = row["timestamp"]
    if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not 0 <= stamp < float("inf"):
        raise ValueError(f"{at}: timestamp must be a number of milliseconds >= 0, got {stamp!r}")
    num_input = _tokens(row["input_length"], at=at, name="input_length")
    num_output = _tokens(row["output_length"], at=at, name="output_length")
    return line, round(stamp * NS_PER_MS), num_input, num_output


def _tokens(value: Any, *, at: str, name: str) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or str(count) != str(value).strip():
        raise ValueError(f"{at}: {name} must be a whole number >= 1, got {value!r}")
    return count
