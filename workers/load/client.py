"""The load generator as its caller sees it: a specification in, records out.

The generator runs in processes of its own (:mod:`workers.load.generate`), so that nothing in the caller can delay a
send or a time stamp.
"""

import asyncio
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlsplit

from analysis.records import Record, read_records
from conf.schema import Endpoint
from workers.errors import ClientLimitError, ServelabError
from workers.load.workload import Request, read_arrivals

# One process carries this many token events per second with room to spare.
EVENTS_PER_PROCESS_PER_S = 15_000
# Between the last "ready" and the first due time: the word "go" has to reach every process.
START_DELAY_NS = 50_000_000
STOP_GRACE_S = 3.0
_MAX_ERROR_CHARS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """One load: the requests of ``arrivals`` against one server.

    In phase ``"measured"`` a request leaves at its ``due_ns`` after the start. In phase ``"warmup"`` requests with
    equal ``due_ns`` form a group, and a group starts when the one before is answered.
    """

    arrivals: str  # path of arrivals.parquet
    base_url: str  # http://host:port
    model: str  # name under which the model is served
    endpoint: Endpoint = Endpoint.completions
    phase: str = "measured"
    temperature: float = 0.0
    ignore_eos: bool = True  # forced output lengths
    request_timeout_s: float = 600.0
    max_concurrency: int | None = None
    processes: int | None = None  # None: from the expected rate of token events

    def __post_init__(self) -> None:
        if self.phase not in {"warmup", "measured"}:
            raise ValueError(f"phase must be warmup or measured, got {self.phase!r}")
        _ = self.address

    @property
    def address(self) -> tuple[str, int]:
        """Host and port.

        Raises:
            ValueError: ``base_url`` is something else than ``http://host:port``.
        """
        url = urlsplit(self.base_url)
        if url.scheme != "http" or url.hostname is None or url.port is None or url.path not in {"", "/"}:
            raise ValueError(f"base_url must look like http://host:port, got {self.base_url!r}")
        return url.hostname, url.port

    def to_json(self) -> dict[str, Any]:
        """Plain values, for a JSON file."""
        return asdict(self) | {"endpoint": self.endpoint.value}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LoadSpec":
        """The reverse of :meth:`to_json`."""
        return cls(**(values | {"endpoint": Endpoint(values["endpoint"])}))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientStats:
    """What the generator knows about itself; over several processes the worst one counts."""

    cpu_share: float  # CPU time of a process / wall time of the window
    cpu_s: float  # CPU time of the window, over all processes
    after_cpu_s: float  # CPU time spent afterwards on parsing and writing, over all processes
    loop_delay_ms: dict[str, float]  # p50, p99, max: how late a 10 ms timer was served
    peak_open_streams: int  # requests sent and not yet answered, over all processes
    num_connections: int
    num_processes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """All records, in the order of their index, with stamps from ``t0_ns``."""

    records: list[Record]
    client: ClientStats
    t0_ns: int  # start of the run on CLOCK_MONOTONIC (``time.perf_counter_ns`` of any process of this host)
    started_at_s: float  # the same instant, wall clock (Unix time)


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Counts over all processes."""

    num_sent: int
    num_done: int
    num_requests: int


async def run_load(
    spec: LoadSpec,
    *,
    on_started: Callable[[int], None] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    cpu_affinity: set[int] | None = None,
) -> LoadResult:
    """Run a load and return its records; failed requests are records, never exceptions.

    Cancel the task to stop: the processes see their lifeline close and end.

    Args:
        spec: what to send where.
        on_started: called with ``t0_ns`` when the processes have been told to go.
        on_progress: called about every second.
        cpu_affinity: cores the processes may use.

    Raises:
        ClientLimitError: this host cannot hold as many streams; nothing was sent.
        ValueError: a request cannot be put for this endpoint.
        ServelabError: a process of the generator died.
    """
    requests = read_arrivals(Path(spec.arrivals))
    num_processes = spec.processes or _num_processes(
        requests, cores=len(cpu_affinity or os.sched_getaffinity(0))
    )
    num_processes = max(1, min(num_processes, len(requests), spec.max_concurrency or len(requests)))
    with tempfile.TemporaryDirectory(prefix="servelab-load-") as folder:
        shards = [
            _Shard(spec, number=i, of=num_processes, folder=Path(folder) / str(i), cpu_affinity=cpu_affinity)
            for i in range(num_processes)
        ]
        try:
            await _all(shard.start() for shard in shards)
            t0_ns = time.perf_counter_ns() + START_DELAY_NS
            started_at_s = time.time() + START_DELAY_NS / 1e9
            for shard in shards:
                shard.go(t0_ns)
            if on_started is not None:
                on_started(t0_ns)

            def report() -> None:
                if on_progress is not None:
                    sent, done = (
                        sum(getattr(shard, name) for shard in shards) for name in ("num_sent", "num_done")
                    )
                    on_progress(Progress(num_sent=sent, num_done=done, num_requests=len(requests)))

            await _all(shard.finish(report) for shard in shards)
        finally:
            await _all(shard.stop() for shard in shards)
        records = sorted((r for shard in shards for r in shard.records()), key=lambda record: record.index)
        return LoadResult(
            records=records,
            client=merge_stats([shard.stats() for shard in shards], records),
            t0_ns=t0_ns,
            started_at_s=started_at_s,
        )


def merge_stats(stats: Sequence[ClientStats], records: Sequence[Record]) -> ClientStats:
    """One row for all processes: the worst share and delays, sums of counts, the peak from the records."""
    return ClientStats(
        cpu_share=max(one.cpu_share for one in stats),
        cpu_s=sum(one.cpu_s for one in stats),
        after_cpu_s=sum(one.after_cpu_s for one in stats),
        loop_delay_ms={key: max(one.loop_delay_ms[key] for one in stats) for key in ("p50", "p99", "max")},
        peak_open_streams=peak_open_streams(records),
        num_connections=sum(one.num_connections for one in stats),
        num_processes=len(stats),
    )


def peak_open_streams(records: Sequence[Record]) -> int:
    """Count the most requests that were sent and not yet done at one time."""
    spans = [(r.sent_ns, r.done_ns) for r in records if r.sent_ns is not None and r.done_ns is not None]
    changes = sorted([(sent, 1) for sent, _ in spans] + [(done, -1) for _, done in spans])
    peak = now = 0
    for _, change in changes:
        now += change
        peak = max(peak, now)
    return peak


def _num_processes(requests: Sequence[Request], *, cores: int) -> int:
    """As many as the mean rate of token events needs, at most one a core; one where the rate is not finite."""
    span_ns = requests[-1].due_ns - requests[0].due_ns if requests else 0
    if span_ns <= 0:
        return 1
    events_per_s = sum(request.num_output_tokens for request in requests) / (span_ns / 1e9)
    return max(1, min(math.ceil(events_per_s / EVENTS_PER_PROCESS_PER_S), cores))


async def _all(jobs: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all; the first failure ends the others and is raised."""
    tasks = [asyncio.ensure_future(job) for job in jobs]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Shard:
    """One generator process, seen from here: every ``of``-th request from ``number`` on."""

    def __init__(
        self, spec: LoadSpec, *, number: int, of: int, folder: Path, cpu_affinity: set[int] | None
    ) -> None:
        self.num_sent = 0
        self.num_done = 0
        self._folder = folder
        cap = spec.max_concurrency
        share = None if cap is None else cap // of + (number < cap % of)
        self._job = {
            "load": replace(
                spec, max_concurrency=share, arrivals=str(Path(spec.arrivals).resolve())
            ).to_json(),
            "shard": number,
            "num_shards": of,
            "out_dir": str(folder),
            "cpu_affinity": sorted(cpu_affinity) if cpu_affinity else None,
        }
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process and wait until it is ready to send."""
        self._folder.mkdir()
        job = self._folder / "job.json"
        job.write_text(json.dumps(self._job))
        with self._stderr.open("wb") as stderr:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "workers.load.generate", str(job),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=stderr,
                env=os.environ | {"PYTHONPATH": import_path()}, start_new_session=True,
            )  # fmt: skip
        await self._event("ready")

    def go(self, t0_ns: int) -> None:
        self._stdin.write(b"go %d\n" % t0_ns)

    async def finish(self, report: Callable[[], None]) -> None:
        """Wait until every request is over and the records are written."""
        await self._event("finished", report)

    async def stop(self) -> None:
        """Close the lifeline; kill what does not end by itself."""
        process = self._process
        if process is None:
            return
        self._stdin.close()
        try:
            await asyncio.wait_for(process.wait(), STOP_GRACE_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    def records(self) -> list[Record]:
        return read_records(self._folder / "records.parquet")

    def stats(self) -> ClientStats:
        return ClientStats(**json.loads((self._folder / "client.json").read_text()))

    @property
    def _stdin(self) -> asyncio.StreamWriter:
        process = cast("asyncio.subprocess.Process", self._process)
        return cast("asyncio.StreamWriter", process.stdin)

    @property
    def _stderr(self) -> Path:
        return self._folder / "stderr.txt"

    async def _event(self, name: str, report: Callable[[], None] | None = None) -> None:
        """Read events up to the one called ``name``."""
        process = cast("asyncio.subprocess.Process", self._process)
        async for line in cast("asyncio.StreamReader", process.stdout):
            event = json.loads(line)
            if event["event"] == name:
                return
            if event["event"] == "failed":
                raise _ERRORS[event["class"]](event["message"])
            if event["event"] == "progress":
                self.num_sent, self.num_done = event["sent"], event["done"]
                if report is not None:
                    report()
        code = await process.wait()
        tail = self._stderr.read_text(errors="replace")[-_MAX_ERROR_CHARS:]
        raise ServelabError(f"the load generator ended with code {code} before it was {name}: {tail}")


_ERRORS: dict[str, type[Exception]] = {"ClientLimitError": ClientLimitError, "ValueError": ValueError}


def import_path() -> str:
    """Return the ``PYTHONPATH`` with which a child finds this package, whatever put it on our own path."""
    root = str(Path(__file__).resolve().parents[2])
    inherited = os.environ.get("PYTHONPATH")
    return f"{root}{os.pathsep}{inherited}" if inherited else root
