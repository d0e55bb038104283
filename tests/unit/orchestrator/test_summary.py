"""The end of a sweep in text: the table, the failures, the time."""

from pathlib import Path

from fakes.cells import FAILED, INVALID, fake_result
from rich.console import Console

from orchestrator.summary import (
    CellOutcome,
    TimeSpent,
    add_timing,
    notes,
    number,
    outcome_line,
    print_summary,
    time_line,
)


def outcome(name="c", *, axes=None, **values):
    return CellOutcome(axes=axes or {}, result=fake_result(name, **values), folder=Path("/runs/s") / name)


SPENT = TimeSpent(phases={"start_s": 30.0, "measured_s": 50.0}, wall_s=100.0, num_slots=1)


def printed(outcomes, *, not_started=0, links=()) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    with console.file:
        print_summary(outcomes, time_spent=SPENT, links=links, not_started=not_started, console=console)
        return console.export_text()


def test_three_states():
    """valid, invalid (kept, does not count), failed."""
    assert [outcome(**values).state for values in ({}, INVALID, FAILED)] == ["valid", "invalid", "failed"]


def test_a_failure_names_overrides_class_and_log():
    line = outcome_line(outcome(axes={"kv.dtype": "fp8", "load.rate_per_s": 4.0}, **FAILED))
    assert (
        line == "kv.dtype=fp8 load.rate_per_s=4.0: FAILED (died) the server ended · log: /runs/s/c/server.log"
    )


def test_a_measured_cell_shows_its_main_figures_and_reasons():
    """Unknown is a dash; a saturated run says so without being invalid."""
    metrics = {"ttft_ms/p50": 1234.5, "tpot_ms/mean": None, "run/saturated": 1.0}
    assert outcome_line(outcome(metrics=metrics)) == "c: valid ttft_p50=1,234 ms tpot=- ms · saturated"
    assert outcome_line(outcome(**INVALID)).endswith(" · send_lag")


def test_figures_have_three_digits():
    assert [number(value) for value in (None, 0.0, 0.12345, 12.345, 99.96, 1234567.8)] == [
        "-", "0", "0.123", "12.3", "100", "1,234,568",
    ]  # fmt: skip


def test_the_table_has_a_row_per_cell_and_a_column_per_axis():
    """An axis that a cell does not have is empty; failed cells have dashes, never zeros."""
    text = printed([outcome("a", axes={"kv.dtype": "fp8"}), outcome("b", axes={"engine": "e"}, **FAILED)])
    header, first, second = (line for line in text.splitlines() if line.startswith(("┃", "│")))
    assert [word.strip() for word in header.split("┃")][1:4] == ["dtype", "engine", "TTFT p50 ms"]
    assert [cell.strip() for cell in first.split("│")][1:4] == ["fp8", "", "12.5"]
    assert [cell.strip() for cell in second.split("│")][1:-1] == ["", "e", *["-"] * 6, "FAILED died"]


def test_failures_follow_the_table_and_links_come_last():
    text = printed([outcome("a", **FAILED)], not_started=1, links=("http://one", "http://two"))
    lines = text.rstrip().splitlines()
    assert lines[-5].startswith("a: FAILED (died)")
    assert lines[-4] == "1 cell not started"
    assert lines[-3].startswith("time: 100 s")
    assert lines[-2:] == ["http://one", "http://two"]


def test_text_of_users_is_not_markup():
    """Brackets in an axis value are printed as they are."""
    assert "x=[red]" in printed([outcome(axes={"x": "[red]"}, **FAILED)])


def test_a_shared_warning_is_one_line():
    both = [outcome(name, warnings=["small n"]) for name in "ab"]
    assert notes([*both, outcome("c", warnings=["other"])]) == ["note: 2 cells: small n", "note: c: other"]


def test_time_is_told_by_phase():
    """100 s on one slot: 30 + 50 in phases, 20 rest."""
    assert time_line(SPENT) == (
        "time: 100 s on 1 slot(s): environments 0 s (0%), model 0 s (0%), engine starts 30 s (30%), "
        "output probes 0 s (0%), warm-up 0 s (0%), measured 50 s (50%), engine stops 0 s (0%), rest 20 s (20%)"
    )


def test_rest_is_slot_time_and_never_negative():
    """Two slots of 10 s hold 20 s; phases of 25 s (clocks differ) leave none."""
    assert TimeSpent(phases={"start_s": 5.0}, wall_s=10.0, num_slots=2).rest_s == 15.0
    assert TimeSpent(phases={"start_s": 25.0}, wall_s=10.0, num_slots=2).rest_s == 0.0


def test_timings_add_up_phase_by_phase():
    """A phase that did not happen adds nothing; what is no phase is left out."""
    total = add_timing({"start_s": 1.0}, {"start_s": 2.0, "warmup_s": None, "evidence_s": 9.0})
    assert (total["start_s"], total["warmup_s"], "evidence_s" in total) == (3.0, 0.0, False)


def test_a_sweep_of_no_time_divides_by_nothing():
    assert time_line(TimeSpent(phases={}, wall_s=0.0, num_slots=1)).startswith("time: 0 s")
