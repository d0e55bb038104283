"""Which cells a repeated command runs."""

from dataclasses import dataclass

import pytest

from conf.schema import Rerun
from orchestrator.resume import decide


@dataclass(frozen=True)
class Keyed:
    key: str


CELLS = [Keyed("valid"), Keyed("new"), Keyed("failed"), Keyed("invalid")]
RESULTS = {
    "valid": {"outcome": "done", "verdict": {"valid": True}},
    "failed": {"outcome": "failed", "verdict": {"valid": False}},
    "invalid": {"outcome": "done", "verdict": {"valid": False}},
}


@pytest.mark.parametrize(
    ("rerun", "todo", "done"),
    [
        (Rerun.none, ["new"], ["valid", "failed", "invalid"]),
        (Rerun.failed, ["new", "failed", "invalid"], ["valid"]),
        (Rerun.all, ["valid", "new", "failed", "invalid"], []),
    ],
)
def test_rerun_chooses_which_finished_cells_run_again(rerun, todo, done):
    """A failed or invalid cell keeps its row unless asked for; the order of the sweep stays."""
    decision = decide(CELLS, RESULTS, rerun=rerun)
    assert [cell.key for cell in decision.todo] == todo
    assert [cell.key for cell in decision.done] == done
    assert (decision.num_failed, decision.num_invalid) == (1, 1)


def test_sentence_counts_what_stays_and_what_runs():
    sentence = decide(CELLS, RESULTS, rerun=Rerun.none).sentence()
    assert sentence == "3 done before (1 failed, 1 invalid; rerun=failed runs them again), 1 to run"
    assert decide(CELLS, RESULTS, rerun=Rerun.all).sentence() == "0 done before, 4 to run (3 of them again)"
    assert decide(CELLS, {}, rerun=Rerun.none).sentence() == "0 done before, 4 to run"


def test_a_finished_sweep_has_nothing_to_run():
    decision = decide(CELLS[:1], RESULTS, rerun=Rerun.failed)
    assert (decision.done, decision.todo) == ((Keyed("valid"),), ())


def test_result_without_verdict_is_not_valid():
    """An unreadable or old result is run again on rerun=failed, never taken for a good one."""
    decision = decide([Keyed("x")], {"x": {"outcome": "done"}}, rerun=Rerun.failed)
    assert [cell.key for cell in decision.todo] == ["x"]
