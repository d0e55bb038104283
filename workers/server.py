"""A running engine: started through the supervisor, ready only after a real generation, stopped without remains."""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from workers import processes, supervise
from workers.errors import EngineDiedError, EngineStartError, ServelabError
from workers.failures import REMEDIES, classify_failure, failure_reason
from workers.http_call import Answer, Target, call
from workers.ports import PortLease, lease_ports

T = TypeVar("T")

POLL_S = 0.1
HEALTH_TIMEOUT_S = 5.0
MAX_ATTEMPTS = 2
HTTP_OK = 200
READ_LIMIT_BYTES = 16 * 2**20  # of a log; failures stand at its end
TAIL_LIMIT_BYTES = 64 * 2**10
TAIL_LINES = 20
STOP_MARGIN_S = supervise.REST_GRACE_S + supervise.KILL_WAIT_S + 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How one engine is started."""

    argv_for_port: Callable[[int], list[str]]
    env: Mapping[str, str]  # the whole environment; only VLLM_PORT is added
    log_path: Path  # stdout and stderr, appended
    cwd: Path  # outside any source tree: engines probe for importable names
    model: str  # served name, for the readiness generation
    start_timeout_s: float
    stop_grace_s: float  # between TERM and KILL
    host: str = "127.0.0.1"
    ports_folder: Path | None = None  # None: shared by everybody on this host


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One try to start a server, for the record."""

    port: int
    internal_port: int
    outcome: str  # "ready" or the cause of EngineStartError
    message: str
    seconds: float


class Server:
    """One engine process tree. ``async with await Server.start(spec) as server`` stops it at the end."""

    def __init__(self, spec: ServerSpec, *, lease: PortLease, hold: contextlib.ExitStack) -> None:
        self.spec = spec
        self.port = lease.port
        self.base_url = f"http://{spec.host}:{lease.port}"
        self.argv = spec.argv_for_port(lease.port)
        self.env = {**spec.env, "VLLM_PORT": str(lease.internal_port)}
        self.log_path = spec.log_path
        self.internal_port = lease.internal_port
        self.pid: int | None = None
        self.supervisor_pid: int | None = None
        self.guard_pid: int | None = None
        self.exit_code: int | None = None  # of the main process; negative = signal
        self.started_s: float | None = None  # from launch to the first generation
        self.attempts: tuple[Attempt, ...] = ()
        self._hold = hold
        self._log_offset = spec.log_path.stat().st_size if spec.log_path.exists() else 0
        self._process: subprocess.Popen[bytes] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._exec_problem: str | None = None
        self._left: list[int] = []  # what the supervisor could not kill
        self._launched = asyncio.Event()
        self._ended = asyncio.Event()  # the main process has ended, or nobody can tell any more
        self._owns_port = False
        self._stopped = False
        self._began = time.monotonic()

    @classmethod
    def reserve(cls, spec: ServerSpec, *, avoid: Collection[int] = ()) -> Self:
        """A server that holds its ports and has not been started; ``avoid``: ports that have just failed."""
        with contextlib.ExitStack() as stack:
            lease = stack.enter_context(lease_ports(folder=spec.ports_folder, avoid=avoid))
            return cls(spec, lease=lease, hold=stack.pop_all())

    @classmethod
    async def start(cls, spec: ServerSpec) -> Self:
        """Reserve ports and :meth:`open`."""
        server = cls.reserve(spec)
        await server.open()
        return server

    async def open(self) -> None:
        """Start the process and wait until it has answered one generation.

        Raises:
            EngineStartError: with the class of the failure and the last log lines; nothing is left running.
        """
        try:
            await self._launch()
            await self._become_ready()
        except BaseException:
            await self.stop()
            raise
        self.started_s = time.monotonic() - self._began

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    # --- while it runs ---

    def alive(self) -> bool:
        """Whether the main process runs."""
        return self.pid is not None and not self._ended.is_set()

    async def wait_ended(self) -> int | None:
        """Wait for the end of the main process; its exit code, None if the supervisor was lost."""
        await self._ended.wait()
        return self.exit_code

    async def while_alive(self, work: Awaitable[T]) -> T:
        """Await ``work``, but no longer than the server lives.

        Raises:
            EngineDiedError: the server ended first; ``work`` has been cancelled.
        """
        task = asyncio.ensure_future(work)
        watch = asyncio.ensure_future(self._ended.wait())
        try:
            await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise self.died()
        finally:
            watch.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    def died(self) -> EngineDiedError:
        """The error that ends a cell whose server has ended."""
        return EngineDiedError(
            f"the server (pid {self.pid}, port {self.port}) {self._end_text()} during the cell; log: {self.log_path}",
            log_tail=self.log_tail(),
        )

    def log_tail(self, n: int = TAIL_LINES) -> str:
        """The last ``n`` log lines of this launch."""
        return log_tail(self.log_path, n, offset=self._log_offset)

    async def call(
        self,
        method: str,
        path: str,
        *,
        json_body: Mapping[str, Any] | None = None,
        timeout_s: float = HEALTH_TIMEOUT_S,
    ) -> Answer:
        """One request to this server. Raises ``OSError``."""
        target = Target(host=self.spec.host, port=self.port, method=method, path=path)
        return await call(target, json_body=json_body, timeout_s=timeout_s)

    # --- start ---

    async def _launch(self) -> None:
        config = {
            "argv": self.argv,
            "env": self.env,
            "cwd": str(self.spec.cwd),
            "log": str(self.log_path),
            "grace_s": self.spec.stop_grace_s,
        }
        self._began = time.monotonic()
        command = [sys.executable, "-I", "-S", supervise.__file__]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
        self._process = process
        self._reading = asyncio.create_task(self._read_events(process))
        assert process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):  # the end of the events tells
            process.stdin.write(json.dumps(config).encode() + b"\n")
            process.stdin.flush()
        await self._launched.wait()
        if self._exec_problem is not None:
            raise self._start_error("environment_broken", f"cannot be executed: {self._exec_problem}")

    async def _read_events(self, process: subprocess.Popen[bytes]) -> None:
        """Follow the supervisor until its end; its silence counts as the end of the server."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        transport, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), process.stdout
        )
        try:
            async for line in reader:
                self._note(json.loads(line))
            await asyncio.to_thread(process.wait)
        finally:
            transport.close()
            self._launched.set()
            self._ended.set()

    def _note(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "supervisor":
                self.supervisor_pid, self.guard_pid = event["pid"], event["guard_pid"]
            case "started":
                self.pid = event["pid"]
                self._launched.set()
            case "exec_failed":
                self._exec_problem = event["reason"]
                self._launched.set()
            case "exit":
                self.exit_code = event["code"]
                self._ended.set()
            case "left":
                self._left = event["pids"]

    async def _become_ready(self) -> None:
        try:
            async with asyncio.timeout(self.spec.start_timeout_s):
                await self.while_alive(self._wait_healthy())
                self._check_listener()
                answer = await self.while_alive(self._generate())
        except TimeoutError:
            await self.stop()
            raise self._failure(
                f"was not ready within {self.spec.start_timeout_s:g} s", timed_out=True
            ) from None
        except EngineDiedError:
            await self.stop()
            raise self._failure(f"{self._end_text()} before it was ready", timed_out=False) from None
        if (problem := _generation_problem(answer)) is not None:
            raise self._start_error("generation_failed", problem)

    async def _wait_healthy(self) -> None:
        while not await self._healthy():  # noqa: ASYNC110 - another process becomes ready
            await asyncio.sleep(POLL_S)

    async def _healthy(self) -> bool:
        try:
            answer = await self.call("GET", "/health")
        except OSError:
            return False
        return answer.status == HTTP_OK

    def _check_listener(self) -> None:
        """The answer must come from our own process tree."""
        if self.supervisor_pid is not None and processes.listener_in_tree(
            self.port, root=self.supervisor_pid
        ):
            self._owns_port = True
            return
        others = processes.listeners(self.port)
        raise self._start_error(
            "port_taken",
            f"does not own its port {self.port}: it is served by another program (pids {others})",
        )

    async def _generate(self) -> Answer:
        body = {"model": self.spec.model, "prompt": "Hello, my name is", "max_tokens": 2, "temperature": 0}
        try:
            return await self.call(
                "POST", "/v1/completions", json_body=body, timeout_s=self.spec.start_timeout_s
            )
        except TimeoutError:
            raise
        except OSError as error:
            await asyncio.sleep(2 * POLL_S)  # a dying server closes connections before its exit is seen
            raise self._start_error(
                "generation_failed", f"broke off its first generation: {error}"
            ) from error

    def _failure(self, what: str, *, timed_out: bool) -> EngineStartError:
        text = read_log(self.log_path, offset=self._log_offset)
        cause = classify_failure(text, exit_code=None if timed_out else self.exit_code, timed_out=timed_out)
        reason = failure_reason(text, cause=cause)
        return self._start_error(cause, what if reason is None else f"{what}: {reason!r}")

    def _start_error(self, cause: str, what: str) -> EngineStartError:
        return EngineStartError(
            f"the server on port {self.port} {what} ({cause}); {REMEDIES[cause]}; log: {self.log_path}",
            cause=cause,
            log_tail=self.log_tail(),
        )

    def _end_text(self) -> str:
        if self.exit_code is None:
            return "was lost with its supervisor"
        return (
            f"ended with code {self.exit_code}"
            if self.exit_code >= 0
            else f"was killed by signal {-self.exit_code}"
        )

    # --- stop ---

    async def stop(self) -> None:
        """Stop the server and verify that its tree is gone and its port free. May be called again.

        Raises:
            ServelabError: something survived SIGKILL or still listens on the port.
        """
        if self._stopped:
            return
        self._stopped = True
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()  # from here on the supervisor stops the tree, whatever happens to us
        try:
            await asyncio.shield(asyncio.ensure_future(self._verify_stopped()))
        finally:
            self._hold.close()

    async def _verify_stopped(self) -> None:
        if self._reading is not None:
            await asyncio.wait({self._reading}, timeout=self.spec.stop_grace_s + STOP_MARGIN_S)
            self._reading.cancel()
        left = await asyncio.to_thread(processes.kill_writers, self.log_path, wait_s=supervise.KILL_WAIT_S)
        left += [pid for pid in self._left if pid not in left and processes.exists(pid)]
        if left:
            raise ServelabError(
                f"processes {left} of the server on port {self.port} survived SIGKILL and may hold its device; "
                "see /proc/PID/stack before starting another engine on this host",
            )
        if self._owns_port and processes.listening_sockets(self.port):
            raise ServelabError(
                f"port {self.port} is still served after the server's end, by pids {processes.listeners(self.port)}",
            )


async def start_with_retries(
    spec: ServerSpec,
    *,
    busy_wait_s: float,
    device_free: Callable[[], bool] | None = None,
    attempts: list[Attempt] | None = None,
) -> Server:
    """Start a server; a taken port or a busy device is tried once more, nothing else is.

    Before the second try on a busy device this waits until ``device_free()``, at most ``busy_wait_s``. Every try is
    appended to ``attempts`` and, on success, kept in ``server.attempts``.

    Raises:
        EngineStartError: of the last try.
    """
    made = attempts if attempts is not None else []
    while True:
        server = Server.reserve(spec, avoid={attempt.port for attempt in made})
        began = time.monotonic()
        try:
            await server.open()
        except EngineStartError as error:
            made.append(_attempt(server, error.cause, str(error), began=began))
            if len(made) >= MAX_ATTEMPTS or not error.retryable:
                raise
            if error.cause == "device_busy":
                await _wait_for_device(device_free, seconds=busy_wait_s)
        else:
            made.append(_attempt(server, "ready", "", began=began))
            server.attempts = tuple(made)
            return server


def _attempt(server: Server, outcome: str, message: str, *, began: float) -> Attempt:
    seconds = time.monotonic() - began
    return Attempt(
        port=server.port,
        internal_port=server.internal_port,
        outcome=outcome,
        message=message,
        seconds=seconds,
    )


async def _wait_for_device(device_free: Callable[[], bool] | None, *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if device_free is not None and device_free():
            return
        await asyncio.sleep(min(1.0, left))


def _generation_problem(answer: Answer) -> str | None:
    """None if the answer is a completion with at least one token, else what it is instead."""
    if answer.status != HTTP_OK:
        return f"answered HTTP {answer.status} to its first generation: {answer.text[:200]}"
    try:
        body = json.loads(answer.body)
        text, num_tokens = body["choices"][0]["text"], body["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError):
        return f"answered its first generation with something else than a completion: {answer.text[:200]}"
    if not isinstance(text, str) or not num_tokens:
        return f"answered its first generation without a token: {answer.text[:200]}"
    return None


def read_log(path: Path, *, offset: int = 0) -> str:
    """A log from ``offset`` on, the last 16 MiB of it; empty if there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(offset, path.stat().st_size - READ_LIMIT_BYTES))
        return file.read().decode(errors="replace")


def log_tail(path: Path, n: int = TAIL_LINES, *, offset: int = 0) -> str:
    """The last ``n`` lines of a log from ``offset`` on; a line longer than the last 64 KiB is cut at its start."""
    if not path.exists():
        return ""
    start = max(offset, path.stat().st_size - TAIL_LIMIT_BYTES)
    return "\n".join(read_log(path, offset=start).splitlines()[-n:])
