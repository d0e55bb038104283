"""A sweep that is ended from outside leaves no server and no RUNNING run, and loses nothing that was measured."""

import signal
import time

import psutil
import pytest
from fakes.mlflow_store import FILTERS
from fakes.stub import Script
from fakes.sweeps import cluster, gone, lab

pytestmark = FILTERS
STOP_S = 10
KINDS = ("sweep", "cell", "superseded")


def slow(folder):
    """Two cells; at its first start the engine of the second stalls in a request, and ends only when killed."""
    place = lab(folder)
    place.engine("quick")
    hangs = Script(
        stall_requests=(5,), children=1, children_ignore_sigterm=True, lock_path=str(folder / "slow.lock")
    )
    place.recovering_engine("slow", hangs, starts=1, lock=str(folder / "slow.lock.0"))
    place.define(grid={"engine": ["quick", "slow"]})
    return place


@pytest.fixture(scope="module")
def started(tmp_path_factory):
    """Three commands that are in the middle of their second cell; one of them on a cluster of its own."""
    places = {name: slow(tmp_path_factory.mktemp(name)) for name in ("int", "term", "kill")}
    with cluster(slots=1) as address:
        more = {"int": [], "term": [f"ray.address={address}"], "kill": []}
        running = {name: place.start(place.mine("+sweep=s", *more[name])) for name, place in places.items()}
        try:
            for command in running.values():
                command.wait_for(r"slow-\S+ . measure", seconds=90)
            yield {name: (places[name], running[name]) for name in places}
        finally:
            for command in running.values():
                if command.process.poll() is None:
                    command.process.kill()
                    command.process.wait()


def states(place):
    """Status of every run, by kind."""
    return {kind: [run.info.status for run in place.tracked(kind)] for kind in KINDS}


def check_stopped(place, command, servers):
    """Nothing runs, nothing is RUNNING, the first cell is kept, the second has no result."""
    assert place.servers() == []
    assert not any(psutil.pid_exists(pid) for pid in servers)
    assert states(place) == {"sweep": ["KILLED"], "cell": ["FINISHED", "KILLED"], "superseded": []}
    assert all(run.info.end_time for kind in KINDS for run in place.tracked(kind))
    (result,) = place.results()
    assert (result["axes"], result["verdict"]["valid"]) == ({"engine": "quick"}, True)
    assert "Traceback" not in str(command)
    assert "will be tried again" not in str(command)
    assert "FAILED" not in str(command)
    assert command.out.read_text().count("│ valid ") == 1
    assert "1 cell not started" in command.out.read_text()


def test_ctrl_c_ends_everything(started):
    """SIGINT to the whole group, as a terminal sends it: exit 130 within 10 s."""
    place, command = started["int"]
    servers = place.servers()
    assert servers
    assert command.end(signal.SIGINT, seconds=STOP_S, group=True) == 130, str(command)
    check_stopped(place, command, servers)


def test_a_sweep_in_use_is_one_message(started):
    """A second command on a sweep that runs: which process has it, exit code 1, and the first goes on."""
    place, command = started["term"]
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 1, str(done)
    assert f"error: sweep s in {place.runs} is in use by process {command.process.pid}" in done.stderr
    assert "Traceback" not in done.stderr
    assert command.process.poll() is None


def test_sigterm_ends_everything(started):
    """SIGTERM to the driver alone, on a cluster that goes on: exit 143 within 10 s."""
    place, command = started["term"]
    servers = place.servers()
    assert servers
    assert command.end(signal.SIGTERM, seconds=STOP_S) == 143, str(command)
    check_stopped(place, command, servers)


def test_a_killed_driver_takes_its_servers_along(started):
    """SIGKILL: the servers are gone within seconds; runs stay RUNNING until the next command, which finishes the sweep."""
    place, command = started["kill"]
    servers = place.servers()
    assert servers
    assert command.end(signal.SIGKILL, seconds=1) == -signal.SIGKILL
    assert gone(servers, seconds=STOP_S)
    assert states(place) == {"sweep": ["RUNNING"], "cell": ["FINISHED", "RUNNING"], "superseded": []}
    done = place.run(place.mine("+sweep=s"))
    assert done.code == 0, str(done)
    assert "1 done before, 1 to run" in done.stderr
    assert [result["verdict"]["valid"] for result in place.results()] == [True, True]
    assert states(place) == {
        "sweep": ["FINISHED"],
        "cell": ["FINISHED", "FINISHED"],
        "superseded": ["KILLED"],
    }
    (stale,) = place.tracked("superseded")
    assert stale.data.tags["servelab.closed"] == "stale"
    assert place.starts("slow") == ["free", "free"]


def test_a_signal_while_ray_starts_is_a_stop_too(tmp_path):
    """Ray installs a handler of its own for SIGTERM; exit code and tracking store say what happened all the same."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    places = {number: slow(tmp_path / number.name) for number in numbers}
    running = {number: places[number].start(places[number].mine("+sweep=s")) for number in numbers}
    for number, command in running.items():
        command.wait_for("2 to run")
        time.sleep(0.3)  # into Ray's start, which takes seconds
        command.send(number, group=number == signal.SIGINT)
    for number, command in running.items():
        place = places[number]
        assert command.process.wait(30) == 128 + number, str(command)
        assert states(place)["sweep"] == ["KILLED"]
        assert place.results() == []
        assert not (place.root / "slow.starts").exists()
        assert "Traceback" not in str(command)
