"""Whole commands on stub engines: the happy path, repeated and re-run, and what is refused before anything starts."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest
import yaml
from fakes.composed import cells_of
from fakes.mlflow_store import FILTERS
from fakes.sweeps import cluster, lab

pytestmark = FILTERS
FILES = {
    "cell.yaml", "evidence.json", "arrivals.parquet", "records.parquet", "timeseries.parquet", "server.log",
    "environment.txt", "client.json", "result.json",
}  # fmt: skip
GRID = {"engine": ["a", "b"], "load": {"rate_per_s": [40, 80]}}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = lab(tmp_path_factory.mktemp("sweep"), database=False)
    made.engine("a")
    made.engine("b")
    made.define(grid=GRID)
    return made


@pytest.fixture(scope="module")
def first(place):
    """Two engines x two rates from nothing, the tracking database included."""
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 0, str(done)
    return done


@pytest.fixture(scope="module")
def again(place, first):
    """The same command once more."""
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 0, str(done)
    return done


@pytest.fixture(scope="module")
def address():
    """A Ray cluster that is there already."""
    with cluster(slots=3) as found:
        yield found


@pytest.fixture(scope="module")
def reruns(place, first, address):
    """One cell again: from the runs folder, from a copy with an older engine's result, and as a Hydra configuration."""
    source = next(place.sweep().glob("*/cell.yaml")).parent
    copy = place.root / "downloads" / "artifacts"
    shutil.copytree(source, copy)
    result = json.loads((copy / "result.json").read_text())
    result["server"]["server.version"] = "0.31.0"
    (copy / "result.json").write_text(json.dumps(result))
    commands = commands_again(place, source, copy, f"ray.address={address}")
    with ThreadPoolExecutor(3) as pool:
        return dict(zip(commands, pool.map(place.run, commands.values()), strict=True))


def commands_again(place, source, copy, ray):
    """How a person runs one cell again; on a Ray cluster that exists already."""
    return {
        "runs": place.argv(f"from_file={source / 'cell.yaml'}", "sweep.name=from_runs", ray),
        "copy": place.argv(
            f"from_file={copy / 'cell.yaml'}", "sweep.name=from_copy", "load.num_requests=10", ray
        ),
        "native": place.argv(
            "--config-dir", str(copy), "--config-name", "cell", "+sweep.name=native", f"+{ray}"
        ),
    }


def test_a_sweep_measures_every_cell(place, first):
    """Four valid cells; the two rates of an engine share its one start, in the order of the sweep."""
    results = place.results()
    assert [result["axes"] for result in results] == [
        {"engine": engine, "load.rate_per_s": rate} for engine in "ab" for rate in (40.0, 80.0)
    ]
    assert [result["verdict"] for result in results] == [{"valid": True, "reasons": []}] * 4
    assert [result["launch_key"] == results[0]["launch_key"] for result in results] == [
        True,
        True,
        False,
        False,
    ]
    assert first.stderr.count("· start") == 2
    for result in results:
        metrics, timing = result["metrics"], result["timing"]
        assert (metrics["requests/total"], metrics["requests/failed"], metrics["server/completed"]) == (
            20,
            0,
            20,
        )
        assert 5 <= metrics["ttft_ms/p50"] <= metrics["e2el_ms/p50"]  # the stub's first token takes 5 ms
        assert timing["start_s"] > 0
        assert timing["measured_s"] > 0.2  # 19 gaps of 1/80 s
        assert (result["attempts"], result["error"]) == ([], None)


def test_every_file_of_a_cell_is_there(place, first):
    """The files of the runs folder, whole: strict JSON, readable tables, the log, the plan."""
    assert yaml.safe_load((place.sweep() / "sweep.yaml").read_text())["sweep"]["grid"] == GRID
    plan = json.loads((place.sweep() / "plan.json").read_text())
    assert [len(launch["cells"]) for launch in plan["commands"][0]["launches"]] == [2, 2]
    for cell in plan["cells"]:
        folder = place.sweep() / cell["folder"]
        assert {path.name for path in folder.iterdir()} >= FILES
        assert pq.read_table(folder / "records.parquet").num_rows == 20
        assert pq.read_table(folder / "arrivals.parquet").num_rows == 20
        assert pq.read_table(folder / "timeseries.parquet").num_rows > 0
        assert "Application startup complete" in (folder / "server.log").read_text()
        assert json.loads((folder / "evidence.json").read_text())


def test_tracking_holds_parent_and_children(place, first):
    """Parent and four children FINISHED, with parameters, metrics, tags and files."""
    (parent,) = place.tracked("sweep")
    children = place.tracked("cell")
    assert [run.info.status for run in (parent, *children)] == ["FINISHED"] * 5
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert parent.data.metrics["cells/valid"] == 4
    results = {result["cell_key"]: result for result in place.results()}
    for run in children:
        result = results[run.data.tags["servelab.cell"]]
        assert result["mlflow_run_id"] == run.info.run_id
        assert run.data.params["engine"] == result["axes"]["engine"]
        assert run.data.params["load.rate_per_s"] == str(result["axes"]["load.rate_per_s"])
        assert run.data.metrics["ttft_ms/p50"] == result["metrics"]["ttft_ms/p50"]
        assert run.data.tags["verdict"] == "valid"
        assert run.data.tags["server.version"] == "0.32.0"
        assert {file.path for file in place.client().list_artifacts(run.info.run_id)} >= FILES


def test_the_terminal_shows_table_time_and_links(first):
    """Progress on stderr as it happens; table, where the time went and two links on stdout."""
    assert first.stderr.count("valid ttft_p50=") == 4
    assert first.stdout.count("│ valid ") == 4
    (time_line,) = [line for line in first.stdout.splitlines() if line.startswith("time: ")]
    assert all(name in time_line for name in ("environments", "engine starts", "warm-up", "measured", "rest"))
    links = [line for line in first.stdout.splitlines() if line.startswith("http://127.0.0.1:5000/#/")]
    assert ["compare-runs" in link for link in links] == [False, True]


def test_the_same_command_again_starts_nothing(place, first, again):
    """All done: no engine, no Ray, the same table."""
    assert "4 done before, 0 to run" in again.stderr
    assert "· start" not in again.stderr
    assert again.stdout.count("│ valid ") == 4
    assert again.seconds < first.seconds / 2
    assert [run.info.status for run in (*place.tracked("sweep"), *place.tracked("cell"))][:5] == [
        "FINISHED"
    ] * 5


def test_a_cell_runs_again_from_the_runs_folder(place, reruns):
    """Old and new side by side, and the sentence that nothing differs."""
    done = reruns["runs"]
    assert done.code == 0, str(done)
    assert "original" in done.stdout
    assert "same workload, same engine facts as the original" in done.stdout
    (result,) = place.results("from_runs")
    assert result["cell_key"] in {other["cell_key"] for other in place.results()}


def test_a_cell_runs_again_from_downloaded_artifacts(place, reruns):
    """With an override; what differs from the original is named."""
    done = reruns["copy"]
    assert done.code == 0, str(done)
    assert "drift: server.version was '0.31.0', is '0.32.0'" in done.stdout
    assert "drift: workload_hash was" in done.stdout
    (result,) = place.results("from_copy")
    assert result["metrics"]["requests/total"] == 10


def test_a_cell_is_a_configuration_of_its_own(place, reruns):
    """``--config-dir DIR --config-name cell`` runs the same cell."""
    done = reruns["native"]
    assert done.code == 0, str(done)
    (result,), (other,) = place.results("native"), place.results("from_runs")
    assert result["cell_key"] == other["cell_key"]


def test_tracking_is_rebuilt_from_disk(place, reruns, again):
    """``relog`` into an empty store: the sweep with its four cells and their files is there."""
    done = place.run(place.argv(f"relog={place.runs}", f"tracking.uri=sqlite:///{place.root / 'new.db'}"))
    assert done.code == 0, str(done)
    assert "s: 4 logged, 0 logged before, 0 without a result" in done.stdout
    children = [
        run for run in place.tracked("cell", database="new.db") if run.data.tags["servelab.sweep"] == "s"
    ]
    assert [run.info.status for run in children] == ["FINISHED"] * 4
    assert children[0].data.metrics["requests/total"] == 20
    assert {file.path for file in place.client("new.db").list_artifacts(children[0].info.run_id)} >= FILES


# --- refused before anything starts ---


@pytest.fixture
def bare(tmp_path):
    return small(lab(tmp_path, database=False))


def small(made):
    """One engine, two rates."""
    made.engine("a")
    made.define(grid={"load": {"rate_per_s": [40, 80]}})
    return made


def refused(place, *overrides: str, code: int) -> str:
    """Run a command that must fail with one message, and leave no result and no server."""
    done = place.run(place.mine("+sweep=s", *overrides))
    assert done.code == code, str(done)
    assert "Traceback" not in done.stderr
    assert list(place.runs.glob("*/*/result.json")) == []
    assert place.servers() == []
    (message,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return message


def test_a_slot_that_no_node_has_is_refused_at_once(tmp_path, address):
    """hardware.kind=cuda on a cluster without a GPU does not wait for one."""
    place = small(lab(tmp_path))
    cuda = ("hardware.kind=cuda", "engine.tensor_parallel_size=64")
    message = refused(place, "engine=a", *cuda, f"ray.address={address}", code=2)
    assert "needs 64 GPU on one node, the largest node has 0" in message
    (parent,) = place.tracked("sweep")
    assert parent.info.status == "FAILED"


def test_a_setting_that_the_engine_cannot_express_is_refused(bare):
    """The old family has no name for a KV dtype that is not the model's; Ray is not started to find out."""
    message = refused(
        bare, "engine=a", "engine.family=v0", "kv.dtype=float16", "model.dtype=bfloat16", code=2
    )
    assert "kv.dtype=float16 with model.dtype=bfloat16" in message
    assert not (bare.root / "mlflow.db").exists()


@pytest.mark.parametrize(
    ("uri", "code", "expected"),
    [
        ("http://127.0.0.1:9", 1, "http://127.0.0.1:9"),
        ("file:///nowhere/mlruns", 2, "tracking.uri"),
    ],
)
def test_a_tracking_store_that_cannot_be_used_is_one_message(bare, uri, code, expected):
    """Known before any engine starts."""
    assert expected in refused(bare, "engine=a", f"tracking.uri={uri}", code=code)


def test_a_damaged_result_is_one_message(bare):
    """Which file, and what to do; the sweep does not start over it."""
    argv = bare.mine("+sweep=s", "engine=a")
    folder = bare.sweep() / cells_of(*argv[3:])[0].folder
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"outcome": NaN}')
    done = bare.run(argv)
    assert (done.code, "Traceback" in done.stderr) == (1, False), str(done)
    assert f"error: {folder / 'result.json'} is damaged" in done.stderr
