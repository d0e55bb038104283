"""What an earlier launch left is ended; what only looks like it is left alone."""

import asyncio
import fcntl
import subprocess
import sys
import time
from contextlib import ExitStack

import pytest

from workers import clean

# Renames itself as engines' children do, ignores SIGTERM, and keeps its output.
CHILD = """
import ctypes, signal, time
ctypes.CDLL(None).prctl(15, b"VLLM::EngineCor", 0, 0, 0)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("up", flush=True)
time.sleep(60)
"""


@pytest.fixture
def processes():
    started = []
    yield started
    for process in started:
        process.kill()
        process.wait()


def start(processes, log):
    with log.open("ab") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD], stdout=out, stdin=subprocess.DEVNULL, start_new_session=True
        )
    processes.append(process)
    deadline = time.monotonic() + 10
    while "up" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


def abandoned_folder(root):
    """The folder of a launch whose owner was killed: the lock is there and nobody holds it."""
    folder = root / f"{clean.PREFIX}dead_one"
    folder.mkdir()
    (folder / clean.LOCK_NAME).touch()
    return folder


def test_what_an_ended_launch_left_is_killed_and_nothing_else(tmp_path, processes):
    """A child under another name, in a session of its own; a twin of a live launch and an unrelated one stay."""
    said = []
    with ExitStack() as stack:
        live_folder = stack.enter_context(clean.launch_folder())
        left = start(processes, abandoned_folder(tmp_path) / clean.LOG_NAME)
        live = start(processes, live_folder / clean.LOG_NAME)
        unrelated = start(processes, tmp_path / clean.LOG_NAME)
        assert set(clean.leftovers()) == {left.pid}
        asyncio.run(clean.end_leftovers(grace_s=0.1, say=said.append))
        assert left.wait(timeout=5) == -9
        assert (live.poll(), unrelated.poll()) == (None, None)
    assert said[0] == f"waiting for the end of an earlier launch's pid {left.pid} (VLLM::EngineCor)"
    assert said[1].startswith("killing")


def test_a_folder_that_is_gone_has_no_owner(tmp_path, processes):
    """Its log was deleted with it, and is still written to."""
    folder = abandoned_folder(tmp_path)
    left = start(processes, folder / clean.LOG_NAME)
    (folder / clean.LOG_NAME).unlink()
    assert clean.leftovers() == {left.pid: f"{folder / clean.LOG_NAME} (deleted)"}


def test_a_held_lock_protects(tmp_path, processes):
    folder = abandoned_folder(tmp_path)
    start(processes, folder / clean.LOG_NAME)
    with (folder / clean.LOCK_NAME).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert clean.leftovers() == {}
