"""The runs folder as data: atomic writes, strict JSON, results that are whole or absent.

JSON here never holds ``NaN`` or ``Infinity``: an infinite float is stored as the text ``"inf"`` or ``"-inf"`` and
comes back as a float, NaN is stored as ``null``.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, NoReturn, Protocol, cast

import numpy as np
from omegaconf import OmegaConf

from conf.schema import COMMAND_KEYS, Config
from orchestrator.paths import CellPaths, SweepPaths
from workers.errors import ServelabError

INFINITIES = {"inf": math.inf, "-inf": -math.inf}
CELL_HEADER = "# One resolved cell. Run it again: python -m orchestrator from_file=<this file> [overrides]\n"


class DamagedFileError(ServelabError):
    """A file of the runs folder is neither whole nor simply cut short."""

    cause = "damaged_file"


class SweepBusyError(ServelabError):
    """Another process works on this sweep's folder."""

    cause = "sweep_busy"


class _Cell(Protocol):
    @property
    def config(self) -> Config: ...
    @property
    def axes(self) -> Mapping[str, Any]: ...
    @property
    def key(self) -> str: ...
    @property
    def folder(self) -> str: ...


class _Launch(Protocol):
    @property
    def key(self) -> str: ...
    @property
    def cells(self) -> Sequence[_Cell]: ...


class _Plan(Protocol):
    @property
    def launches(self) -> Sequence[_Launch]: ...


def write_bytes(path: Path, data: bytes) -> None:
    """Replace a file at once: after a crash it holds the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Write strict JSON, atomically."""
    write_bytes(path, (json.dumps(_storable(value), indent=1, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Read strict JSON.

    Raises:
        DamagedFileError: the file is not strict JSON, whole or cut short.
        FileNotFoundError: there is no such file.
    """
    try:
        return _parse(path.read_bytes().decode())
    except ValueError as error:
        raise DamagedFileError(f"{path} is not strict JSON: {error}; mend or delete it") from error


def write_result(paths: CellPaths, result: Mapping[str, Any]) -> None:
    """Write a cell's result; the cell is finished from here on. Call it after every other file of the cell."""
    write_json(paths.result, result)


def read_result(path: Path) -> dict[str, Any] | None:
    """Read a result; None if it is missing, empty or cut short, that is: the cell is not done.

    Raises:
        DamagedFileError: the file is damaged in another way than by a crash.
    """
    try:
        data = path.read_bytes().rstrip(b"\0 \t\r\n")
    except FileNotFoundError:
        return None
    if not data:
        return None
    try:
        result = _parse(data.decode())
    except ValueError as error:
        if _cut_short(data, error):
            return None
        raise DamagedFileError(
            f"{path} is damaged ({error}); delete it to run the cell again, or mend it to keep its numbers",
        ) from error
    if not isinstance(result, dict):
        raise DamagedFileError(
            f"{path} must hold a JSON object, got {type(result).__name__}; delete it to run the cell again"
        )
    return result


def read_results(paths: SweepPaths, cells: Sequence[_Cell]) -> dict[str, dict[str, Any]]:
    """Results of those cells that are done, by cell key. A result of another key in the folder does not count."""
    found = {cell.key: read_result(paths.cell(cell).result) for cell in cells}
    return {
        key: result for key, result in found.items() if result is not None and result.get("cell_key") == key
    }


def state(result: Mapping[str, Any] | None) -> str:
    """``valid``, ``invalid`` or ``failed`` for a finished cell, ``not_started`` without a result."""
    if result is None:
        return "not_started"
    if result.get("outcome") != "done":
        return "failed"
    return "valid" if (result.get("verdict") or {}).get("valid") else "invalid"


def count(paths: SweepPaths, cells: Sequence[_Cell]) -> dict[str, int]:
    """Number of cells by :func:`state`; ``done`` = valid + invalid, ``total`` = all."""
    results = read_results(paths, cells)
    states = [state(results.get(cell.key)) for cell in cells]
    counts = {name: states.count(name) for name in ("valid", "invalid", "failed", "not_started")}
    return counts | {"done": counts["valid"] + counts["invalid"], "total": len(states)}


def plain_config(config: Config) -> dict[str, Any]:
    """The part of a typed configuration that a cell measures, as plain data; enum members by name."""
    return {key: value for key, value in _plain(config).items() if key not in COMMAND_KEYS}


def write_cell(paths: CellPaths, cell: _Cell) -> None:
    """Start an attempt of a cell: move away what earlier ones left, then write ``cell.yaml``."""
    archive(paths)
    text = OmegaConf.to_yaml(OmegaConf.create(plain_config(cell.config)))
    write_bytes(paths.cell_yaml, (CELL_HEADER + text).encode())


def read_cell(path: Path) -> dict[str, Any]:
    """The plain configuration stored in a ``cell.yaml``."""
    return cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(path), resolve=True))


def archive(paths: CellPaths) -> Path | None:
    """Move everything an earlier attempt left except ``cell.yaml`` into ``attempts/<n>``; returns that folder.

    The result goes first, so that a crash in between leaves a cell that is not done rather than half a cell.
    """
    kept = {paths.cell_yaml, paths.attempts}
    left = [
        path for path in sorted(paths.root.glob("*")) if path not in kept and not path.name.startswith(".")
    ]
    if not left:
        return None
    numbers = [int(path.name) for path in paths.attempts.glob("*") if path.name.isdigit()]
    target = paths.attempts / str(max(numbers, default=0) + 1)
    target.mkdir(parents=True)
    for path in sorted(left, key=lambda path: path != paths.result):
        path.rename(target / path.name)
    _sync_folder(target)
    _sync_folder(paths.root)
    return target


def write_files(paths: CellPaths, files: Mapping[str, bytes]) -> None:
    """Write what a slot sent, by path relative to the cell's folder."""
    for name, data in files.items():
        relative = PurePath(name)
        if relative.is_absolute() or ".." in relative.parts:
            raise ValueError(f"a cell's file must lie inside its folder, got {name!r}")
        write_bytes(paths.root / relative, data)


def write_sweep(paths: SweepPaths, *, cells: Sequence[_Cell], config: Config, plan: _Plan) -> None:
    """Write ``sweep.yaml`` (grid and base) and ``plan.json`` (cells, and the launches of every command so far)."""
    text = OmegaConf.to_yaml(OmegaConf.create({"sweep": _plain(config)["sweep"]} | plain_config(config)))
    write_bytes(
        paths.sweep_yaml, ("# The grid of this sweep and the configuration under it.\n" + text).encode()
    )
    launches = [{"key": launch.key, "cells": [cell.key for cell in launch.cells]} for launch in plan.launches]
    commands = read_json(paths.plan_json)["commands"] if paths.plan_json.exists() else []
    if launches or not commands:
        commands.append({"at": datetime.now(UTC).isoformat(timespec="seconds"), "launches": launches})
    listed = [{"key": cell.key, "folder": cell.folder, "axes": dict(cell.axes)} for cell in cells]
    write_json(paths.plan_json, {"cells": listed, "commands": commands})


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonLines:
    """The whole records of an append-only file, and the cut-off end a crash may have left."""

    rows: tuple[dict[str, Any], ...]
    torn: bytes = b""


def read_lines(path: Path) -> JsonLines:
    r"""Read records that end with ``\n`` and nothing else; a missing file holds none.

    Raises:
        DamagedFileError: a line other than a cut-off last one is not a JSON object; names file and line.
    """
    data = path.read_bytes() if path.exists() else b""
    *lines, last = data.split(b"\n")
    rows = [_row(path, number, line) for number, line in enumerate(lines, start=1)]
    whole = _object(last)
    if whole is not None:
        return JsonLines(rows=(*rows, whole))
    return JsonLines(rows=tuple(rows), torn=last)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Append one record and wait until it is on disk; a cut-off end from an earlier crash is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    created = not path.exists()
    line = json.dumps(_storable(record), allow_nan=False).encode() + b"\n"
    with path.open("a+b") as file:
        file.seek(0)
        head, newline, last = file.read().rpartition(b"\n")
        if last and _object(last) is None:
            file.truncate(len(head) + len(newline))
        elif last:
            line = b"\n" + line
        file.write(line)
        file.flush()
        os.fsync(file.fileno())
    if created:
        _sync_folder(path.parent)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on a file, waiting for it; it ends with the process."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def sole_owner(paths: SweepPaths) -> Iterator[None]:
    """Work on a sweep's folder alone.

    Raises:
        SweepBusyError: another process does already.
    """
    paths.root.mkdir(parents=True, exist_ok=True)
    with paths.lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise SweepBusyError(
                f"sweep {paths.name} in {paths.runs_dir} is in use by process {file.read().strip() or '?'};"
                " wait for it or end it, or choose another sweep.name",
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def _plain(config: Config) -> dict[str, Any]:
    plain = OmegaConf.to_container(OmegaConf.structured(config), resolve=True, enum_to_str=True)
    return cast("dict[str, Any]", plain)


def _storable(value: Any) -> Any:
    """The value as JSON can hold it, non-finite floats replaced."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, Mapping):
        return {str(key): _storable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_storable(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    return str(value) if isinstance(value, PurePath) else value


def _restored(value: Any) -> Any:
    if isinstance(value, str):
        return INFINITIES.get(value, value)
    if isinstance(value, dict):
        return {key: _restored(item) for key, item in value.items()}
    return [_restored(item) for item in value] if isinstance(value, list) else value


def _parse(text: str) -> Any:
    return _restored(json.loads(text, parse_constant=_refuse))


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _cut_short(data: bytes, error: ValueError) -> bool:
    """True if the bytes are the beginning of a JSON object rather than a spoilt one."""
    if not data.startswith(b"{"):
        return False
    if isinstance(error, UnicodeDecodeError):
        return error.reason == "unexpected end of data" and error.end == len(data)
    if not isinstance(error, json.JSONDecodeError):
        return False
    return (
        error.pos >= len(error.doc) or error.msg.startswith("Unterminated string") or not data.endswith(b"}")
    )


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        value = _parse(line.decode())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _row(path: Path, number: int, line: bytes) -> dict[str, Any]:
    row = _object(line)
    if row is None:
        shown = line[:80].decode(errors="replace")
        raise DamagedFileError(
            f"{path}, line {number} is not a JSON object: {shown!r}; mend or delete that line"
        )
    return row


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
