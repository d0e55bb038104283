"""The noise floor: how far launches of one and the same cell lie apart.

Runs are *identical* if everything they were asked for is equal, prompts and arrival times included; they differ in
the launch alone. Compared arms share prompts and arrivals too, so that the spread over launches is what is left between
two arms that do not differ: starts, memory layout, thread placement, the host's own load. Prompts are no part of it.
Latencies compared are the p50 of TTFT and the mean of TPOT of each run.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIN_LAUNCHES = 3  # two values have a difference, not a spread
FIGURES = {"ttft": "ttft_ms/p50", "tpot": "tpot_ms/mean"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A valid run: what it was asked for (without its place in the sweep) and its metrics."""

    asked: Mapping[str, Any]
    workload_hash: str | None
    metrics: Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """One figure over several launches."""

    launches: int
    mean_ms: float
    cv: float  # sample standard deviation / mean
    max_over_min: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """The spreads of one group of identical runs; None where fewer than three runs have the figure."""

    asked: Mapping[str, Any]
    launches: int
    ttft: Spread | None
    tpot: Spread | None


def noise_floor(runs: Iterable[Run]) -> list[Floor]:
    """One floor for each group of at least three identical runs, in the order in which the groups appear."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        if run.workload_hash is not None:
            key = repr((sorted((name, str(value)) for name, value in run.asked.items()), run.workload_hash))
            groups.setdefault(key, []).append(run)
    return [_floor(group) for group in groups.values() if len(group) >= MIN_LAUNCHES]


def _floor(group: Sequence[Run]) -> Floor:
    found = {name: spread([run.metrics.get(figure) for run in group]) for name, figure in FIGURES.items()}
    return Floor(asked=group[0].asked, launches=len(group), ttft=found["ttft"], tpot=found["tpot"])


def spread(values: Iterable[float | None]) -> Spread | None:
    """Spread of the values that are known and positive; None for fewer than three."""
    known = [value for value in values if value is not None and value > 0]
    if len(known) < MIN_LAUNCHES:
        return None
    mean = statistics.fmean(known)
    return Spread(
        launches=len(known),
        mean_ms=mean,
        cv=statistics.stdev(known) / mean,
        max_over_min=max(known) / min(known),
    )


def noise_metrics(floors: Iterable[Floor]) -> dict[str, float]:
    """``noise/ttft_cv`` and ``noise/tpot_cv``: the largest of all groups, so that no claim is made below any of them."""
    found: dict[str, float] = {}
    for floor in floors:
        for name, figure in (("noise/ttft_cv", floor.ttft), ("noise/tpot_cv", floor.tpot)):
            if figure is not None:
                found[name] = max(figure.cv, found.get(name, 0.0))
    return found
