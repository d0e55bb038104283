"""Reading metrics: names, series, deltas."""

import pytest

from workers import prometheus
from workers.families import FAMILIES
from workers.prometheus import HistogramDelta, ServerWindow

V1 = FAMILIES["v1"]
V0 = FAMILIES["v0"]


def gauges(text, family=V1):
    return prometheus.gauges(prometheus.parse(text), family=family)


def window(before, after, family=V1) -> ServerWindow:
    return prometheus.window(prometheus.parse(before), prometheus.parse(after), family=family)


@pytest.mark.parametrize(
    ("text", "family"),
    [
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.31\n', V1),
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.31\n', V0),
        ('vllm:gpu_cache_usage_perc{model_name="m"} 0.31\nvllm:kv_cache_usage_perc{model_name="m"} 0.31\n', V1),
        ('vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.31\n', V1),
    ],
)  # fmt: skip
def test_kv_usage_under_any_of_its_names(text, family):
    """Old name, new name and both give 0.31; both never give 0.62 (D1)."""
    assert gauges(text, family)["kv_usage_max"] == 0.31


def test_an_absent_gauge_is_none_and_named():
    """No name present: missing, not 0 (D1)."""
    samples = prometheus.parse("vllm:num_requests_running 1.0\n")
    assert prometheus.gauges(samples, family=V1)["kv_usage_max"] is None
    assert "kv_usage" in prometheus.missing(samples, family=V1)
    assert "running" not in prometheus.missing(samples, family=V1)


def histogram(name, total, count):
    return (
        f"# TYPE {name} histogram\n"
        f'{name}_bucket{{engine="0",le="+Inf"}} {count}\n'
        f'{name}_sum{{engine="0"}} {total}\n{name}_count{{engine="0"}} {count}\n'
    )


@pytest.mark.parametrize("name", ["vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"])
def test_inter_token_latency_has_two_names(name):
    itl = window(histogram(name, 1.0, 10), histogram(name, 3.0, 20)).histograms["itl"]
    assert itl == HistogramDelta(sum=2.0, count=10)
    assert itl.mean == 0.2


def test_per_request_mean_does_not_replace_inter_token_latency():
    """vllm:request_time_per_output_token_seconds is another quantity (D1)."""
    name = "vllm:request_time_per_output_token_seconds"
    assert window(histogram(name, 1.0, 10), histogram(name, 3.0, 20)).histograms["itl"] is None


def preemptions(value, created="1.7769301736864786e+09"):
    return (
        "# TYPE vllm:num_preemptions_total counter\n"
        f'vllm:num_preemptions_total{{engine="0"}} {value}\n'
        "# TYPE vllm:num_preemptions_created gauge\n"
        f'vllm:num_preemptions_created{{engine="0"}} {created}\n'
    )


def test_counter_delta_ignores_created():
    """3 → 10 is 7, whatever the Unix time beside it says (D2)."""
    found = window(preemptions(3.0), preemptions(10.0))
    assert found.counters["preemptions"] == 7
    assert not found.restarted


@pytest.mark.parametrize(
    ("after", "created"),
    [(2.0, "1.7769301999999999e+09"), (2.0, "1.7769301736864786e+09"), (5.0, "1.7769301999999999e+09")],
)
def test_restart_is_seen_by_a_fall_or_by_a_later_creation(after, created):
    """Never -1 and never 1.7e9: a restart leaves no delta at all (D2)."""
    found = window(preemptions(3.0), preemptions(after, created))
    assert found.restarted
    assert found.counters["preemptions"] is None


@pytest.mark.parametrize(("before", "after"), [("", preemptions(0.0)), ("", ""), (preemptions(1.0), "")])
def test_a_counter_absent_at_either_end_is_unknown(before, after):
    """Absent is not 0 (D2)."""
    found = window(before, after)
    assert found.counters["preemptions"] is None
    assert not found.restarted


TWO_ENGINES = """
# HELP vllm:num_requests_waiting Number of requests waiting: 99
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 3.0
vllm:num_requests_waiting{engine="1"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 3.0
vllm:num_requests_waiting_by_reason{engine="1",reason="capacity"} 0.0
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} 0.0
vllm:num_requests_waiting_by_reason{engine="1",reason="deferred"} 0.0
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0"} 2.0
vllm:num_preemptions_total{engine="1"} 1.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:kv_cache_usage_perc{engine="1"} 0.5
"""


def test_series_of_several_engines():
    """Waiting 3 (not 6), preemptions 3, KV max 0.50 and mean 0.375, never 0.75 (D3)."""
    found = gauges(TWO_ENGINES)
    assert found["waiting"] == 3
    assert found["kv_usage_max"] == 0.5
    assert found["kv_usage_mean"] == 0.375
    before = TWO_ENGINES.replace("} 2.0", "} 0.0").replace("} 1.0", "} 0.0")
    assert window(before, TWO_ENGINES).counters["preemptions"] == 3


def test_one_engine_that_restarts_is_a_restart():
    after = TWO_ENGINES.replace('preemptions_total{engine="1"} 1.0', 'preemptions_total{engine="1"} 0.0')
    assert window(TWO_ENGINES, after.replace("} 2.0", "} 9.0")).restarted


def test_an_engine_that_vanishes_is_a_restart():
    after = TWO_ENGINES.replace('vllm:num_preemptions_total{engine="1"} 1.0\n', "")
    assert window(TWO_ENGINES, after).restarted


def completed(**by_reason):
    lines = "".join(
        f'vllm:request_success_total{{engine="0",finished_reason="{reason}"}} {value}\n'
        for reason, value in by_reason.items()
    )
    return f"# TYPE vllm:request_success_total counter\n{lines}"


def test_aborted_requests_are_not_completed():
    before, after = completed(stop=1, length=1, abort=1), completed(stop=2, length=5, abort=4, error=2)
    assert window(before, after).counters["completed"] == 5


def test_prefix_hit_share_over_two_cells():
    """0/0 → 131072/0 → 262144/124518 is 0.0 % and 95.0 % (B5)."""

    def scrape(queries, hits):
        return f"vllm:prefix_cache_queries_total {queries}\nvllm:prefix_cache_hits_total {hits}\n"

    first = window(scrape(0, 0), scrape(131072, 0))
    second = window(scrape(131072, 0), scrape(262144, 124518))
    assert first.prefix_hit_share == 0.0
    assert second.prefix_hit_share == pytest.approx(0.95, abs=5e-4)
    assert window("", "").prefix_hit_share is None
    assert window(scrape(5, 0), scrape(5, 0)).prefix_hit_share is None


def test_info_labels_of_the_first_engine():
    text = (
        'vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="90"} 1.0\n'
        'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="91"} 1.0\n'
    )
    assert prometheus.info_labels(prometheus.parse(text), family=V1)["num_gpu_blocks"] == "91"
    assert prometheus.info_labels([], family=V1) is None


def test_kept_lines_are_those_of_the_names_alone():
    keep = prometheus.keep_lines(["vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"])
    kept = keep(TWO_ENGINES.encode()).decode()
    assert kept.count("\n") == 4
    assert gauges(kept)["waiting"] == 3
