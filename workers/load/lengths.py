"""How many tokens go in and come out: draws from a ``Length``."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from conf.schema import Length, LengthKind

# A range that holds less than one draw in ten thousand is a mistake in the range, not bad luck.
MAX_ROUNDS = 10_000

_Number = TypeVar("_Number", int, float)


def draw_lengths(
    spec: Length,
    *,
    count: int,
    rng: np.random.Generator,
    where: str,
    trace_lengths: Sequence[int] | None = None,
) -> list[int]:
    """Draw ``count`` token counts, each >= 1.

    ``fixed``: ``value``. ``uniform``: integers ``min`` to ``max``, both included. ``lognormal``: median ``value``,
    ``sigma`` of the logarithm, rounded, and drawn again until inside ``min`` to ``max`` (never clipped, so that no
    length piles up at a bound). ``trace``: the first ``count`` of ``trace_lengths``.
    ``where`` is the configuration key of ``spec`` in messages, for instance ``workload.input``.

    Raises:
        ValueError: a value that the kind needs is missing, the range is empty or too narrow, the trace too short.
    """
    if spec.kind is LengthKind.trace:
        return _trace(trace_lengths, count=count, where=where)
    return _DRAWS[spec.kind](spec, count, rng, where)


def _trace(lengths: Sequence[int] | None, *, count: int, where: str) -> list[int]:
    if lengths is None:
        raise ValueError(f"{where}.kind=trace needs load.trace.path")
    if count > len(lengths):
        raise ValueError(
            f"{where}.kind=trace: load.trace.path has {len(lengths)} rows, the load asks for {count}"
        )
    return list(lengths[:count])


def _fixed(spec: Length, count: int, _rng: np.random.Generator, where: str) -> list[int]:
    return [_needed(spec.value, key=f"{where}.value", kind="fixed")] * count


def _uniform(spec: Length, count: int, rng: np.random.Generator, where: str) -> list[int]:
    low = _needed(spec.min, key=f"{where}.min", kind="uniform")
    high = _needed(spec.max, key=f"{where}.max", kind="uniform")
    _check_range(low, high, where=where)
    drawn: list[int] = rng.integers(low, high, size=count, endpoint=True).tolist()
    return drawn


def _lognormal(spec: Length, count: int, rng: np.random.Generator, where: str) -> list[int]:
    median = _needed(spec.value, key=f"{where}.value", kind="lognormal")
    sigma = _needed(spec.sigma, key=f"{where}.sigma", kind="lognormal")
    low, high = spec.min or 1, spec.max or np.inf
    _check_range(low, high, where=where)
    kept: list[int] = []
    for _ in range(MAX_ROUNDS):
        drawn = np.rint(rng.lognormal(np.log(median), sigma, size=count))
        kept += drawn[(drawn >= low) & (drawn <= high)].astype(np.int64).tolist()
        if len(kept) >= count:
            return kept[:count]
    raise ValueError(
        f"{where}: of {MAX_ROUNDS * count} lognormal draws (value={median}, sigma={sigma}) only {len(kept)} "
        f"fell inside min={low}, max={high}; widen the range"
    )


def _needed(value: _Number | None, *, key: str, kind: str) -> _Number:
    if value is None:
        raise ValueError(f"{key} must be set for kind={kind}")
    return value


def _check_range(low: float, high: float, *, where: str) -> None:
    if not 1 <= low <= high:
        raise ValueError(f"{where} needs 1 <= min <= max, got min={low}, max={high}")


_Draw = Callable[[Length, int, np.random.Generator, str], list[int]]
_DRAWS: dict[LengthKind, _Draw] = {
    LengthKind.fixed: _fixed,
    LengthKind.uniform: _uniform,
    LengthKind.lognormal: _lognormal,
}
