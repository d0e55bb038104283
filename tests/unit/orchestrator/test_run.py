"""The driver over a scripted cluster: who is blamed, who is tried again, and what is written down."""

import json
import os
import signal
from collections import deque
from pathlib import Path

import pytest
from fakes.cells import FakeCell, fake_config

from conf.schema import Engine, Kv, Model, ModelSource
from orchestrator import store
from orchestrator.paths import SweepPaths
from orchestrator.plan import Launch, Plan
from orchestrator.run import Driver, StopSignal, check_commands
from workers.events import CellFailed, CellFinished, LaunchFinished, Phase

OVER = LaunchFinished(timing={"start_s": 2.0})
DONE = {"verdict": {"valid": True, "reasons": []}, "metrics": {}, "server": {}, "timing": {}}


class Closed:
    """The end of a launch's stream."""


class Lost:
    """The end of a launch's slot."""

    message = "ActorDiedError: the worker died"


class FakeCluster:
    """Plays, for every launch that is submitted, the next script of events; ``cut`` is what ending it yields."""

    def __init__(self, *scripts, cut=()):
        self.scripts, self.cut = deque(scripts), cut
        self.submitted, self.queue, self.open = [], deque(), []

    def submit(self, spec):
        self.submitted.append([cell.key for cell in spec.cells])
        self.open.append(spec.key)
        self.queue.extend((spec.key, event) for event in self.scripts.popleft())

    def events(self, *, timeout_s):
        if self.queue:
            yield self.queue.popleft()

    def stop_all(self):
        yield from ((self.open[-1], event) for event in self.cut)


class FakeTracker:
    """Gives a run id to every cell that starts."""

    def __init__(self):
        self.finished = []

    def start_cell(self, cell):
        return f"run-{cell.key}"

    def finish_cell(self, run_id, result, paths):
        self.finished.append((run_id, result["outcome"]))


class FakeDisplay:
    def __init__(self):
        self.said, self.over = [], []

    def say(self, line):
        self.said.append(line)

    def cell_over(self, line):
        self.over.append(line)

    def launch(self, key, phase, label):
        pass

    def launch_over(self, key):
        pass


def finished(key):
    return CellFinished(cell=key, payload=DONE, files={})


def failed(key, *, retryable=False, cause="died"):
    return CellFailed(
        cell=key, cause=cause, message="m", retryable=retryable, files={"server.log": b"last words"}
    )


class Played:
    """One sweep of cells a and b in one launch, driven to its end."""

    def __init__(self, folder: Path, cluster: FakeCluster, *, stop: StopSignal | None = None, **settings):
        self.paths = SweepPaths(folder, "s")
        cells = tuple(FakeCell(key) for key in "ab")
        launch = Launch(key="l", label="launch", cells=cells)
        self.tracker, self.display = FakeTracker(), FakeDisplay()
        self.driver = Driver(
            config=fake_config(**settings),
            paths=self.paths,
            tracker=self.tracker,
            plan=Plan(launches=(launch,)),
            stop=stop or StopSignal(),
        )
        self.driver.display = self.display
        self.driver._loop(cluster)

    def result(self, key):
        return store.read_result(self.paths.cell(FakeCell(key)).result)

    def causes(self, key):
        return [attempt["cause"] for attempt in self.result(key)["attempts"]]


def test_one_launch_serves_its_cells(tmp_path):
    """Each cell has a result with its run, and the launch's time is counted once."""
    cluster = FakeCluster([Phase(name="start"), finished("a"), finished("b"), OVER, Closed()])
    played = Played(tmp_path, cluster)
    assert cluster.submitted == [["a", "b"]]
    assert played.tracker.finished == [("run-a", "done"), ("run-b", "done")]
    assert (played.result("a")["mlflow_run_id"], played.result("a")["attempts"]) == ("run-a", [])
    assert played.driver.time_spent().phases["start_s"] == 2.0


def test_a_cell_that_fails_leaves_the_others_alone(tmp_path):
    """The server went on: b is measured by the same launch."""
    cluster = FakeCluster([failed("a", cause="ValueError"), finished("b"), OVER, Closed()])
    played = Played(tmp_path, cluster)
    assert len(cluster.submitted) == 1
    assert [played.result(key)["outcome"] for key in "ab"] == ["failed", "done"]
    assert played.display.over[0].startswith("cell-a: FAILED (ValueError) m · log: ")


def test_a_dead_server_is_one_attempt_of_its_cell(tmp_path):
    """a died at its first attempt: both cells start again, b without a blemish; the log of a's first attempt stays."""
    cluster = FakeCluster(
        [failed("a", retryable=True), OVER, Closed()], [finished("a"), finished("b"), OVER, Closed()]
    )
    played = Played(tmp_path, cluster)
    assert cluster.submitted == [["a", "b"], ["a", "b"]]
    assert (played.causes("a"), played.causes("b")) == (["died"], [])
    assert (played.paths.cell(FakeCell("a")).attempts / "1" / "server.log").read_bytes() == b"last words"
    assert played.display.said == ["cell-a: died, will be tried again: m"]


def test_a_cell_that_kills_every_server_fails_alone(tmp_path):
    """After retries=1 a has failed with two attempts; b, which was never tried, gets an engine of its own."""
    dies = [failed("a", retryable=True), OVER, Closed()]
    cluster = FakeCluster(dies, dies, [finished("b"), OVER, Closed()])
    played = Played(tmp_path, cluster)
    assert cluster.submitted == [["a", "b"], ["a", "b"], ["b"]]
    assert played.causes("a") == ["died", "died"]
    assert [played.result(key)["outcome"] for key in "ab"] == ["failed", "done"]


@pytest.mark.parametrize("retries", [0, 2])
def test_retries_bound_the_attempts(tmp_path, retries):
    """``retries`` new tries, whoever else waits."""
    dies = [failed("a", retryable=True), OVER, Closed()]
    cluster = FakeCluster(*[dies] * (retries + 1), [finished("b"), OVER, Closed()])
    assert len(Played(tmp_path, cluster, retries=retries).causes("a")) == retries + 1


def test_a_lost_slot_is_blamed_on_the_cell_it_worked_on(tmp_path):
    """The slot died while b was measured; a is done and stays."""
    cluster = FakeCluster(
        [finished("a"), Phase(name="measure", cell="b"), Lost()], [finished("b"), OVER, Closed()]
    )
    played = Played(tmp_path, cluster)
    assert cluster.submitted == [["a", "b"], ["b"]]
    assert (played.causes("a"), played.causes("b")) == ([], ["slot_lost"])


def test_a_slot_lost_before_any_cell_is_blamed_on_all(tmp_path):
    """Twice lost while the engine started: both cells have failed, and nothing is started for ever."""
    cluster = FakeCluster([Phase(name="start"), Lost()], [Phase(name="start"), Lost()])
    played = Played(tmp_path, cluster)
    assert [played.result(key)["error"]["class"] for key in "ab"] == ["slot_lost", "slot_lost"]


def test_a_launch_that_says_nothing_ends_too(tmp_path):
    """No event, no result: class no_result after the second try."""
    played = Played(tmp_path, FakeCluster([Closed()], [Closed()]))
    assert (played.causes("a"), played.result("b")["error"]["class"]) == (["no_result"] * 2, "no_result")


def test_fail_fast_stops_at_the_first_failure(tmp_path):
    """b is cut; it has neither a result nor an attempt."""
    cluster = FakeCluster([failed("a"), finished("b")], cut=[failed("b"), OVER, Lost()])
    played = Played(tmp_path, cluster, fail_fast=True)
    assert (played.result("a")["outcome"], played.result("b")) == ("failed", None)
    assert cluster.submitted == [["a", "b"]]


def test_what_ends_because_it_is_stopped_has_not_failed(tmp_path):
    """On a signal, a cell that was finished meanwhile counts; a server's death and a lost slot do not."""
    stop = StopSignal()
    stop(signal.SIGTERM, None)
    cluster = FakeCluster([])
    driver = Played(tmp_path, cluster, stop=stop).driver
    assert cluster.submitted == []
    assert stop.exit_code == 143
    driver._submit(
        cluster_with_cut := FakeCluster([], cut=[finished("a"), failed("b"), OVER, Lost()]),
        driver._waiting[0],
    )
    driver._cut(cluster_with_cut)
    paths = SweepPaths(tmp_path, "s")
    assert store.read_result(paths.cell("cell-a").result)["outcome"] == "done"
    assert store.read_result(paths.cell("cell-b").result) is None


def test_processes_that_stay_are_named(tmp_path):
    """A launch whose cells are done but whose server survived says so."""
    over = LaunchFinished(timing={}, problem="processes [7] survived SIGKILL")
    played = Played(tmp_path, FakeCluster([finished("a"), finished("b"), over, Closed()]))
    assert played.display.said == ["launch: processes [7] survived SIGKILL"]


def test_every_attempt_is_a_line_of_events(tmp_path):
    """What happened to which cell, in order."""
    cluster = FakeCluster(
        [failed("a", retryable=True), Closed()],
        [finished("a"), failed("b", cause="does_not_fit"), OVER, Closed()],
    )
    played = Played(tmp_path, cluster)
    lines = [json.loads(line) for line in played.paths.events.read_text().splitlines()]
    assert [(line["cell"], line["state"], line["cause"]) for line in lines] == [
        ("a", "again", "died"),
        ("a", "valid", None),
        ("b", "failed", "does_not_fit"),
    ]


def test_a_foreign_cell_is_a_programming_error(tmp_path):
    with pytest.raises(RuntimeError, match="finished cell x, which it was not given"):
        Played(tmp_path, FakeCluster([finished("x")]))


def test_the_handlers_before_come_back():
    """The first signal is remembered; handlers are those from before afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    with StopSignal().installed() as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.number, stop.exit_code) == (signal.SIGTERM, 143)
    assert signal.getsignal(signal.SIGTERM) is before


# --- settings that an engine cannot express ---


def launch_of(**values):
    cell = FakeCell("a", config=fake_config(**values))
    return [Launch(key="l", label="l", cells=(cell,))]


OLD = Engine(name="old", version="0.7.3", family="v0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"engine": OLD, "kv": Kv(dtype="float16")}, "kv.dtype=float16 with model.dtype=bfloat16"),
        (
            {"engine": OLD, "model": Model(name="m", source=ModelSource.hub, id="o/m")},
            "kv.memory_bytes=67108864",
        ),
        (
            {"engine": Engine(name="e", version="0.32.0", extra_args=["--port=1"])},
            "extra_args repeats --port=1",
        ),
    ],
)
def test_what_an_engine_cannot_express_is_known_before_it_starts(values, message):
    with pytest.raises(ValueError, match=message):
        check_commands(launch_of(**values))


@pytest.mark.parametrize("values", [{}, {"engine": OLD}])
def test_what_an_engine_can_express_passes(values):
    """A local model's bytes per token are known once it is prepared: that they are not yet is no fault."""
    check_commands(launch_of(**values))
