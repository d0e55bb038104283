"""Draws of token counts."""

import numpy as np
import pytest

from conf.schema import Length, LengthKind
from workers.load.lengths import draw_lengths


def draw(kind, *, count=1_000, trace=None, seed=0, **fields):
    spec = Length(kind=LengthKind(kind), **fields)
    rng = np.random.default_rng(seed)
    return draw_lengths(spec, count=count, rng=rng, where="workload.input", trace_lengths=trace)


def test_fixed_repeats_its_value():
    assert draw("fixed", value=7, count=3) == [7, 7, 7]


def test_uniform_reaches_both_bounds_and_nothing_else():
    assert set(draw("uniform", min=3, max=5)) == {3, 4, 5}


def test_lognormal_has_its_median():
    """Half of the draws lie below ``value``: the median of 10,001 is 100 +- 3."""
    drawn = draw("lognormal", value=100, sigma=0.5, count=10_001)
    assert np.median(drawn) == pytest.approx(100, abs=3)


def test_lognormal_is_drawn_again_outside_its_range_and_never_clipped():
    """Clipping to 90..110 would put 46 % on each bound; of 2,000 draws inside 21 values each gets about 95."""
    drawn = draw("lognormal", value=100, sigma=1.0, min=90, max=110, count=2_000)
    values, counts = np.unique(drawn, return_counts=True)
    assert values.tolist() == list(range(90, 111))
    assert counts.max() < 170


def test_trace_gives_its_first_rows():
    assert draw("trace", trace=[5, 6, 7], count=2) == [5, 6]


@pytest.mark.parametrize(
    "fields",
    [{"kind": "uniform", "min": 1, "max": 900}, {"kind": "lognormal", "value": 50, "sigma": 1.0, "max": 60}],
)
def test_more_requests_begin_with_the_same_lengths(fields):
    """A run of 500 starts like a run of 100 of the same seed; every length is a plain whole number."""
    long = draw(**fields, count=500)
    assert long[:100] == draw(**fields, count=100)
    assert {type(length) for length in long} == {int}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "fixed"}, "workload.input.value must be set for kind=fixed"),
        ({"kind": "uniform", "min": 3}, "workload.input.max must be set for kind=uniform"),
        ({"kind": "uniform", "min": 9, "max": 3}, "1 <= min <= max, got min=9, max=3"),
        ({"kind": "lognormal", "value": 9}, "workload.input.sigma must be set for kind=lognormal"),
        ({"kind": "trace"}, "load.trace.path"),
        ({"kind": "trace", "trace": [1], "count": 2}, "has 1 rows, the load asks for 2"),
    ],
)
def test_incomplete_specs_name_the_key(fields, message):
    with pytest.raises(ValueError, match=message):
        draw(**fields)


def test_a_range_that_is_hardly_ever_hit_is_an_error():
    with pytest.raises(ValueError, match="only 0 fell inside min=900, max=901; widen the range"):
        draw("lognormal", value=10, sigma=0.1, min=900, max=901, count=1)
