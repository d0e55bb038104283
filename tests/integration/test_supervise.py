"""Nothing outlives its owner: the supervisor with real process trees."""

import contextlib
import fcntl
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fakes import stub

from workers import supervise

FAST = {"grace_s": 0.5}
SILENCE_S = 15.0


class Supervised:
    """An owner in miniature: starts the supervisor, reads its events."""

    def __init__(self, folder, script, **changes):
        self.config = {
            "argv": stub.argv(0),
            "env": {"PATH": os.environ["PATH"], **stub.environment(script)},
            "cwd": str(folder),
            "log": str(folder / "server.log"),
            **FAST,
            **changes,
        }
        command = [sys.executable, "-I", "-S", supervise.__file__]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self.process.stdin.write(json.dumps(self.config).encode() + b"\n")
        self.process.stdin.flush()
        self.events = []

    def next(self):
        ready, _, _ = select.select([self.process.stdout], [], [], SILENCE_S)
        assert ready, f"no event for {SILENCE_S} s after {self.events}"
        line = self.process.stdout.readline()
        if line:
            self.events.append(json.loads(line))
        return self.events[-1] if line else None

    def until(self, name):
        while (event := self.next()) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"no event {name!r} in {self.events}")

    def close(self):
        """End of the lifeline; returns the remaining events' names."""
        self.process.stdin.close()
        return self.drain()

    def drain(self):
        before = len(self.events)
        while self.next() is not None:
            pass
        return [event["event"] for event in self.events[before:]]


@pytest.fixture
def supervised(tmp_path):
    """Start supervised stubs; whatever happens, nothing is left."""
    started = []

    def start(script, **changes):
        started.append(Supervised(tmp_path, script, **changes))
        return started[-1]

    yield start
    for one in started:
        with contextlib.suppress(BrokenPipeError):
            one.process.stdin.close()
        one.drain()
        one.process.stdout.close()
        one.process.wait()


def gone(pids, within_s):
    """Whether all processes have ended (a zombie has) in time."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def alive(pid):
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def locked(path):
    """Whether somebody holds the lock."""
    with path.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def tree(one, size, within_s=5.0):
    """Pids of the server and its children, once there are ``size`` of them."""
    supervisor = one.until("supervisor")["pid"]
    one.until("started")
    end = time.monotonic() + within_s
    while len(found := supervise.descendants(supervisor)) < size or not all(map(_named, found[1:])):
        assert time.monotonic() < end, found
        time.sleep(0.02)
    return supervisor, found


def _named(pid):
    return psutil.Process(pid).name().startswith("VLLM")


def ignores_term(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    ignored = next(line for line in lines if line.startswith("SigIgn:")).split()[1]
    return bool(int(ignored, 16) & 1 << signal.SIGTERM - 1)


def test_end_of_the_lifeline_stops_the_tree_and_says_clean(supervised):
    """A server that listens to TERM ends by itself, well within the grace."""
    one = supervised(stub.Script(children=2, silent=True), grace_s=5.0)
    _, pids = tree(one, 3)
    began = time.monotonic()
    assert one.close() == ["exit", "clean"]
    assert time.monotonic() - began < 2.0
    assert one.events[-2] == {"event": "exit", "code": 0}
    assert gone(pids, 0.1)


def test_children_in_sessions_of_their_own_that_ignore_term_are_killed(supervised, tmp_path):
    """The main process leaves, its detached children do not: they are killed after the grace, their locks free."""
    lock = tmp_path / "memory"
    script = stub.Script(
        children=2, children_ignore_sigterm=True, leave_children=True, silent=True, lock_path=str(lock)
    )
    one = supervised(script)
    _, pids = tree(one, 3)
    assert locked(tmp_path / "memory.0")
    assert one.close() == ["exit", "clean"]
    assert gone(pids, 0.1)
    assert not locked(tmp_path / "memory.0")
    assert not locked(tmp_path / "memory.1")


def test_a_server_that_ignores_term_is_killed_after_the_grace(supervised):
    """TERM, the whole grace, then KILL; the exit code says so."""
    one = supervised(stub.Script(ignore_sigterm=True, silent=True))
    _, pids = tree(one, 1)
    while not ignores_term(pids[0]):
        time.sleep(0.02)
    began = time.monotonic()
    assert one.close() == ["exit", "clean"]
    assert 0.4 < time.monotonic() - began < 3.0
    assert one.events[-2]["code"] == -signal.SIGKILL
    assert gone(pids, 0.1)


def test_a_killed_main_process_takes_its_detached_children_along(supervised, tmp_path):
    """SIGKILL of the API server: its renamed children end and free the device; a namesake elsewhere lives on."""
    lock = tmp_path / "memory"
    script = stub.Script(children=1, children_ignore_sigterm=True, silent=True, lock_path=str(lock))
    rename = "import ctypes,time;ctypes.CDLL(None).prctl(15,b'VLLM::EngineCor',0,0,0);print(1,flush=True);time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", rename], stdout=subprocess.PIPE) as namesake:
        namesake.stdout.readline()
        one = supervised(script)
        _, pids = tree(one, 2)
        assert {psutil.Process(pids[1]).name(), namesake_name(namesake)} == {"VLLM::EngineCor"}
        os.kill(pids[0], signal.SIGKILL)
        assert one.drain() == ["exit", "clean"]
        assert one.events[-2]["code"] == -signal.SIGKILL
        assert gone(pids, 0.1)
        assert not locked(tmp_path / "memory.0")
        assert namesake.poll() is None
        namesake.kill()


def namesake_name(process):
    return psutil.Process(process.pid).name()


@pytest.mark.parametrize("victim", ["supervisor", "guard"])
def test_a_killed_watcher_leaves_nothing(supervised, victim):
    """Either of the two watchers may be killed: the other one clears the tree, detached children included."""
    one = supervised(stub.Script(children=1, children_ignore_sigterm=True, leave_children=True, silent=True))
    supervisor, pids = tree(one, 2)
    guard = one.events[0]["guard_pid"]
    os.kill(supervisor if victim == "supervisor" else guard, signal.SIGKILL)
    assert one.drain()[-1] == "clean"
    assert gone([*pids, supervisor, guard], 1.0)


def test_a_program_that_cannot_be_executed_is_reported(supervised):
    """No time-out: the reason comes at once and names the program."""
    one = supervised(stub.Script(), argv=["/nonexistent/python", "-m", "vllm"])
    assert "No such file or directory" in one.until("exec_failed")["reason"]
    assert one.drain() == ["clean"]


@pytest.mark.parametrize("key", ["log", "cwd"])
def test_a_missing_folder_is_reported(supervised, key):
    """A log or working folder that is not there stops the start with its name."""
    one = supervised(stub.Script(), **{key: "/nonexistent/folder/x"})
    assert "/nonexistent/folder/x" in one.until("exec_failed")["reason"]
    assert one.drain() == ["clean"]


def test_the_server_gets_exactly_the_given_environment(supervised, monkeypatch, tmp_path):
    """Nothing of the owner's environment reaches it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    print_env = "import os; print(sorted(os.environ))"
    one = supervised(
        stub.Script(), argv=[sys.executable, "-c", print_env], env={"ONLY": "1", "LC_ALL": "C.UTF-8"}
    )
    assert one.until("exit")["code"] == 0
    assert (tmp_path / "server.log").read_text().strip() == "['LC_ALL', 'ONLY']"


def test_output_is_appended_byte_for_byte(supervised, tmp_path):
    """stdout and stderr go straight to the file, after what is already there."""
    (tmp_path / "server.log").write_text("before\n")
    code = "import sys; sys.stdout.write('a' * 1000000); sys.stdout.flush(); sys.stderr.write('b' * 1000000)"
    one = supervised(stub.Script(), argv=[sys.executable, "-c", code])
    assert one.until("exit")["code"] == 0
    text = (tmp_path / "server.log").read_text()
    assert text == "before\n" + "a" * 1000000 + "b" * 1000000
