"""MLflow, used by the driver alone: one run per sweep, one child run per cell. A view that disk can rebuild.

Once :meth:`Tracker.open` has returned, a failing store never raises into a sweep: what could not be logged is
remembered, named once with its remedy, and logged later with ``python -m orchestrator relog=<folder>``.
MLflow is imported on first use, since that takes seconds.
"""

import getpass
import json
import logging
import os
import sqlite3
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar
from urllib.parse import quote, urlencode

import pyarrow as pa
import pyarrow.parquet as pq

from analysis.noise import Run as NoiseRun
from analysis.noise import noise_floor, noise_metrics
from conf.schema import Config, Tracking
from orchestrator import address, entries, store
from orchestrator.paths import CellPaths, RunPaths, SweepPaths
from workers.errors import ServelabError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

BATCH_METRICS, BATCH_TEXTS = 1000, 100  # what a tracking server takes in one request
CHECK_TIMEOUT_S = 5
SLOW_S, PAUSE_S = 2.0, 30.0  # a store that takes this long to fail is left alone for that long
MAX_COMPARED = 100  # runs in one compare link
SWEEP, SWEEP_ID, KIND, CELL = "servelab.sweep", "servelab.sweep_id", "servelab.kind", "servelab.cell"
STARTED_AT, CLOSED, SUPERSEDED = "servelab.started_at", "servelab.closed", "servelab.superseded"
PARENT = "mlflow.parentRunId"
TTFT = "ttft_ms/p50"
LOGGED = ("FINISHED", "FAILED")  # states that only a completely logged cell has

T = TypeVar("T")


class TrackingUnavailableError(ServelabError):
    """The tracking store cannot be reached or used."""

    cause = "tracking_unavailable"


class _Cell(Protocol):
    @property
    def config(self) -> Config: ...
    @property
    def axes(self) -> Mapping[str, Any]: ...
    @property
    def key(self) -> str: ...
    @property
    def folder(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Start:
    """What a cell's run is created with."""

    key: str
    folder: str
    axes: Mapping[str, Any]
    settings: Mapping[str, Any]
    start_ms: int | None = None


def to_stderr(message: str) -> None:
    """Print one line to standard error."""
    print(message, file=sys.stderr)


class Tracker:
    """The tracking store as a sweep sees it. Use as a context manager: leaving it leaves no run RUNNING."""

    def __init__(
        self,
        client: "MlflowClient",
        *,
        uri: str,
        experiment_id: str,
        runs: RunPaths,
        warn: Callable[[str], None] = to_stderr,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.client = client
        self.uri = uri
        self.experiment_id = experiment_id
        self.not_logged: list[str] = []
        self._runs = runs
        self._warn = warn
        self._clock = clock
        self._failures = _failures()
        self._resume_at = 0.0
        self._warned = False
        self._paths: SweepPaths | None = None
        self._parent_start: Mapping[str, Any] = {}
        self._parent: str | None = None
        self._open = False

    @classmethod
    def open(cls, tracking: Tracking, *, runs_dir: Path, warn: Callable[[str], None] = to_stderr) -> Self:
        """Connect, creating the local database and the experiment where they do not exist; safe to race.

        Raises:
            ValueError: ``tracking.uri`` is not an address that can be used.
            TrackingUnavailableError: the store does not answer or is not usable.
        """
        runs = RunPaths(runs_dir.absolute())
        uri = address.resolve(tracking.uri, runs=runs)
        address.neutralise(os.environ)
        client, experiment_id = _connect(uri, experiment=tracking.experiment, runs=runs)
        return cls(client, uri=uri, experiment_id=experiment_id, runs=runs, warn=warn)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._open and self._paths is not None:
            self.close_running(self._paths.name)
            self.finish_sweep(
                status="KILLED" if kind in {KeyboardInterrupt, SystemExit} else "FAILED", counts={}
            )
        if self.not_logged:
            self._warn(f"{len(self.not_logged)} not logged: {', '.join(self.not_logged)}. {self._remedy()}")

    def start_sweep(self, name: str, *, num_cells: int, config: Config) -> str | None:
        """Create the sweep's run, or take up the one of an earlier command; returns its id, None if that failed."""
        sweep = config.sweep
        grid = {f"grid.{axis}": values for axis, values in _flat(sweep.grid).items()}
        settings = {"seed": config.seed, "repeats": sweep.repeats, "sentinels": sweep.sentinels}
        return self.take_up(name, params={"sweep": name, "num_cells": num_cells, **settings, **grid})

    def take_up(self, name: str, *, params: Mapping[str, Any]) -> str | None:
        """As :meth:`start_sweep`, with parameters given. A parameter once logged keeps its first value."""
        self._paths = self._runs.sweep(name)
        self._parent_start = params
        self._parent = None
        return self._attempt(f"sweep {name}", self._ensure_parent)

    def start_cell(self, cell: _Cell) -> str | None:
        """Create a cell's run, RUNNING; runs of earlier attempts become superseded. None if that failed."""
        settings = store.plain_config(cell.config)
        start = _Start(key=cell.key, folder=cell.folder, axes=cell.axes, settings=settings)
        # Not counted as missing yet: finish_cell tries again, with everything.
        return self._attempt(None, lambda: self._create_cell(start))

    def finish_cell(self, run_id: str | None, result: Mapping[str, Any], paths: CellPaths) -> str | None:
        """Log a cell's numbers, tags and files and end its run: FAILED for a failed cell, else FINISHED.

        ``run_id=None`` (its start could not be logged) creates the run now. Returns the run id, None if that failed.
        """
        logged = self._attempt(paths.name, lambda: self._finish(run_id, result, paths))
        if logged is not None and paths.name in self.not_logged:
            self.not_logged.remove(paths.name)
        return logged

    def finish_sweep(self, *, status: str, counts: Mapping[str, int]) -> None:
        """End the sweep's run. FINISHED becomes FAILED if a cell failed; ``counts`` become ``cells/…`` metrics."""
        if status == "FINISHED" and counts.get("failed"):
            status = "FAILED"
        self._open = False
        if self._paths is not None:
            self._attempt(f"end of sweep {self._paths.name}", lambda: self._finish_parent(status, counts))

    def close_stale(self, name: str) -> int:
        """End the runs that a killed driver left RUNNING in this sweep, its own run included; returns their number."""
        return self._attempt(None, lambda: self._close(name, reason="stale", kinds=("cell", "sweep"))) or 0

    def close_running(self, name: str) -> int:
        """End the cells' runs of this sweep that are still RUNNING: the last thing before the sweep's own run ends."""
        return self._attempt(None, lambda: self._close(name, reason="interrupted", kinds=("cell",))) or 0

    def logged_cells(self, name: str) -> set[tuple[str, str]]:
        """``(cell key, started_at)`` of every completely logged cell of a sweep.

        Raises:
            TrackingUnavailableError: the store failed, so that nobody knows.
        """
        found = self._attempt(f"sweep {name}", lambda: list(self._search(name, kind="cell")))
        if found is None:
            raise TrackingUnavailableError(f"the runs of sweep {name} could not be read; nothing was changed")
        return {(_tag(run, CELL), _tag(run, STARTED_AT)) for run in found if run.info.status in LOGGED}

    def sweep_status(self, name: str) -> str | None:
        """The state of a sweep's run; None if there is none."""
        found = self._attempt(None, lambda: self._find_parent(name))
        return found.info.status if found else None

    def links(self, ui_url: str) -> tuple[str, ...]:
        """Two addresses in the MLflow UI: all cells un-nested as charts, and in compare view. Empty if that failed."""
        return self._attempt(None, lambda: self._links(ui_url)) or ()

    def _attempt(self, what: str | None, action: Callable[[], T]) -> T | None:
        """Run the action unless the store failed slowly a moment ago; on failure remember ``what`` and return None."""
        began = self._clock()
        if began < self._resume_at:
            self._miss(what)
            return None
        try:
            return action()
        except self._failures as error:
            now = self._clock()
            self._resume_at = now + PAUSE_S if now - began > SLOW_S else now
            self._miss(what)
            if not self._warned:
                self._warned = True
                self._warn(
                    f"tracking: {address.shown(self.uri)} failed: {_first_line(error)}. {self._remedy()}"
                )
            return None

    def _miss(self, what: str | None) -> None:
        if what is not None and what not in self.not_logged:
            self.not_logged.append(what)

    def _remedy(self) -> str:
        folder = self._paths.root if self._paths else self._runs.root
        return f"The data is on disk; log it once the store is back: python -m orchestrator relog={folder}"

    def _ensure_parent(self) -> str:
        if self._parent is not None:
            return self._parent
        name = self._sweep().name
        texts = entries.as_text(self._parent_start, limit=entries.MAX_PARAM)
        found = self._find_parent(name)
        if found is None:
            tags = self._identity(name, kind="sweep") | _origin()
            run_id = str(self.client.create_run(self.experiment_id, tags=tags, run_name=name).info.run_id)
        else:
            run_id = str(found.info.run_id)
            self.client.update_run(run_id, status="RUNNING")
            if CLOSED in found.data.tags:
                self.client.delete_tag(run_id, CLOSED)
            texts = {key: value for key, value in texts.items() if key not in found.data.params}
        self._open = True
        self._log(run_id, params=texts)
        self._log_sweep_files(run_id)
        self._parent = run_id
        return run_id

    def _sweep(self) -> SweepPaths:
        if self._paths is None:
            raise RuntimeError("start_sweep comes before anything that is logged")
        return self._paths

    def _log_sweep_files(self, run_id: str) -> None:
        paths = self._sweep()
        for path in (paths.sweep_yaml, paths.plan_json, paths.events):
            if path.is_file():
                self.client.log_artifact(run_id, str(path))

    def _create_cell(self, start: _Start) -> str:
        parent = self._ensure_parent()
        name = self._sweep().name
        earlier = list(self._search(name, kind="cell", cell=start.key))
        tags = self._identity(name, kind="cell") | _origin() | {PARENT: parent, CELL: start.key}
        tags |= {"servelab.folder": start.folder}
        run = self.client.create_run(
            self.experiment_id,
            start_time=start.start_ms,
            tags=entries.as_text(tags, limit=entries.MAX_TAG),
            run_name=entries.title(axes=start.axes, folder=start.folder),
        )
        for old in earlier:
            self._supersede(old)
        self._log(run.info.run_id, params=entries.params(start.settings, axes=start.axes))
        return str(run.info.run_id)

    def _finish(self, run_id: str | None, result: Mapping[str, Any], paths: CellPaths) -> str:
        written_ms = round(paths.result.stat().st_mtime * 1000) if paths.result.exists() else _now_ms()
        start_ms, end_ms = entries.times_ms(result, written_ms=written_ms)
        if run_id is None:
            run_id = self._create_cell(_start_from_disk(result, paths, start_ms=start_ms))
        points = [(name, value, end_ms, 0) for name, value in entries.metrics(result).items()]
        points += [(p.name, p.value, start_ms + p.step_ms, p.step_ms) for p in _read_series(paths.timeseries)]
        tags = entries.tags(result) | {STARTED_AT: str(result.get("started_at"))}
        self._log(run_id, params=entries.reported_params(result), tags=tags, points=points)
        self.client.log_artifacts(run_id, str(paths.root))
        status = "FAILED" if store.state(result) == "failed" else "FINISHED"
        self.client.set_terminated(run_id, status, end_time=end_ms)
        return run_id

    def _finish_parent(self, status: str, counts: Mapping[str, int]) -> None:
        parent = self._ensure_parent()
        self._open = False
        now = _now_ms()
        points = [(f"cells/{name}", float(value), now, 0) for name, value in counts.items()]
        valid = [
            run for run in self._search(self._sweep().name, kind="cell") if _tag(run, "verdict") == "valid"
        ]
        best = min((ttft for run in valid if (ttft := run.data.metrics.get(TTFT)) is not None), default=None)
        points += [("best/ttft_ms_p50", best, now, 0)] if best is not None else []
        floors = noise_floor(map(_noise_run, valid))
        points += [(name, value, now, 0) for name, value in noise_metrics(floors).items()]
        self._log(parent, points=points, tags={"servelab.status": status.lower()})
        self._log_sweep_files(parent)
        self.client.set_terminated(parent, status)

    def _close(self, name: str, *, reason: str, kinds: Sequence[str]) -> int:
        running = [
            run for kind in kinds for run in self._search(name, kind=kind) if run.info.status == "RUNNING"
        ]
        for run in running:
            self.client.set_tag(run.info.run_id, CLOSED, reason)
            self.client.set_terminated(run.info.run_id, "KILLED")
            if _tag(run, KIND) == "cell" and reason == "stale":
                self._supersede(run)
        return len(running)

    def _supersede(self, run: "Run") -> None:
        """Take a run out of the cells' charts: its kind changes, its content stays."""
        if run.info.status == "RUNNING":
            self.client.set_terminated(run.info.run_id, "KILLED")
        self._log(run.info.run_id, tags={SUPERSEDED: "true", KIND: "superseded"})

    def _identity(self, name: str, *, kind: str) -> dict[str, str]:
        return {SWEEP: name, SWEEP_ID: self._sweep_id(name, create=True), KIND: kind}

    def _sweep_id(self, name: str, *, create: bool) -> str:
        """The identity of a sweep's folder: another folder of that name, here or on a shared server, has another."""
        path = self._runs.sweep(name).tracking
        if path.exists():
            return str(store.read_json(path)["sweep_id"])
        if not create:
            return ""
        sweep_id = f"{entries.key(name)[:60].replace('/', '_')}-{uuid.uuid4().hex[:12]}"
        store.write_json(path, {"sweep_id": sweep_id})
        return sweep_id

    def _find_parent(self, name: str) -> "Run | None":
        return next(self._search(name, kind="sweep"), None)

    def _search(self, name: str, *, kind: str, cell: str | None = None) -> "Iterator[Run]":
        """Runs of this sweep of one kind (and of one cell), newest first."""
        sweep_id = self._sweep_id(name, create=False)
        token: str | None = "" if sweep_id else None
        while token is not None:
            page = self.client.search_runs(
                [self.experiment_id],
                filter_string=_filter(sweep_id, kind=kind)
                + (f" and tags.`{CELL}` = '{cell}'" if cell else ""),
                order_by=["attributes.start_time DESC"],
                page_token=token or None,
            )
            yield from page
            token = page.token or None

    def _log(
        self,
        run_id: str,
        *,
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
        points: Sequence[tuple[str, float, int, int]] = (),
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        log = self.client.log_batch
        for some_params in _batches(
            [Param(key, value) for key, value in (params or {}).items()], size=BATCH_TEXTS
        ):
            log(run_id, params=some_params, synchronous=True)
        for some_tags in _batches(
            [RunTag(key, value) for key, value in (tags or {}).items()], size=BATCH_TEXTS
        ):
            log(run_id, tags=some_tags, synchronous=True)
        for some_points in _batches([Metric(*point) for point in points], size=BATCH_METRICS):
            log(run_id, metrics=some_points, synchronous=True)

    def _links(self, ui_url: str) -> tuple[str, ...]:
        if self._paths is None:
            return ()
        served = self.uri.startswith("http") and ui_url == Tracking().ui_url
        ui = (self.uri if served else ui_url).rstrip("/")
        name = self._paths.name
        ids = [run.info.run_id for run in self._search(name, kind="cell") if run.info.status == "FINISHED"]
        view = {
            "searchFilter": _filter(self._sweep_id(name, create=False), kind="cell"),
            "orderByKey": "metrics.`ttft_ms/p50`",
            "orderByAsc": "true",
            "compareRunsMode": "CHART",
            "workflowType": "machine_learning",
        }
        compared = {"runs": json.dumps(ids[:MAX_COMPARED]), "experiments": json.dumps([self.experiment_id])}
        charts = f"{ui}/#/experiments/{self.experiment_id}/runs?{urlencode(view, quote_via=quote)}"
        return charts, f"{ui}/#/compare-runs?{urlencode(compared, quote_via=quote)}"


def _connect(uri: str, *, experiment: str, runs: RunPaths) -> tuple["MlflowClient", str]:
    """A client and the id of the experiment.

    Several processes that migrate one new SQLite file break it, so a lock beside the file lets one at a time do it.
    """
    path = address.sqlite_path(uri)
    local = not uri.startswith(address.SERVERS)
    try:
        if path is None:
            return _client(uri, experiment=experiment, artifacts=runs.artifacts if local else None)
        with store.locked(path.with_name(f"{path.name}.lock")):
            address.check_sqlite(path)
            return _client(uri, experiment=experiment, artifacts=runs.artifacts)
    except _open_failures() as error:
        raise TrackingUnavailableError(
            f"tracking store {address.shown(uri)} cannot be used: {_first_line(error)};"
            " start it or set tracking.uri (leave it out for mlflow.db beside the runs folder)",
        ) from error


def _client(uri: str, *, experiment: str, artifacts: Path | None) -> tuple["MlflowClient", str]:
    from mlflow import MlflowClient

    for name in ("mlflow", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    with _impatience():
        if uri.startswith(address.DATABASES):
            _ping_database(uri)
        client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        return client, _experiment(client, name=experiment, artifacts=artifacts)


def _experiment(client: "MlflowClient", *, name: str, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            found = client.get_experiment_by_name(name)
    if found is None or found.lifecycle_stage != "active":
        raise ValueError(
            f"tracking.experiment {name!r} was deleted in MLflow; restore it or choose another name"
        )
    return str(found.experiment_id)


@contextmanager
def _impatience() -> Iterator[None]:
    """Short time-outs while the store is looked for: a wrong address is told in seconds."""
    short = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": str(CHECK_TIMEOUT_S)}
    old = {name: os.environ[name] for name in short if name in os.environ}
    os.environ.update(short)
    try:
        yield
    finally:
        for name in short:
            del os.environ[name]
        os.environ.update(old)


def _ping_database(uri: str) -> None:
    """Connect once: MLflow itself retries for minutes."""
    from sqlalchemy import create_engine

    engine = create_engine(uri)
    engine.connect().close()
    engine.dispose()


def _failures() -> tuple[type[Exception], ...]:
    """What MLflow raises when the store, the network or the disk fails."""
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError
    from urllib3.exceptions import HTTPError

    return (MlflowException, SQLAlchemyError, HTTPError, OSError)


def _open_failures() -> tuple[type[Exception], ...]:
    """On top of those: a database of another program or a newer MLflow, and a missing database driver."""
    from alembic.util import CommandError

    return (*_failures(), CommandError, sqlite3.Error, ImportError)


def _start_from_disk(result: Mapping[str, Any], paths: CellPaths, *, start_ms: int) -> _Start:
    return _Start(
        key=str(result.get("cell_key")),
        folder=paths.name,
        axes=result.get("axes") or {},
        settings=store.read_cell(paths.cell_yaml) if paths.cell_yaml.exists() else {},
        start_ms=start_ms,
    )


def _read_series(path: Path) -> list[entries.Point]:
    """The drawn series; none if the file is missing or cut short (the file itself is logged all the same)."""
    if not path.is_file():
        return []
    try:
        table = pq.read_table(path, columns=["t_ns", "source", "name", "value"])
    except pa.ArrowInvalid:
        return []
    return entries.series(table.to_pylist())


def _filter(sweep_id: str, *, kind: str) -> str:
    return f"tags.`{SWEEP_ID}` = '{sweep_id}' and tags.`{KIND}` = '{kind}'"


def _origin() -> dict[str, str]:
    """Who runs this, as the UI's own columns show it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"
    return {"mlflow.user": user, "mlflow.source.name": "servelab", "mlflow.source.type": "LOCAL"}


def _flat(grid: Mapping[str, Any], *, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in grid.items():
        dotted = f"{prefix}{name}"
        flat |= _flat(value, prefix=f"{dotted}.") if isinstance(value, Mapping) else {dotted: value}
    return flat


def _noise_run(run: "Run") -> NoiseRun:
    """A cell's run, for the noise floor: its repeat is its place in the sweep."""
    asked = {name: value for name, value in run.data.params.items() if name != "repeat"}
    return NoiseRun(
        asked=asked, workload_hash=_tag(run, "servelab.workload_hash") or None, metrics=run.data.metrics
    )


def _tag(run: "Run", name: str) -> str:
    return str(run.data.tags.get(name, ""))


def _batches(items: Sequence[T], *, size: int) -> Iterator[Sequence[T]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _first_line(error: BaseException) -> str:
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return entries.shorten(line, limit=300).rstrip(".")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
