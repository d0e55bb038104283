"""MLflow holds what happened, whatever the shell, the other processes and the store do."""

import json
import math
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fakes.cells import FAILED, INVALID, FakeCell, fake_config, fake_result
from fakes.mlflow_store import FILTERS, own_environment, runs_with_database

from conf.schema import Load, Tracking
from orchestrator import store, tracking
from orchestrator.paths import RunPaths
from orchestrator.tracking import Tracker, TrackingUnavailableError

pytestmark = FILTERS
HERE = Path(__file__).parent
CONFIG = fake_config()


@pytest.fixture(autouse=True)
def restored_environment(monkeypatch):
    own_environment(monkeypatch)


@pytest.fixture
def runs(tmp_path) -> RunPaths:
    return runs_with_database(tmp_path)


@pytest.fixture
def tracker(runs) -> Tracker:
    return Tracker.open(Tracking(), runs_dir=runs.root)


def record(tracker: Tracker, runs: RunPaths, key: str, **values) -> str:
    """One cell of sweep ``s``, on disk and logged."""
    cell = FakeCell(key, axes={"kv.dtype": "fp8"})
    paths = runs.sweep("s").cell(cell)
    store.write_cell(paths, cell)
    run_id = tracker.start_cell(cell)
    result = fake_result(key, **values)
    store.write_result(paths, result)
    tracker.finish_cell(run_id, result, paths)
    return run_id


def status(tracker: Tracker, run_id: str) -> str:
    return tracker.client.get_run(run_id).info.status


def start_python(code: str, *arguments: object, **environment: str) -> subprocess.Popen:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_sweep_is_a_parent_with_its_cells(tracker, runs):
    """Parameters, metrics, tags and files of each cell, and its state, under the sweep's run."""
    parent = tracker.start_sweep("s", num_cells=3, config=CONFIG)
    ids = [
        record(tracker, runs, "a"),
        record(tracker, runs, "b", **INVALID),
        record(tracker, runs, "c", **FAILED),
    ]
    tracker.finish_sweep(status="FINISHED", counts={"done": 2, "failed": 1, "invalid": 1})

    cells = [tracker.client.get_run(run_id) for run_id in ids]
    assert [run.info.status for run in cells] == ["FINISHED", "FINISHED", "FAILED"]
    assert [run.data.tags["verdict"] for run in cells] == ["valid", "invalid", "failed"]
    assert {run.data.tags["mlflow.parentRunId"] for run in cells} == {parent}
    first = cells[0].data
    assert first.params["kv.dtype"] == "bfloat16"  # the typed configuration's value
    assert first.params["server.kv_cache_tokens"] == "4096"
    assert first.tags["server.attention_backend"] == "CPU_ATTN"
    assert first.metrics == {
        "ttft_ms/p50": 12.5,
        "ttft_ms/p99": 40.0,
        "timing/start_s": 3.5,
        "timing/measured_s": 10.0,
    }
    files = {item.path for item in tracker.client.list_artifacts(ids[0])}
    assert files == {"cell.yaml", "result.json"}

    sweep = tracker.client.get_run(parent)
    assert sweep.info.status == "FAILED"
    assert sweep.data.metrics["cells/failed"] == 1
    assert sweep.data.metrics["best/ttft_ms_p50"] == 12.5
    assert sweep.data.params["grid.kv.dtype"] == "['auto', 'fp8']"


def test_artifacts_are_plain_files_in_awkward_folders(tmp_path):
    """A space and a percent sign in the path; the artifact is the cell file itself."""
    runs = runs_with_database(tmp_path / "my 100% runs")
    tracker = Tracker.open(Tracking(), runs_dir=runs.root)
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    record(tracker, runs, "a")
    assert runs.database.is_file()
    (artifact,) = runs.artifacts.rglob("cell.yaml")
    assert artifact.read_bytes() == runs.sweep("s").cell("cell-a").cell_yaml.read_bytes()


def test_series_become_metrics_with_milliseconds_as_steps(tracker, runs):
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    paths = runs.sweep("s").cell("cell-a")
    rows = [
        {"t_ns": n * 500_000_000, "source": "server", "name": "waiting", "value": float(n)} for n in range(3)
    ]
    store.write_cell(paths, FakeCell("a"))
    pq.write_table(pa.Table.from_pylist(rows), paths.timeseries)
    run_id = tracker.finish_cell(None, fake_result("a"), paths)
    history = tracker.client.get_metric_history(run_id, "ts/waiting")
    assert [(point.step, point.value) for point in history] == [(0, 0.0), (500, 1.0), (1000, 2.0)]
    assert history[1].timestamp - history[0].timestamp == 500


def test_a_torn_series_file_does_not_stop_the_rest(tracker, runs):
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    paths = runs.sweep("s").cell("cell-a")
    store.write_cell(paths, FakeCell("a"))
    paths.timeseries.write_bytes(b"PAR1 torn")
    run_id = tracker.finish_cell(None, fake_result("a"), paths)
    assert status(tracker, run_id) == "FINISHED"
    assert "timeseries.parquet" in {item.path for item in tracker.client.list_artifacts(run_id)}


def test_non_finite_numbers_reach_no_metric(tracker, runs):
    """Rate inf, one-token replies: every JSON file is strict, the rate is infinity again, no metric is 1.797e308."""
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    cell = FakeCell(
        "a", config=fake_config(load=Load(rate_per_s=math.inf)), axes={"load.rate_per_s": math.inf}
    )
    paths = runs.sweep("s").cell(cell)
    store.write_cell(paths, cell)
    numbers = {"rate/offered_per_s": math.inf, "tpot_ms/p50": None, "tpot_ms/mean": math.nan, "tpot_ms/n": 0}
    result = fake_result("a", metrics=numbers, axes=cell.axes)
    store.write_result(paths, result)
    run_id = tracker.finish_cell(tracker.start_cell(cell), result, paths)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    for path in runs.root.rglob("*.json"):
        json.loads(path.read_text(), parse_constant=refuse)
    assert store.read_result(paths.result)["axes"] == {"load.rate_per_s": math.inf}
    run = tracker.client.get_run(run_id)
    assert float(run.data.params["load.rate_per_s"]) == math.inf
    assert run.data.metrics == {"tpot_ms/n": 0.0, "timing/start_s": 3.5, "timing/measured_s": 10.0}
    with sqlite3.connect(runs.database) as database:
        worst = database.execute("SELECT count(*) FROM metrics WHERE abs(value) > 1e300 OR is_nan").fetchone()
    database.close()
    assert worst == (0,)


def test_more_values_than_one_request_takes(tracker, runs):
    """2500 metrics and 150 tags go in batches; a tag of 9000 characters is cut visibly."""
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    metrics = {f"m/{n}": n for n in range(2500)}
    server = {f"fact_{n}": n for n in range(150)} | {"long": "x" * 9000}
    run = tracker.client.get_run(record(tracker, runs, "a", metrics=metrics, server=server))
    assert len(run.data.metrics) == 2502
    assert run.data.tags["server.fact_149"] == "149"
    assert run.data.tags["server.long"] == "x" * 7999 + "…"


WORKER = """
import sys
from pathlib import Path
from mlflow.entities import Metric
from conf.schema import Tracking
from fakes.cells import FakeCell, fake_config, fake_result
from orchestrator import store
from orchestrator.paths import RunPaths
from orchestrator.tracking import Tracker

root, name = Path(sys.argv[1]), sys.argv[2]
with Tracker.open(Tracking(), runs_dir=root) as tracker:
    tracker.start_sweep(name, num_cells=1, config=fake_config())
    paths = RunPaths(root).sweep(name).cell("cell-a")
    store.write_cell(paths, FakeCell("a"))
    run_id = tracker.start_cell(FakeCell("a"))
    for step in range(20):
        tracker.client.log_batch(run_id, metrics=[Metric(f"m/{n}", n, 0, step) for n in range(20)])
    tracker.finish_cell(run_id, fake_result("a", metrics={}, timing={}), paths)
    tracker.finish_sweep(status="FINISHED", counts={"done": 1})
"""


def test_four_processes_at_once_on_an_empty_folder(tmp_path):
    """Each logs 20 metrics x 20 steps: 4 runs FINISHED, 400 points each, no text in any output."""
    runs = RunPaths(tmp_path / "runs")
    workers = [start_python("import mlflow.entities\n" + WORKER, runs.root, f"w{n}") for n in range(4)]
    outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    assert outputs == [""] * 4
    assert [worker.returncode for worker in workers] == [0] * 4
    tracker = Tracker.open(Tracking(), runs_dir=runs.root)
    found = tracker.client.search_runs([tracker.experiment_id], "tags.`servelab.kind` = 'cell'")
    assert [run.info.status for run in found] == ["FINISHED"] * 4
    points = [
        sum(len(tracker.client.get_metric_history(run.info.run_id, f"m/{n}")) for n in range(20))
        for run in found
    ]
    assert points == [400] * 4


CHILD = """
import sys
from pathlib import Path
from conf.schema import Tracking
from fakes.cells import FakeCell, fake_config, fake_result
from orchestrator import store
from orchestrator.paths import RunPaths
from orchestrator.tracking import Tracker

root, key = Path(sys.argv[1]), sys.argv[2]
tracker = Tracker.open(Tracking(experiment="mine"), runs_dir=root)
parent = tracker.start_sweep("s", num_cells=2, config=fake_config())
paths = RunPaths(root).sweep("s").cell(f"cell-{key}")
store.write_cell(paths, FakeCell(key))
run_id = tracker.start_cell(FakeCell(key))
tracker.finish_cell(run_id, fake_result(key), paths)
print(parent, run_id)
"""


def test_run_and_experiment_of_the_users_shell_do_not_matter(runs):
    """Two cells in processes of their own, with MLFLOW_RUN_ID=P: three runs, both children of P, P unchanged."""
    tracker = Tracker.open(Tracking(experiment="mine"), runs_dir=runs.root)
    parent = tracker.start_sweep("s", num_cells=2, config=CONFIG)
    before = tracker.client.get_run(parent).data
    shell = {"MLFLOW_RUN_ID": parent, "MLFLOW_EXPERIMENT_NAME": "other", "MLFLOW_EXPERIMENT_ID": "0"}
    workers = [start_python(CHILD, runs.root, key, **shell) for key in "xy"]
    printed = [worker.communicate(timeout=240)[0].split() for worker in workers]
    assert [words[0] for words in printed] == [parent, parent]
    children = [words[1] for words in printed]
    assert len({parent, *children}) == 3
    for child in children:
        run = tracker.client.get_run(child)
        assert run.data.tags["mlflow.parentRunId"] == parent
        assert run.info.experiment_id == tracker.experiment_id
    after = tracker.client.get_run(parent).data
    assert (after.params, after.metrics, after.tags) == (before.params, before.metrics, before.tags)
    assert tracker.client.get_experiment_by_name("other") is None
    assert tracker.client.search_runs(["0"]) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from conf.schema import Tracking
from fakes.cells import FakeCell, fake_config
from orchestrator.tracking import Tracker

tracker = Tracker.open(Tracking(), runs_dir=Path(sys.argv[1]))
print(tracker.start_sweep("s", num_cells=1, config=fake_config()))
print(tracker.start_cell(FakeCell("a")), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_runs_of_a_killed_driver_are_closed_at_the_next_start(runs):
    """With a reason; runs of another sweep are left alone; the sweep's run is taken up again."""
    dead = start_python(KILLED, runs.root)
    parent, child = dead.communicate(timeout=240)[0].split()
    assert dead.returncode == -signal.SIGKILL
    tracker = Tracker.open(Tracking(), runs_dir=runs.root)
    other = tracker.start_sweep("other", num_cells=1, config=CONFIG)
    assert [status(tracker, run_id) for run_id in (parent, child, other)] == ["RUNNING"] * 3

    assert tracker.close_stale("s") == 2
    assert [status(tracker, run_id) for run_id in (parent, child, other)] == ["KILLED", "KILLED", "RUNNING"]
    closed = tracker.client.get_run(child)
    assert (closed.data.tags["servelab.closed"], closed.data.tags["servelab.superseded"]) == ("stale", "true")
    assert closed.info.end_time is not None
    assert tracker.close_stale("s") == 0

    again = Tracker.open(Tracking(), runs_dir=runs.root)
    assert again.start_sweep("s", num_cells=1, config=CONFIG) == parent
    run = again.client.get_run(parent)
    assert run.info.status == "RUNNING"
    assert "servelab.closed" not in run.data.tags


@pytest.mark.parametrize(
    ("error", "expected"), [(ZeroDivisionError, "FAILED"), (KeyboardInterrupt, "KILLED")]
)
def test_an_unexpected_error_leaves_no_run_running(tracker, error, expected):
    """The open cell is KILLED; the sweep is FAILED, after Ctrl-C KILLED. Both have an end."""
    parent = tracker.start_sweep("s", num_cells=1, config=CONFIG)
    child = tracker.start_cell(FakeCell("a"))
    with pytest.raises(error), tracker:
        raise error
    ended = [tracker.client.get_run(run_id).info for run_id in (parent, child)]
    assert [info.status for info in ended] == [expected, "KILLED"]
    assert all(info.end_time for info in ended)


def test_interrupted_sweep_is_closed_as_killed(tracker, runs):
    """The last pass finds runs that an interrupted call created but nobody remembers."""
    parent = tracker.start_sweep("s", num_cells=2, config=CONFIG)
    done, forgotten = record(tracker, runs, "a"), tracker.start_cell(FakeCell("b"))
    assert tracker.close_running("s") == 1
    tracker.finish_sweep(status="KILLED", counts={"done": 1, "not_started": 1})
    assert [status(tracker, run_id) for run_id in (parent, done, forgotten)] == [
        "KILLED",
        "FINISHED",
        "KILLED",
    ]
    assert tracker.client.get_run(parent).info.end_time is not None


def test_a_new_attempt_supersedes_the_old_run(tracker, runs):
    """The old run keeps its numbers and leaves the cells' charts."""
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    first = record(tracker, runs, "a", started_at="2026-01-01T00:00:00+00:00", **FAILED)
    second = record(tracker, runs, "a")
    old = tracker.client.get_run(first)
    assert (old.info.status, old.data.tags["servelab.superseded"]) == ("FAILED", "true")
    assert tracker.logged_cells("s") == {("a", "2026-01-02T03:04:05+00:00")}
    _, compare = tracker.links("http://ui")
    assert (first in compare, second in compare) == (False, True)


def test_folders_of_one_name_are_different_sweeps(tmp_path):
    """On a shared store another folder's sweep of that name is neither taken up nor closed."""
    shared = Tracking(uri=f"sqlite:///{tmp_path}/shared.db")
    mine = Tracker.open(shared, runs_dir=tmp_path / "a" / "runs")
    yours = Tracker.open(shared, runs_dir=tmp_path / "b" / "runs")
    first = mine.start_sweep("s", num_cells=1, config=CONFIG)
    assert yours.close_stale("s") == 0
    assert yours.start_sweep("s", num_cells=1, config=CONFIG) != first
    assert status(mine, first) == "RUNNING"


def test_parameters_of_a_resumed_sweep_keep_their_first_value(runs):
    """MLflow refuses to change a parameter; a grown grid does not fail the sweep."""
    for num_cells in (2, 3):
        with Tracker.open(Tracking(), runs_dir=runs.root) as tracker:
            parent = tracker.start_sweep("s", num_cells=num_cells, config=CONFIG)
            tracker.finish_sweep(status="FINISHED", counts={"done": num_cells, "failed": 0})
            assert tracker.not_logged == []
    run = tracker.client.get_run(parent)
    assert (run.info.status, run.data.params["num_cells"]) == ("FINISHED", "2")
    assert run.data.metrics["cells/done"] == 3


def test_links_open_the_cells_as_charts_and_in_compare_view(tracker, runs):
    tracker.start_sweep("s", num_cells=1, config=CONFIG)
    run_id = record(tracker, runs, "a")
    charts, compare = tracker.links("http://127.0.0.1:5000/")
    sweep_id = store.read_json(runs.sweep("s").tracking)["sweep_id"]
    route, _, query = charts.partition("#")[2].partition("?")
    assert route == f"/experiments/{tracker.experiment_id}/runs"
    assert " " not in charts
    assert "`" not in charts
    assert parse_qs(query) == {
        "searchFilter": [f"tags.`servelab.sweep_id` = '{sweep_id}' and tags.`servelab.kind` = 'cell'"],
        "orderByKey": ["metrics.`ttft_ms/p50`"],
        "orderByAsc": ["true"],
        "compareRunsMode": ["CHART"],
        "workflowType": ["machine_learning"],
    }
    assert unquote(compare) == (
        f'http://127.0.0.1:5000/#/compare-runs?runs=["{run_id}"]&experiments=["{tracker.experiment_id}"]'
    )


class OneExperiment(BaseHTTPRequestHandler):
    """A tracking server that knows the experiment and answers nothing else."""

    def do_GET(self):
        known = urlsplit(self.path).path.endswith("/experiments/get-by-name")
        body = json.dumps(
            {"experiment": {"experiment_id": "7", "name": "servelab", "lifecycle_stage": "active"}}
        )
        self.send_response(200 if known else 503)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode() if known else b"{}")

    def log_message(self, *arguments):
        pass


def test_a_server_that_goes_away_loses_no_cell(runs, monkeypatch):
    """Nothing raises, one warning with the remedy, the cell is remembered, its files stay."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    server = ThreadingHTTPServer(("127.0.0.1", 0), OneExperiment)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        said: list[str] = []
        uri = f"http://127.0.0.1:{server.server_port}"
        tracker = Tracker.open(Tracking(uri=uri), runs_dir=runs.root, warn=said.append)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    with tracker:
        assert tracker.start_sweep("s", num_cells=2, config=CONFIG) is None
        assert [record(tracker, runs, key) for key in "ab"] == [None, None]
        assert tracker.close_running("s") == 0
        tracker.finish_sweep(status="FINISHED", counts={"done": 2})
        assert tracker.links("http://ui") == ()
    assert {"cell-a", "cell-b"} < set(tracker.not_logged)
    assert store.read_result(runs.sweep("s").cell("cell-a").result)["metrics"]["ttft_ms/p99"] == 40.0
    warning, summary = said
    assert f"tracking: {uri} failed: " in warning
    assert f"python -m orchestrator relog={runs.root}/s" in warning
    assert "cell-a, cell-b" in summary


def test_a_store_that_fails_slowly_is_left_alone_for_a_while(tracker, runs, monkeypatch):
    """Waiting for a time-out at every call would hold up the sweep; quick failures are tried again at once."""
    tracker._warn = lambda _message: None
    now = [0.0]
    calls = []

    def failing(seconds: float):
        def action() -> None:
            calls.append(now[0])
            now[0] += seconds
            raise OSError("away")

        return action

    tracker._clock = lambda: now[0]
    for _ in range(2):
        tracker._attempt("x", failing(0.1))
    tracker._attempt("y", failing(20.0))
    tracker._attempt("z", failing(20.0))
    now[0] += 31.0
    tracker._attempt("z", failing(20.0))
    assert calls == [0.0, 0.1, 0.2, 51.2]
    assert tracker.not_logged == ["x", "y", "z"]


def test_an_unreachable_server_is_told_at_once(runs):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, never listening: refused
        uri = f"http://user:secret@127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            TrackingUnavailableError, match=r"http://\*\*\*@127.* cannot be used.*set tracking\.uri"
        ):
            Tracker.open(Tracking(uri=uri), runs_dir=runs.root)


def test_a_server_that_never_answers_is_given_up(runs, monkeypatch):
    monkeypatch.setattr(tracking, "CHECK_TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began = time.monotonic()
        with pytest.raises(TrackingUnavailableError, match="cannot be used"):
            Tracker.open(Tracking(uri=f"http://127.0.0.1:{silent.getsockname()[1]}"), runs_dir=runs.root)
        assert time.monotonic() - began < 5


def test_a_file_that_is_no_database_is_told_at_once(runs):
    runs.database.write_bytes(b"notes" * 1000)
    with pytest.raises(TrackingUnavailableError, match=r"mlflow\.db cannot be used: file is not a database"):
        Tracker.open(Tracking(), runs_dir=runs.root)
    assert runs.database.read_bytes() == b"notes" * 1000


def test_a_deleted_experiment_is_told(tracker, runs):
    tracker.client.delete_experiment(tracker.experiment_id)
    with pytest.raises(ValueError, match="'servelab' was deleted in MLflow; restore it"):
        Tracker.open(Tracking(), runs_dir=runs.root)


def test_importing_the_module_does_not_import_mlflow():
    code = "import sys, orchestrator.tracking, orchestrator.relog; print('mlflow' in sys.modules, 'ray' in sys.modules)"
    assert start_python(code).communicate(timeout=60)[0] == "False False\n"
