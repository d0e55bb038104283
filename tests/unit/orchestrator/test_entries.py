"""What MLflow is told about a cell."""

import math

import pytest
from fakes.cells import FAILED, INVALID, fake_config, fake_result

from conf.schema import Load
from orchestrator import entries
from orchestrator.store import plain_config


def test_axes_and_usual_settings_are_parameters():
    """An unset setting is left out, a group axis shows its option, infinity is the text inf."""
    settings = plain_config(fake_config(load=Load(rate_per_s=math.inf)))
    found = entries.params(
        settings, axes={"engine": "vllm_0_32", "load.rate_per_s": math.inf, "load.slo.ttft_ms": 50}
    )
    assert found["engine"] == "vllm_0_32"
    assert found["engine.version"] == "0.32.0"
    assert found["load.rate_per_s"] == "inf"
    assert found["load.slo.ttft_ms"] == "50"
    assert found["kv.prefix_caching"] == "false"
    assert "sparsity.target" not in found
    assert 20 <= len(found) <= 30


def test_missing_and_non_finite_numbers_are_no_metrics():
    """A store would make 1.797e308 of infinity; a truth value is no number."""
    result = fake_result(
        "a", metrics={"x": math.inf, "y": math.nan, "z": -math.inf, "ok": 2, "none": None, "flag": True}
    )
    assert entries.metrics(result) == {"ok": 2.0, "timing/start_s": 3.5, "timing/measured_s": 10.0}


def test_server_facts_are_tags_and_the_compared_ones_parameters():
    result = fake_result(
        "a", server={"version": "0.32.0", "server.kv_cache_tokens": 64, "pid": 7, "commit": None}
    )
    found = entries.tags(result)
    assert (found["server.version"], found["server.kv_cache_tokens"], found["server.pid"]) == (
        "0.32.0",
        "64",
        "7",
    )
    assert "server.commit" not in found
    assert entries.reported_params(result) == {"server.version": "0.32.0", "server.kv_cache_tokens": "64"}


def test_verdict_tags_name_the_reasons():
    valid, invalid = entries.tags(fake_result("a")), entries.tags(fake_result("a", **INVALID))
    assert valid["verdict"] == "valid"
    assert "verdict.reasons" not in valid
    assert (invalid["verdict"], invalid["verdict.reasons"]) == ("invalid", "send_lag")
    assert invalid["verdict.details"] == "send_lag: 30 ms > 20 ms"
    failed = entries.tags(fake_result("a", **FAILED))
    assert (failed["verdict"], failed["error.class"], failed["error.message"]) == (
        "failed",
        "died",
        "the server ended",
    )


def test_long_text_is_cut_visibly():
    assert entries.shorten("abcdef", limit=6) == "abcdef"
    assert entries.shorten("abcdefg", limit=6) == "abcde…"
    tag = entries.tags(fake_result("a", error={"class": "x", "message": "y" * 9000}))["error.message"]
    assert len(tag) == 8000
    assert tag.endswith("y…")


def test_names_hold_only_what_stores_accept():
    assert entries.key("a[0]@(b)/c d.e-f:g") == "a_0___b_/c d.e-f:g"
    assert len(entries.key("x" * 300)) == 250


def test_series_of_the_server_are_drawn_thinned():
    """At most 1000 points of each series, first and last kept."""
    usage = [
        {"t_ns": n * 1_000_000, "source": "server", "name": "kv_usage_max", "value": n / 1999}
        for n in range(2000)
    ]
    other = [
        {"t_ns": 5_400_000, "source": "server", "name": "running", "value": 3.0},
        {"t_ns": 1, "source": "host", "name": "running", "value": 9.0},
        {"t_ns": 1, "source": "server", "name": "waiting", "value": math.nan},
        {"t_ns": 1, "source": "server", "name": "prompt_tokens", "value": 1.0},
    ]
    points = entries.series(usage + other)
    drawn = [point for point in points if point.name == "ts/kv_usage_max"]
    assert len(drawn) == 1000
    assert (drawn[0].step_ms, drawn[-1].step_ms, drawn[-1].value) == (0, 1999, 1.0)
    rest = [(point.name, point.step_ms, point.value) for point in points if point not in drawn]
    assert rest == [("ts/running", 5, 3.0)]


@pytest.mark.parametrize(
    ("axes", "expected"),
    [({"kv.dtype": "fp8", "load.rate_per_s": 4.0}, "dtype=fp8, rate_per_s=4.0"), ({}, "cell-a")],
)
def test_a_run_is_named_by_its_axes(axes, expected):
    assert entries.title(axes=axes, folder="cell-a") == expected


def test_times_come_from_the_result():
    """2026-01-02T03:04:05Z is 1767323045 s; an end before the start cannot be."""
    result = fake_result("a")
    assert entries.times_ms(result, written_ms=1767323050000) == (1767323045000, 1767323050000)
    assert entries.times_ms(result, written_ms=5) == (1767323045000, 1767323045000)
    assert entries.times_ms({}, written_ms=5) == (5, 5)
