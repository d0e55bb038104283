"""Sweeps in which something fails: what is printed, stored, tried again, and what is left alone."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fakes.mlflow_store import FILTERS
from fakes.stub import Script
from fakes.sweeps import cluster, lab

pytestmark = FILTERS
NO_MEMORY = "ValueError: No available memory for the cache blocks. Try increasing gpu_memory_utilization."
BROKEN = "RuntimeError: the second reason is another one"
ENGINES = ["one", "two", "three", "four"]


@pytest.fixture(scope="module")
def address():
    with cluster(slots=4) as found:
        yield found


@pytest.fixture(scope="module")
def ran(tmp_path_factory, address):
    """(lab, command's end) of four independent sweeps, run side by side; ``fast`` on a Ray of its own with one slot."""
    ray = f"ray.address={address}"
    makes = {"f4": four, "fast": four, "faults": many, "contradiction": contradicting}
    more = {"f4": [ray], "fast": ["fail_fast=true"], "faults": [ray], "contradiction": [ray]}
    places = {name: make(tmp_path_factory.mktemp(name)) for name, make in makes.items()}
    with ThreadPoolExecutor(len(places)) as pool:
        ends = {
            name: pool.submit(place.run, place.mine("+sweep=s", *more[name]))
            for name, place in places.items()
        }
        return {name: (place, ends[name].result()) for name, place in places.items()}


# --- F4: one failing cell neither spoils nor hides the rest ---


def four(folder):
    """Cells one to four; two and three fail at their first start, for different reasons."""
    place = lab(folder)
    place.engine("one")
    place.engine("two", Script(exit_code=1, exit_text=NO_MEMORY, exit_once=str(folder / "two")))
    place.engine("three", Script(exit_code=3, exit_text=BROKEN, exit_once=str(folder / "three")))
    place.engine("four")
    place.define(grid={"engine": ENGINES})
    return place


@pytest.fixture(scope="module")
def f4(ran):
    place, done = ran["f4"]
    return place, done, place.results(), place.tracked("sweep"), place.tracked("cell")


@pytest.fixture(scope="module")
def f4_again(f4, address):
    place = f4[0]
    return place, place.run(place.mine("+sweep=s", f"ray.address={address}", "rerun=failed"))


def test_cells_beside_failing_ones_complete(f4):
    """Cells 1 and 4 are done, 2 and 3 failed, each with its own class and without any number."""
    _, done, results, _, _ = f4
    assert done.code == 1, str(done)
    assert [result["outcome"] for result in results] == ["done", "failed", "failed", "done"]
    assert [(result["error"] or {}).get("class") for result in results] == [
        None,
        "does_not_fit",
        "died",
        None,
    ]
    for result, reason in ((results[1], NO_MEMORY), (results[2], BROKEN)):
        assert reason in result["error"]["message"]
        assert reason in result["error"]["log_tail"]
        assert "EngineStartError" in result["error"]["traceback"]
        assert (result["metrics"], result["server"]) == ({}, {})
        assert len(result["attempts"]) == 1  # neither kind of failure is mended by another try


def test_a_failure_is_printed_when_it_happens_and_again_at_the_end(f4):
    """With overrides, class and the path of a log that exists."""
    place, done, _, _, _ = f4
    progress = [line for line in done.stderr.splitlines() if line.startswith("cell ")]
    assert len(progress) == 4
    for engine, cause in (("two", "does_not_fit"), ("three", "died")):
        (live,) = [line for line in progress if f"engine={engine}:" in line]
        (final,) = [line for line in done.stdout.splitlines() if line.startswith(f"engine={engine}:")]
        assert f"FAILED ({cause})" in live
        assert live.partition(" ")[2].partition(" ")[2] == final
        log = final.rpartition("log: ")[2]
        assert log.startswith(str(place.sweep()))
        assert (NO_MEMORY if engine == "two" else BROKEN) in Path(log).read_text()


def test_failures_are_counted_where_people_look(f4):
    """The parent is FAILED with two failed cells, each child says how it went, events.jsonl in order of time."""
    place, _, _, (parent,), children = f4
    assert parent.info.status == "FAILED"
    assert (parent.data.metrics["cells/done"], parent.data.metrics["cells/failed"]) == (2, 2)
    states = {run.data.params["engine"]: run.info.status for run in children}
    assert states == {"one": "FINISHED", "two": "FAILED", "three": "FAILED", "four": "FINISHED"}
    tags = {run.data.params["engine"]: run.data.tags.get("error.class") for run in children}
    assert (tags["two"], tags["three"]) == ("does_not_fit", "died")
    lines = (place.sweep() / "events.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["state"] for line in lines[:4]) == ["failed", "failed", "valid", "valid"]


def test_failed_cells_alone_run_again(f4, f4_again):
    """``rerun=failed`` runs 2 and 3; the results of 1 and 4 stay, the earlier attempts of 2 and 3 as well."""
    _, _, before, _, _ = f4
    place, done = f4_again
    assert done.code == 0, str(done)
    assert "2 done before, 2 to run (2 of them again)" in done.stderr
    after = place.results()
    assert [result["verdict"]["valid"] for result in after] == [True] * 4
    assert [new["started_at"] == old["started_at"] for new, old in zip(after, before, strict=True)][::3] == [
        True,
        True,
    ]
    assert len(list(place.sweep().glob("two-*/attempts/1/result.json"))) == 1
    (parent,) = place.tracked("sweep")
    assert (parent.info.status, parent.data.metrics["cells/failed"]) == ("FINISHED", 0)
    assert len(place.tracked("superseded")) == 2


def test_fail_fast_leaves_the_rest_not_started(ran):
    """Stops after 2; 3 and 4 are not started."""
    place, done = ran["fast"]
    assert done.code == 1, str(done)
    assert [result["outcome"] for result in place.results()] == ["done", "failed"]
    assert "2 cells not started" in done.stdout
    assert [run.data.params["engine"] for run in place.tracked("cell")] == ["one", "two"]
    (parent,) = place.tracked("sweep")
    assert (parent.info.status, parent.data.metrics["cells/not_started"]) == ("FAILED", 2)


# --- one sweep of many faults ---


def dying(place, name, *, starts: int):
    """An engine whose first starts die in the middle, leaving a child that ignores TERM and holds a device."""
    lock = str(place.root / f"{name}.lock")
    script = Script(
        die_mid_request=5,
        children=1,
        child_title="VLLM::EngineCor",
        children_ignore_sigterm=True,
        lock_path=lock,
    )
    place.recovering_engine(name, script, starts=starts, lock=f"{lock}.0")


def many(folder):
    """One engine for every way to go wrong."""
    place = lab(folder)
    dying(place, "dies_once", starts=1)
    dying(place, "dies_always", starts=9)
    place.engine("compiles", Script(jit_line_at=7))
    place.engine("short", Script(output_tokens=(None, 2, 3, 1)))
    place.engine("liar", Script(version="0.31.0"))
    place.define(grid={"engine": ["dies_once", "dies_always", "compiles", "short", "liar"]})
    return place


@pytest.fixture(scope="module")
def faults(ran):
    """Engine → its result, in one sweep."""
    place, done = ran["faults"]
    assert done.code == 1, str(done)
    return place, done, {result["axes"]["engine"]: result for result in place.results()}


def test_a_server_that_dies_in_a_cell_gets_a_second_attempt(faults):
    """The second attempt counts; the first is recorded, with its log."""
    place, done, results = faults
    result = results["dies_once"]
    assert result["verdict"] == {"valid": True, "reasons": []}
    (attempt,) = result["attempts"]
    assert (attempt["attempt"], attempt["cause"]) == (1, "died")
    assert "ended with code 1 during the cell" in attempt["message"]
    (log,) = place.sweep().glob("dies_once-*/attempts/1/server.log")
    assert "EngineDeadError" in log.read_text()
    assert "died, will be tried again" in done.stderr


def test_a_server_that_dies_again_fails_its_cell(faults):
    """Two attempts, class died; nothing of what was half measured looks like a result."""
    _, _, results = faults
    result = results["dies_always"]
    assert (result["outcome"], result["error"]["class"], result["metrics"]) == ("failed", "died", {})
    assert [attempt["attempt"] for attempt in result["attempts"]] == [1, 2]
    assert "EngineDeadError" in result["error"]["log_tail"]


def test_the_next_start_waits_for_the_end_of_the_tree(faults):
    """E1: at each start the lock that the last start's child held is free, and nothing is left at the end."""
    place, _, _ = faults
    assert place.starts("dies_once") == ["free", "free"]
    assert place.starts("dies_always") == ["free", "free"]
    assert place.servers() == []


@pytest.mark.parametrize(
    ("engine", "reason", "detail"),
    [
        ("compiles", "jit_in_window", "1 compilation(s), first: "),
        ("short", "short_output", "output shorter than requested (15 of 20)"),
        ("liar", "evidence_mismatch", "0.31.0"),
    ],
)
def test_a_run_that_does_not_count_says_why(faults, engine, reason, detail):
    """The numbers stay, the verdict is invalid by name, here and in the tracking store."""
    place, done, results = faults
    result = results[engine]
    assert (result["outcome"], result["verdict"]["valid"]) == ("done", False)
    assert {found["name"] for found in result["verdict"]["reasons"]} == {reason}
    assert detail in result["verdict"]["reasons"][0]["detail"]
    assert result["metrics"]["requests/total"] == 20
    (run,) = [run for run in place.tracked("cell") if run.data.params["engine"] == engine]
    assert (run.info.status, run.data.tags["verdict"]) == ("FINISHED", "invalid")
    assert reason in run.data.tags["verdict.reasons"]
    assert f"engine={engine}: INVALID" in done.stderr


def contradicting(folder):
    """Two cells of one launch; the prefix of the first is longer than the prompts that are drawn on the node."""
    place = lab(folder)
    place.engine("one")
    place.define(
        grid={"engine": ["one"], "workload": {"shared_prefix_tokens": [30, 0]}},
        workload={"input": {"kind": "lognormal", "value": 16, "sigma": 0.5, "max": 64}},
    )
    return place


def test_a_contradiction_seen_on_the_node_fails_that_cell_alone(ran):
    """One sentence, with the traceback in the result; the other cell is measured on the same server."""
    place, done = ran["contradiction"]
    assert done.code == 1, str(done)
    failed, measured = place.results()
    assert failed["error"]["class"] == "ValueError"
    message = "workload.shared_prefix_tokens must be < every prompt length, got 30"
    assert failed["error"]["message"].startswith(message)
    assert "raise ValueError(" in failed["error"]["traceback"]
    assert measured["verdict"]["valid"]
    assert done.stderr.count("· start") == 1
    assert "Traceback" not in done.stderr
