"""The time series and the window's two ends."""

import asyncio

import pytest

from workers import scrape
from workers.families import FAMILIES
from workers.http_call import Answer
from workers.prometheus import HistogramDelta, ServerWindow
from workers.scrape import Row, Scraper, Snapshot

V1 = FAMILIES["v1"]
TEXT = (
    'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_waiting{engine="0"} 1.0\n'
    'vllm:kv_cache_usage_perc{engine="0"} 0.5\nvllm:num_preemptions_total{engine="0"} 4.0\n'
)


class Answers:
    """Stands in for the HTTP call: one scripted answer per call (text, status or error), and the paths asked for."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.paths = []

    async def __call__(self, target, *, timeout_s):
        self.paths.append(target.path)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return (
            Answer(status=answer, body=b"")
            if isinstance(answer, int)
            else Answer(status=200, body=answer.encode())
        )


def run(scraper: Scraper, *, samples: int) -> None:
    async def steps():
        for _ in range(samples):
            await scraper._sample()

    asyncio.run(steps())


def scraper(monkeypatch, answers: Answers, **options) -> Scraper:
    monkeypatch.setattr(scrape, "call", answers)
    ticks = iter(range(1_000, 10_000, 1_000))
    return Scraper("http://h:1/", family=V1, interval_s=0.5, clock_ns=lambda: next(ticks), **options)


def test_rows_are_long_format_on_the_clock_of_the_run(monkeypatch):
    sampler = scraper(monkeypatch, Answers(TEXT))
    run(sampler, samples=1)
    assert sampler.rows(start_ns=400) == [
        Row(t_ns=600, source="server", name="running", value=2.0),
        Row(t_ns=600, source="server", name="waiting", value=1.0),
        Row(t_ns=600, source="server", name="kv_usage_max", value=0.5),
        Row(t_ns=600, source="server", name="kv_usage_mean", value=0.5),
        Row(t_ns=600, source="server", name="preemptions", value=4.0),
    ]


def test_a_failed_scrape_is_a_counted_gap(monkeypatch):
    """Three scrapes of which one fails give two points, never a zero."""
    sampler = scraper(monkeypatch, Answers(TEXT, TimeoutError("no answer"), TEXT))
    run(sampler, samples=3)
    running = [row.t_ns for row in sampler.rows(start_ns=0) if row.name == "running"]
    assert running == [1_000, 3_000]
    assert sampler.failed == 1


def test_only_the_needed_names_are_asked_for(monkeypatch):
    answers = Answers(TEXT)
    run(scraper(monkeypatch, answers), samples=1)
    assert answers.paths[0].startswith("/metrics/?name[]=vllm%3Anum_requests_running&")


def test_a_server_that_cannot_select_is_asked_for_everything(monkeypatch):
    answers = Answers(404, TEXT, TEXT)
    sampler = scraper(monkeypatch, answers)
    run(sampler, samples=2)
    assert answers.paths[1:] == ["/metrics"] * 2
    assert sampler.failed == 0


def test_host_samples_share_the_series(monkeypatch):
    class Host:
        def sample(self):
            return {"host_cpu_share": 0.25}

    sampler = scraper(monkeypatch, Answers(TEXT), host=Host())
    run(sampler, samples=1)
    assert Row(t_ns=1_000, source="host", name="host_cpu_share", value=0.25) in sampler.rows(start_ns=0)


def test_run_stops_when_told(monkeypatch):
    async def steps():
        sampler = scraper(monkeypatch, Answers(TEXT))
        stop = asyncio.Event()
        task = asyncio.create_task(sampler.run(stop))
        await asyncio.sleep(0)
        stop.set()
        await task
        return sampler

    assert len(asyncio.run(steps()).rows(start_ns=0)) == 5


def test_a_failed_snapshot_has_no_text_and_says_why(monkeypatch):
    sampler = scraper(monkeypatch, Answers(ConnectionRefusedError("refused")))
    snapshot = asyncio.run(sampler.snapshot())
    assert snapshot == Snapshot(t_ns=1_000, text=None, error="refused")
    assert snapshot.samples == []


def test_a_window_with_a_failed_end_knows_nothing():
    """A failed scrape is not zero preemptions."""
    before = Snapshot(t_ns=0, text=TEXT)
    after = Snapshot(t_ns=1, text=None, error="refused")
    window = scrape.server_window(before, after, family=V1, jit_events=())
    assert scrape.server_metrics(window, [])["preemptions/total"] is None
    assert window.gauges_before["running"] == 2


def test_metrics_of_a_window():
    window = ServerWindow(
        counters={"preemptions": 7.0, "prefix_queries": 100.0, "prefix_hits": 25.0},
        histograms={"queue": HistogramDelta(sum=1.5, count=10), "ttft": HistogramDelta(sum=0.0, count=0)},
        gauges_before={},
    )
    rows = [
        Row(t_ns=t, source="server", name=name, value=value)
        for t, name, value in [
            (-5, "waiting", 100.0), (0, "waiting", 1.0), (10, "waiting", 3.0), (11, "waiting", 100.0),
            (0, "kv_usage_max", 0.5), (10, "kv_usage_max", 0.9), (0, "kv_usage_mean", 0.4), (10, "kv_usage_mean", 0.6),
        ]
    ]  # fmt: skip
    found = scrape.server_metrics(window, rows, start_ns=0, end_ns=10)
    assert found["preemptions/total"] == 7
    assert found["prefix_cache/hit_share"] == 0.25
    assert found["queue_time_ms/mean"] == pytest.approx(150)
    assert found["server_ttft_ms/mean"] is None
    assert (found["waiting/mean"], found["waiting/max"]) == (2, 3)
    assert (found["kv_usage/mean"], found["kv_usage/max"]) == (0.5, 0.9)
    assert found["running/mean"] is None


def test_timeseries_round_trip(tmp_path):
    rows = [Row(t_ns=-3, source="host", name="host_cpu_share", value=0.5)]
    scrape.write_timeseries(tmp_path / "t.parquet", rows)
    assert scrape.read_timeseries(tmp_path / "t.parquet") == rows


def test_requests_in_the_system_are_running_and_waiting_at_one_scrape():
    """A scrape that gave only one of the two says nothing."""
    rows = [
        Row(t_ns=1, source="server", name="running", value=2.0),
        Row(t_ns=1, source="server", name="waiting", value=3.0),
        Row(t_ns=2, source="server", name="running", value=9.0),
        Row(t_ns=3, source="host", name="running", value=9.0),
    ]
    assert scrape.in_system(rows) == [(1, 5.0)]
