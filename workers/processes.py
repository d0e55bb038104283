"""Who belongs to a server: look-ups in /proc by listening port and by log file."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from workers.supervise import descendants, send

LISTEN = "0A"
PROC = Path("/proc")


def listening_sockets(port: int, *, proc: Path = PROC) -> set[str]:
    """Inode numbers of the sockets that listen on a TCP port of this host, IPv4 and IPv6."""
    found = set()
    for table in ("net/tcp", "net/tcp6"):
        path = proc / table
        if not path.exists():
            continue  # a kernel without IPv6
        for line in path.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def open_files(pid: int) -> dict[str, str]:
    """Descriptor → target of a process; empty if it has ended or belongs to somebody else."""
    folder = PROC / str(pid) / "fd"
    found = {}
    try:
        names = [path.name for path in folder.iterdir()]
    except OSError:
        return {}
    for name in names:
        try:
            found[name] = os.readlink(folder / name)  # noqa: PTH115 - "socket:[1]" is no path
        except OSError:
            continue  # closed while we looked
    return found


def exists(pid: int) -> bool:
    """Whether the kernel still knows a process, zombies included."""
    return (PROC / str(pid)).exists()


def listener_in_tree(port: int, *, root: int) -> bool:
    """Whether ``root`` or a descendant of it listens on the port."""
    wanted = {f"socket:[{inode}]" for inode in listening_sockets(port)}
    tree = [root, *descendants(root)]
    return any(wanted.intersection(open_files(pid).values()) for pid in tree)


def listeners(port: int) -> list[int]:
    """Pids, as far as we may see them, that listen on a port."""
    wanted = {f"socket:[{inode}]" for inode in listening_sockets(port)}
    return [pid for pid in _pids() if wanted and wanted.intersection(open_files(pid).values())]


def log_writers(log: Path) -> list[int]:
    """Pids that hold the log open for writing: everything a server left behind, however it was detached.

    Environment markers and titles do not survive a process that renames itself; inherited output does.
    Readers (someone following the log) are not counted, nor is this process.
    """
    if not log.is_file():
        return []  # a missing log, or a device that everybody writes to
    target = str(log.resolve())
    return [pid for pid in _pids() if pid != os.getpid() and _writes(pid, target)]


def writers(wanted: Callable[[str], bool]) -> dict[int, list[str]]:
    """Pid → files it holds open for writing, of those whose path is wanted. A deleted file ends in `` (deleted)``.

    Only processes that we may look into are seen; this process is not counted.
    """
    found = {pid: _written(pid, wanted) for pid in _pids() if pid != os.getpid()}
    return {pid: files for pid, files in found.items() if files}


def kill_writers(log: Path, *, wait_s: float) -> list[int]:
    """Kill what still writes to the log; return the pids that are alive after ``wait_s``."""
    end = time.monotonic() + wait_s
    while left := log_writers(log):
        for pid in left:
            send(pid, signal.SIGKILL)
        if time.monotonic() >= end:
            break
        time.sleep(0.02)
    return left


def _pids() -> list[int]:
    return [int(path.name) for path in PROC.iterdir() if path.name.isdigit()]


def _writes(pid: int, target: str) -> bool:
    return any(name for name, where in open_files(pid).items() if where == target and _writable(pid, name))


def _written(pid: int, wanted: Callable[[str], bool]) -> list[str]:
    files = {where for name, where in open_files(pid).items() if wanted(where) and _writable(pid, name)}
    return sorted(files)


def _writable(pid: int, descriptor: str) -> bool:
    try:
        lines = (PROC / str(pid) / "fdinfo" / descriptor).read_text().splitlines()
    except OSError:
        return False
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), 0)
    return flags & os.O_ACCMODE != os.O_RDONLY
