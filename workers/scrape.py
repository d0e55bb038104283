"""The server's metrics and the host as a time series, and exact counters at the two ends of a window.

While the engine is measured a scrape asks only for the few names it needs (the server's client library can select;
0.32 takes 1.7 ms for them and 10 ms for everything) and keeps the bytes with a time stamp; parsing waits until the
window is over. A scrape that fails is a gap that is counted, never a zero.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

from workers import prometheus
from workers.families import Family
from workers.http_call import Target, call
from workers.prometheus import Sample, ServerWindow
from workers.telemetry import HostSampler

HTTP_OK = 200
SNAPSHOT_TIMEOUT_S = 10.0

SCHEMA = pa.schema(
    [
        pa.field("t_ns", pa.int64(), nullable=False),  # since the start of the run; before it: negative
        pa.field("source", pa.string(), nullable=False),  # "server" | "host"
        pa.field("name", pa.string(), nullable=False),
        pa.field("value", pa.float64(), nullable=False),
    ]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One whole scrape. ``text`` is None if it failed, and ``error`` says why."""

    t_ns: int
    text: str | None
    error: str | None = None

    @property
    def samples(self) -> list[Sample]:
        """All samples; none if the scrape failed."""
        return [] if self.text is None else prometheus.parse(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One value at one time, on the clock of the records."""

    t_ns: int
    source: str
    name: str
    value: float


class _RefusedError(OSError):
    """The server answered, with another status than 200."""


class Scraper:
    """Samples one server until told to stop; all stamps are ``time.perf_counter_ns``."""

    def __init__(
        self,
        base_url: str,
        *,
        family: Family,
        interval_s: float,
        host: HostSampler | None = None,
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        parts = urlsplit(base_url)
        self._host_name, self._port = parts.hostname or "", parts.port or 80
        self._path = family.routes["metrics"]
        self._family = family
        self._interval_s = interval_s
        self._host = host
        self._clock_ns = clock_ns
        counters = [
            spelling for names in family.counters.values() for n in names for spelling in (n, f"{n}_total")
        ]
        names = [*(n for names in family.gauges.values() for n in names), *counters]
        self._keep = prometheus.keep_lines(names)
        self._selected_path: str | None = f"{self._path}/?" + "&".join(
            f"name[]={quote(name)}" for name in names
        )
        self._bodies: list[tuple[int, bytes]] = []
        self._host_samples: list[tuple[int, dict[str, float]]] = []
        self.failed = 0

    async def snapshot(self) -> Snapshot:
        """One whole scrape now, for the two ends of a window."""
        t_ns = self._clock_ns()
        try:
            body = await self._get(self._path, timeout_s=SNAPSHOT_TIMEOUT_S)
        except OSError as error:
            return Snapshot(t_ns=t_ns, text=None, error=str(error) or type(error).__name__)
        return Snapshot(t_ns=t_ns, text=body.decode("utf-8", "replace"))

    async def run(self, stop: asyncio.Event) -> None:
        """Sample at the interval, on absolute times, until ``stop`` is set. A late scrape skips, it never bunches."""
        due_s = time.perf_counter()
        while not stop.is_set():
            await self._sample()
            due_s = max(due_s + self._interval_s, time.perf_counter())
            try:
                async with asyncio.timeout(due_s - time.perf_counter()):
                    await stop.wait()
            except TimeoutError:
                continue

    async def _sample(self) -> None:
        t_ns = self._clock_ns()
        if self._host is not None:
            self._host_samples.append((t_ns, self._host.sample()))
        try:
            body = await self._selected()
        except OSError:
            self.failed += 1
            return
        self._bodies.append((t_ns, self._keep(body)))

    async def _selected(self) -> bytes:
        """The needed names; everything from a server that has no route to select them."""
        timeout_s = max(1.0, self._interval_s)
        if self._selected_path is None:
            return await self._get(self._path, timeout_s=timeout_s)
        try:
            return await self._get(self._selected_path, timeout_s=timeout_s)
        except _RefusedError:
            self._selected_path = None
            return await self._get(self._path, timeout_s=timeout_s)

    async def _get(self, path: str, *, timeout_s: float) -> bytes:
        target = Target(host=self._host_name, port=self._port, method="GET", path=path)
        answer = await call(target, timeout_s=timeout_s)
        if answer.status != HTTP_OK:
            raise _RefusedError(f"{target}: status {answer.status}")
        return answer.body

    def rows(self, *, start_ns: int) -> list[Row]:
        """The series so far: gauges per engine summed, shares as maximum and mean, counters as they stand."""
        server = [
            Row(t_ns=t_ns - start_ns, source="server", name=name, value=value)
            for t_ns, body in self._bodies
            for name, value in _values(prometheus.parse(body.decode("utf-8", "replace")), family=self._family)
        ]
        host = [
            Row(t_ns=t_ns - start_ns, source="host", name=name, value=value)
            for t_ns, sample in self._host_samples
            for name, value in sample.items()
        ]
        return sorted(server + host, key=lambda row: row.t_ns)


def server_window(
    before: Snapshot, after: Snapshot, *, family: Family, jit_events: tuple[str, ...] | None
) -> ServerWindow:
    """Deltas between two snapshots, with what the log said about compilation in between."""
    found = prometheus.window(before.samples, after.samples, family=family)
    return ServerWindow(
        counters=found.counters,
        histograms=found.histograms,
        gauges_before=found.gauges_before,
        restarted=found.restarted,
        jit_events=jit_events,
    )


def server_metrics(
    window: ServerWindow, rows: Sequence[Row], *, start_ns: int = 0, end_ns: int | None = None
) -> dict[str, float | None]:
    """What the server says about a window, under the run's metric names; None where it says nothing.

    ``preemptions/total``, ``prefix_cache/hit_share`` (hits / looked-up tokens), ``server/prompt_tokens``,
    ``server/generation_tokens``, ``server/completed``: deltas of counters. ``queue_time_ms/mean``,
    ``server_ttft_ms/mean``, ``server_itl_ms/mean``, ``server_e2el_ms/mean``: histogram sum / count over the window.
    ``kv_usage``, ``running``, ``waiting`` (``/mean``, ``/max``): over the scrapes with ``start_ns <= t_ns <= end_ns``;
    shares of several engines enter the maximum by their maximum and the mean by their mean.
    """
    inside = [row for row in rows if row.t_ns >= start_ns and (end_ns is None or row.t_ns <= end_ns)]
    counters = window.counters
    return {
        "preemptions/total": counters.get("preemptions"),
        "prefix_cache/hit_share": window.prefix_hit_share,
        "server/prompt_tokens": counters.get("prompt_tokens"),
        "server/generation_tokens": counters.get("generation_tokens"),
        "server/completed": counters.get("completed"),
        "queue_time_ms/mean": _mean_ms(window, "queue"),
        "server_ttft_ms/mean": _mean_ms(window, "ttft"),
        "server_itl_ms/mean": _mean_ms(window, "itl"),
        "server_e2el_ms/mean": _mean_ms(window, "e2el"),
        "kv_usage/mean": _mean(_named(inside, "kv_usage_mean")),
        "kv_usage/max": max(_named(inside, "kv_usage_max"), default=None),
        "running/mean": _mean(_named(inside, "running")),
        "running/max": max(_named(inside, "running"), default=None),
        "waiting/mean": _mean(_named(inside, "waiting")),
        "waiting/max": max(_named(inside, "waiting"), default=None),
        "server_cpu_cores/mean": _mean(_named(inside, "server_cpu_cores")),
        "server_rss_bytes/max": max(_named(inside, "server_rss_bytes"), default=None),
        "host_cpu_share/mean": _mean(_named(inside, "host_cpu_share")),
    }


def in_system(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """Time of each scrape and the requests the server had then, running and waiting; scrapes without both are left out."""
    waiting = {row.t_ns: row.value for row in rows if row.source == "server" and row.name == "waiting"}
    return [
        (row.t_ns, row.value + waiting[row.t_ns])
        for row in rows
        if row.source == "server" and row.name == "running" and row.t_ns in waiting
    ]


def write_timeseries(path: Path, rows: Sequence[Row]) -> None:
    """Write rows to a Parquet file in long format (zstd)."""
    columns: Mapping[str, list[object]] = {
        field.name: [getattr(row, field.name) for row in rows] for field in SCHEMA
    }
    pq.write_table(pa.table(columns, schema=SCHEMA), path, compression="zstd")


def read_timeseries(path: Path) -> list[Row]:
    """Read rows back."""
    return [Row(**row) for row in pq.read_table(path).to_pylist()]


def _values(samples: Sequence[Sample], *, family: Family) -> list[tuple[str, float]]:
    found: dict[str, float | None] = prometheus.gauges(samples, family=family)
    found |= prometheus.counters(samples, family=family)
    return [(name, value) for name, value in found.items() if value is not None]


def _mean_ms(window: ServerWindow, quantity: str) -> float | None:
    delta = window.histograms.get(quantity)
    mean_s = None if delta is None else delta.mean
    return None if mean_s is None else mean_s * 1000


def _named(rows: Sequence[Row], name: str) -> list[float]:
    return [row.value for row in rows if row.name == name]


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
