"""How far launches of one cell lie apart."""

import pytest

from analysis.noise import Run, noise_floor, noise_metrics, spread


def run(ttft, tpot=10.0, *, asked=None, workload="w"):
    metrics = {"ttft_ms/p50": ttft, "tpot_ms/mean": tpot}
    return Run(asked=asked or {}, workload_hash=workload, metrics=metrics)


def test_spread_of_known_values():
    """90, 100, 110: mean 100, sample deviation 10."""
    found = spread([90.0, 100.0, 110.0])
    assert found.cv == pytest.approx(0.1)
    assert found.max_over_min == pytest.approx(110 / 90)
    assert (found.launches, found.mean_ms) == (3, 100.0)


def test_two_values_and_unknown_ones_are_no_spread():
    """None is no zero: it neither counts nor widens the spread."""
    assert spread([1.0, 2.0]) is None
    assert spread([1.0, None, 2.0]) is None
    assert spread([5.0, None, 5.0, 5.0]).cv == 0.0


def test_only_identical_runs_are_one_group():
    """Another setting or another workload is no noise."""
    same = [run(100 + i) for i in range(3)]
    other = [run(900.0, asked={"kv.dtype": "fp8"}), run(900.0, workload="v"), run(900.0, workload=None)]
    (floor,) = noise_floor([*same, *other])
    assert (floor.launches, floor.ttft.mean_ms, floor.tpot.cv) == (3, 101.0, 0.0)


def test_metrics_are_the_largest_of_all_groups():
    quiet = [run(100.0, tpot) for tpot in (9.0, 10.0, 11.0)]
    loud = [run(ttft, asked={"rate": 4}) for ttft in (90.0, 100.0, 110.0)]
    found = noise_metrics(noise_floor([*quiet, *loud]))
    assert found == pytest.approx({"noise/ttft_cv": 0.1, "noise/tpot_cv": 0.1})
    assert noise_metrics(noise_floor(loud[:2])) == {}
    assert "noise/tpot_cv" not in noise_metrics(noise_floor([run(t, None) for t in (1.0, 2.0, 3.0)]))
