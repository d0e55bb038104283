"""When requests are due: every offset is computed before the run, by a pure function."""

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from conf.schema import ArrivalKind, Load

NS_PER_S = 1_000_000_000
# Gaps drawn at a time when only the duration is known.
BLOCK = 1024


def arrival_offsets_ns(
    load: Load, *, rng: np.random.Generator, trace_offsets_ns: Sequence[int] | None = None
) -> list[int]:
    """Compute the due times of a run: ns from its start, in order.

    ``constant``: ``i / rate``. ``poisson``, ``gamma``: independent gamma gaps of mean ``1 / rate`` and coefficient
    of variation ``1 / sqrt(burstiness)`` (Poisson: burstiness 1), the first arrival after the first gap.
    ``burst``, and any of these at ``rate_per_s=inf``: all at 0. ``trace``: the trace's own times.
    Arrivals end after ``num_requests`` of them, or before ``duration_s``, whichever comes first; a longer run of
    the same generator begins with the arrivals of the shorter one.

    Raises:
        ValueError: a rate or burstiness that is not > 0, or nothing that ends the run.
    """
    _check(load)
    if load.arrival is ArrivalKind.trace:
        return _trace(load, trace_offsets_ns)
    if load.arrival is ArrivalKind.burst or math.isinf(load.rate_per_s):
        return _burst(load)
    if load.arrival is ArrivalKind.constant:
        return _constant(load)
    burstiness = load.burstiness if load.arrival is ArrivalKind.gamma else 1.0
    return _renewal(load, burstiness=burstiness, rng=rng)


def _check(load: Load) -> None:
    for key in ("rate_per_s", "burstiness"):
        value = getattr(load, key)
        if not value > 0:
            raise ValueError(f"load.{key} must be > 0, got {value}")
    if math.isinf(load.burstiness):
        raise ValueError("load.burstiness must be finite, got inf; equal gaps are load.arrival=constant")
    if load.arrival is not ArrivalKind.trace and load.num_requests is None and load.duration_s is None:
        raise ValueError("load.num_requests or load.duration_s must be set: nothing ends the run")


def _trace(load: Load, offsets_ns: Sequence[int] | None) -> list[int]:
    if offsets_ns is None:
        raise ValueError("load.arrival=trace needs load.trace.path")
    if load.num_requests is not None and load.num_requests > len(offsets_ns):
        raise ValueError(
            f"load.num_requests must be <= {len(offsets_ns)}, the rows of load.trace.path, got {load.num_requests}"
        )
    return [offset for offset in offsets_ns[: load.num_requests] if offset < _end_ns(load)]


def _burst(load: Load) -> list[int]:
    if load.num_requests is None:
        raise ValueError("load.num_requests must be set for a burst (load.rate_per_s=inf): its duration is 0")
    return [0] * load.num_requests


def _constant(load: Load) -> list[int]:
    count = _most(load)
    if load.duration_s is not None:
        # One more than fits, so that rounding of the product cannot drop the last; the cut below is exact.
        count = min(count, math.ceil(load.duration_s * load.rate_per_s) + 1)
    offsets = (round(i * NS_PER_S / load.rate_per_s) for i in range(int(count)))
    return [offset for offset in offsets if offset < _end_ns(load)]


def _renewal(load: Load, *, burstiness: float, rng: np.random.Generator) -> list[int]:
    count, end_s = _most(load), math.inf if load.duration_s is None else load.duration_s
    times: npt.NDArray[np.float64] = np.empty(0)
    while len(times) < count and (len(times) == 0 or times[-1] < end_s):
        gaps = rng.standard_gamma(burstiness, BLOCK) / (burstiness * load.rate_per_s)
        start = times[-1] if len(times) else 0.0
        times = np.concatenate([times, start + np.cumsum(gaps)])
    offsets = np.rint(times * NS_PER_S).astype(np.int64).tolist()
    kept: list[int] = [offset for offset in offsets if offset < _end_ns(load)]
    return kept[: load.num_requests]


def _most(load: Load) -> float:
    return math.inf if load.num_requests is None else load.num_requests


def _end_ns(load: Load) -> float:
    return math.inf if load.duration_s is None else load.duration_s * NS_PER_S
