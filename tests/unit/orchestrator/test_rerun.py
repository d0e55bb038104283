"""Old and new side by side."""

import io
from pathlib import Path

from fakes.cells import FAILED, fake_result
from rich.console import Console

from orchestrator.rerun import Drift, drift_lines, drifts, print_comparison, ratio

ORIGINAL = Path("/runs/s/c/cell.yaml")


def facts(**changes):
    reported = {"server.version": "0.32.0", "host.name": "one", "process.pid": 1} | changes
    return fake_result("c", server=reported)


def printed(old, new) -> str:
    console = Console(file=io.StringIO(), width=160)
    print_comparison(old, new, original=ORIGINAL, console=console)
    return console.file.getvalue()


def test_what_differs_by_nature_is_no_drift():
    """Process ids and the like."""
    assert drifts(facts(), facts(**{"process.pid": 2})) == []


def test_every_drift_is_named_with_both_values():
    """Engine and host facts, the workload, the metric definitions; a fact that is gone is None."""
    old = facts(**{"device0.driver": "1"}) | {"workload_hash": "w1", "metrics_version": "1"}
    new = facts(**{"server.version": "0.31.0"}) | {"workload_hash": "w2", "metrics_version": "2"}
    assert drifts(old, new) == [
        Drift(name="workload_hash", old="w1", new="w2"),
        Drift(name="metrics_version", old="1", new="2"),
        Drift(name="server.version", old="0.32.0", new="0.31.0"),
        Drift(name="device0.driver", old="1", new=None),
    ]


def test_a_drift_is_a_sentence():
    assert drift_lines([]) == ["same workload, same engine facts as the original"]
    (line,) = drift_lines([Drift(name="host.name", old="one", new=None)])
    assert line == "drift: host.name was 'one', is None"


def test_ratios_exist_only_between_numbers():
    assert [ratio(2.0, 3.0), ratio(0.0, 1.0), ratio(None, 1.0), ratio(1.0, None)] == ["1.50", "-", "-", "-"]


def test_old_and_new_stand_side_by_side():
    """12.5 ms then, 25 ms now: ratio 2.00."""
    text = printed(facts(), facts() | {"metrics": {"ttft_ms/p50": 25.0}})
    (row,) = [line for line in text.splitlines() if "TTFT p50 ms" in line]
    assert [cell.strip() for cell in row.split("│")][1:5] == ["TTFT p50 ms", "12.5", "25", "2.00"]
    assert "same workload" in text


def test_a_failed_side_has_no_numbers():
    assert "12.5" not in printed(fake_result("c", **FAILED), fake_result("c", **FAILED))


def test_nothing_to_compare_is_said():
    """A downloaded cell.yaml without its result; a run that was interrupted."""
    assert printed(None, facts()).strip() == f"nothing to compare: no result.json beside {ORIGINAL}"
    assert printed(facts(), None).strip() == "nothing to compare: the new run left no result"
