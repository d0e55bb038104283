"""Reading a server's metrics: exact names, deltas between two scrapes, ``None`` for what is not there.

Rules, once for all readers:

* A sample is found by its exact name and by nothing else, so ``…_created`` (a Unix time) and ``…_by_reason`` (a
  breakdown of the same requests) are never taken for the quantity itself.
* Of two names of one quantity the newest that is present counts; they never add up.
* Counters and request counts are summed over engines, shares are not: they have a maximum and a mean.
* A counter that fell, or whose ``_created`` moved, means that the server restarted: no delta exists then.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from workers.families import Family

Labels = frozenset[tuple[str, str]]

# Series of a counter that are another quantity: an aborted request is not a completed one.
_EXCLUDED = {"completed": ("finished_reason", frozenset({"abort", "error"}))}
_SHARES = frozenset({"kv_usage"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One line of an exposition."""

    name: str
    labels: Labels
    value: float

    def label(self, name: str) -> str | None:
        """A label's value, or None."""
        return dict(self.labels).get(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramDelta:
    """What a histogram collected between two scrapes. ``sum`` is in the metric's own unit (seconds or tokens)."""

    sum: float
    count: float

    @property
    def mean(self) -> float | None:
        """Mean of the observations, or None without any."""
        return self.sum / self.count if self.count > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerWindow:
    """What the server's metrics say about one measured window.

    Attributes:
        counters: quantity → increase, summed over engines; None if absent at either end or after a restart.
        histograms: quantity → increase; None likewise.
        gauges_before: quantity → value just before the window (requests summed, shares as their maximum).
        restarted: a counter fell or was created anew inside the window.
        jit_events: log lines inside the window that report compilation; None if the log could not be read.
    """

    counters: Mapping[str, float | None]
    histograms: Mapping[str, HistogramDelta | None]
    gauges_before: Mapping[str, float | None]
    restarted: bool = False
    jit_events: tuple[str, ...] | None = ()

    @property
    def prefix_hit_share(self) -> float | None:
        """Hits / looked-up tokens; None if unknown or if nothing was looked up."""
        queries, hits = self.counters.get("prefix_queries"), self.counters.get("prefix_hits")
        return hits / queries if queries and hits is not None else None


def parse(text: str) -> list[Sample]:
    """All samples of an exposition; comments carry none."""
    return [
        Sample(name=sample.name, labels=frozenset(sample.labels.items()), value=float(sample.value))
        for metric in text_string_to_metric_families(text)
        for sample in metric.samples
    ]


def gauges(samples: Sequence[Sample], *, family: Family) -> dict[str, float | None]:
    """Every gauge of a family: requests summed over engines; shares as ``…_max`` and ``…_mean`` over engines."""
    found: dict[str, float | None] = {}
    for quantity, names in family.gauges.items():
        values = [sample.value for sample in _series(samples, names)]
        if quantity in _SHARES:
            found[f"{quantity}_max"] = max(values) if values else None
            found[f"{quantity}_mean"] = sum(values) / len(values) if values else None
        else:
            found[quantity] = sum(values) if values else None
    return found


def counters(samples: Sequence[Sample], *, family: Family) -> dict[str, float | None]:
    """Every counter of a family as it stands, summed over engines."""
    found = {quantity: _counter(samples, quantity, family=family) for quantity in family.counters}
    return {quantity: sum(s.value for s in series) if series else None for quantity, series in found.items()}


def missing(samples: Sequence[Sample], *, family: Family) -> list[str]:
    """Names of quantities that a scrape does not hold, for a warning."""
    absent = [name for name, names in family.gauges.items() if not _series(samples, names)]
    absent += [name for name in family.counters if not _counter(samples, name, family=family)]
    return absent + [
        name for name, names in family.histograms.items() if not _series(samples, _suffixed(names, "_sum"))
    ]


def info_labels(samples: Sequence[Sample], *, family: Family) -> dict[str, str] | None:
    """Labels of the cache-configuration metric of the first engine, or None."""
    found = _series(samples, (family.info,))
    first = min(found, key=lambda sample: sample.label("engine") or "", default=None)
    return None if first is None else dict(first.labels)


def window(before: Sequence[Sample], after: Sequence[Sample], *, family: Family) -> ServerWindow:
    """Deltas of everything a family counts between two scrapes of one server."""
    if restarted(before, after, family=family):
        return ServerWindow(
            counters=dict.fromkeys(family.counters),
            histograms=dict.fromkeys(family.histograms),
            gauges_before=_before(before, family=family),
            restarted=True,
        )
    return ServerWindow(
        counters={
            name: _delta(_counter(before, name, family=family), _counter(after, name, family=family))
            for name in family.counters
        },
        histograms={name: _histogram(before, after, names) for name, names in family.histograms.items()},
        gauges_before=_before(before, family=family),
    )


def restarted(before: Sequence[Sample], after: Sequence[Sample], *, family: Family) -> bool:
    """True if any series of the family fell, vanished beside its siblings, or was created later than before."""
    names = [name for alternatives in family.counters.values() for name in alternatives]
    spellings = [*names, *(f"{name}_total" for name in names)]
    spellings += [
        f"{name}{suffix}"
        for alternatives in family.histograms.values()
        for name in alternatives
        for suffix in ("_sum", "_count")
    ]
    old, new = _index(before), _index(after)
    present = {name for name, _ in new}
    if any(_fell(old, new, present, name) for name in spellings):
        return True
    created = [f"{name}_created" for name in (*names, *(n for a in family.histograms.values() for n in a))]
    return any(new[key] > value for key, value in old.items() if key[0] in created and key in new)


def _fell(
    old: Mapping[tuple[str, Labels], float],
    new: Mapping[tuple[str, Labels], float],
    present: set[str],
    name: str,
) -> bool:
    series = {key: value for key, value in old.items() if key[0] == name}
    return name in present and any(key not in new or new[key] < value for key, value in series.items())


def _histogram(
    before: Sequence[Sample], after: Sequence[Sample], names: tuple[str, ...]
) -> HistogramDelta | None:
    total = _delta(_series(before, _suffixed(names, "_sum")), _series(after, _suffixed(names, "_sum")))
    count = _delta(_series(before, _suffixed(names, "_count")), _series(after, _suffixed(names, "_count")))
    return None if total is None or count is None else HistogramDelta(sum=total, count=count)


def _delta(before: list[Sample], after: list[Sample]) -> float | None:
    """Increase over all series; a series that is new beside known siblings started at 0."""
    if not before or not after or before[0].name != after[0].name:
        return None
    return sum(sample.value for sample in after) - sum(sample.value for sample in before)


def _counter(samples: Sequence[Sample], quantity: str, *, family: Family) -> list[Sample]:
    names = family.counters[quantity]
    found = _series(samples, tuple(spelling for name in names for spelling in (f"{name}_total", name)))
    label, values = _EXCLUDED.get(quantity, ("", frozenset()))
    return [sample for sample in found if sample.label(label) not in values]


def _series(samples: Iterable[Sample], names: tuple[str, ...]) -> list[Sample]:
    """All series of the first name that is present."""
    by_name: dict[str, list[Sample]] = {name: [] for name in names}
    for sample in samples:
        if sample.name in by_name:
            by_name[sample.name].append(sample)
    return next((series for series in by_name.values() if series), [])


def _suffixed(names: tuple[str, ...], suffix: str) -> tuple[str, ...]:
    return tuple(f"{name}{suffix}" for name in names)


def _index(samples: Sequence[Sample]) -> dict[tuple[str, Labels], float]:
    return {(sample.name, sample.labels): sample.value for sample in samples}


def _before(samples: Sequence[Sample], *, family: Family) -> dict[str, float | None]:
    return gauges(samples, family=family)


def keep_lines(names: Iterable[str]) -> Callable[[bytes], bytes]:
    """A filter that keeps an exposition's lines of some names, cheaply: no parsing while the engine is measured."""
    prefixes = tuple(f"{name}{{".encode() for name in names) + tuple(f"{name} ".encode() for name in names)
    return lambda body: b"\n".join(line for line in body.splitlines() if line.startswith(prefixes)) + b"\n"
