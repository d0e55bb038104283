"""What the load generator costs and how true its stamps are: ``python -m workers.load.bench``.

One mock server (on one core) that knows when it wrote each token answers, in turn, this project's generator, a raw
socket client that only time-stamps (the floor), and ``vllm bench serve`` from an engine environment's Python if one
is given; each on the same other core, with the same requests. For every client:

- CPU s per 100k token events: user and system time of its process from the first due time to the last answer.
- CPU after: what it then spends per 100k events on parsing and writing (not known for ``vllm bench serve``).
- TTFT error: ``|client's TTFT from send - (server's first write - server's receipt of the request)|``.
"""

import argparse
import asyncio
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from workers.load.client import LoadSpec, import_path, run_load
from workers.load.payload import http_request
from workers.load.workload import Request, read_arrivals, write_arrivals

NUM_PROMPT_WORDS = 32

# Runs inside the engine's environment. The data set is replaced (the same prompts for every client, no tokenizer),
# and CPU time is taken where the sends begin and where the evaluation begins.
_VLLM_BENCH = """
import json, os, sys, time
os.sched_setaffinity(0, {int(sys.argv.pop(1))})
out, count, tokens, prompt = sys.argv.pop(1), int(sys.argv.pop(1)), int(sys.argv.pop(1)), sys.argv.pop(1)
import vllm.benchmarks.serve as serve
from vllm.benchmarks.datasets import SampleRequest
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
def samples(args, tokenizer):
    return [SampleRequest(prompt=prompt, prompt_len=32, expected_output_len=tokens, request_id=f"measured-{i}")
            for i in range(count)]
marks = {}
def marked(function):
    def call(*args, **kwargs):
        marks.setdefault("end", time.process_time())
        return function(*args, **kwargs)
    return call
real = serve.get_request
async def get_request(*args, **kwargs):
    marks["start"] = time.process_time()
    async for item in real(*args, **kwargs):
        yield item
serve.get_samples, serve.get_request = samples, get_request
serve.calculate_metrics = marked(serve.calculate_metrics)
serve.calculate_metrics_for_embeddings = marked(serve.calculate_metrics_for_embeddings)
parser = FlexibleArgumentParser()
serve.add_cli_args(parser)
serve.main(parser.parse_args(sys.argv[1:]))
with open(out, "w") as file:
    json.dump(marks["end"] - marks["start"], file)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One benchmark."""

    rate_per_s: float
    duration_s: float
    num_tokens: int
    first_ms: float
    gap_ms: float
    server_core: int
    client_core: int
    engine_python: str | None

    @property
    def num_requests(self) -> int:
        return round(self.rate_per_s * self.duration_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one client reported: CPU over the window and after it (s), TTFT from send by request id (ns)."""

    cpu_s: float
    after_cpu_s: float | None
    ttft_ns: dict[str, int]
    send_lag_ns: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One client in one round."""

    cpu_s_per_100k: float
    after_cpu_s_per_100k: float | None
    error_p50_ms: float
    error_p99_ms: float
    send_lag_p99_ms: float | None
    num_requests: int


def ours(setting: Setting, *, url: str, arrivals: Path) -> Measured:
    """This project's generator, in one process."""
    spec = LoadSpec(arrivals=str(arrivals), base_url=url, model="mock", processes=1)
    result = asyncio.run(run_load(spec, cpu_affinity={setting.client_core}))
    answered = [r for r in result.records if r.first_token_ns is not None and r.sent_ns is not None]
    return Measured(
        cpu_s=result.client.cpu_s,
        after_cpu_s=result.client.after_cpu_s,
        ttft_ns={f"measured-{r.index}": (r.first_token_ns or 0) - (r.sent_ns or 0) for r in answered},
        send_lag_ns=[(r.sent_ns or 0) - r.due_ns for r in answered],
    )


def raw(setting: Setting, *, url: str, arrivals: Path) -> Measured:
    """The floor: sockets and stamps, nothing else; in a process of its own."""
    command = [
        sys.executable,
        "-m",
        "workers.load.bench",
        "--raw",
        url,
        str(arrivals),
        str(setting.client_core),
    ]
    env = os.environ | {"PYTHONPATH": import_path()}
    answer = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, env=env).stdout)
    return Measured(
        cpu_s=answer["cpu_s"], after_cpu_s=None, ttft_ns=answer["ttft_ns"], send_lag_ns=answer["lag_ns"]
    )


def vllm_bench_serve(setting: Setting, *, url: str, arrivals: Path) -> Measured:
    """``vllm bench serve`` of the engine environment; CPU only of its sending and receiving part."""
    folder = arrivals.parent
    prompt = read_arrivals(arrivals)[0].prompt_text or ""
    command = [
        str(setting.engine_python), "-c", _VLLM_BENCH, str(setting.client_core), str(folder / "cpu.json"),
        str(setting.num_requests), str(setting.num_tokens), prompt,
        "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions", "--model", "mock",
        "--skip-tokenizer-init", "--dataset-name", "random", "--num-prompts", str(setting.num_requests),
        "--request-rate", str(setting.rate_per_s), "--ignore-eos", "--disable-tqdm", "--ready-check-timeout-sec", "0",
        "--save-result", "--save-detailed", "--result-dir", str(folder), "--result-filename", "vllm.json",
    ]  # fmt: skip
    with (folder / "vllm.log").open("w") as log:
        code = subprocess.run(command, stdout=log, stderr=log, cwd=folder, check=False).returncode
    if code != 0 or not (folder / "vllm.json").exists():
        tail = (folder / "vllm.log").read_text()[-2000:]
        raise RuntimeError(f"vllm bench serve ended with code {code}: {tail}")
    result = json.loads((folder / "vllm.json").read_text())
    ttft_ns = {f"measured-{i}": round(s * 1e9) for i, s in enumerate(result["ttfts"]) if s}
    return Measured(cpu_s=json.loads((folder / "cpu.json").read_text()), after_cpu_s=None, ttft_ns=ttft_ns)


def run_raw(url: str, arrivals: Path, core: int) -> None:
    """Send and stamp with blocking-free sockets and epoll; print what came out as JSON."""
    os.sched_setaffinity(0, {core})
    spec = LoadSpec(arrivals=str(arrivals), base_url=url, model="mock")
    requests = read_arrivals(arrivals)
    payloads = [http_request(request, spec=spec) for request in requests]
    start_ns = time.perf_counter_ns() + 100_000_000
    dues = [start_ns + request.due_ns for request in requests]
    cpu_s = time.process_time()
    sent, reads = _exchange(spec.address, dues, payloads)
    cpu_s = time.process_time() - cpu_s
    first = [next(ns for ns, data in stream if b'"text":' in data) for stream in reads]
    ttft_ns = {f"measured-{i}": first[i] - sent[i] for i in range(len(requests))}
    print(
        json.dumps(
            {"cpu_s": cpu_s, "ttft_ns": ttft_ns, "lag_ns": [s - d for s, d in zip(sent, dues, strict=True)]}
        )
    )


def _exchange(
    address: tuple[str, int], dues: list[int], payloads: list[bytes]
) -> tuple[list[int], list[list[tuple[int, bytes]]]]:
    """Send every payload at its time over kept-alive sockets; return send stamps and stamped reads."""
    now, epoll = time.perf_counter_ns, select.epoll()
    reads: list[list[tuple[int, bytes]]] = [[] for _ in dues]
    sent: list[int] = []
    sockets: dict[int, socket.socket] = {}
    streams: dict[int, list[tuple[int, bytes]]] = {}
    idle: list[int] = []
    num_left = len(dues)
    while num_left:
        while len(sent) < len(dues) and dues[len(sent)] <= now():
            if not idle:
                connection = socket.create_connection(address)
                connection.setblocking(False)
                sockets[connection.fileno()] = connection
                epoll.register(connection.fileno(), select.EPOLLIN)
                idle.append(connection.fileno())
            fd = idle.pop()
            streams[fd] = reads[len(sent)]
            sent.append(now())
            os.write(fd, payloads[len(sent) - 1])
        wait_s = max(dues[len(sent)] - now(), 0) / 1e9 if len(sent) < len(dues) else None
        for fd, _ in epoll.poll(wait_s):
            data = os.read(fd, 65536)
            streams[fd].append((now(), data))
            if data.endswith(b"0\r\n\r\n"):
                idle.append(fd)
                num_left -= 1
    for connection in sockets.values():
        connection.close()
    return sent, reads


def compare(measured: Measured, truth: dict[str, Any]) -> Row:
    """Hold a client's numbers against the server's."""
    true_ns = {r["request_id"]: r["token_ns"][0] - r["received_ns"] for r in truth["requests"]}
    num_events = sum(len(r["token_ns"]) for r in truth["requests"])
    errors = [abs(ttft - true_ns[name]) / 1e6 for name, ttft in measured.ttft_ns.items()]
    p50, p99 = np.percentile(errors, [50, 99]).tolist()
    scale = 1e5 / num_events
    lags = measured.send_lag_ns
    return Row(
        cpu_s_per_100k=measured.cpu_s * scale,
        after_cpu_s_per_100k=None if measured.after_cpu_s is None else measured.after_cpu_s * scale,
        error_p50_ms=p50,
        error_p99_ms=p99,
        send_lag_p99_ms=None if lags is None else float(np.percentile(lags, 99)) / 1e6,
        num_requests=len(errors),
    )


def run_rounds(setting: Setting, *, rounds: int, say: Callable[[str], None]) -> dict[str, list[Row]]:
    """All clients in turn, ``rounds`` times, against one server."""
    clients = {"servelab": ours, "raw sockets": raw}
    if setting.engine_python is not None:
        clients["vllm bench serve"] = vllm_bench_serve
    rows: dict[str, list[Row]] = {name: [] for name in clients}
    with tempfile.TemporaryDirectory(prefix="servelab-bench-") as folder, _server(setting) as url:
        arrivals = Path(folder) / "arrivals.parquet"
        write_arrivals(arrivals, _requests(setting))
        for number in range(rounds):
            for name, client in clients.items():
                _get(f"{url}/reset")
                row = compare(client(setting, url=url, arrivals=arrivals), _get(f"{url}/truth"))
                rows[name].append(row)
                say(f"round {number + 1}: {name}: {row}")
    return rows


def table_of(rows: dict[str, list[Row]], *, title: str) -> Table:
    """Medians over the rounds, and the ratio of CPU to ``vllm bench serve`` within each round."""
    table = Table(title=title)
    for column in ("client", "CPU s / 100k events", "ratio to vllm", "CPU after", "TTFT error p50 ms", "p99 ms", "send lag p99 ms"):  # fmt: skip
        table.add_column(column, justify="left" if column == "client" else "right")
    reference = rows.get("vllm bench serve")
    for name, ones in rows.items():
        ratios = [a.cpu_s_per_100k / b.cpu_s_per_100k for a, b in zip(ones, reference or [], strict=False)]
        table.add_row(
            name,
            _median([one.cpu_s_per_100k for one in ones]),
            _median(ratios),
            _median([one.after_cpu_s_per_100k for one in ones]),
            _median([one.error_p50_ms for one in ones]),
            _median([one.error_p99_ms for one in ones]),
            _median([one.send_lag_p99_ms for one in ones]),
        )
    return table


def _median(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{statistics.median(known):.2f}" if known else "-"


def _requests(setting: Setting) -> list[Request]:
    """Poisson arrivals of one text prompt."""
    gaps_s = np.random.default_rng(0).exponential(1 / setting.rate_per_s, setting.num_requests)
    text = "hello " * NUM_PROMPT_WORDS
    return [
        Request(index=i, due_ns=round(due_s * 1e9), prompt_text=text, num_output_tokens=setting.num_tokens)
        for i, due_s in enumerate(np.cumsum(gaps_s))
    ]


@contextmanager
def _server(setting: Setting) -> Iterator[str]:
    command = [
        sys.executable, "-m", "workers.load.mock_server", "--core", str(setting.server_core),
        "--first-ms", str(setting.first_ms), "--gap-ms", str(setting.gap_ms),
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": import_path()}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            yield f"http://127.0.0.1:{json.loads(line)['port']}"
        finally:
            process.kill()


def _get(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(url) as answer:  # noqa: S310 - our own server on loopback
        page: dict[str, Any] = json.load(answer)
    return page


def main(argv: Sequence[str]) -> None:
    """Print the table."""
    if argv[:1] == ["--raw"]:
        run_raw(argv[1], Path(argv[2]), int(argv[3]))
        return
    parser = argparse.ArgumentParser(
        prog="python -m workers.load.bench", description="Cost and truth of the client."
    )
    parser.add_argument("--engine-python", help="Python of an environment with vLLM: adds vllm bench serve")
    parser.add_argument("--rate", type=float, default=200.0, help="requests per second")
    parser.add_argument("--duration", type=float, default=10.0, help="seconds of arrivals")
    parser.add_argument("--tokens", type=int, default=100, help="tokens per answer")
    parser.add_argument("--first-ms", type=float, default=50.0)
    parser.add_argument("--gap-ms", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server-core", type=int, default=0)
    parser.add_argument("--client-core", type=int, default=1)
    args = parser.parse_args(argv)
    setting = Setting(
        rate_per_s=args.rate,
        duration_s=args.duration,
        num_tokens=args.tokens,
        first_ms=args.first_ms,
        gap_ms=args.gap_ms,
        server_core=args.server_core,
        client_core=args.client_core,
        engine_python=args.engine_python,
    )
    console = Console()
    rows = run_rounds(setting, rounds=args.rounds, say=lambda line: console.print(line, highlight=False))
    events_per_s = round(args.rate * args.tokens)
    console.print(table_of(rows, title=f"{events_per_s} token events/s, medians of {args.rounds} rounds"))


if __name__ == "__main__":
    main(sys.argv[1:])
