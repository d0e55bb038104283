"""The load generator against a scripted server on loopback: rate, truth, limits, failures."""

import asyncio
import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import numpy as np
import pytest
import uvloop

from conf.schema import Endpoint
from workers.errors import ClientLimitError, ServelabError
from workers.load.client import LoadSpec, run_load
from workers.load.generate import record_of
from workers.load.payload import http_request
from workers.load.sender import Flight, Sender, _Connection
from workers.load.workload import Request, write_arrivals

S = 1_000_000_000
MS = 1_000_000


@contextmanager
def mock_server(*, first_ms=0.0, gap_ms=1.0):
    command = [
        sys.executable,
        "-m",
        "workers.load.mock_server",
        f"--first-ms={first_ms}",
        f"--gap-ms={gap_ms}",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield f"http://127.0.0.1:{json.loads(process.stdout.readline())['port']}"
        finally:
            process.kill()


def get(url):
    with urllib.request.urlopen(url) as answer:
        return json.load(answer)


def constant(n, *, rate, tokens=2, text=None):
    ids = None if text else (5, 6, 7)
    return [
        Request(index=i, due_ns=round(i * S / rate), prompt_token_ids=ids, prompt_text=text, num_prompt_tokens=3, num_output_tokens=tokens)
        for i in range(n)
    ]  # fmt: skip


def load(tmp_path, url, requests, **options):
    """Run a load and return its result."""
    arrivals = tmp_path / "arrivals.parquet"
    write_arrivals(arrivals, requests)
    hooks = {
        name: options.pop(name) for name in ("on_progress", "on_started", "cpu_affinity") if name in options
    }
    return asyncio.run(
        run_load(LoadSpec(arrivals=str(arrivals), base_url=url, model="mock", **options), **hooks)
    )


def test_rate_is_reached_though_each_send_costs_time(monkeypatch):
    """B1: 2,000 arrivals at 200/s with 0.5 ms of work for each send; a drifting sender gives 182/s."""
    requests = constant(2000, rate=200, tokens=1)
    real_send = _Connection.send

    def slow_send(connection, flight):
        until = time.perf_counter_ns() + MS // 2
        while time.perf_counter_ns() < until:
            pass
        real_send(connection, flight)

    monkeypatch.setattr(_Connection, "send", slow_send)

    async def drive(url):
        spec = LoadSpec(arrivals="", base_url=url, model="mock")
        host, port = spec.address
        sender = Sender(host=host, port=port, timeout_ns=10 * S)
        flights = [
            Flight(index=r.index, due_ns=r.due_ns, payload=http_request(r, spec=spec)) for r in requests
        ]
        await sender.prepare(flights)
        t0_ns = time.perf_counter_ns() + 20 * MS
        for flight in flights:
            flight.due_ns += t0_ns
        await sender.run(flights)
        sender.close()
        return [
            record_of(f, request=r, phase="measured", t0_ns=t0_ns)
            for f, r in zip(flights, requests, strict=True)
        ]

    with mock_server() as url:
        records = uvloop.run(drive(url))
    assert not [r.error for r in records if r.failed]
    sent = np.array([r.sent_ns for r in records]) / S
    lag_ms = (sent - np.array([r.due_ns for r in records]) / S) * 1e3
    # The slope over all sends: one late last send on a busy machine is no lower rate.
    rate_per_s = 1 / np.polyfit(np.arange(2000), sent, 1)[0]
    print(f"rate {rate_per_s:.2f}/s, lag first {lag_ms[:200].mean():.2f} last {lag_ms[-200:].mean():.2f} ms")
    assert rate_per_s == pytest.approx(200, rel=0.01)
    assert lag_ms[-200:].mean() - lag_ms[:200].mean() <= 5
    assert lag_ms.min() >= 0


def test_no_pool_limit_throttles(tmp_path):
    """B3: 150 arrivals at 100/s, first token at once, streams held 3 s: 150 open together, TTFT < 0.5 s."""
    with mock_server(gap_ms=3000) as url:
        result = load(tmp_path, url, constant(150, rate=100, tokens=2))
        truth = get(f"{url}/truth")
    assert truth["peak_open"] == 150
    assert max(r.first_token_ns - r.due_ns for r in result.records) < 0.5 * S
    assert not [r.error for r in result.records if r.failed]
    assert (result.client.peak_open_streams, result.client.num_connections) == (150, truth["num_connections"])


def errors_p99_ms(result, truth):
    """99th percentiles of how far TTFT (from send) and ITL are from what the server wrote, and of the send lag."""
    truths = {t["request_id"]: t for t in truth["requests"]}
    ttft, itl, lag = [], [], []
    for record in result.records:
        truth = truths[f"measured-{record.index}"]
        written = np.array(truth["token_ns"])
        assert (record.error, record.num_output_tokens, record.num_output_tokens_client) == (None, 100, 100)
        assert len(record.token_ns) == 100
        ttft.append((record.first_token_ns - record.sent_ns) - (written[0] - truth["received_ns"]))
        itl.extend(np.diff(record.token_ns) - np.diff(written))
        lag.append(record.sent_ns - record.due_ns)
    named = {"ttft": ttft, "itl": itl, "lag": lag}
    return {name: float(np.percentile(np.abs(values), 99)) / MS for name, values in named.items()}


def test_stamps_are_the_servers_truth(tmp_path):
    """50 req/s of 100 tokens: p99 errors of a few ms at most, on a machine that may be busy with other things.

    Other processes only ever add to the errors, so the first of five rounds without them decides.
    """
    started, progress = [], []
    with mock_server(first_ms=50, gap_ms=10) as url:
        for _ in range(5):
            get(f"{url}/reset")
            hooks = {"on_started": started.append, "on_progress": progress.append}
            result = load(tmp_path, url, constant(100, rate=50, tokens=100), **hooks)
            p99 = errors_p99_ms(result, get(f"{url}/truth"))
            print({name: round(value, 3) for name, value in p99.items()}, result.client)
            if max(p99.values()) < 5:
                break
    assert max(p99.values()) < 5
    assert started[-1] == result.t0_ns
    assert 0 < result.client.cpu_share < 1
    assert progress[-1].num_requests == 100


def test_a_prompt_larger_than_the_sockets_buffer(tmp_path):
    """What the socket does not take at once follows."""
    with mock_server() as url:
        result = load(tmp_path, url, constant(3, rate=100, tokens=3, text="x" * 8_000_000))
    assert [(r.error, r.num_output_tokens) for r in result.records] == [(None, 3)] * 3


def test_shards_share_one_clock_and_merge(tmp_path):
    """Three processes send every third request each; the records come back as one run."""
    with mock_server(first_ms=5, gap_ms=1) as url:
        result = load(tmp_path, url, constant(90, rate=200, tokens=3), processes=3)
    assert [r.index for r in result.records] == list(range(90))
    assert result.client.num_processes == 3
    assert not [r.error for r in result.records if r.failed]
    for shard in range(3):
        lags_ns = [r.sent_ns - r.due_ns for r in result.records[shard::3]]
        assert 0 <= np.median(lags_ns) < 0.1 * S


def test_concurrency_cap_keeps_client_queueing_apart(tmp_path):
    """Cap 2 and ten requests at once: the rest wait here, and the record says since when."""
    with mock_server(first_ms=20, gap_ms=1) as url:
        result = load(tmp_path, url, constant(10, rate=1e9), max_concurrency=2)
        truth = get(f"{url}/truth")
    assert (truth["peak_open"], truth["num_connections"]) == (2, 2)
    waits = sorted(r.sent_ns - r.queued_ns for r in result.records)
    assert waits[1] < 10 * MS
    assert waits[2] > 15 * MS
    assert waits[-1] > 75 * MS  # behind four rounds of 21 ms


def test_warmup_groups_wait_for_each_other(tmp_path):
    """Equal due times are a group; a group starts when the one before is answered."""
    requests = [r for group in range(3) for r in constant(2, rate=1e9, tokens=2)]
    requests = [
        Request(index=i, due_ns=i // 2, prompt_text="a", num_output_tokens=2) for i in range(len(requests))
    ]
    with mock_server(first_ms=20) as url:
        result = load(tmp_path, url, requests, phase="warmup", endpoint=Endpoint.chat)
    assert {r.phase for r in result.records} == {"warmup"}
    assert not [r.error for r in result.records if r.failed]
    for before, after in zip(result.records[:4], result.records[2:], strict=True):
        assert after.sent_ns >= before.done_ns or before.index % 2
        assert after.due_ns >= before.last_token_ns


FAULTS = {
    "http_400": (400, 0, "the server answered HTTP 400: max_tokens is too large"),
    "close": (None, 0, "the connection was closed before a response came"),
    "error_event": (200, 2, "the server reported an error in the stream: the engine is dead"),
    "cut": (200, 2, "the stream was cut after 2 token events"),
    "stall": (200, 2, "timed out after 0.5 s"),
}


def test_failed_requests_are_records_with_a_sentence(tmp_path):
    """Refusal, close, error event, cut, stall; a healthy request beside them succeeds."""
    texts = [*(f"fault:{name}" for name in FAULTS), "healthy"]
    requests = [
        Request(index=i, due_ns=i * MS, prompt_text=text, num_output_tokens=5) for i, text in enumerate(texts)
    ]
    with mock_server() as url:
        result = load(tmp_path, url, requests, request_timeout_s=0.5)
    got = {text.removeprefix("fault:"): (r.http_status, len(r.token_ns), r.error)
           for text, r in zip(texts, result.records, strict=True)}  # fmt: skip
    assert got == FAULTS | {"healthy": (200, 5, None)}


def test_refused_connections_are_records(tmp_path):
    """Nothing listens: every request fails with its sentence, and the run ends."""
    result = load(tmp_path, "http://127.0.0.1:9", constant(20, rate=200))
    assert {r.error for r in result.records} == {"no connection to 127.0.0.1:9: Connection refused"}
    assert {(r.sent_ns, r.done_ns, r.first_token_ns) for r in result.records} == {(None, None, None)}


@contextmanager
def descriptor_limit(soft, hard):
    """Let child processes start with these limits (``preexec_fn`` of the asyncio subprocess)."""
    real = asyncio.create_subprocess_exec

    def limited(*args, **kwargs):
        return real(
            *args, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard)), **kwargs
        )

    asyncio.create_subprocess_exec = limited
    try:
        yield
    finally:
        asyncio.create_subprocess_exec = real


def test_too_few_descriptors_stop_before_the_first_request(tmp_path):
    """B3: soft and hard limit 64, the load needs 100 streams."""
    with mock_server() as url:
        with (
            descriptor_limit(64, 64),
            pytest.raises(ClientLimitError, match=r"100 streams .* hard limit is 64"),
        ):
            load(tmp_path, url, constant(100, rate=1e9), processes=1)
        assert get(f"{url}/truth")["requests"] == []


def test_a_low_soft_limit_is_raised(tmp_path):
    """B3: soft 64 and hard 4096: 100 of 100 streams at once succeed."""
    with mock_server(gap_ms=300) as url, descriptor_limit(64, 4096):
        result = load(tmp_path, url, constant(100, rate=1e9), processes=1)
        peak = get(f"{url}/truth")["peak_open"]
    assert [r.error for r in result.records] == [None] * 100
    assert peak == 100


def test_cancelled_load_leaves_no_process(tmp_path):
    """Cancelling closes the lifeline; the generator ends within its grace."""
    arrivals = tmp_path / "arrivals.parquet"
    write_arrivals(arrivals, constant(1000, rate=10))

    async def cancel_early(url):
        begun = asyncio.Event()
        spec = LoadSpec(arrivals=str(arrivals), base_url=url, model="mock")
        task = asyncio.create_task(run_load(spec, on_started=lambda _: begun.set()))
        await begun.wait()
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with mock_server() as url:
        asyncio.run(cancel_early(url))
    children = subprocess.run(
        ["ps", "-o", "args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    )
    assert "workers.load.generate" not in children.stdout


def test_a_dead_generator_is_an_error_with_its_last_words(tmp_path, monkeypatch):
    """The child cannot read its arrivals."""
    real = LoadSpec.to_json
    monkeypatch.setattr(LoadSpec, "to_json", lambda spec: real(spec) | {"arrivals": "/nonexistent.parquet"})
    with pytest.raises(
        ServelabError, match=r"ended with code 1 before it was ready: (?s:.*)FileNotFoundError"
    ):
        load(tmp_path, "http://127.0.0.1:9", constant(1, rate=1))
