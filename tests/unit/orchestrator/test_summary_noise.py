"""What a sweep of identical cells says at its end, and that its cells are identical."""

from pathlib import Path

from fakes.cells import FAILED, INVALID, fake_result
from fakes.composed import cells_of

from conf.schema import ModelSource
from orchestrator.identity import launch_key, workload_hash
from orchestrator.plan import plan
from orchestrator.summary import CellOutcome, noise_lines
from workers.load.workload import build_requests


def outcomes(*ttfts, **values):
    return [
        CellOutcome(
            axes={"kv.dtype": "fp8"},
            result=fake_result(str(n), metrics={"ttft_ms/p50": ttft, "tpot_ms/mean": 10.0}, **values),
            folder=Path("runs"),
        )
        for n, ttft in enumerate(ttfts)
    ]


def test_the_spread_between_launches_is_one_line():
    """Failed and invalid cells are no part of it."""
    failed = CellOutcome(axes={}, result=fake_result("f", **FAILED), folder=Path("runs"))
    (line,) = noise_lines([*outcomes(90.0, 100.0, 110.0), *outcomes(9000.0, **INVALID), failed])
    assert line.startswith(
        "noise floor, 3 launches of kv.dtype=fp8: TTFT p50 100 ms, CV 10.0 %, max/min 1.22, "
    )
    assert line.endswith("TPOT mean 10 ms, CV 0.0 %, max/min 1.00")
    assert noise_lines(outcomes(90.0, 100.0)) == []


def test_aa_asks_the_same_of_six_launches():
    """Six cells, six launches, one workload: the same prompts at the same times."""
    cells = cells_of("+sweep=aa")
    assert len({cell.key for cell in cells}) == len({launch_key(cell.config) for cell in cells}) == 6
    assert len({workload_hash(cell.config) for cell in cells}) == 1
    requests = [
        build_requests(
            cell.config.workload, cell.config.load, seed=0, repeat=cell.config.draw, vocab_size=1000
        )
        for cell in cells
    ]
    assert all(other == requests[0] for other in requests[1:])
    assert plan(cells).estimate_s < 8 * 60
    assert cells[0].config.model.source is ModelSource.package


def test_repeats_of_other_sweeps_draw_anew():
    cells = cells_of("sweep.repeats=2")
    assert [cell.config.draw for cell in cells] == [0, 1]
    assert len({workload_hash(cell.config) for cell in cells}) == 2
