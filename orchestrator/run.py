"""The sweep on one screen: plan → run → record → summarise (``expand`` has happened)."""

import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.schema import Config, ModelSource
from orchestrator import ray_environment, resume, store
from orchestrator.display import Display, show
from orchestrator.expand import Cell
from orchestrator.identity import workload_hash
from orchestrator.paths import CellPaths, SweepPaths
from orchestrator.plan import Launch, Plan, plan
from orchestrator.relog import log_missing
from orchestrator.summary import CellOutcome, TimeSpent, add_timing, outcome_line, print_summary
from orchestrator.tracking import Tracker
from workers import engines
from workers.events import CellFailed, CellFinished, CellSpec, Event, LaunchFinished, LaunchSpec, Phase
from workers.model import PreparedModel

if TYPE_CHECKING:
    from collections.abc import Iterator

    from orchestrator.cluster import Cluster

POLL_S = 0.5
EXIT_FAILED = 1
# Stands for a local model before it is prepared: only whether its KV bytes can be counted matters then.
ANY_MODEL = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 16}


@dataclass(slots=True)
class StopSignal:
    """Remembers the first SIGINT or SIGTERM; a second one ends the process at once."""

    number: int | None = None

    @property
    def exit_code(self) -> int | None:
        """128 + the signal's number, as shells count; None while there was none."""
        return None if self.number is None else 128 + self.number

    def __call__(self, number: int, _frame: object) -> None:
        """Signal handler."""
        if self.number is not None:
            os._exit(128 + number)
        self.number = number

    def install(self) -> dict[signal.Signals, Any]:
        """Handle both signals from here on; returns the handlers before. Needed again once Ray has set its own."""
        return {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}

    @contextmanager
    def installed(self) -> "Iterator[StopSignal]":
        """Handle both signals inside the block."""
        before = self.install()
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@dataclass(slots=True, kw_only=True)
class Job:
    """A launch that waits or runs: what is left of its cells, and how each of them has failed so far."""

    launch: Launch
    cells: list[Cell]
    attempt: int = 1
    attempts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # by cell key
    current: str | None = None  # key of the cell that the slot works on
    moved: bool = False  # this attempt has ended or failed a cell

    def cell(self, key: str | None) -> Cell | None:
        """The cell of that key, if it is left."""
        return next((cell for cell in self.cells if cell.key == key), None)


def run_sweep(cells: Sequence[Cell], config: Config) -> int:
    """Run what is not done yet, record everything, print the result; returns the exit code.

    0 all cells done (valid or invalid) · 1 a cell failed · 130/143 ended by SIGINT/SIGTERM.

    Raises:
        ValueError: an engine, the tracking store or the cluster cannot do what the configuration asks.
        ServelabError: the store does not answer, the sweep is in use, or a stored result is damaged.
    """
    paths = SweepPaths(Path(config.runs_dir), str(config.sweep.name))
    with StopSignal().installed() as stop, store.sole_owner(paths):
        decision = resume.decide(cells, store.read_results(paths, cells), rerun=config.rerun)
        todo = plan(decision.todo, seed=config.seed, shuffle=config.sweep.shuffle)
        check_commands(todo.launches)
        with Tracker.open(config.tracking, runs_dir=Path(config.runs_dir)) as tracker:
            tracker.close_stale(paths.name)
            store.write_sweep(paths, cells=cells, config=config, plan=todo)
            driver = Driver(config=config, paths=paths, tracker=tracker, plan=todo, stop=stop)
            with show(total=len(decision.todo)) as display:
                display.say(f"sweep {paths.name}: {decision.sentence()} → {paths.root}")
                driver.display = display
                driver.run(cells)
            links = tracker.links(config.tracking.ui_url)
        outcomes = read_outcomes(paths, cells)
    print_summary(
        outcomes, time_spent=driver.time_spent(), links=links, not_started=len(cells) - len(outcomes)
    )
    failed = any(outcome.state == "failed" for outcome in outcomes)
    return stop.exit_code or (EXIT_FAILED if failed else 0)


def read_outcomes(paths: SweepPaths, cells: Sequence[Cell]) -> list[CellOutcome]:
    """What is known of every cell that has a result, in the order of the sweep."""
    results = store.read_results(paths, cells)
    return [
        CellOutcome(axes=cell.axes, result=results[cell.key], folder=paths.cell(cell).root)
        for cell in cells
        if cell.key in results
    ]


def check_commands(launches: Sequence[Launch]) -> None:
    """Write down every engine's command once, so that what it cannot express is known before anything starts.

    Raises:
        ValueError: for a setting that an engine cannot express, by the setting's name.
    """
    for launch in launches:
        config = launch.cells[0].config
        known = config.model.source is not ModelSource.hub
        model = PreparedModel(path="", sha256=None, vocab_size=None, config=ANY_MODEL if known else {})
        engines.command(config, model=model, port=0, python=Path("python"))


class Driver:
    """Submits launches, turns their events into files and tracking, retries what can be retried."""

    def __init__(
        self, *, config: Config, paths: SweepPaths, tracker: Tracker, plan: Plan, stop: StopSignal
    ) -> None:
        self._config = config
        self._paths = paths
        self._tracker = tracker
        self._waiting = deque(Job(launch=launch, cells=list(launch.cells)) for launch in plan.launches)
        self._running: dict[str, Job] = {}
        self._run_ids: dict[str, str | None] = {}
        self._started_at: dict[str, str] = {}
        self._timing: dict[str, float] = {}
        self._num_slots = 1
        self._num_failed = 0
        self._began = time.monotonic()
        self._ended: float | None = None
        self._stop = stop
        self._cutting = False
        self.display: Display

    def run(self, cells: Sequence[Cell]) -> None:
        """Run every waiting launch; ends early on a signal, or on a failure under ``fail_fast``."""
        self._tracker.start_sweep(self._paths.name, num_cells=len(cells), config=self._config)
        status = "FAILED"
        try:
            if self._waiting:
                self._run_on_cluster()
            status = "KILLED" if self._stop.number else "FINISHED"
        finally:
            self._ended = time.monotonic()
            self._tracker.close_running(self._paths.name)
            if self._tracker.not_logged:
                log_missing(self._paths, self._tracker)
            self._tracker.finish_sweep(status=status, counts=store.count(self._paths, cells))

    def _run_on_cluster(self) -> None:
        ray_environment.prepare()
        from orchestrator.cluster import Cluster

        try:
            cluster = Cluster(self._config)
        except SystemExit:  # SIGTERM while Ray starts: its own handler has replaced ours
            self._stop.number = signal.SIGTERM
            return
        self._stop.install()
        try:
            fits = [cluster.capacity(job.launch.cells[0].config) for job in self._waiting]
            self._num_slots = min([*fits, len(fits)])
            self._loop(cluster)
        finally:
            cluster.close()

    def _loop(self, cluster: "Cluster") -> None:
        while (self._waiting or self._running) and not self._stop.number:
            while self._waiting and len(self._running) < self._num_slots:
                self._submit(cluster, self._waiting.popleft())
            for launch, event in cluster.events(timeout_s=POLL_S):
                self._handle(launch, event)
            if self._config.fail_fast and self._num_failed:
                self._waiting.clear()
                break
        if self._running:
            self._cut(cluster)

    def _submit(self, cluster: "Cluster", job: Job) -> None:
        self._running[job.launch.key] = job
        job.current, job.moved = None, False
        specs = tuple(
            CellSpec(key=cell.key, config=cell.config, swept=frozenset(cell.axes)) for cell in job.cells
        )
        cluster.submit(
            LaunchSpec(key=job.launch.key, cells=specs, base_env=dict(os.environ), attempt=job.attempt),
        )

    def _cut(self, cluster: "Cluster") -> None:
        self.display.say("stopping: servers are being ended, what was measured is kept")
        self._cutting = True
        for launch, event in cluster.stop_all():
            self._handle(launch, event)
        self._running.clear()

    def _handle(self, launch: str, event: Event | Any) -> None:
        job = self._running.get(launch)
        if job is None:
            return
        match event:
            case Phase():
                self._phase(job, event)
            case CellFinished():
                self._finished(job, event)
            case LaunchFinished():
                self._timing = add_timing(self._timing, event.timing)
                if event.problem is not None:
                    self.display.say(f"{job.launch.label}: {event.problem}")
            case _ if self._cutting:
                pass  # what ends because we end it has not failed
            case CellFailed():
                self._failed(job, event)
            case _:
                self._launch_over(job, event)

    def _phase(self, job: Job, event: Phase) -> None:
        cell = job.cell(event.cell)
        job.current = event.cell
        if cell is not None and cell.key not in self._run_ids:
            self._begin(cell)
        self.display.launch(job.launch.key, event, cell.folder if cell else job.launch.label)

    def _begin(self, cell: Cell) -> None:
        self._started_at[cell.key] = datetime.now(UTC).isoformat(timespec="seconds")
        store.write_cell(self._paths.cell(cell), cell)
        self._run_ids[cell.key] = self._tracker.start_cell(cell)

    def _finished(self, job: Job, event: CellFinished) -> None:
        cell = job.cell(event.cell)
        if cell is None:
            raise RuntimeError(f"launch {job.launch.key} finished cell {event.cell}, which it was not given")
        self._record(job, cell, {"outcome": "done", "error": None, **event.payload}, event.files)

    def _failed(self, job: Job, event: CellFailed) -> None:
        cell = job.cell(event.cell)
        if cell is None:
            return
        attempts = job.attempts.setdefault(cell.key, [])
        attempts.append({"attempt": len(attempts) + 1, "cause": event.cause, "message": event.message})
        job.moved = True
        if event.retryable and len(attempts) <= self._config.retries and not self._stop.number:
            self._try_again(cell, event)
            return
        error = {
            "class": event.cause,
            "message": event.message,
            "log_tail": event.log_tail,
            "traceback": event.traceback,
        }
        payload = {
            "outcome": "failed",
            "error": error,
            "metrics": {},
            "server": {},
            "verdict": {"valid": False, "reasons": [{"name": "failed", "detail": event.message}]},
            "timing": dict(event.timing),
        }
        self._record(job, cell, payload, event.files)

    def _try_again(self, cell: Cell, event: CellFailed) -> None:
        """Keep the attempt's files under ``attempts/``; the cell stays in its job."""
        paths = self._paths.cell(cell)
        if cell.key not in self._run_ids:
            self._begin(cell)
        store.write_files(paths, event.files)
        store.archive(paths)
        self._note(cell, state="again", cause=event.cause, message=event.message)
        self.display.say(f"{cell.folder}: {event.cause}, will be tried again: {event.message}")

    def _note(self, cell: Cell, **what: str | None) -> None:
        at = datetime.now(UTC).isoformat(timespec="seconds")
        store.append_line(self._paths.events, {"at": at, "cell": cell.key, "folder": cell.folder, **what})

    def _record(self, job: Job, cell: Cell, payload: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        if cell.key not in self._run_ids:
            self._begin(cell)
        run_id = self._run_ids[cell.key]
        result = {
            "cell_key": cell.key,
            "sweep": self._paths.name,
            "axes": cell.axes,
            "launch_key": job.launch.key,
            "workload_hash": workload_hash(cell.config),
            "attempts": job.attempts.get(cell.key, []),
            "mlflow_run_id": run_id,
            "started_at": self._started_at[cell.key],
            **payload,
        }
        paths: CellPaths = self._paths.cell(cell)
        store.write_files(paths, files)
        store.write_result(paths, result)
        self._tracker.finish_cell(run_id, result, paths)
        job.cells.remove(cell)
        job.moved = True
        outcome = CellOutcome(axes=cell.axes, result=result, folder=paths.root)
        self._note(cell, state=outcome.state, cause=(result["error"] or {}).get("class"))
        self._num_failed += outcome.state == "failed"
        self.display.cell_over(outcome_line(outcome))

    def _launch_over(self, job: Job, event: Any) -> None:
        """The slot has gone. Cells that are left start again on a new engine, blamed or not."""
        del self._running[job.launch.key]
        self.display.launch_over(job.launch.key)
        lost = getattr(event, "message", None)
        current = job.cell(job.current)
        if lost is not None:
            self._blame([current] if current else job.cells, job, cause="slot_lost", message=lost)
        elif not job.moved:
            self._blame(job.cells, job, cause="no_result", message="the launch ended without a result")
        if job.cells:
            job.attempt += 1
            self._waiting.append(job)

    def _blame(self, cells: Sequence[Cell], job: Job, *, cause: str, message: str) -> None:
        for cell in list(cells):
            self._failed(job, CellFailed(cell=cell.key, cause=cause, message=message, retryable=True))

    def time_spent(self) -> TimeSpent:
        """Seconds by phase over all slots, so far."""
        wall = (self._ended or time.monotonic()) - self._began
        return TimeSpent(phases=self._timing, wall_s=wall, num_slots=self._num_slots)
