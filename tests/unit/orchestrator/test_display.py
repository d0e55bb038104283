"""What stands on the screen while a sweep runs."""

import io

import pytest
from rich.console import Console

from orchestrator import display
from orchestrator.display import LiveDisplay, PlainDisplay, show
from workers.events import Phase


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(display.time, "monotonic", lambda: now[0])
    return now


def plain():
    text = io.StringIO()
    return text, PlainDisplay(Console(file=text, width=40), total=2)


def test_plain_output_has_a_line_per_phase(clock):
    """A phase that only counts up is repeated every 15 s."""
    text, shown = plain()
    for seconds, done in ((0, 1), (5, 2), (16, 9)):
        clock[0] = float(seconds)
        shown.launch("l", Phase(name="measure", cell="c", done=done, total=20), "cell-c")
    shown.launch("l", Phase(name="stop"), "launch")
    assert text.getvalue().splitlines() == ["cell-c · measure 1/20", "cell-c · measure 9/20", "launch · stop"]


def test_the_same_phase_of_the_next_cell_is_shown(clock):
    text, shown = plain()
    for cell in ("a", "b"):
        shown.launch("l", Phase(name="warm-up", cell=cell), cell)
    assert text.getvalue().splitlines() == ["a · warm-up", "b · warm-up"]


def test_a_launch_that_starts_again_is_shown_again(clock):
    text, shown = plain()
    for _ in range(2):
        shown.launch("l", Phase(name="start", detail="1 of 2"), "launch")
        shown.launch_over("l")
    assert text.getvalue().splitlines() == ["launch · start 1 of 2"] * 2


def test_cells_are_counted_and_long_lines_stay_whole():
    """Paths can be copied: nothing is wrapped, coloured or read as markup."""
    text, shown = plain()
    path = "/runs/[bold]/" + "x" * 60
    shown.cell_over(f"a: valid {path}")
    shown.cell_over("b: FAILED")
    assert text.getvalue().splitlines() == [f"cell 1/2 a: valid {path}", "cell 2/2 b: FAILED"]


def test_the_display_follows_the_terminal():
    """Live bars on a terminal, lines elsewhere."""
    with show(total=1, console=Console(file=io.StringIO())) as shown:
        assert isinstance(shown, PlainDisplay)
    with show(total=1, console=Console(file=io.StringIO(), force_terminal=True, width=100)) as shown:
        assert isinstance(shown, LiveDisplay)


def test_live_bars_come_and_go():
    """One bar for the sweep, one per slot; sentences and outcomes stay above them."""
    text = io.StringIO()
    with show(total=2, console=Console(file=text, force_terminal=True, width=120)) as shown:
        shown.launch("l", Phase(name="measure", cell="c", done=3, total=9), "cell-c")
        assert [task.description for task in shown._progress.tasks] == ["sweep", "cell-c · measure"]
        assert shown._progress.tasks[1].completed == 3
        shown.cell_over("c: valid [x]")
        shown.launch_over("l")
        shown.launch_over("l")
        shown.say("stopping")
        assert [(task.description, task.completed) for task in shown._progress.tasks] == [("sweep", 1)]
    assert "c: valid [x]" in text.getvalue()
    assert "stopping" in text.getvalue()
