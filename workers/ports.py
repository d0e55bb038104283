"""Ports for servers on one host, without the race of probe, release, bind later.

A launch leases a block of consecutive ports: the first for HTTP, the rest for what the engine opens by itself
(vLLM scans upwards from ``VLLM_PORT``). A lease is an exclusive ``flock`` in a folder shared by everybody on the
host, held by the owner and released by the kernel when it dies. Blocks lie outside the ephemeral range, so that no
outgoing connection takes one. Only a program that knows nothing of this can still grab a port; the start then
fails with ``port_taken`` and is tried again on another block.
"""

import contextlib
import fcntl
import os
import socket
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from workers.errors import EngineStartError

BLOCK = 32
LOWEST = 10240
HIGHEST = 65535
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


@dataclass(frozen=True, slots=True, kw_only=True)
class PortLease:
    """Ports of one launch: HTTP, and where the search for internal ports starts."""

    port: int
    internal_port: int


def block_starts(ephemeral: tuple[int, int]) -> list[int]:
    """First ports of all blocks that do not touch the ephemeral range (both ends inclusive)."""
    low, high = ephemeral
    starts = range(LOWEST, HIGHEST - BLOCK + 2, BLOCK)
    return [start for start in starts if start + BLOCK <= low or start > high]


def ephemeral_range() -> tuple[int, int]:
    """The kernel's range for outgoing connections, both ends inclusive."""
    low, high = EPHEMERAL.read_text().split()
    return int(low), int(high)


def port_is_free(port: int) -> bool:
    """Whether nothing is bound to a TCP port on any address. Sockets in TIME_WAIT count as bound."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def num_free_blocks(*, up_to: int) -> int:
    """Blocks whose HTTP port nobody is bound to, counted up to a number; leases are not looked at."""
    free = 0
    for start in block_starts(ephemeral_range()):
        free += port_is_free(start)
        if free >= up_to:
            break
    return free


def default_folder() -> Path:
    """Where leases of this host live; shared by all users, hence writable by all."""
    folder = Path(tempfile.gettempdir()) / "servelab-ports"
    if not folder.exists():
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # another user was faster
            folder.chmod(0o1777)
    return folder


@contextlib.contextmanager
def lease_ports(*, folder: Path | None = None, avoid: Collection[int] = ()) -> Iterator[PortLease]:
    """Hold a block of ports. ``avoid``: HTTP ports that have just failed.

    Raises:
        EngineStartError: ``port_taken``, when every block of the host is leased or in use.
    """
    place = folder or default_folder()
    for start in block_starts(ephemeral_range()):
        if start in avoid:
            continue
        lock = _try_lock(place / f"{start}.lock")
        if lock is None:
            continue
        try:
            if port_is_free(start) and port_is_free(start + 1):
                yield PortLease(port=start, internal_port=start + 1)
                return
        finally:
            os.close(lock)
    raise EngineStartError(
        f"no free block of {BLOCK} ports outside the ephemeral range {ephemeral_range()} (leases in {place}); "
        "stop other servers on this host or narrow net.ipv4.ip_local_port_range",
        cause="port_taken",
    )


def _try_lock(path: Path) -> int | None:
    """An exclusively locked descriptor, or None if somebody holds it."""
    lock = _open(path)
    if lock is None:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock


def _open(path: Path) -> int | None:
    # Read-only is enough for flock, and files of other users cannot be opened for writing. O_CREAT on such a file is
    # refused in sticky folders, hence the two steps.
    try:
        return os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        pass
    except PermissionError:
        return None
    try:
        return os.open(path, os.O_RDONLY | os.O_CREAT, 0o644)
    except PermissionError:
        return None
