"""The open-loop sender: every request leaves at its absolute due time, whatever came of those before.

While it runs, a read is only time-stamped and kept; parsing waits until the run is over. All stamps here are
``time.perf_counter_ns()``.
"""

import asyncio
import os
import resource
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from workers.load.deadline import Deadline
from workers.load.stream import ResponseScanner

# Connections are opened this long before they are needed, in one go for all that are needed by then.
OPEN_AHEAD_NS = 50_000_000
OPEN_AT_LATEST_NS = 25_000_000
# Servers close idle connections (uvicorn after 5 s); one about to be closed must not carry a request.
MAX_IDLE_NS = 2_000_000_000
# A burst must not keep the loop from time-stamping the first answers.
MAX_SENDS_PER_TURN = 32
CONNECTS_AT_ONCE = 256
TICK_NS = 10_000_000

_now = time.perf_counter_ns
_END_OF_CHUNKS = b"\r\n\r\n"


@dataclass(slots=True, kw_only=True, eq=False)
class Flight:
    """One request under way, and what came back so far (ns of the process's clock)."""

    index: int
    due_ns: int
    payload: bytes  # the whole HTTP request
    queued_ns: int | None = None
    expires_ns: int = 0  # when its time is over; set at its start
    sent_ns: int | None = None
    closed_ns: int | None = None
    error: str | None = None
    reads: list[tuple[int, bytes]] = field(default_factory=list)
    connection: "_Connection | None" = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the sender knows about itself over one run."""

    wall_ns: int
    cpu_s: float  # user and system time of the process
    loop_delays_ns: tuple[int, ...]  # how late each tick of a 10 ms timer was served
    num_connections: int  # opened since the sender was made


class Sender:
    """Sends flights to one server over a keep-alive pool without limit.

    Args:
        timeout_ns: time from the start of a request until its connection is closed.
        max_concurrency: requests under way at once; further ones wait here, with ``queued_ns`` set to the time
            at which they would have left.
        on_tick: called every 10 ms of a run.
    """

    def __init__(
        self,
        *,
        host: str,
        port: int,
        timeout_ns: int,
        max_concurrency: int | None = None,
        on_tick: Callable[[], None] | None = None,
    ) -> None:
        self.num_sent = 0
        self.num_done = 0
        self.num_connections = 0
        self._loop = asyncio.get_running_loop()
        self._address = (host, port)
        self._timeout_ns = timeout_ns
        self._cap = max_concurrency
        self._on_tick = on_tick
        self._flights: Sequence[Flight] = ()
        self._next = 0  # first flight that is not due yet
        self._ahead = 0  # first flight for which no connection was opened ahead
        self._left = 0
        self._active = 0
        self._idle: deque[_Connection] = deque()  # longest idle first
        self._unconnected: deque[Flight] = deque()  # started, no connection yet
        self._waiting: deque[Flight] = deque()  # held back by max_concurrency
        self._started: deque[Flight] = deque()  # in the order of their time-outs
        self._opening: set[asyncio.Task[None]] = set()
        self._num_opening = 0  # exact at once, while tasks leave the set one turn later
        self._finished: asyncio.Future[None] | None = None
        self._send_timer = Deadline(self._loop, self._send_due)
        self._tick_timer = Deadline(self._loop, self._tick)
        self._tick_due_ns = 0
        self._delays_ns: list[int] = []

    async def prepare(self, flights: Sequence[Flight]) -> None:
        """Open the connections that the first moments of ``flights`` need."""
        soon = sum(flight.due_ns <= flights[0].due_ns + OPEN_AHEAD_NS for flight in flights)
        wanted = min(soon, self._cap or soon)
        while wanted > 0:
            batch = min(wanted, CONNECTS_AT_ONCE)
            for _ in range(batch):
                self._open()
            await asyncio.gather(*self._opening)
            wanted -= batch

    async def run(self, flights: Sequence[Flight]) -> Window:
        """Send every flight at its ``due_ns`` and wait until each is answered, failed or timed out."""
        self._flights, self._next, self._ahead, self._left = flights, 0, 0, len(flights)
        self._finished = self._loop.create_future()
        self._delays_ns = []
        started_ns, cpu_s = _now(), _cpu_s()
        self._drop_stale(started_ns)
        self._tick_due_ns = started_ns + TICK_NS
        self._tick_timer.set(self._tick_due_ns)
        if flights:
            self._send_due()
            await self._finished
        self._finished = None
        return Window(
            wall_ns=_now() - started_ns,
            cpu_s=_cpu_s() - cpu_s,
            loop_delays_ns=tuple(self._delays_ns),
            num_connections=self.num_connections,
        )

    def close(self) -> None:
        """Close every connection and timer."""
        self._send_timer.close()
        self._tick_timer.close()
        for task in self._opening:
            task.cancel()
        for connection in list(self._idle):
            connection.close()

    def _send_due(self) -> None:
        flights, count = self._flights, len(self._flights)
        last = min(self._next + MAX_SENDS_PER_TURN, count)
        while self._next < last and flights[self._next].due_ns <= _now():
            self._next += 1
            self._release(flights[self._next - 1])
        now = _now()
        if self._ahead < count and flights[self._ahead].due_ns <= now + OPEN_AT_LATEST_NS:
            self._open_ahead(now + OPEN_AHEAD_NS)
        wake_ns = flights[self._next].due_ns if self._next < count else None
        if self._ahead < count:
            wake_ns = min(wake_ns or now, flights[self._ahead].due_ns - OPEN_AT_LATEST_NS)
        if wake_ns is not None:
            self._send_timer.set(wake_ns)

    def _open_ahead(self, until_ns: int) -> None:
        while self._ahead < len(self._flights) and self._flights[self._ahead].due_ns <= until_ns:
            self._ahead += 1
        wanted = max(self._ahead - self._next, 0) + len(self._unconnected)
        if self._cap is not None:
            wanted = min(wanted, self._cap - self._active + len(self._unconnected))
        for _ in range(min(wanted - len(self._idle) - self._num_opening, CONNECTS_AT_ONCE)):
            self._open()

    def _release(self, flight: Flight) -> None:
        """The flight is due: send it, or hold it back under the cap."""
        if self._cap is not None:
            flight.queued_ns = _now()
            if self._active >= self._cap:
                self._waiting.append(flight)
                return
        self._start(flight)

    def _start(self, flight: Flight) -> None:
        self._active += 1
        self.num_sent += 1
        flight.expires_ns = _now() + self._timeout_ns
        self._started.append(flight)
        if self._idle:
            connection = self._idle.pop()
            connection.idle_since_ns = None
            connection.send(flight)
            return
        self._unconnected.append(flight)
        if self._num_opening < len(self._unconnected):
            self._open()

    def _open(self) -> None:
        self._num_opening += 1
        task = self._loop.create_task(self._connect())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    async def _connect(self) -> None:
        host, port = self._address
        try:
            _, connection = await self._loop.create_connection(lambda: _Connection(self), host, port)
        except OSError as error:
            self._num_opening -= 1
            if self._unconnected:
                reason = error.strerror or str(error)
                self.finish(self._unconnected.popleft(), error=f"no connection to {host}:{port}: {reason}")
            return
        self._num_opening -= 1
        self.num_connections += 1
        self.offer(connection)

    def offer(self, connection: "_Connection") -> None:
        """A connection is free: give it the first flight that waits for one, or keep it."""
        if self._unconnected:
            connection.send(self._unconnected.popleft())
            return
        connection.idle_since_ns = _now()
        self._idle.append(connection)

    def forget(self, connection: "_Connection") -> None:
        """A connection is closed or about to be: out of the pool, if it is there."""
        if connection.idle_since_ns is not None:
            connection.idle_since_ns = None
            self._idle.remove(connection)

    def finish(self, flight: Flight, *, error: str | None) -> None:
        """The flight is over; ``error`` is what the client knows about a failure."""
        flight.connection = None
        flight.closed_ns = _now()
        flight.error = flight.error or error
        self._active -= 1
        self.num_done += 1
        self._left -= 1
        if self._waiting:
            self._start(self._waiting.popleft())
        if self._left == 0 and self._finished is not None and not self._finished.done():
            self._finished.set_result(None)

    def _tick(self) -> None:
        now = _now()
        if self._finished is None:
            return
        self._delays_ns.append(now - self._tick_due_ns)
        self._drop_stale(now)
        self._time_out(now)
        if self._on_tick is not None:
            self._on_tick()
        self._tick_due_ns = max(self._tick_due_ns + TICK_NS, now)
        self._tick_timer.set(self._tick_due_ns)

    def _drop_stale(self, now: int) -> None:
        while self._idle and (self._idle[0].idle_since_ns or 0) < now - MAX_IDLE_NS:
            connection = self._idle.popleft()
            connection.idle_since_ns = None
            connection.close()

    def _time_out(self, now: int) -> None:
        started = self._started
        while started and (started[0].closed_ns is not None or started[0].expires_ns <= now):
            flight = started.popleft()
            if flight.closed_ns is not None:
                continue
            error = f"timed out after {self._timeout_ns / 1e9:g} s"
            if flight.connection is not None:
                flight.connection.abandon(error)
            else:
                self._unconnected.remove(flight)
                self.finish(flight, error=error)


class _Connection(asyncio.Protocol):
    """One keep-alive connection; carries one flight at a time."""

    __slots__ = ("_chunked", "_fd", "_flight", "_num_scanned", "_reads", "_scanner", "_sender", "_transport",
                 "idle_since_ns")  # fmt: skip

    def __init__(self, sender: Sender) -> None:
        self.idle_since_ns: int | None = None  # None: not in the pool
        self._sender = sender
        self._flight: Flight | None = None
        self._reads: list[tuple[int, bytes]] = []
        self._scanner = ResponseScanner()
        self._num_scanned = 0
        self._chunked = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._fd = transport.get_extra_info("socket").fileno()

    def send(self, flight: Flight) -> None:
        """Hand the request to the socket itself: a transport would wait for the end of the loop's turn."""
        self._flight, flight.connection = flight, self
        self._reads = flight.reads
        self._scanner = ResponseScanner()
        self._num_scanned = 0
        self._chunked = False
        payload = flight.payload
        flight.sent_ns = _now()
        try:
            written = os.write(self._fd, payload)
        except BlockingIOError:
            written = 0
        except OSError as error:
            # Later: a failure here must not start the next flight inside the start of this one.
            asyncio.get_running_loop().call_soon(self.abandon, f"the connection broke: {error.strerror}")
            return
        if written < len(payload):
            self._transport.write(payload[written:])

    def data_received(self, data: bytes) -> None:
        self._reads.append((_now(), data))
        if self._chunked and not data.endswith(_END_OF_CHUNKS) and len(data) > 3:
            return
        self._look_for_end()

    def eof_received(self) -> None:
        """The server closes: not to be sent on any more, though the loop closes it only later."""
        self._sender.forget(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._sender.forget(self)
        if self._flight is not None:
            flight, self._flight = self._flight, None
            self._sender.finish(flight, error=f"the connection broke: {exc}" if exc else None)

    def abandon(self, error: str) -> None:
        """Give up the flight and close."""
        flight, self._flight = self._flight, None
        self._transport.abort()
        if flight is not None:
            self._sender.finish(flight, error=error)

    def close(self) -> None:
        self._transport.abort()

    def _look_for_end(self) -> None:
        """Called for reads that may end the response, and until its head is complete."""
        if self._flight is None:
            self.close()  # bytes that nobody asked for
            return
        scanner, reads = self._scanner, self._reads
        data = b"".join([data for _, data in reads[self._num_scanned :]])
        self._num_scanned = len(reads)
        try:
            complete = scanner.feed(data)
        except ValueError:
            self.abandon("malformed response")  # the parser names it again, from the bytes
            return
        self._chunked = scanner.chunked
        if not complete:
            return
        flight, self._flight = self._flight, None
        if scanner.keep_alive:
            self._sender.offer(self)  # before finish: a flight held back can have this connection
        else:
            self._transport.close()
        self._sender.finish(flight, error=None)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
