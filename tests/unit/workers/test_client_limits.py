"""Descriptor limits, request bytes, and what the caller computes around the generator."""

import json
import resource

import pytest

from analysis.records import Record
from conf.schema import Endpoint
from workers.errors import ClientLimitError
from workers.load.client import ClientStats, LoadSpec, _num_processes, merge_stats, peak_open_streams
from workers.load.limits import MARGIN, ensure_descriptors
from workers.load.payload import http_request
from workers.load.workload import Request


@pytest.fixture
def limits(monkeypatch):
    """A fake of the process's limits: a mutable [soft, hard]."""
    values = [64, 64]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(values))
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: values.__setitem__(slice(None), pair))
    return values


def test_a_hard_limit_below_the_need_is_named(limits):
    """B3: limit and need are in the sentence."""
    with pytest.raises(
        ClientLimitError, match=rf"100 streams at once need {100 + MARGIN} .*, the hard limit is 64:"
    ):
        ensure_descriptors(100)
    assert limits == [64, 64]


def test_the_soft_limit_is_raised_to_the_need(limits):
    """B3: no further than needed."""
    limits[:] = [64, 4096]
    ensure_descriptors(100)
    assert limits == [100 + MARGIN, 4096]


@pytest.mark.parametrize(
    "start", [(1024, 1024), (1024, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2]
)
def test_a_sufficient_limit_stays(limits, start):
    """Infinity is -1 here, and no small number."""
    limits[:] = start
    ensure_descriptors(100)
    assert tuple(limits) == start


SPEC = LoadSpec(arrivals="a", base_url="http://127.0.0.1:8000", model="m", temperature=0.5)


def request(**kw):
    return Request(**({"index": 7, "due_ns": 0, "prompt_text": "é", "num_output_tokens": 5} | kw))


def parts(data):
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    return lines[0], dict(line.split(": ", 1) for line in lines[1:]), body


def test_completions_request():
    """Token ids go as ids; lengths are forced; usage is always asked for."""
    line, headers, body = parts(http_request(request(prompt_text=None, prompt_token_ids=(3, 4)), spec=SPEC))
    assert line == "POST /v1/completions HTTP/1.1"
    assert int(headers["content-length"]) == len(body)
    assert (headers["host"], headers["x-request-id"]) == ("127.0.0.1:8000", "measured-7")
    assert json.loads(body) == {
        "model": "m", "prompt": [3, 4], "max_tokens": 5, "min_tokens": 5, "ignore_eos": True, "temperature": 0.5,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_chat_request_with_natural_stops():
    """The limit is only a limit; nothing that only vLLM knows is sent."""
    spec = LoadSpec(arrivals="a", base_url="http://h:1", model="m", endpoint=Endpoint.chat, ignore_eos=False)
    line, headers, body = parts(http_request(request(), spec=spec))
    assert line == "POST /v1/chat/completions HTTP/1.1"
    assert int(headers["content-length"]) == len(body)
    assert json.loads(body) == {
        "model": "m", "messages": [{"role": "user", "content": "é"}], "max_tokens": 5, "temperature": 0.0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_chat_cannot_take_token_ids():
    """Refused before anything is sent."""
    spec = LoadSpec(arrivals="a", base_url="http://h:1", model="m", endpoint=Endpoint.chat)
    with pytest.raises(ValueError, match="request 7 has token ids, the chat route takes text"):
        http_request(request(prompt_text=None, prompt_token_ids=(3,)), spec=spec)


@pytest.mark.parametrize("url", ["https://h:1", "http://h", "http://h:1/v1", "h:1", ""])
def test_base_url_is_host_and_port(url):
    """Anything else is named."""
    with pytest.raises(ValueError, match="base_url must look like http://host:port"):
        LoadSpec(arrivals="a", base_url=url, model="m")


def test_unknown_phase():
    with pytest.raises(ValueError, match="phase must be warmup or measured, got 'cold'"):
        LoadSpec(arrivals="a", base_url="http://h:1", model="m", phase="cold")


def test_spec_survives_json():
    """What the child reads is what the parent meant."""
    assert LoadSpec.from_json(json.loads(json.dumps(SPEC.to_json()))) == SPEC


def record(sent, done):
    return Record(index=0, phase="measured", due_ns=0, sent_ns=sent, done_ns=done)


def test_peak_of_open_streams():
    """[0, 10), [5, 15), [10, 20): two at once; a stream that ends where one begins does not overlap it."""
    assert peak_open_streams([record(0, 10), record(5, 15), record(10, 20), record(None, None)]) == 2
    assert peak_open_streams([]) == 0


@pytest.mark.parametrize(
    ("rate_per_s", "tokens", "cores", "want"),
    [(100, 100, 8, 1), (200, 100, 8, 2), (200, 100, 1, 1), (1000, 100, 8, 7), (float("inf"), 100, 8, 1)],
)
def test_processes_follow_the_event_rate(rate_per_s, tokens, cores, want):
    """15,000 events per second each, at most one a core: 10k → 1, 20k → 2, 100k → 7."""
    gap_ns = 1e9 / rate_per_s
    requests = [request(index=i, due_ns=round(i * gap_ns), num_output_tokens=tokens) for i in range(1000)]
    assert _num_processes(requests, cores=cores) == want


def test_the_worst_process_counts():
    """Shares and delays: the maximum; times and counts: the sum."""

    def one(share, delay):
        delays = {"p50": delay, "p99": delay, "max": delay}
        return ClientStats(cpu_share=share, cpu_s=1.0, after_cpu_s=0.5, loop_delay_ms=delays, peak_open_streams=9,
                           num_connections=4, num_processes=1)  # fmt: skip

    merged = merge_stats([one(0.2, 3.0), one(0.4, 1.0)], [record(0, 10)])
    assert (merged.cpu_share, merged.cpu_s, merged.after_cpu_s) == (0.4, 2.0, 1.0)
    assert merged.loop_delay_ms == {"p50": 3.0, "p99": 3.0, "max": 3.0}
    assert (merged.peak_open_streams, merged.num_connections, merged.num_processes) == (1, 8, 2)
