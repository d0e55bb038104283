"""A cell's identity: hashes of what affects its measurement, and of nothing else.

In: engine build, plugin sources, model and its bytes, workload and trace bytes, load, seed, repeat, metrics version.
Out: where files lie, where results go, time-outs, numbers of slots and processes, and keys without effect (the
burstiness of a Poisson process). A value has one identity however it is spelled: ``1``, ``1.0`` and ``1e0``.
"""

import hashlib
import json
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import is_dataclass
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, cast

from conf.keys import fields_of, plain
from conf.schema import COMMAND_KEYS, ArrivalKind, Config, Load, Model, ModelSource, Workload

KEY_LENGTH = 12

# Texts of sections that several cells share: id → (the section, kept alive; its text). Valid while none is changed.
Memo = dict[int, tuple[Any, str]]

# How patiently and with how many hands, not what is measured.
NO_IDENTITY = frozenset(
    {
        *COMMAND_KEYS,
        "hardware.engine_slots",
        "hardware.start_timeout_s",
        "hardware.stop_grace_s",
        "hardware.busy_wait_s",
        "load.request_timeout_s",
        "load.drain_timeout_s",
        "load.processes",
        "model.path",
        "workload.path",
        "load.trace.path",
    }
)
# Names are for people: arms under another name are still the same work.
_NOT_WORKLOAD = frozenset({"name", "dtype", "redraw"})
# What is asked of a running engine.
_NOT_LAUNCH = frozenset({"load", "workload", "seed"})
# What judges and observes a run does not change what is asked of the engine.
_NOT_ASKED = ("slo", "limits", "scrape_interval_s")

# Model files up to this many bytes in all are hashed whole; of larger models each file's size and ends.
WHOLE_MODEL_BYTES = 4 * 2**30
_END_BYTES = 2**20

_NUMBERS = (float, float | None)
_SCALARS = (int, int | None, str, str | None, bool)


def cell_key(config: Config, *, plugin_sha256: str | None = None, memo: Memo | None = None) -> str:
    """The cell's identity: 12 hexadecimal digits."""
    return _digest(
        [f"plugin={plugin_sha256}", f"metrics={metrics_version()}", *_texts(config, memo=memo).values()]
    )


def launch_key(config: Config, *, memo: Memo | None = None) -> str:
    """What the engine sees, plus repeat and sentinel (each is a launch of its own).

    With prefix caching on, cells do not share a launch: the later one would find the cache warm.
    """
    texts = _texts(config, memo=memo)
    apart = frozenset() if config.kv.prefix_caching else _NOT_LAUNCH
    return _digest(["launch", *(text for name, text in texts.items() if name not in apart)])


def workload_hash(config: Config) -> str:
    """What compared cells must share: prompts, lengths, arrivals, seed, repeat, the model that is asked."""
    asked = {
        "workload": _without(_section("workload", config.workload), _NOT_WORKLOAD),
        "load": _without(_section("load", config.load), _NOT_ASKED),
        "model": _without(_section("model", config.model), _NOT_WORKLOAD),
        "seed": config.seed,
        "repeat": config.draw,
    }
    return _digest(["workload", _canonical(asked)])


def identity(config: Config) -> dict[str, Any]:
    """The part of a configuration that affects the measurement, with the hashes of the files it names."""
    return {name: _section(name, getattr(config, name)) for name in _parts()}


def _texts(config: Config, *, memo: Memo | None) -> dict[str, str]:
    """Canonical JSON of every part of the identity; texts of shared sections are taken from the memo."""
    memo = {} if memo is None else memo
    return {name: _text(name, getattr(config, name), memo) for name in _parts()}


def _text(name: str, value: Any, memo: Memo) -> str:
    if not is_dataclass(value):
        return f"{name}={_canonical(value)}"
    if id(value) not in memo:
        memo[id(value)] = (value, f"{name}={_canonical(_section(name, value))}")
    return memo[id(value)][1]


@cache
def _parts() -> tuple[str, ...]:
    return tuple(name for name in fields_of(Config) if name not in NO_IDENTITY)


def _section(name: str, value: Any) -> Any:
    if not is_dataclass(value):
        return value
    result = _typed(value, f"{name}.")
    if isinstance(value, Model):
        result["sha256"] = _model_sha256(value)
    if isinstance(value, Workload):
        result["sha256"] = _file_sha256(value.path)
    if isinstance(value, Load):
        result["trace"]["sha256"] = _file_sha256(value.trace.path)
        result = _without(result, _without_effect(value))
    return result


@cache
def metrics_version() -> str:
    """The version of the metric definitions; numbers of two versions are two measurements.

    Raises:
        RuntimeError: the installation lacks the metric definitions.
    """
    try:
        from analysis.metrics import METRICS_VERSION
    except ImportError as error:
        raise RuntimeError(
            "analysis.metrics.METRICS_VERSION is part of every cell's identity and cannot be imported: "
            f"{error}; install the project again"
        ) from error
    return METRICS_VERSION


def _typed(section: Any, prefix: str) -> dict[str, Any]:
    """A section as plain data; numbers take the type the schema declares, whatever the caller assigned."""
    return {
        name: read(getattr(section, name)) for name, read in _readers(cast("Hashable", type(section)), prefix)
    }


@cache
def _readers(section: Any, prefix: str) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    """How each field of a section that belongs to the identity becomes plain data."""
    return tuple(
        (name, _reader(annotation, f"{prefix}{name}."))
        for name, (annotation, _) in fields_of(section).items()
        if prefix + name not in NO_IDENTITY
    )


def _reader(annotation: Any, prefix: str) -> Callable[[Any], Any]:
    if is_dataclass(annotation):
        return partial(_typed, prefix=prefix)
    if annotation in _NUMBERS:
        return _number
    return _same if annotation in _SCALARS else plain


def _same(value: Any) -> Any:
    return value


def _number(value: float | None) -> float | None:
    # Adding zero makes -0.0 and 0.0 one value.
    return None if value is None else float(value) + 0.0


def _without_effect(load: Load) -> tuple[str, ...]:
    if load.arrival is ArrivalKind.trace:
        return ("rate_per_s", "burstiness")
    return () if load.arrival is ArrivalKind.gamma else ("burstiness",)


def _without(mapping: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _digest(parts: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:KEY_LENGTH]


def _file_sha256(path: str | None) -> str | None:
    if path is None:
        return None
    stat = Path(path).stat()
    return _hash_file(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_file(path: str, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - size and time make the memo safe
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_sha256(model: Model) -> str | None:
    """The bytes of a local model folder; a folder that only exists on other nodes is known by its path."""
    if model.source is not ModelSource.path or model.path is None:
        return None
    root = Path(model.path)
    if not root.is_dir():
        return hashlib.sha256(str(root).encode()).hexdigest()
    files = sorted(path for path in root.rglob("*") if path.is_file())
    stats = [(path, path.stat()) for path in files]
    return _hash_folder(
        str(root),
        tuple((str(path.relative_to(root)), stat.st_size, stat.st_mtime_ns) for path, stat in stats),
    )


@lru_cache(maxsize=64)
def _hash_folder(root: str, files: tuple[tuple[str, int, int], ...]) -> str:
    whole = sum(size for _, size, _ in files) <= WHOLE_MODEL_BYTES
    digest = hashlib.sha256()
    for name, size, mtime_ns in files:
        path = str(Path(root, name))
        content = _hash_file(path, size, mtime_ns) if whole else _hash_ends(path, size)
        digest.update(f"{name}\0{size}\0{content}\n".encode())
    return digest.hexdigest()


def _hash_ends(path: str, size: int) -> str:
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        digest.update(file.read(_END_BYTES))
        file.seek(max(0, size - _END_BYTES))
        digest.update(file.read(_END_BYTES))
    return digest.hexdigest()
