"""An OpenAI-compatible fake of a vLLM server, run as a process and told what to do by ``stub.Script``.

``python stub_engine.py --model M --served-model-name N --host H --port P [vLLM flags]``; standard library only.
Serves /health, /version, /v1/models, /metrics, /v1/completions, /v1/chat/completions (SSE or one JSON body), and
/stub/state: what the stub saw (argv, environment, peak number of open streams). Counters and histograms on /metrics
hold what the stub really did.
"""

import argparse
import asyncio
import contextlib
import ctypes
import fcntl
import heapq
import itertools
import json
import os
import selectors
import signal
import socket
import struct
import sys
import time
from functools import partial
from pathlib import Path

import stub_metrics
import stub_plugin
from stub import VARIABLE, from_json, hits

LIBC = ctypes.CDLL(None, use_errno=True)
PR_SET_NAME = 15
BYTES_PER_TOKEN = {"fp8": 11520, "turboquant_4bit_nc": 6120}  # a model with 30 layers, 3 KV heads of size 64
SSE_HEAD = (
    b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
STATUS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


class TimerSelector(selectors.EpollSelector):
    """Epoll whose time-outs are kept by a timerfd: tokens go out on the microsecond, not on the next millisecond."""

    def __init__(self):
        super().__init__()
        self._timer = LIBC.timerfd_create(1, os.O_NONBLOCK | os.O_CLOEXEC)  # 1: CLOCK_MONOTONIC
        self._selector.register(self._timer, 1)  # 1: EPOLLIN

    def select(self, timeout=None):
        nanoseconds = 0 if timeout is None or timeout <= 0 else max(1, int(timeout * 1e9))
        spec = struct.pack("qqqq", 0, 0, nanoseconds // 10**9, nanoseconds % 10**9)  # zero disarms
        LIBC.timerfd_settime(self._timer, 0, spec, None)
        return super().select(None if nanoseconds else timeout)


def parse_args(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="stub-model")
    parser.add_argument("--served-model-name", nargs="+")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--kv-cache-memory-bytes", type=int, default=64 * 2**20)
    parser.add_argument("--block-size", type=int, default=128)
    parser.add_argument("--attention-backend")
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--scheduling-policy", default="fcfs")
    parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True)
    args, _ = parser.parse_known_args(argv)
    return args


def log(role, text, *, level="INFO", where="stub.py:1"):
    stamp = time.strftime("%m-%d %H:%M:%S")
    sys.stderr.write(f"({role} pid={os.getpid()}) {level} {stamp} [{where}] {text}\n")
    sys.stderr.flush()


def chatter(stream, count):
    line = b"INFO: a line nobody asked for, but somebody has to drain.......\n"
    stream.buffer.write((line * (count // len(line) + 1))[:count])
    stream.flush()


class Cache:
    """The KV cache as reported: flags, unless the script says otherwise."""

    def __init__(self, args, script):
        self.dtype = script.cache_dtype or args.kv_cache_dtype
        self.block_size = script.block_size or args.block_size
        self.memory_bytes = script.kv_cache_memory_bytes or args.kv_cache_memory_bytes
        self.per_token = BYTES_PER_TOKEN.get(args.kv_cache_dtype.split("_e")[0], 23040)
        self.num_blocks = script.num_gpu_blocks or self.memory_bytes // (self.per_token * self.block_size)
        self.num_tokens = self.num_blocks * self.block_size
        self.prefix_caching = args.enable_prefix_caching
        self._seen = set()

    def labels(self):
        return {
            "block_size": str(self.block_size),
            "cache_dtype": self.dtype,
            "enable_prefix_caching": str(self.prefix_caching),
            "gpu_memory_utilization": "0.92",
            "kv_cache_dtype_skip_layers": "[]",
            "kv_cache_memory_bytes": str(self.memory_bytes),
            "kv_cache_size_tokens": str(self.num_tokens),
            "num_cpu_blocks": "None",
            "num_gpu_blocks": str(self.num_blocks),
            "sliding_window": "None",
        }

    def lookup(self, tokens):
        """Number of leading prompt tokens that were seen before, in whole blocks; remembers this prompt."""
        if not self.prefix_caching:
            return 0
        found, key, unbroken = 0, 0, True
        for start in range(0, len(tokens) - self.block_size + 1, self.block_size):
            key = hash((key, tuple(tokens[start : start + self.block_size])))
            unbroken = unbroken and key in self._seen
            found += self.block_size if unbroken else 0
            self._seen.add(key)
        return found


class Generation:
    """One request on its way: waits, is admitted, emits tokens at scripted times."""

    def __init__(self, engine, connection, body, *, chat, tokens, index):
        self.engine, self.connection, self.chat, self.tokens, self.index = (
            engine,
            connection,
            chat,
            tokens,
            index,
        )
        self.body = body
        self.stream = bool(body.get("stream"))
        self.asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        script = engine.script
        scripted = script.output_tokens[index % len(script.output_tokens)] if index is not None else None
        self.length = self.asked if scripted is None else min(scripted, self.asked)
        if hits(script.empty_requests, index):
            self.length = 0
        self.finish_reason = script.finish_reason or ("length" if self.length == self.asked else "stop")
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{next(engine.ids):032x}"
        self.received = engine.now()
        self.admitted = None
        self.first_due = None
        self.sent = 0
        self.pieces = []
        self.times = []
        self.role_sent = False
        self.open = True
        self.stalled = False
        self.timer = None

    # --- life ---
    def begin(self):
        if self.stream:
            self.connection.send(SSE_HEAD)
            delay = self.engine.script.role_at_s
            if self.chat and delay is not None:
                self.engine.loop.call_at(self.received + delay, self._send_role)

    def admit(self):
        self.admitted = self.engine.now()
        self.first_due = self.admitted + self.engine.first_token_delay(self)
        self.timer = self.engine.loop.call_at(self.first_due, self._tick)

    def cancel(self):
        """The client went away."""
        if self.open:
            self._close("abort")

    def _tick(self):
        script, engine = self.engine.script, self.engine
        if self.length == 0:
            self._finish()
            return
        if self.sent >= script.fault_after_tokens and self._fault():
            return
        count = min(script.tokens_per_chunk, self.length - self.sent)
        self._emit(count)
        if engine.script.die_mid_request is not None and engine.script.die_mid_request == self.index:
            engine.die()
        if self.sent >= self.length:
            self._finish()
            return
        due = (
            self.first_due
            + (self.sent + min(script.tokens_per_chunk, self.length - self.sent) - 1) * script.itl_s
        )
        self.timer = engine.loop.call_at(due, self._tick)

    def _fault(self):
        script = self.engine.script
        if hits(script.stall_requests, self.index):
            if self.stalled:
                return False
            self.stalled = True
            self.timer = self.engine.loop.call_later(script.stall_s, self._tick)
            return True
        if hits(script.error_requests, self.index):
            error = {
                "message": "EngineCore encountered an issue.",
                "type": "InternalServerError",
                "code": 500,
            }
            self._event({"error": error | {"param": None}})
            self.connection.send(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")
            self._close("error")
            return True
        if hits(script.cut_requests, self.index):
            self.connection.transport.abort()
            return True
        return False

    # --- output ---
    def _emit(self, count):
        script = self.engine.script
        now = self.engine.now()
        text = "".join(script.words[(self.sent + i) % len(script.words)] for i in range(count))
        self.pieces.append(text)
        self.sent += count
        last = self.sent >= self.length
        if self.stream:
            if self.chat and not self.role_sent:
                self._send_role()
            usage = self._usage() if last and script.usage == "last_chunk" else None
            self._event(self._chunk_body(text, count, last=last), usage=usage)
        self.engine.count_tokens(self, count, now)
        self.times.append(now)

    def _chunk_body(self, text, count, *, last):
        reason = self.finish_reason if last else None
        if not self.chat:
            choice = {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": reason,
                "stop_reason": None,
            }
            return {"choices": [choice | {"token_ids": None, "prompt_token_ids": None}]}
        script = self.engine.script
        before = self.sent - count
        names = script.reasoning_fields
        name = names[before % len(names)] if before < script.reasoning_tokens else "content"
        choice = {
            "index": 0,
            "delta": {name: text},
            "logprobs": None,
            "finish_reason": reason,
            "token_ids": None,
        }
        return {"choices": [choice]}

    def _send_role(self):
        if not self.open or self.role_sent:
            return
        self.role_sent = True
        delta = {"role": "assistant", "content": ""}
        self._event({"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}]})

    def _event(self, body, *, usage=None):
        kind = "chat.completion.chunk" if self.chat else "text_completion"
        head = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.engine.name}
        tail = {} if usage is None else {"usage": usage}
        text = json.dumps({**head, **body, **tail}, ensure_ascii=False, separators=(",", ":"))
        self.connection.send(_chunk(f"data: {text}\n\n".encode()))

    def _usage(self):
        script = self.engine.script
        prompt = round(len(self.tokens) * script.prompt_tokens_factor)
        output = self.sent + script.usage_extra_tokens
        return {"prompt_tokens": prompt, "total_tokens": prompt + output, "completion_tokens": output}

    def _finish(self):
        if self.stream:
            self._end_stream()
        else:
            self._reply()
        self._close(self.finish_reason if self.finish_reason in stub_metrics.REASONS else "stop")

    def _end_stream(self):
        if self.length == 0:
            if self.chat:
                self._send_role()
            self._event(self._chunk_body("", 0, last=True))
        wanted = (self.body.get("stream_options") or {}).get("include_usage")
        if wanted and self.engine.script.usage == "final":
            self._event({"choices": []}, usage=self._usage())
        self.connection.send(_chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    def _reply(self):
        text, logprobs = "".join(self.pieces), None
        if not self.chat and self.body.get("logprobs") is not None:
            tokens = self._continuation()
            text, logprobs = "".join(tokens), self._logprobs(tokens)
        choice = {"index": 0, "finish_reason": self.finish_reason, "logprobs": logprobs, "stop_reason": None}
        choice |= {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
        kind = "chat.completion" if self.chat else "text_completion"
        body = {"id": self.id, "object": kind, "created": int(time.time()), "model": self.engine.name}
        self.connection.reply(200, body | {"choices": [choice], "usage": self._usage()})

    def _continuation(self):
        """One token per word: scripted, or copied from where the prompt's last word stood before."""
        scripted = self.engine.script.probe_words
        if scripted is not None:
            return [scripted[i % len(scripted)] for i in range(self.sent)]
        words = str(self.body["prompt"]).split()
        for _ in range(self.sent):
            earlier = [place for place, word in enumerate(words[:-1]) if word == words[-1]]
            words.append(words[earlier[-1] + 1] if earlier else words[0])
        return [f" {word}" for word in words[len(words) - self.sent :]]

    def _logprobs(self, tokens):
        """The completions shape of vLLM."""
        value = self.engine.script.probe_logprob
        others = {f" other{rank}": -4.0 - rank for rank in range(1, self.body["logprobs"])}
        return {
            "text_offset": [len("".join(tokens[:place])) for place in range(len(tokens))],
            "token_logprobs": [value] * len(tokens),
            "tokens": tokens,
            "top_logprobs": [{token: value} | others for token in tokens],
        }

    def _close(self, reason):
        self.open = False
        if self.timer is not None:
            self.timer.cancel()
        self.connection.generation = None
        self.engine.closed(self, reason)


def _chunk(data):
    return b"%x\r\n%b\r\n" % (len(data), data)


class Engine:
    """Queue, running set, counters."""

    def __init__(self, args, script, loop):
        self.args, self.script, self.loop = args, script, loop
        self.plugin_sha256 = stub_plugin.load(args, script)
        self.now = loop.time
        self.name = (args.served_model_name or [args.model])[0]
        self.max_model_len = script.max_model_len or args.max_model_len
        self.cache = Cache(args, script)
        self.counts = stub_metrics.Counts()
        self.ids = itertools.count()
        self.streams = itertools.count()
        self.order = itertools.count()
        self.waiting = []
        self.running = set()
        self.compiled = set()
        self.ended = 0
        self.open_streams = 0
        self.connections = 0
        self.state = {"peak_streams": 0, "peak_connections": 0, "num_streams": 0, "num_generations": 0}
        self.ready_at = None

    def submit(self, connection, body, *, chat):
        script = self.script
        index = next(self.streams) if body.get("stream") else None
        self._announce(index)
        tokens = _prompt_tokens(body, chat=chat)
        asked = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        if script.generation_status != 200 or hits(script.reject_requests, index):
            status = script.generation_status if script.generation_status != 200 else 500
            connection.reply(status, _error("scripted failure", status))
            return
        if len(tokens) + asked > self.max_model_len:
            message = f"This model's maximum context length is {self.max_model_len} tokens."
            connection.reply(400, _error(message, 400))
            return
        generation = Generation(self, connection, body, chat=chat, tokens=tokens, index=index)
        connection.generation = generation
        generation.begin()
        if script.generation_hangs:
            return
        if generation.stream:
            self.open_streams += 1
            self.state["peak_streams"] = max(self.state["peak_streams"], self.open_streams)
        rank = body.get("priority", 0) if self.args.scheduling_policy == "priority" else 0
        heapq.heappush(self.waiting, (rank, next(self.order), generation))
        self._schedule()

    def _announce(self, index):
        script = self.script
        self.state["num_generations"] += 1
        self.state["num_streams"] += index is not None
        if script.chatty_bytes_per_request:
            chatter(sys.stdout, script.chatty_bytes_per_request)
        if index is not None and index == script.reset_counters_at:
            self.counts = stub_metrics.Counts()
        if index is not None and index == script.jit_line_at:
            text = (
                "Triton kernel JIT compilation during inference: _fwd_kernel. This causes a latency spike; "
            )
            log("EngineCore", text + "consider extending warmup to cover this shape/config.", level="WARNING")

    def _schedule(self):
        limit = self.script.max_running or self.args.max_num_seqs
        while self.waiting and len(self.running) < limit:
            _, _, generation = heapq.heappop(self.waiting)
            if generation.open:
                self.running.add(generation)
                generation.admit()

    def first_token_delay(self, generation):
        script, tokens = self.script, generation.tokens
        found = self.cache.lookup(tokens)
        if self.cache.prefix_caching:
            self.counts.counters["prefix_cache_queries"] += len(tokens)
            self.counts.counters["prefix_cache_hits"] += found
        self._observe("request_queue_time_seconds", generation.admitted - generation.received)
        bucket = next((edge for edge in script.compile_buckets if len(tokens) <= edge), None)
        compiling = script.compile_cost_s and bucket not in self.compiled
        self.compiled.add(bucket)
        delay = script.ttft_s + (len(tokens) - found) * script.prefill_s_per_token
        return delay + (script.compile_cost_s if compiling else 0.0)

    def count_tokens(self, generation, count, now):
        counters = self.counts.counters
        counters["generation_tokens"] += count
        if generation.times:
            self._observe("inter_token_latency_seconds", now - generation.times[-1])
            return
        counters["prompt_tokens"] += len(generation.tokens)
        counters["num_preemptions"] += self.script.preemptions_per_request
        self._observe("request_prompt_tokens", len(generation.tokens))
        self._observe("time_to_first_token_seconds", now - generation.received)
        self._observe("request_prefill_time_seconds", now - generation.admitted)

    def closed(self, generation, reason):
        self.running.discard(generation)
        self.counts.finished[reason] += 1
        if generation.stream:
            self.open_streams -= 1
            self.ended += 1
            self._write_truth(generation)
        if generation.times:
            self._observe_end(generation)
        if self.script.die_after_requests is not None and self.ended >= self.script.die_after_requests:
            self.loop.call_later(0.01, self.die)  # after the last bytes are out
        self._schedule()

    def _observe_end(self, generation):
        first, last = generation.times[0], generation.times[-1]
        self._observe("e2e_request_latency_seconds", last - generation.received)
        self._observe("request_inference_time_seconds", last - generation.admitted)
        self._observe("request_decode_time_seconds", last - first)
        self._observe("request_generation_tokens", generation.sent)
        if generation.sent > 1:
            self._observe("request_time_per_output_token_seconds", (last - first) / (generation.sent - 1))

    def _observe(self, name, value):
        self.counts.histograms[name].observe(value)

    def _write_truth(self, generation):
        if self.script.truth_path is None:
            return
        row = {
            "index": generation.index,
            "id": generation.id,
            "num_prompt_tokens": len(generation.tokens),
            "num_output_tokens": generation.sent,
            "received_ns": int(generation.received * 1e9),
            "admitted_ns": int(generation.admitted * 1e9) if generation.admitted is not None else None,
            "token_ns": [int(t * 1e9) for t in generation.times],
        }
        with Path(self.script.truth_path).open("a") as file:
            file.write(json.dumps(row) + "\n")

    def reports(self):
        if self.plugin_sha256 is None or not self.script.engine_route:
            return 404, {"detail": "Not Found"}
        known = {"plugin_sha256": self.plugin_sha256, "per_token": self.cache.per_token}
        return 200, stub_plugin.reports(self.args, self.script, self.cache, **known)

    def die(self):
        log("APIServer", self.script.die_text, level="ERROR")
        os._exit(self.script.die_code)

    def metrics(self):
        held = sum(len(g.tokens) + g.sent for g in self.running)
        gauges = {
            "running": len(self.running),
            "waiting": len(self.waiting),
            "kv_usage": min(1.0, held / max(1, self.cache.num_tokens)),
        }
        script = self.script
        return stub_metrics.render(
            self.counts, gauges=gauges, cache=self.cache.labels(), model=self.name,
            engines=script.metric_engines, drop=script.metrics_drop, rename=script.metrics_rename,
        )  # fmt: skip


def _prompt_tokens(body, *, chat):
    """Token ids as given; a text counts one token per word."""
    if chat:
        text = " ".join(str(message.get("content", "")) for message in body.get("messages", []))
        return [hash(word) for word in text.split()] or [0]
    prompt = body.get("prompt", "")
    if isinstance(prompt, list):
        return (
            prompt
            if prompt and isinstance(prompt[0], int)
            else _prompt_tokens({"prompt": prompt[0]}, chat=False)
        )
    return [hash(word) for word in prompt.split()] or [0]


def _error(message, status):
    return {
        "error": {"message": message, "type": "BadRequestError" if status == 400 else "Error", "code": status}
    }


class Http(asyncio.Protocol):
    """Enough HTTP/1.1: keep-alive, bodies with Content-Length, chunked replies."""

    def __init__(self, engine):
        self.engine = engine
        self.buffer = bytearray()
        self.generation = None
        self.transport = None
        self.queue = bytearray()
        self.line = ""

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        engine = self.engine
        engine.connections += 1
        engine.state["peak_connections"] = max(engine.state["peak_connections"], engine.connections)

    def connection_lost(self, _error):
        self.engine.connections -= 1
        if self.generation is not None:
            self.generation.cancel()

    def data_received(self, data):
        self.buffer += data
        while self._take():
            pass

    def _take(self):
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        head = self.buffer[:end].decode("latin-1").split("\r\n")
        headers = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        size = int(headers.get("content-length", 0))
        if len(self.buffer) < end + 4 + size:
            return False
        body = bytes(self.buffer[end + 4 : end + 4 + size])
        del self.buffer[: end + 4 + size]
        method, target, _ = head[0].split(" ", 2)
        self._handle(method, target.partition("?")[0], body)
        return True

    def _handle(self, method, path, body):
        engine = self.engine
        self.line = f"{method} {path} HTTP/1.1"
        if path in {"/v1/completions", "/v1/chat/completions"} and method == "POST":
            self._access(200)
            engine.submit(self, json.loads(body), chat=path.endswith("/chat/completions"))
            return
        routes = {
            "/health": self._health,
            "/ping": self._health,
            "/version": lambda: (200, {"version": engine.script.version}),
            "/v1/models": lambda: (200, self._models()),
            "/metrics": lambda: (engine.script.metrics_status, engine.metrics()),
            stub_plugin.ROUTE: engine.reports,
            "/stub/state": lambda: (200, engine.state | {"argv": sys.argv, "environment": dict(os.environ)}),
        }
        status, answer = routes.get(path, lambda: (404, {"detail": "Not Found"}))()
        self._access(status)
        self.reply(status, answer)

    def _access(self, status):
        sys.stdout.write(f'INFO:     127.0.0.1:0 - "{self.line}" {status} {STATUS.get(status, "")}\n')
        sys.stdout.flush()

    def _health(self):
        return (200, "") if self.engine.now() >= self.engine.ready_at else (503, "")

    def _models(self):
        engine = self.engine
        card = {"id": engine.name, "object": "model", "created": int(time.time()), "owned_by": "vllm"}
        card |= {"root": engine.args.model, "parent": None, "max_model_len": engine.max_model_len}
        return {"object": "list", "data": [card]}

    def reply(self, status, body):
        text = body if isinstance(body, str) else json.dumps(body)
        kind = "text/plain; version=0.0.4; charset=utf-8" if isinstance(body, str) else "application/json"
        data = text.encode()
        head = (
            f"HTTP/1.1 {status} {STATUS.get(status, 'Error')}\r\nserver: uvicorn\r\ncontent-type: {kind}\r\n"
        )
        self.send(f"{head}content-length: {len(data)}\r\n\r\n".encode() + data)

    def send(self, data):
        step = self.engine.script.write_bytes
        if step is None:
            self.transport.write(data)
            return
        idle = not self.queue
        self.queue += data
        if idle:
            self._send_piece(step)

    def _send_piece(self, step):
        self.transport.write(bytes(self.queue[:step]))
        del self.queue[:step]
        if self.queue:
            self.engine.loop.call_later(self.engine.script.write_gap_s, self._send_piece, step)


# --- start ---


def fork_children(script, children):
    """Add children in sessions of their own, as an engine core is; each holds its lock until it ends."""
    for number in range(script.children):
        children.append(_fork_child(script, number))


def _fork_child(script, number):
    held, holding = os.pipe()
    pid = os.fork()
    if pid:
        os.close(holding)
        os.read(held, 1)  # returns when the child holds its lock
        os.close(held)
        return pid
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.children_ignore_sigterm else signal.SIG_DFL)
    if script.lock_path is not None:
        lock = os.open(f"{script.lock_path}.{number}", os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, str(os.getpid()).encode())
    LIBC.prctl(PR_SET_NAME, script.child_title.encode()[:15], 0, 0, 0)  # last: a test may wait for the name
    os.close(holding)
    while True:
        signal.pause()


def install_signals(script, children):
    def leave(_number, _frame):
        log("APIServer", "[shutdown] API server: shutdown triggered", where="launcher.py:254")
        for pid in [] if script.leave_children else children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        os._exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if script.ignore_sigterm else leave)
    signal.signal(signal.SIGINT, signal.SIG_IGN if script.ignore_sigterm else leave)


def probe_port(start):
    """As vLLM searches an internal port: upwards from VLLM_PORT, probed, released, bound later."""
    for port in range(start, start + 1000):
        with socket.socket() as candidate, contextlib.suppress(OSError):
            candidate.bind(("", port))
            return port
    raise RuntimeError(f"no free port from {start}")


def bind(host, port):
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        text = f"[Errno {error.errno}] error while attempting to bind on address ('{host}', {port}): "
        log("APIServer", text + os.strerror(error.errno).lower(), level="ERROR")
        print(f"OSError: [Errno {error.errno}] {os.strerror(error.errno)}", file=sys.stderr, flush=True)
        os._exit(1)
    return listener


def bind_all(args, script):
    """The HTTP listener and, if scripted, the internal one, after the scripted delay."""
    internal = probe_port(int(os.environ.get("VLLM_PORT", "29500"))) if script.internal_port else None
    time.sleep(script.bind_delay_s)
    listeners = [bind(args.host, args.port)]
    if internal is not None:
        inner = bind("", internal)
        inner.listen(8)
        log("EngineCore", f"internal port {internal}")
        listeners.append(inner)
    return listeners


def announce(args, script, cache):
    log("APIServer", f"vLLM API server version {script.version}", where="api_utils.py:347")
    log("APIServer", f"non-default args: {vars(args)}", where="api_utils.py:286")
    resolved = f"model='{args.model}', kv_cache_dtype={args.kv_cache_dtype}"
    log("EngineCore", f"Initializing a V1 LLM engine (v{script.version}) with config: {resolved}")
    backend = (
        f"Using AttentionBackendEnum.{args.attention_backend} backend." if args.attention_backend else None
    )
    for line in filter(None, [script.backend_line or backend, *script.log_lines]):
        log("Worker", line)
    concurrency = cache.num_tokens / args.max_model_len
    text = f"CPU KV cache size: {cache.num_tokens:,} tokens, Maximum concurrency for {args.max_model_len:,} tokens"
    log("EngineCore", f"{text} per request: {concurrency:.2f}x", where="kv_cache_utils.py:2327")


def fails(script):
    return script.exit_code is not None and not (script.exit_once and Path(script.exit_once).exists())


def fail_as_scripted(script):
    if script.exit_once is not None:
        Path(script.exit_once).touch()
    time.sleep(script.exit_after_s)
    if script.exit_text:
        print(script.exit_text, file=sys.stderr, flush=True)
    os._exit(script.exit_code)


async def serve(args, script, listener):
    loop = asyncio.get_running_loop()
    engine = Engine(args, script, loop)
    announce(args, script, engine.cache)
    await asyncio.sleep(script.start_delay_s)
    engine.ready_at = loop.time() + script.ready_after_s
    if script.die_after_s is not None:
        loop.call_later(script.die_after_s, engine.die)
    log("APIServer", f"Starting vLLM server on http://{args.host}:{args.port}", where="entry.py:140")
    log("APIServer", "Available routes are:", where="launcher.py:186")
    server = await loop.create_server(partial(Http, engine), sock=listener, backlog=2048)
    print("INFO:     Application startup complete.", flush=True)
    await server.serve_forever()


def main():
    script = from_json(os.environ.get(VARIABLE, "{}"))
    args = parse_args(sys.argv[1:])
    children = []
    install_signals(script, children)
    fork_children(script, children)
    if script.silent:
        while True:
            signal.pause()
    for stream in (sys.stdout, sys.stderr) if script.chatty_bytes else ():
        chatter(stream, script.chatty_bytes)
    if fails(script):
        fail_as_scripted(script)
    listener, *internal = bind_all(args, script)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(TimerSelector())) as runner:
        runner.run(serve(args, script, listener))
    del internal


if __name__ == "__main__":
    main()
