"""MLflow can be rebuilt from the runs folder."""

import pytest
from fakes.cells import FAILED, INVALID, FakeCell, fake_config, fake_result
from fakes.mlflow_store import FILTERS, own_environment, runs_with_database

from conf.schema import Tracking
from orchestrator import store
from orchestrator.paths import RunPaths
from orchestrator.relog import log_missing, relog
from orchestrator.tracking import Tracker, TrackingUnavailableError

pytestmark = FILTERS


@pytest.fixture(autouse=True)
def restored_environment(monkeypatch):
    own_environment(monkeypatch)


@pytest.fixture
def runs(tmp_path) -> RunPaths:
    return runs_with_database(tmp_path)


def measure(runs: RunPaths, sweep: str, key: str, **values) -> None:
    """A finished cell on disk."""
    paths = runs.sweep(sweep).cell(f"cell-{key}")
    store.write_cell(paths, FakeCell(key))
    store.write_result(paths, fake_result(key, axes={"kv.dtype": "bfloat16"}, **values))


def logged(tracker: Tracker) -> list[tuple[str, str, str]]:
    """Sweep, cell and state of every run, in order."""
    found = tracker.client.search_runs([tracker.experiment_id])
    tags = "servelab.sweep", "servelab.cell"
    return sorted((*(run.data.tags.get(tag, "") for tag in tags), run.info.status) for run in found)


def reopen(runs: RunPaths) -> Tracker:
    return Tracker.open(Tracking(), runs_dir=runs.root)


def test_an_empty_store_is_rebuilt_and_a_second_time_adds_nothing(runs, capsys):
    """Both sweeps of a runs folder; the states are those of the cells."""
    measure(runs, "s", "a")
    measure(runs, "s", "b", **INVALID)
    measure(runs, "s", "c", **FAILED)
    measure(runs, "t", "d")
    assert relog(runs.root, Tracking()) == 0
    assert capsys.readouterr().out == (
        "s: 3 logged, 0 logged before, 0 without a result\nt: 1 logged, 0 logged before, 0 without a result\n"
    )
    expected = [
        ("s", "", "FAILED"),
        ("s", "a", "FINISHED"),
        ("s", "b", "FINISHED"),
        ("s", "c", "FAILED"),
        ("t", "", "FINISHED"),
        ("t", "d", "FINISHED"),
    ]
    assert logged(reopen(runs)) == expected

    assert relog(runs.root / "s", Tracking()) == 0
    assert capsys.readouterr().out == "s: 0 logged, 3 logged before, 0 without a result\n"
    assert logged(reopen(runs)) == expected


def test_a_rebuilt_run_equals_the_one_logged_live(runs):
    """Same parameters, metrics and start time as far as the disk knows them."""
    measure(runs, "s", "a")
    relog(runs.root, Tracking())
    tracker = reopen(runs)
    (run,) = tracker.client.search_runs([tracker.experiment_id], "tags.`servelab.kind` = 'cell'")
    assert run.info.start_time == 1767323045000
    assert run.data.params["engine.version"] == "0.32.0"
    assert run.data.params["server.version"] == "0.32.0"
    assert run.data.metrics["ttft_ms/p99"] == 40.0
    assert run.data.tags["servelab.workload_hash"] == "abc"
    assert {item.path for item in tracker.client.list_artifacts(run.info.run_id)} == {
        "cell.yaml",
        "result.json",
    }


def test_cells_measured_while_the_store_was_broken_are_logged_later(runs):
    """The store breaks during cell b: data stays on disk, relog adds b alone and closes its half-made run."""
    tracker = reopen(runs)
    said: list[str] = []
    tracker._warn = said.append
    tracker.start_sweep("s", num_cells=2, config=fake_config())
    sweep = runs.sweep("s")
    for key in "ab":
        store.write_cell(sweep.cell(f"cell-{key}"), FakeCell(key))
        run_id = tracker.start_cell(FakeCell(key))
        whole = runs.database.read_bytes()
        if key == "b":
            runs.database.write_bytes(b"broken" * 1000)
        store.write_result(sweep.cell(f"cell-{key}"), fake_result(key))
        tracker.finish_cell(run_id, fake_result(key), sweep.cell(f"cell-{key}"))
    tracker.close_running("s")
    tracker.finish_sweep(status="FINISHED", counts={"done": 2})
    assert "cell-b" in tracker.not_logged
    assert "cell-a" not in tracker.not_logged
    assert len(said) == 1
    with pytest.raises(TrackingUnavailableError):
        relog(sweep.root, Tracking())

    runs.database.write_bytes(whole)
    assert relog(sweep.root, Tracking()) == 0
    expected = [("s", "", "FINISHED"), ("s", "a", "FINISHED"), ("s", "b", "FINISHED"), ("s", "b", "KILLED")]
    assert logged(reopen(runs)) == expected


def test_a_resumed_sweep_logs_what_the_store_missed(runs):
    """Cells of an earlier command, and cells of this one once the store is back; nobody is left not logged."""
    measure(runs, "s", "a")
    tracker = reopen(runs)
    tracker._warn = lambda _message: None
    tracker.start_sweep("s", num_cells=2, config=fake_config())
    measure(runs, "s", "b")
    whole = runs.database.read_bytes()
    runs.database.write_bytes(b"broken" * 1000)
    assert tracker.finish_cell(None, fake_result("b"), runs.sweep("s").cell("cell-b")) is None
    assert log_missing(runs.sweep("s"), tracker) == 0
    runs.database.write_bytes(whole)
    assert log_missing(runs.sweep("s"), tracker) == 2
    assert log_missing(runs.sweep("s"), tracker) == 0
    assert "cell-b" not in tracker.not_logged
    assert logged(tracker) == [("s", "", "RUNNING"), ("s", "a", "FINISHED"), ("s", "b", "FINISHED")]


def test_unfinished_cells_are_counted_and_the_sweep_is_not_finished(runs, capsys):
    """A torn result is a cell that is not done."""
    measure(runs, "s", "a")
    torn = runs.sweep("s").cell("cell-b")
    store.write_cell(torn, FakeCell("b"))
    torn.result.write_text('{"cell_key": "b", "me')
    assert relog(runs.root, Tracking()) == 0
    assert "1 logged, 0 logged before, 1 without a result" in capsys.readouterr().out
    assert logged(reopen(runs)) == [("s", "", "KILLED"), ("s", "a", "FINISHED")]
    relog(runs.root, Tracking())
    assert len(logged(reopen(runs))) == 2


def test_a_damaged_result_is_named_and_the_others_are_logged(runs, capsys):
    measure(runs, "s", "a")
    measure(runs, "s", "b")
    damaged = runs.sweep("s").cell("cell-b").result
    damaged.write_text('{"cell_key" "b"}')
    assert relog(runs.root, Tracking()) == 1
    assert f"1 logged, 0 logged before, 0 without a result; {damaged} is damaged" in capsys.readouterr().out


def test_a_running_sweep_is_left_alone(runs):
    measure(runs, "s", "a")
    with store.sole_owner(runs.sweep("s")), pytest.raises(store.SweepBusyError, match="sweep s"):
        relog(runs.root, Tracking())


def test_a_folder_without_sweeps_is_refused(tmp_path):
    with pytest.raises(ValueError, match="relog must name a runs folder or a sweep in it"):
        relog(tmp_path, Tracking())
