"""What the tracking store is told about a cell: parameters, metrics, tags and a few time series. Pure.

Missing and non-finite numbers are left out: stores turn infinity into 1.797e308.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from orchestrator.store import state

# Settings that are parameters of every cell; its axes come on top.
SETTINGS = (
    "engine.version", "engine.enforce_eager", "engine.max_model_len", "engine.max_num_seqs",
    "engine.max_num_batched_tokens", "engine.tensor_parallel_size", "hardware.kind", "model.name", "model.dtype",
    "kv.dtype", "kv.memory_bytes", "kv.block_size", "kv.prefix_caching", "sparsity.method", "sparsity.scale_factor",
    "sparsity.target", "scheduler.policy", "workload.name", "workload.input.value", "workload.output.value",
    "load.arrival", "load.rate_per_s", "load.burstiness", "load.num_requests", "load.duration_s", "seed", "repeat",
)  # fmt: skip
# Facts the server reported that people compare: tags are not selectable in the compare view, parameters are.
COMPARED_FACTS = ("version", "attention_backend", "kv_cache_dtype", "kv_cache_tokens")
# The server's series in timeseries.parquet that are drawn as metrics ``ts/<name>``.
SERIES = ("kv_usage_max", "running", "waiting")
MAX_POINTS = 1000
MAX_KEY, MAX_PARAM, MAX_TAG = 250, 6000, 8000
_NOT_IN_KEY = re.compile(r"[^A-Za-z0-9_\-. :/]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One value of a series; ``step_ms`` counts from the start of the run."""

    name: str
    value: float
    step_ms: int


def shorten(text: str, *, limit: int) -> str:
    """The text, or its beginning and an ellipsis if it is longer than ``limit`` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def params(settings: Mapping[str, Any], *, axes: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of a cell: its axes and those of the usual settings that are set, dotted.

    ``settings`` is the cell's plain configuration.
    """
    usual = {name: value for name in SETTINGS if (value := _leaf(settings, name)) is not None}
    name = _leaf(settings, "engine.name")
    return as_text({**({"engine": name} if name else {}), **axes, **usual}, limit=MAX_PARAM)


def reported_params(result: Mapping[str, Any]) -> dict[str, str]:
    """What the server reported, as far as people compare it."""
    facts = _facts(result)
    return as_text(
        {f"server.{name}": facts[name] for name in COMPARED_FACTS if name in facts}, limit=MAX_PARAM
    )


def tags(result: Mapping[str, Any]) -> dict[str, str]:
    """Verdict, identity, error and every fact the server reported."""
    verdict = result.get("verdict") or {}
    reasons: Sequence[Mapping[str, Any]] = verdict.get("reasons") or ()
    error = result.get("error") or {}
    found = {
        "verdict": state(result),
        "verdict.reasons": ", ".join(str(reason.get("name")) for reason in reasons) or None,
        "verdict.details": "; ".join(f"{r.get('name')}: {r.get('detail')}" for r in reasons) or None,
        "servelab.workload_hash": result.get("workload_hash"),
        "servelab.launch": result.get("launch_key"),
        "servelab.metrics_version": result.get("metrics_version"),
        "servelab.attempts": len(result.get("attempts") or ()) or None,
        "error.class": error.get("class"),
        "error.message": error.get("message"),
    }
    facts = {name if "." in name else f"server.{name}": value for name, value in _facts(result).items()}
    return as_text(
        {name: value for name, value in (found | facts).items() if value is not None}, limit=MAX_TAG
    )


def metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """Finite numbers of a result: its metrics by name, and its phases as ``timing/…``."""
    timing = {f"timing/{name}": value for name, value in (result.get("timing") or {}).items()}
    return finite({**(result.get("metrics") or {}), **timing})


def finite(values: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among the values that a tracking store can hold."""
    return {
        key(name): float(value)
        for name, value in values.items()
        if _is_number(value) and math.isfinite(value)
    }


def series(rows: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The few drawn series out of rows ``t_ns, source, name, value``, each thinned evenly to at most 1000 points."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        if row["source"] == "server" and row["name"] in SERIES and math.isfinite(row["value"]):
            point = Point(name=f"ts/{row['name']}", value=row["value"], step_ms=round(row["t_ns"] / 1e6))
            found.setdefault(point.name, []).append(point)
    return [point for name in sorted(found) for point in _thinned(found[name])]


def title(*, axes: Mapping[str, Any], folder: str) -> str:
    """A run's readable name: the values of its axes, or its folder."""
    words = [f"{name.rpartition('.')[2]}={_text(value)}" for name, value in axes.items()]
    return shorten(", ".join(words) or folder, limit=MAX_KEY)


def times_ms(result: Mapping[str, Any], *, written_ms: int) -> tuple[int, int]:
    """Start and end of a cell's run in Unix milliseconds; ``written_ms`` is when its result was written."""
    started = result.get("started_at")
    start = round(datetime.fromisoformat(started).timestamp() * 1000) if started else written_ms
    return start, max(start, written_ms)


def key(name: str) -> str:
    """A name as tracking stores accept it."""
    return shorten(_NOT_IN_KEY.sub("_", name), limit=MAX_KEY).replace("…", "_")


def as_text(values: Mapping[str, Any], *, limit: int) -> dict[str, str]:
    """Names and values as the tracking store takes them."""
    return {key(name): shorten(_text(value), limit=limit) for name, value in values.items()}


def _facts(result: Mapping[str, Any]) -> dict[str, Any]:
    reported = result.get("server") or {}
    return {name.removeprefix("server."): value for name, value in reported.items() if value is not None}


def _leaf(settings: Mapping[str, Any], dotted: str) -> Any:
    value: Any = settings
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return None
        value = value[part]
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool) or value is None else str(value)


def _thinned(points: Sequence[Point]) -> list[Point]:
    if len(points) <= MAX_POINTS:
        return list(points)
    last = len(points) - 1
    return [points[round(i * last / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]
