"""Runs one server so that nothing of it outlives its owner, whatever dies.

Run as a script with one JSON line on stdin: ``{"argv", "env", "cwd", "log", "grace_s"}``. The rest of stdin is a
lifeline: when it ends, the owner is gone or wants the server stopped. Standard library only, no imports from here.

Two processes watch, both in sessions of their own and both subreapers, so that daemonised descendants stay in the
tree. The *guard* only waits for the *supervisor*; the supervisor starts the server and watches the lifeline::

    owner ··(exits at once)··  guard ── supervisor ── server ── its children

Owner dies: the lifeline ends. Supervisor is killed: PDEATHSIG takes the server, the guard the rest. Guard is killed:
PDEATHSIG asks the supervisor to stop. The first process leaves at once, because an owner's direct children may be
killed before they can clean up.

Events on stdout, one JSON object per line: ``supervisor`` (pid, guard_pid), ``started`` (pid), ``exec_failed``
(reason), ``exit`` (code of the server's main process; negative = signal), then ``clean`` or ``left`` (pids).
"""

import ctypes
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
REST_GRACE_S = 2.0  # for what is left after the main process has ended
KILL_WAIT_S = 10.0  # a killed process can stay for a while in the kernel (device memory)
TICK_S = 0.02

LIBC = ctypes.CDLL(None, use_errno=True)


def descendants(root: int) -> list[int]:
    """Pids of all living descendants of ``root`` (zombies are not alive), children before grandchildren."""
    children: dict[int, list[int]] = {}
    alive = set()
    for name in os.listdir("/proc"):  # noqa: PTH208
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # ended while we looked
        children.setdefault(int(parent), []).append(int(name))
        if state not in {b"Z", b"X"}:
            alive.add(int(name))
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(0), [])
        todo += below
        found += [pid for pid in below if pid in alive]
    return found


def say(event: str, **values: Any) -> None:
    """Write one event; an owner that is gone reads nothing."""
    try:
        os.write(1, (json.dumps({"event": event, **values}) + "\n").encode())
    except OSError:
        return


def send(pid: int, number: int) -> None:
    """Signal a process that may have ended meanwhile."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def prctl(option: int, value: int) -> None:
    """Set a process attribute; it must not fail silently."""
    if LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class Children:
    """Reaps everything that ends below this process and remembers how the main child ended."""

    def __init__(self, main: int) -> None:
        self.main = main
        self.code: int | None = None

    def reap(self) -> None:
        """Collect all zombies; report the end of the main child once."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.main:
                self.code = os.waitstatus_to_exitcode(status)
                say("exit", code=self.code)

    def wait(self, *, until: Callable[[], bool], seconds: float) -> None:
        """Reap until a condition holds or the time is over."""
        end = time.monotonic() + seconds
        self.reap()
        while not until() and time.monotonic() < end:
            time.sleep(TICK_S)
            self.reap()


def stop_tree(children: Children, *, grace_s: float) -> None:
    """TERM to the main child first, to the rest once it has ended or the grace is over, then KILL everything."""
    me = os.getpid()
    if children.code is None:
        send(children.main, signal.SIGTERM)
        children.wait(until=lambda: children.code is not None, seconds=grace_s)
    rest = descendants(me)
    for pid in rest:
        send(pid, signal.SIGTERM)
    if rest and children.code is not None:
        children.wait(until=lambda: not descendants(me), seconds=min(grace_s, REST_GRACE_S))
    end = time.monotonic() + KILL_WAIT_S
    while (left := descendants(me)) and time.monotonic() < end:
        for pid in left:
            send(pid, signal.SIGKILL)
        children.wait(until=lambda: not descendants(me), seconds=10 * TICK_S)
    children.reap()
    say("left", pids=left) if left else say("clean")


def start_server(config: dict[str, Any]) -> int:
    """Fork and exec the server; return its pid. Raises ``OSError`` if log, folder or program cannot be used."""
    log = os.open(config["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    said, saying = os.pipe()  # closed by a successful exec
    supervisor = os.getpid()
    pid = os.fork()
    if pid == 0:
        try:
            become_server(config, log=log, supervisor=supervisor)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the child must report it and end
            os.write(saying, str(error).encode())
        os._exit(127)
    os.close(log)
    os.close(saying)
    with os.fdopen(said, "rb") as file:
        problem = file.read()
    if problem:
        os.waitpid(pid, 0)
        raise OSError(problem.decode())
    return pid


def become_server(config: dict[str, Any], *, log: int, supervisor: int) -> None:
    """In the forked child: own session, log as output, die with the supervisor, exec."""
    os.setsid()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != supervisor:
        raise OSError("the supervisor ended before the server started")
    os.chdir(config["cwd"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    os.execvpe(config["argv"][0], config["argv"], config["env"])  # noqa: S606


def wakeup_pipe() -> int:
    """A descriptor that becomes readable on SIGCHLD and SIGTERM; carries the signal numbers."""

    def noted(_number: int, _frame: FrameType | None) -> None:
        """The number arrives through the wakeup descriptor."""

    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, noted)
    signal.signal(signal.SIGTERM, noted)
    return reading


def watch(children: Children, *, signals: int) -> None:
    """Return when the server's main process has ended, the lifeline has ended, or a stop is asked for."""
    poll = select.poll()
    poll.register(0, select.POLLIN)
    poll.register(signals, select.POLLIN)
    while True:
        children.reap()
        if children.code is not None:
            return
        ready = {descriptor for descriptor, _ in poll.poll()}
        if signals in ready and signal.SIGTERM in os.read(signals, 4096):
            return
        if 0 in ready and not os.read(0, 4096):
            return


def supervise(config: dict[str, Any], *, guard: int) -> None:
    """Body of the supervisor process."""
    os.setsid()
    signals = wakeup_pipe()
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != guard:
        return
    say("supervisor", pid=os.getpid(), guard_pid=guard)
    try:
        pid = start_server(config)
    except OSError as error:
        say("exec_failed", reason=str(error))
        say("clean")
        return
    say("started", pid=pid)
    children = Children(pid)
    watch(children, signals=signals)
    stop_tree(children, grace_s=config["grace_s"])


def guard(config: dict[str, Any]) -> None:
    """Body of the guard process: wait for the supervisor, then make sure that nothing is left."""
    os.setsid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    me = os.getpid()
    pid = os.fork()
    if pid == 0:
        supervise(config, guard=me)
        os._exit(0)
    signal.signal(signal.SIGTERM, lambda _number, _frame: send(pid, signal.SIGTERM))
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status) == 0:
        return
    orphans = Children(pid)
    orphans.code = os.waitstatus_to_exitcode(status)
    stop_tree(orphans, grace_s=config["grace_s"])


def read_config() -> dict[str, Any] | None:
    """The first line of stdin, byte by byte: what follows belongs to the lifeline. None: the owner is gone."""
    line = bytearray()
    while (byte := os.read(0, 1)) != b"\n":
        if not byte:
            return None
        line += byte
    config: dict[str, Any] = json.loads(line)
    return config


def main() -> None:
    """Leave the owner's process tree, then guard."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config = read_config()
    if config is not None and os.fork() == 0:
        guard(config)


if __name__ == "__main__":
    main()
    sys.exit(0)
