"""The generator process: ``python -m workers.load.generate JOB.json``.

Speaks JSON lines on stdout (``ready``, ``started``, ``progress``, ``finished``, or ``failed`` with a class and a
message) and waits for a line ``go [t0_ns]`` on stdin, which is also its lifeline: when stdin closes, it ends.
Writes ``records.parquet`` and ``client.json`` into the job's folder.
"""

import asyncio
import gc
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from analysis.records import Record, write_records
from workers.errors import ClientLimitError
from workers.load.client import START_DELAY_NS, ClientStats, LoadSpec, peak_open_streams
from workers.load.limits import ensure_descriptors
from workers.load.payload import http_request
from workers.load.sender import Flight, Sender, Window
from workers.load.stream import parse_stream
from workers.load.workload import Request, read_arrivals

PROGRESS_NS = 1_000_000_000


def main(argv: Sequence[str]) -> int:
    """Run one job; 0 = every request is over (also failed ones), 2 = it could not start, 3 = the lifeline closed."""
    job = json.loads(Path(argv[0]).read_text())
    if job["cpu_affinity"] is not None:
        os.sched_setaffinity(0, job["cpu_affinity"])
    spec = LoadSpec.from_json(job["load"])
    requests = read_arrivals(Path(spec.arrivals))[job["shard"] :: job["num_shards"]]
    try:
        ensure_descriptors(min(len(requests), spec.max_concurrency or len(requests)))
        flights = [_flight(request, spec=spec) for request in requests]
    except (ClientLimitError, ValueError) as error:
        _say("failed", **{"class": type(error).__name__, "message": str(error)})
        return 2
    outcome = uvloop.run(_run(spec, flights))
    if outcome is None:
        return 3
    t0_ns, windows = outcome
    over_cpu_s = time.process_time()
    records = [
        record_of(flight, request=request, phase=spec.phase, t0_ns=t0_ns)
        for flight, request in zip(flights, requests, strict=True)
    ]
    out_dir = Path(job["out_dir"])
    write_records(out_dir / "records.parquet", records)
    (out_dir / "client.json").write_text(json.dumps(asdict(_stats(windows, records, over_cpu_s=over_cpu_s))))
    _say("finished")
    return 0


def record_of(flight: Flight, *, request: Request, phase: str, t0_ns: int) -> Record:
    """Parse what came back; stamps become relative to ``t0_ns``."""
    parsed = parse_stream(flight.reads, transport_error=flight.error)

    def since(stamp: int | None) -> int | None:
        return None if stamp is None else stamp - t0_ns

    token_ns = tuple([stamp - t0_ns for stamp in parsed.token_ns])
    closed_ns = flight.closed_ns if flight.sent_ns is not None else None
    return Record(
        index=flight.index,
        phase=phase,
        due_ns=flight.due_ns - t0_ns,
        queued_ns=since(flight.queued_ns),
        sent_ns=since(flight.sent_ns),
        first_token_ns=token_ns[0] if token_ns else None,
        first_answer_ns=since(parsed.first_answer_ns),
        last_token_ns=token_ns[-1] if token_ns else None,
        done_ns=since(parsed.done_ns if parsed.error is None else closed_ns),
        token_ns=token_ns,
        num_prompt_tokens_requested=request.num_prompt_tokens,
        num_prompt_tokens=parsed.num_prompt_tokens,
        num_output_tokens_requested=request.num_output_tokens,
        num_output_tokens=parsed.num_output_tokens,
        num_output_tokens_source=parsed.num_output_tokens_source,
        num_output_tokens_client=parsed.num_output_tokens_client,
        finish_reason=parsed.finish_reason,
        http_status=parsed.http_status,
        error=parsed.error,
        text=parsed.text,
    )


async def _run(spec: LoadSpec, flights: list[Flight]) -> tuple[int, list[Window]] | None:
    """Wait for the word, send everything; None if the lifeline closed first."""
    stdin = await _stdin()
    host, port = spec.address
    timeout_ns = round(spec.request_timeout_s * 1e9)
    progress = _Progress()
    sender = Sender(
        host=host,
        port=port,
        timeout_ns=timeout_ns,
        max_concurrency=spec.max_concurrency,
        on_tick=progress.tick,
    )
    progress.sender = sender
    try:
        if flights:
            await sender.prepare(flights)
        _say("ready")
        word, _, t0_text = (await stdin.readline()).decode().partition(" ")
        if word.strip() != "go":
            return None
        t0_ns = int(t0_text) if t0_text else time.perf_counter_ns() + START_DELAY_NS
        _say("started", t0_ns=t0_ns, wall=time.time() + (t0_ns - time.perf_counter_ns()) / 1e9)
        work = asyncio.ensure_future(_send(sender, flights, phase=spec.phase, t0_ns=t0_ns))
        lifeline = asyncio.ensure_future(stdin.read())
        await asyncio.wait([work, lifeline], return_when=asyncio.FIRST_COMPLETED)
        lifeline.cancel()
        if not work.done():
            work.cancel()
            return None
        return t0_ns, work.result()
    finally:
        sender.close()


async def _send(sender: Sender, flights: list[Flight], *, phase: str, t0_ns: int) -> list[Window]:
    """Send with the collector off: a pause of the collector would be booked as the server's."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        if phase == "measured":
            for flight in flights:
                flight.due_ns += t0_ns
            return [await sender.run(flights)]
        windows = []
        for _, members in groupby(flights, key=lambda flight: flight.due_ns):
            group = list(members)
            now = time.perf_counter_ns()
            for flight in group:
                flight.due_ns = now
            windows.append(await sender.run(group))
        return windows
    finally:
        gc.enable()


class _Progress:
    """Says once a second how far the sender is."""

    def __init__(self) -> None:
        self.sender: Sender | None = None
        self._due_ns = 0

    def tick(self) -> None:
        now = time.perf_counter_ns()
        if now >= self._due_ns and self.sender is not None:
            self._due_ns = now + PROGRESS_NS
            _say("progress", sent=self.sender.num_sent, done=self.sender.num_done)


def _flight(request: Request, *, spec: LoadSpec) -> Flight:
    return Flight(index=request.index, due_ns=request.due_ns, payload=http_request(request, spec=spec))


def _stats(windows: Sequence[Window], records: Sequence[Record], *, over_cpu_s: float) -> ClientStats:
    delays_ms = np.array([delay for window in windows for delay in window.loop_delays_ns] or [0]) / 1e6
    p50, p99, worst = np.percentile(delays_ms, [50, 99, 100]).tolist()
    wall_s = sum(window.wall_ns for window in windows) / 1e9
    cpu_s = sum(window.cpu_s for window in windows)
    return ClientStats(
        cpu_share=cpu_s / wall_s if wall_s else 0.0,
        cpu_s=cpu_s,
        after_cpu_s=time.process_time() - over_cpu_s,
        loop_delay_ms={"p50": p50, "p99": p99, "max": worst},
        peak_open_streams=peak_open_streams(records),
        num_connections=windows[-1].num_connections if windows else 0,
        num_processes=1,
    )


async def _stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    return reader


def _say(event: str, **values: Any) -> None:
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
