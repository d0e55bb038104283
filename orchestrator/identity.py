"""A cell's identity: hashes of what affects its measurement, and of nothing else.

In: engine build, plugin sources, model and its bytes, workload and trace bytes, load, seed, repeat, metrics version.
Out: where files lie, where results go, time-outs, numbers of slots and processes, and keys without effect (the
burstiness of a Poisson process). A value has one identity however it is spelled: ``1``, ``1.0`` and ``1e0``.
"""

import hashlib
import json
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from conf.keys import fields_of, plain
from conf.schema import COMMAND_KEYS, ArrivalKind, Config, Load, ModelSource

KEY_LENGTH = 12

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
_NOT_WORKLOAD = frozenset({"name", "dtype"})
# What judges and observes a run does not change what is asked of the engine.
_NOT_ASKED = ("slo", "limits", "scrape_interval_s")

# Model files up to this many bytes in all are hashed whole; of larger models each file's size and ends.
WHOLE_MODEL_BYTES = 4 * 2**30
_END_BYTES = 2**20


def cell_key(config: Config, *, plugin_sha256: str | None = None) -> str:
    """The cell's identity: 12 hexadecimal digits."""
    return _digest({"cell": identity(config), "plugin": plugin_sha256, "metrics": metrics_version()})


def launch_key(config: Config) -> str:
    """What the engine sees, plus repeat and sentinel (each is a launch of its own)."""
    seen = {name: part for name, part in identity(config).items() if name not in {"load", "workload", "seed"}}
    return _digest({"launch": seen})


def workload_hash(config: Config) -> str:
    """What compared cells must share: prompts, lengths, arrivals, seed, repeat, the model that is asked."""
    whole = identity(config)
    asked = {
        "workload": _without(whole["workload"], _NOT_WORKLOAD),
        "load": _without(whole["load"], _NOT_ASKED),
        "model": _without(whole["model"], _NOT_WORKLOAD),
        "seed": whole["seed"],
        "repeat": whole["repeat"],
    }
    return _digest({"workload": asked})


def identity(config: Config) -> dict[str, Any]:
    """The part of a configuration that affects the measurement, with the hashes of the files it names."""
    result: dict[str, Any] = _typed(config, "")
    result["model"]["sha256"] = _model_sha256(config)
    result["workload"]["sha256"] = _file_sha256(config.workload.path)
    result["load"]["trace"]["sha256"] = _file_sha256(config.load.trace.path)
    result["load"] = _without(result["load"], _without_effect(config.load))
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
        name: _typed(getattr(section, name), f"{prefix}{name}.") if kind == "section"
        else _number(getattr(section, name)) if kind == "float"
        else plain(getattr(section, name))
        for name, kind in _layout(type(section), prefix)
    }  # fmt: skip


@cache
def _layout(section: type, prefix: str) -> tuple[tuple[str, str], ...]:
    kinds = []
    for name, (annotation, _) in fields_of(section).items():
        if prefix + name in NO_IDENTITY:
            continue
        if hasattr(annotation, "__dataclass_fields__"):
            kinds.append((name, "section"))
        else:
            kinds.append((name, "float" if annotation in {float, float | None} else "other"))
    return tuple(kinds)


def _number(value: float | None) -> float | None:
    # Adding zero makes -0.0 and 0.0 one value.
    return None if value is None else float(value) + 0.0


def _without_effect(load: Load) -> tuple[str, ...]:
    if load.arrival is ArrivalKind.trace:
        return ("rate_per_s", "burstiness")
    return ("trace",) if load.arrival is ArrivalKind.gamma else ("trace", "burstiness")


def _without(mapping: dict[str, Any], names: Any) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name not in names}


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def _file_sha256(path: str | None) -> str | None:
    if path is None:
        return None
    stat = Path(path).stat()
    return _hash_file(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1024)
def _hash_file(path: str, size: int, mtime_ns: int) -> str:  # noqa: ARG001 - size and time make the memo safe
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _model_sha256(config: Config) -> str | None:
    """The bytes of a local model folder; a folder that only exists on other nodes is known by its path."""
    if config.model.source is not ModelSource.path or config.model.path is None:
        return None
    root = Path(config.model.path)
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
