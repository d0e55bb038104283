"""A scripted OpenAI-compatible server that knows its own truth: ``python -m workers.load.mock_server``.

The first token of every answer leaves ``first_ms`` after its request came, each further one ``gap_ms`` later, in
events of the size that vLLM sends. What was really written when is served at ``/truth`` (``/reset`` clears it), on
the clock of ``time.perf_counter_ns``. A text prompt ``fault:NAME`` asks for one of ``FAULTS``.
Used by the benchmark of the load generator and by its tests. Prints ``{"port": N}`` when it listens.
"""

import argparse
import asyncio
import gc
import heapq
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from typing import Any, cast

import uvloop

from workers.load.deadline import Deadline

FAULTS = ("http_400", "close", "error_event", "cut", "stall")
TOKENS_BEFORE_FAULT = 2
WORDS = (" the", " of", " and", " to")
MODEL = "mock"

_now = time.perf_counter_ns
_HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Mon, 30 Nov 2026 12:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """When tokens leave."""

    first_ns: int
    gap_ns: int


@dataclass(slots=True, kw_only=True)
class Truth:
    """What really happened to one request (ns)."""

    request_id: str | None
    received_ns: int  # the whole request was here
    token_ns: list[int] = field(default_factory=list)  # just before each write
    done_ns: int | None = None
    index_on_connection: int = 0


class MockServer:
    """State shared by all connections."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.truths: list[Truth] = []
        self.num_open = 0
        self.peak_open = 0
        self.num_connections = 0  # that carried a request
        self._sequence = count()
        self._queue: list[tuple[int, int, _Answer]] = []  # heap by due time
        self._timer = Deadline(asyncio.get_running_loop(), self._serve_due)
        self._armed_ns: int | None = None

    def reset(self) -> None:
        self.truths = []
        self.peak_open = self.num_open
        self.num_connections = 0
        gc.collect()

    def report(self) -> dict[str, Any]:
        """Everything since the last reset."""
        return {
            "requests": [asdict(truth) for truth in self.truths],
            "peak_open": self.peak_open,
            "num_connections": self.num_connections,
            "cpu_s": time.process_time(),
        }

    def schedule(self, due_ns: int, answer: "_Answer") -> None:
        heapq.heappush(self._queue, (due_ns, next(self._sequence), answer))
        if self._armed_ns is None or due_ns < self._armed_ns:
            self._arm()

    def _arm(self) -> None:
        self._armed_ns = self._queue[0][0] if self._queue else None
        if self._armed_ns is not None:
            self._timer.set(self._armed_ns)

    def _serve_due(self) -> None:
        self._armed_ns = 0  # nothing that is pushed meanwhile needs to arm
        queue, until_ns = self._queue, _now()
        while queue and queue[0][0] <= until_ns:
            due_ns, _, answer = queue[0]
            next_ns = answer.step(due_ns)
            if next_ns is None:
                heapq.heappop(queue)
            else:
                heapq.heapreplace(queue, (next_ns, next(self._sequence), answer))
        self._arm()


class _Answer:
    """One streamed answer under way."""

    __slots__ = (
        "_bodies",
        "_fault",
        "_left",
        "_num_prompt",
        "_num_tokens",
        "_server",
        "_wire",
        "_writer",
        "truth",
    )

    def __init__(
        self,
        server: MockServer,
        wire: "_Wire",
        *,
        request: dict[str, Any],
        truth: Truth,
        writer: "_Connection",
    ) -> None:
        self.truth = truth
        self._server = server
        self._wire = wire
        self._writer = writer
        self._num_tokens = request.get("max_tokens") or 16
        self._left = self._num_tokens
        prompt = request.get("prompt")
        self._num_prompt = len(prompt) if isinstance(prompt, list) else 8
        self._fault = _fault_of(request)
        self._bodies = [wire.token(word) for word in WORDS]

    def step(self, due_ns: int) -> int | None:
        """Write one token; return when the next is due."""
        writer, truth = self._writer, self.truth
        if writer.closed:
            self._server.num_open -= 1
            return None
        if self._fault is not None and self._num_tokens - self._left >= TOKENS_BEFORE_FAULT:
            self._fail()
            return None
        self._left -= 1
        token_ns = truth.token_ns
        token_ns.append(_now())
        if self._left:
            data = self._bodies[self._left & 3]
            writer.write(data if len(token_ns) > 1 else self._wire.opening() + data)
            return due_ns + self._server.script.gap_ns
        opening = b"" if len(token_ns) > 1 else self._wire.opening()
        writer.write(opening + self._wire.token(WORDS[0], finish="length"))
        writer.write(self._wire.closing(self._num_prompt, self._num_tokens))
        truth.done_ns = _now()
        self._server.num_open -= 1
        return None

    def _fail(self) -> None:
        self._server.num_open -= 1
        if self._fault == "error_event":
            error = {"error": {"message": "the engine is dead", "type": "InternalServerError", "code": 500}}
            self._writer.write(_event(error) + _chunk(b"data: [DONE]\n\n") + _END)
        elif self._fault == "cut":
            self._writer.close()


class _Wire:
    """The events of one answer as bytes."""

    __slots__ = ("_base", "_is_chat")

    def __init__(self, *, is_chat: bool, number: int) -> None:
        self._is_chat = is_chat
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        name = f"{'chatcmpl' if is_chat else 'cmpl'}-{number:032x}"
        self._base = {"id": name, "object": kind, "created": 1_800_000_000, "model": MODEL}

    def opening(self) -> bytes:
        if not self._is_chat:
            return b""
        choice = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return _event(self._base | {"choices": [choice]})

    def token(self, text: str, *, finish: str | None = None) -> bytes:
        content = {"delta": {"content": text}} if self._is_chat else {"text": text}
        choice = {"index": 0, **content, "logprobs": None, "finish_reason": finish, "stop_reason": None}
        return _event(self._base | {"choices": [choice | {"token_ids": None}], "usage": None})

    def closing(self, num_prompt: int, num_output: int) -> bytes:
        usage = {
            "prompt_tokens": num_prompt,
            "total_tokens": num_prompt + num_output,
            "completion_tokens": num_output,
        }
        return _event(self._base | {"choices": [], "usage": usage}) + _chunk(b"data: [DONE]\n\n") + _END


class _Connection(asyncio.Protocol):
    """HTTP/1.1 with keep-alive, as much as a well-behaved client needs."""

    def __init__(self, server: MockServer) -> None:
        self.closed = False
        self._server = server
        self._buffer = b""
        self._num_requests = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._fd = transport.get_extra_info("socket").fileno()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the protocol's signature
        self.closed = True

    def close(self) -> None:
        self.closed = True
        self._transport.close()

    def write(self, data: bytes) -> None:
        """Write to the socket itself, so that the stamp before it is the truth."""
        written = 0
        if not self._transport.get_write_buffer_size():
            try:
                written = os.write(self._fd, data)
            except BlockingIOError:
                written = 0
            except OSError:
                self.closed = True
                return
        if written < len(data):
            self._transport.write(data[written:])

    def data_received(self, data: bytes) -> None:
        received_ns = _now()
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        headers = {
            name.strip().lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head.decode("latin-1").split("\r\n")[1:])
        }
        if len(body) < int(headers.get("content-length", 0)):
            return
        self._buffer = b""
        self._num_requests += 1
        path = head.split(b" ", 2)[1].decode()
        if path.startswith("/v1/") and body:
            self._answer(path, json.loads(body), headers.get("x-request-id"), received_ns)
        else:
            self._serve_page(path)

    def _answer(self, path: str, request: dict[str, Any], request_id: str | None, received_ns: int) -> None:
        fault, server = _fault_of(request), self._server
        if fault == "close":
            self.close()
            return
        if fault == "http_400":
            self._reply(
                "400 Bad Request", json.dumps({"error": {"message": "max_tokens is too large", "code": 400}})
            )
            return
        truth = Truth(request_id=request_id, received_ns=received_ns, index_on_connection=self._num_requests)
        server.truths.append(truth)
        server.num_open += 1
        server.num_connections += self._num_requests == 1
        server.peak_open = max(server.peak_open, server.num_open)
        wire = _Wire(is_chat="chat" in path, number=len(server.truths))
        self.write(_HEAD)
        answer = _Answer(server, wire, request=request, truth=truth, writer=self)
        server.schedule(received_ns + server.script.first_ns, answer)

    def _serve_page(self, path: str) -> None:
        if path == "/reset":
            self._server.reset()
        pages: dict[str, Callable[[], dict[str, Any]]] = {
            "/truth": self._server.report,
            "/v1/models": lambda: {
                "object": "list",
                "data": [{"id": MODEL, "object": "model", "max_model_len": 4096}],
            },
            "/version": lambda: {"version": "0.0.0+mock"},
            "/health": dict,
            "/reset": dict,
        }
        if path in pages:
            self._reply("200 OK", json.dumps(pages[path]()))
        else:
            self._reply("404 Not Found", json.dumps({"detail": "Not Found"}))

    def _reply(self, status: str, body: str) -> None:
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body.encode())}\r\n\r\n"
        self.write(head.encode() + body.encode())


def _fault_of(request: dict[str, Any]) -> str | None:
    prompt = request.get("prompt") or (request.get("messages") or [{}])[-1].get("content")
    name = prompt.removeprefix("fault:") if isinstance(prompt, str) and prompt.startswith("fault:") else None
    return name if name in FAULTS else None


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def _event(value: dict[str, Any]) -> bytes:
    return _chunk(b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n")


async def _serve(args: argparse.Namespace) -> None:
    script = Script(first_ns=round(args.first_ms * 1e6), gap_ns=round(args.gap_ms * 1e6))
    mock = MockServer(script)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(mock), "127.0.0.1", args.port, backlog=2048)
    gc.collect()
    gc.freeze()
    gc.disable()
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await server.serve_forever()


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--first-ms", type=float, default=50.0, help="from the request to its first token")
    parser.add_argument("--gap-ms", type=float, default=10.0, help="between tokens")
    parser.add_argument("--core", type=int, help="the only core to run on")
    args = parser.parse_args(argv)
    if args.core is not None:
        os.sched_setaffinity(0, {args.core})
    uvloop.run(_serve(args))


if __name__ == "__main__":
    main()
