"""Clean start, clean end: what an engine must not find on its host and devices, and must not leave there.

A launch works in a folder of its own and holds the lock in it for its life. A process that writes to the log in such
a folder after the lock's owner has gone is what an engine left behind. Nothing else tells: children rename themselves,
which overwrites their command line and environment, leave their session, and get another parent; inherited output
stays. A process of the same name without that output is somebody else's.
"""

import asyncio
import contextlib
import fcntl
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from workers import processes
from workers.errors import EngineStartError
from workers.supervise import KILL_WAIT_S, REST_GRACE_S, send
from workers.telemetry import DeviceProcess, Devices, DeviceState, process_name

PREFIX = "servelab-"
LOG_NAME = "server.log"
LOCK_NAME = "owner.lock"
POLL_S = 0.2
RELEASE_WAIT_S = 30.0  # a driver gives memory back a while after the process has ended
IDLE_BYTES = 2**30  # what drivers and displays hold on an idle device ...
IDLE_SHARE = 0.02  # ... and more on large ones
SLACK_BYTES = 2**28  # between two readings of an idle device

_LOG = re.compile(rf"(?P<folder>/.*/{PREFIX}[a-z0-9_]{{8}})/{re.escape(LOG_NAME)}(?P<deleted> \(deleted\))?")

Say = Callable[[str], None]


@contextlib.contextmanager
def launch_folder() -> Iterator[Path]:
    """A new folder for one launch, held until the block ends and then removed."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / LOCK_NAME, os.O_RDONLY | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def leftovers() -> dict[int, str]:
    """Pid → log of every process that an engine of an ended launch left on this host."""
    found = processes.writers(lambda path: _LOG.fullmatch(path) is not None)
    abandoned = {log for logs in found.values() for log in logs if _is_abandoned(log)}
    return {pid: log for pid, logs in found.items() for log in logs if log in abandoned}


def _is_abandoned(log: str) -> bool:
    match = _LOG.fullmatch(log)
    if match is None:
        return False
    return match["deleted"] is not None or owner_is_gone(Path(match["folder"]))


def owner_is_gone(folder: Path) -> bool:
    """Whether nobody holds a launch's folder; a folder without a lock is not known to be a launch's."""
    try:
        lock = os.open(folder / LOCK_NAME, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


async def end_leftovers(*, grace_s: float, say: Say) -> None:
    """Wait until no engine of an ended launch is left: its supervisor ends it; after the grace it is killed.

    Raises:
        EngineStartError: cause ``leftover``, something survived SIGKILL.
    """
    if not (left := await asyncio.to_thread(leftovers)):
        return
    say(f"waiting for the end of an earlier launch's {_pids_text(left)}")
    left = await _until_none(leftovers, seconds=grace_s + REST_GRACE_S)
    if left:
        say(f"killing {_pids_text(left)}, left by an earlier launch")
        left = await _until_none(_kill_leftovers, seconds=KILL_WAIT_S)
    if left:
        raise EngineStartError(
            f"{_pids_text(left)} of an earlier launch survived SIGKILL and may hold a device; see /proc/PID/stack",
            cause="leftover",
        )


def _kill_leftovers() -> dict[int, str]:
    left = leftovers()
    for pid in left:
        send(pid, signal.SIGKILL)
    return left


async def _until_none(look: Callable[[], dict[int, str]], *, seconds: float) -> dict[int, str]:
    deadline = time.monotonic() + seconds
    while left := await asyncio.to_thread(look):
        if time.monotonic() >= deadline:
            break
        await asyncio.sleep(POLL_S)
    return left


def _pids_text(left: Mapping[int, str]) -> str:
    return ", ".join(f"pid {pid} ({process_name(pid) or 'ended'})" for pid in sorted(left))


# --- devices ---


def obstacle(state: DeviceState) -> str | None:
    """What on a device keeps an engine from starting there: processes by pid and name, or memory; None if it is free."""
    if state.processes:
        return f"{_device(state)} is used by {', '.join(map(process_text, state.processes))}"
    used, total = state.memory_used_bytes, state.memory_total_bytes
    if used is None or total is None or used <= max(IDLE_BYTES, IDLE_SHARE * total):
        return None
    return (
        f"{_device(state)} has {used / 2**30:.1f} of {total / 2**30:.1f} GiB in use, by no process that can be seen "
        "here (another container?)"
    )


def unreleased(before: DeviceState, now: DeviceState) -> str | None:
    """What an engine left on its device; None if nothing."""
    earlier = {process.pid for process in before.processes or ()}
    more = [process for process in now.processes or () if process.pid not in earlier]
    if more:
        return f"{_device(now)} is still used by {', '.join(map(process_text, more))}"
    if before.memory_used_bytes is None or now.memory_used_bytes is None:
        return None
    kept = now.memory_used_bytes - before.memory_used_bytes
    return f"{_device(now)} did not get {kept / 2**30:.1f} GiB back" if kept > SLACK_BYTES else None


def process_text(process: DeviceProcess) -> str:
    """``pid 12 (python3, 4.0 GiB)``."""
    size = "" if process.memory_bytes is None else f", {process.memory_bytes / 2**30:.1f} GiB"
    return f"pid {process.pid} ({process.name or 'name not visible here'}{size})"


def _device(state: DeviceState) -> str:
    return f"device {state.uuid or '?'} ({state.name or 'unknown'})"


def obstacles(devices: Devices) -> list[str]:
    """:func:`obstacle` of each device that is not free."""
    return [problem for state in devices.states() if (problem := obstacle(state)) is not None]


async def wait_free(devices: Devices, *, wait_s: float, say: Say) -> list[DeviceState]:
    """Wait until the devices are free; returns how they were then.

    Raises:
        EngineStartError: cause ``device_busy``, after ``wait_s``; names every process.
    """
    deadline = time.monotonic() + wait_s
    told = False
    while problems := await asyncio.to_thread(obstacles, devices):
        if not told:
            say(f"waiting up to {wait_s:g} s: {'; '.join(problems)}")
            told = True
        if time.monotonic() >= deadline:
            raise EngineStartError(
                f"{'; '.join(problems)} (device_busy); end these processes, or wait longer with "
                f"hardware.busy_wait_s (now {wait_s:g})",
                cause="device_busy",
            )
        await asyncio.sleep(min(POLL_S, wait_s))
    return devices.states()


async def wait_released(devices: Devices, before: Sequence[DeviceState], *, wait_s: float) -> list[str]:
    """Wait until the devices are as they were before the launch; returns what is not after ``wait_s``."""
    deadline = time.monotonic() + wait_s
    while True:
        now = await asyncio.to_thread(devices.states)
        problems = [unreleased(*pair) for pair in zip(before, now, strict=True)]
        left = [problem for problem in problems if problem is not None]
        if not left or time.monotonic() >= deadline:
            return left
        await asyncio.sleep(min(POLL_S, wait_s))
