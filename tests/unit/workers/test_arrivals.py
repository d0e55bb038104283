"""Due times: rates, spreads, ends, and that nothing but the generator decides them."""

import math

import numpy as np
import pytest

from conf.schema import ArrivalKind, Load
from workers.load.arrivals import arrival_offsets_ns

NS = 1_000_000_000


def offsets(arrival, *, seed=0, trace=None, **fields):
    load = Load(arrival=ArrivalKind(arrival), **fields)
    return arrival_offsets_ns(load, rng=np.random.default_rng(seed), trace_offsets_ns=trace)


def test_constant_is_evenly_spaced_from_zero():
    """Four per second: 0, 0.25, 0.5, 0.75, 1 s."""
    expected = [0, 250_000_000, 500_000_000, 750_000_000, 1_000_000_000]
    assert offsets("constant", rate_per_s=4, num_requests=5) == expected


def test_constant_does_not_drift():
    """Arrival 1,999 of 200/s is due at 9.995 s exactly."""
    assert offsets("constant", rate_per_s=200, num_requests=2_000)[-1] == 9_995_000_000


@pytest.mark.parametrize(
    ("rate", "duration", "count"), [(2.0, 3.0, 6), (3.0, 1.0, 3), (0.1, 5.0, 1), (2.0, 3.1, 7)]
)
def test_constant_arrivals_end_before_the_duration(rate, duration, count):
    """An arrival due exactly at the end is not in the run: 2/s for 3 s is 6 arrivals, the last at 2.5 s."""
    assert len(offsets("constant", rate_per_s=rate, duration_s=duration)) == count


@pytest.mark.parametrize(("burstiness", "variation"), [(0.5, 1.414), (1.0, 1.0), (2.0, 0.707)])
def test_gamma_gaps_have_the_asked_mean_and_spread(burstiness, variation):
    """Case B1: 10,000 gaps at 10/s -> mean 0.100 s +- 3 %, coefficient of variation 1 / sqrt(burstiness) +- 5 %."""
    times = offsets("gamma", rate_per_s=10, burstiness=burstiness, num_requests=10_000)
    gaps = np.diff([0, *times]) / NS
    assert gaps.mean() == pytest.approx(0.1, rel=0.03)
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.05)


def test_poisson_is_gamma_with_burstiness_one_whatever_burstiness_says():
    poisson = offsets("poisson", rate_per_s=10, burstiness=7, num_requests=50)
    assert poisson == offsets("gamma", rate_per_s=10, burstiness=1, num_requests=50)


@pytest.mark.parametrize("arrival", ["constant", "poisson", "gamma", "burst"])
def test_infinite_rate_is_a_burst(arrival):
    """Case B1: rate inf -> every offset 0."""
    assert offsets(arrival, rate_per_s=math.inf, num_requests=7) == [0] * 7


def test_burst_ignores_the_rate():
    assert offsets("burst", rate_per_s=3, num_requests=4) == [0] * 4


@pytest.mark.parametrize("arrival", ["poisson", "gamma", "constant"])
def test_offsets_are_ordered_whole_nanoseconds(arrival):
    times = offsets(arrival, rate_per_s=1_000, num_requests=3_000)
    assert times == sorted(times)
    assert {type(time) for time in times} == {int}


def test_duration_ends_random_arrivals():
    """100/s for 30 s: about 3,000, all before 30 s, the last one within a second of it."""
    times = offsets("poisson", rate_per_s=100, duration_s=30)
    assert len(times) == pytest.approx(3_000, rel=0.1)
    assert 29 * NS < times[-1] < 30 * NS


def test_count_and_duration_end_at_whichever_comes_first():
    by_count = offsets("poisson", rate_per_s=10, num_requests=5, duration_s=1_000)
    by_time = offsets("poisson", rate_per_s=10, num_requests=100_000, duration_s=2)
    assert len(by_count) == 5
    assert by_time[-1] < 2 * NS


def test_a_longer_run_begins_with_the_shorter_one():
    """1,500 arrivals take two blocks of draws; their first 700 are those of a run of 700."""
    long = offsets("gamma", rate_per_s=5, burstiness=0.7, num_requests=1_500)
    assert long[:700] == offsets("gamma", rate_per_s=5, burstiness=0.7, num_requests=700)


def test_twice_the_rate_halves_the_same_gaps():
    """Rates of a sweep see the same randomness."""
    slow = offsets("poisson", rate_per_s=1, num_requests=20)
    fast = offsets("poisson", rate_per_s=2, num_requests=20)
    assert fast == pytest.approx([time / 2 for time in slow], abs=1)


def test_trace_takes_its_own_times():
    trace = [0, 5, 5, 2 * NS]
    assert offsets("trace", trace=trace) == trace
    assert offsets("trace", trace=trace, num_requests=2) == [0, 5]
    assert offsets("trace", trace=trace, duration_s=2) == [0, 5, 5]


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
@pytest.mark.parametrize("key", ["rate_per_s", "burstiness"])
def test_values_that_are_not_positive_are_refused(key, value):
    """Case B1: burstiness 0 or negative is refused before launch."""
    with pytest.raises(ValueError, match=f"load.{key} must be > 0, got {value}"):
        offsets("gamma", **{"rate_per_s": 1, "num_requests": 1, key: value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"arrival": "poisson"}, "load.num_requests or load.duration_s must be set"),
        ({"arrival": "burst", "duration_s": 5.0}, "load.num_requests must be set for a burst"),
        ({"arrival": "poisson", "rate_per_s": math.inf, "duration_s": 5.0}, "must be set for a burst"),
        ({"arrival": "gamma", "burstiness": math.inf, "num_requests": 1}, "load.arrival=constant"),
        ({"arrival": "trace"}, "load.trace.path"),
        (
            {"arrival": "trace", "trace": [0, 1], "num_requests": 3},
            "must be <= 2, the rows of load.trace.path, got 3",
        ),
    ],
)
def test_impossible_loads_name_the_key(fields, message):
    with pytest.raises(ValueError, match=message):
        offsets(**fields)
