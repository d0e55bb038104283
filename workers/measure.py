"""One cell on a running server: warm-up → drain check → window → verdict, and every file it leaves."""

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.metrics import METRICS_VERSION, summarise
from analysis.records import Record, write_records
from conf.schema import Config
from workers import engine_log, families
from workers.environment import EngineBuild
from workers.errors import NotDrainedError
from workers.events import CellFinished, CellSpec, Event, Phase
from workers.evidence import Evidence, Source, collect
from workers.load.client import LoadResult, LoadSpec, Progress, run_load
from workers.load.warmup import warmup_requests
from workers.load.workload import Request, arrivals_sha256, build_requests, write_arrivals
from workers.model import PreparedModel
from workers.overlay import Plugin
from workers.probes import Judgement, Probed, judge_answers
from workers.prometheus import ServerWindow, gauges
from workers.rules import confirmed_by
from workers.scrape import (
    Row,
    Scraper,
    Snapshot,
    in_system,
    server_metrics,
    server_window,
    write_timeseries,
)
from workers.server import Server
from workers.telemetry import Devices, HostSampler
from workers.verdict import InSystem, Verdict, judge

DRAIN_POLL_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A cell and the server it is measured on; ``folder`` is the cell's scratch folder on this node."""

    cell: CellSpec
    server: Server
    build: EngineBuild
    model: PreparedModel
    device_ids: Sequence[str]
    client_cores: frozenset[int] | None
    folder: Path
    emit: Callable[[Event], None]
    plugin: Plugin | None = None
    probed: Probed | None = None  # the launch's answers to the output probes; None: none were asked

    @property
    def config(self) -> Config:
        """The cell's configuration."""
        return self.cell.config

    @property
    def family(self) -> families.Family:
        """What this engine's version calls its metrics and routes."""
        return families.family(self.config.engine)

    def phase(self, name: str, progress: Progress | None = None) -> None:
        """Tell the driver what is going on."""
        done, total = (progress.num_done, progress.num_requests) if progress else (None, None)
        self.emit(Phase(name=name, cell=self.cell.key, done=done, total=total))


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The raw material of a window: the load's records and what the server and the host said meanwhile."""

    load: LoadResult
    before: Snapshot
    after: Snapshot
    rows: list[Row]
    failed_scrapes: int
    devices: list[dict[str, Any]]
    log_from: int  # offsets of the server log, bytes
    log_to: int


async def measure_cell(measurement: Measurement) -> CellFinished:
    """Measure one cell on a server that is ready.

    Raises:
        EngineDiedError: the server ended meanwhile.
        NotDrainedError: an earlier load was still running after ``load.drain_timeout_s``.
        ClientLimitError: this host cannot hold as many streams.
        ValueError: the workload contradicts the model (lengths, vocabulary).
    """
    measurement.folder.mkdir(parents=True)
    requests = build(measurement)
    clock = Clock()
    with clock.phase("warmup_s"):
        measurement.phase("warm-up")
        warm = await measurement.server.while_alive(warm_up(measurement, requests))
        await measurement.server.while_alive(drain(measurement))
    with clock.phase("measured_s"):
        measurement.phase("measure")
        observed = await measurement.server.while_alive(observe(measurement, requests))
    with clock.phase("evidence_s"):
        evidence = await measurement.server.while_alive(collect(source(measurement, observed)))
        payload = await asyncio.to_thread(conclude, measurement, observed, evidence)
        payload["timing"] = clock.seconds
        payload["arrivals_sha256"] = arrivals_sha256(requests)
        files = await asyncio.to_thread(leave, measurement, observed, evidence, warm)
    return CellFinished(cell=measurement.cell.key, payload=payload, files=files)


def build(measurement: Measurement) -> list[Request]:
    """All requests of the run, computed before it."""
    config = measurement.config
    return build_requests(
        config.workload,
        config.load,
        seed=config.seed,
        repeat=config.draw,
        vocab_size=measurement.model.vocab_size,
        max_model_len=config.engine.max_model_len,
    )


async def warm_up(measurement: Measurement, requests: Sequence[Request]) -> list[Record]:
    """Send one request of every shape that the window holds; the rows are kept apart."""
    config = measurement.config
    warm = warmup_requests(
        requests,
        config.load.warmup,
        seed=config.seed,
        repeat=config.draw,
        vocab_size=measurement.model.vocab_size,
    )
    if not warm:
        return []
    path = measurement.folder / "warmup.parquet"
    write_arrivals(path, warm)
    spec = load_spec(measurement, arrivals=path, phase="warmup")
    return (await run_load(spec, cpu_affinity=affinity(measurement))).records


async def drain(measurement: Measurement) -> None:
    """Wait until the server has no request running or waiting.

    Raises:
        NotDrainedError: it still has after ``load.drain_timeout_s``, or does not say.
    """
    scraper = Scraper(measurement.server.base_url, family=measurement.family, interval_s=1.0)
    limit_s = measurement.config.load.drain_timeout_s
    deadline = time.monotonic() + limit_s
    while True:
        found = gauges((await scraper.snapshot()).samples, family=measurement.family)
        if found.get("running") == 0 and found.get("waiting") == 0:
            return
        if time.monotonic() > deadline:
            raise NotDrainedError(
                f"after {limit_s:g} s the server reports running={found.get('running')}, waiting={found.get('waiting')}; "
                "raise load.drain_timeout_s if it is merely slow",
            )
        await asyncio.sleep(DRAIN_POLL_S)


async def observe(measurement: Measurement, requests: Sequence[Request]) -> Observed:
    """Run the load and scrape server and host meanwhile."""
    path = measurement.folder / "arrivals.parquet"
    write_arrivals(path, requests)
    async with scraping(measurement) as (scraper, devices):
        before, log_from = await scraper.snapshot(), log_size(measurement)
        load = await run_load(
            load_spec(measurement, arrivals=path, phase="measured"),
            on_progress=lambda progress: measurement.phase("measure", progress),
            cpu_affinity=affinity(measurement),
        )
        after = await scraper.snapshot()
        facts = devices.facts() if devices is not None else []
    return Observed(
        load=load,
        before=before,
        after=after,
        rows=scraper.rows(start_ns=load.t0_ns),
        failed_scrapes=scraper.failed,
        devices=facts,
        log_from=log_from,
        log_to=log_size(measurement),
    )


@contextlib.asynccontextmanager
async def scraping(measurement: Measurement) -> AsyncIterator[tuple[Scraper, Devices | None]]:
    """A scraper that samples inside the block, and the devices it reads."""
    stop = asyncio.Event()
    devices = Devices.open(",".join(measurement.device_ids)) if measurement.device_ids else None
    assert measurement.server.pid is not None  # noqa: S101 - a ready server has a pid
    scraper = Scraper(
        measurement.server.base_url,
        family=measurement.family,
        interval_s=measurement.config.load.scrape_interval_s,
        host=HostSampler(measurement.server.pid, devices=devices),
    )
    task = asyncio.create_task(scraper.run(stop))
    try:
        yield scraper, devices
    finally:
        stop.set()
        await task
        if devices is not None:
            devices.close()


def conclude(measurement: Measurement, observed: Observed, evidence: Evidence) -> dict[str, Any]:
    """Metrics and verdict: the part of result.json that only this node can know."""
    config = measurement.config
    records = observed.load.records
    window = window_of(measurement, observed)
    summary = summarise(records, slo=config.load.slo)
    ends = [record.done_ns for record in records if record.done_ns is not None]
    metrics: dict[str, float | None] = {
        **summary.metrics,
        **server_metrics(window, observed.rows, end_ns=max(ends, default=None)),
        "kv_cache/tokens": evidence.value("server.kv_cache_tokens"),
        "client/cpu_share": observed.load.client.cpu_share,
        "client/loop_delay_ms/p99": observed.load.client.loop_delay_ms["p99"],
        "client/peak_open_streams": float(observed.load.client.peak_open_streams),
        "scrapes/failed": float(observed.failed_scrapes),
        **(measurement.probed.metrics() if measurement.probed else {}),
    }
    output = judge_output(measurement)
    verdict: Verdict = judge(
        config,
        evidence,
        model_config=measurement.model.config,
        metrics=metrics,
        window=window,
        client=observed.load.client,
        records=records,
        in_system=[InSystem(t_ns=t_ns, requests=count) for t_ns, count in in_system(observed.rows)],
        swept=measurement.cell.swept,
        output_problem=output.problem,
        output_unknown=output.unknown,
    )
    return {
        "metrics_version": METRICS_VERSION,
        "metrics": metrics,
        "warnings": list(summary.warnings),
        "verdict": verdict.to_dict(),
        "server": evidence.values(),
        "confirmed_by": confirmed_by(config, evidence),
        "client": asdict(observed.load.client),
        "start_attempts": [asdict(attempt) for attempt in measurement.server.attempts],
        "model_sha256": measurement.model.sha256,
    }


def judge_output(measurement: Measurement) -> Judgement:
    """The launch's probe answers under this cell's limit."""
    if measurement.probed is None:
        return Judgement()
    return judge_answers(measurement.probed, limit_nats=measurement.config.load.limits.output_nats)


def window_of(measurement: Measurement, observed: Observed) -> ServerWindow:
    """Counter deltas and what the log said about compilation inside the window."""
    with measurement.server.log_path.open("rb") as file:
        file.seek(observed.log_from)
        text = file.read(observed.log_to - observed.log_from).decode("utf-8", "replace")
    return server_window(
        observed.before,
        observed.after,
        family=measurement.family,
        jit_events=engine_log.compilations(text),
    )


def source(measurement: Measurement, observed: Observed) -> Source:
    """Where evidence is collected from."""
    server, build = measurement.server, measurement.build
    assert server.pid is not None  # noqa: S101 - a ready server has a pid
    return Source(
        base_url=server.base_url,
        family=measurement.family,
        pid=server.pid,
        log_path=server.log_path,
        metrics_text=observed.after.text,
        freeze=build.freeze or None,
        freeze_sha256=build.freeze_sha256,
        environment_root=None if measurement.config.engine.executable is not None else build.root,
        device_ids=",".join(measurement.device_ids) or None,
        devices=observed.devices,
        plugin=measurement.plugin,
    )


def leave(
    measurement: Measurement, observed: Observed, evidence: Evidence, warm: Sequence[Record]
) -> dict[str, bytes]:
    """Every file of the cell, as bytes."""
    folder = measurement.folder
    write_records(folder / "records.parquet", [*warm, *observed.load.records])
    write_timeseries(folder / "timeseries.parquet", observed.rows)
    client: Mapping[str, Any] = asdict(observed.load.client)
    probed = measurement.probed
    return {
        **({"probes.json": probed.to_json().encode()} if probed else {}),
        "arrivals.parquet": (folder / "arrivals.parquet").read_bytes(),
        "records.parquet": (folder / "records.parquet").read_bytes(),
        "timeseries.parquet": (folder / "timeseries.parquet").read_bytes(),
        "evidence.json": evidence.to_json().encode(),
        "client.json": json.dumps(client, indent=1).encode(),
        "environment.txt": measurement.build.freeze.encode(),
        "server.log": measurement.server.log_path.read_bytes(),
        "metrics_before.txt": (observed.before.text or "").encode(),
        "metrics_after.txt": (observed.after.text or "").encode(),
    }


def load_spec(measurement: Measurement, *, arrivals: Path, phase: str) -> LoadSpec:
    """The load generator's specification for one phase."""
    config = measurement.config
    return LoadSpec(
        arrivals=str(arrivals),
        base_url=measurement.server.base_url,
        model=config.model.name,
        endpoint=config.workload.endpoint,
        phase=phase,
        temperature=config.workload.temperature,
        ignore_eos=config.workload.ignore_eos,
        request_timeout_s=config.load.request_timeout_s,
        max_concurrency=config.load.max_concurrency if phase == "measured" else None,
        processes=config.load.processes if phase == "measured" else 1,
    )


def affinity(measurement: Measurement) -> set[int] | None:
    """Cores of the load generator; None = any."""
    return set(measurement.client_cores) if measurement.client_cores else None


def log_size(measurement: Measurement) -> int:
    """Bytes of the server's log so far."""
    return measurement.server.log_path.stat().st_size


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Any:
        """Add the time inside the block to ``name``."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
