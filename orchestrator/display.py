"""What a person sees while a sweep runs: live bars on a terminal, one plain line per event elsewhere.

Everything goes to stderr; the result table goes to stdout (see ``summary``).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

from workers.events import Phase

PLAIN_REPEAT_S = 15.0  # a phase that only counts up is repeated at most this often in plain output


class Display(Protocol):
    """The driver's view of whatever shows progress."""

    def launch(self, key: str, phase: Phase, label: str) -> None:
        """A launch entered or advanced a phase; ``label`` names the cell or the launch."""

    def launch_over(self, key: str) -> None:
        """A launch left its slot."""

    def cell_over(self, line: str) -> None:
        """A cell ended; ``line`` says how."""

    def say(self, line: str) -> None:
        """A sentence that stays on the screen."""


class LiveDisplay:
    """rich bars: one for the sweep, one per live slot."""

    def __init__(self, progress: Progress, *, total: int) -> None:
        self._progress = progress
        self._sweep = progress.add_task("sweep", total=total, detail="")
        self._slots: dict[str, TaskID] = {}

    def launch(self, key: str, phase: Phase, label: str) -> None:
        """See Display."""
        if key not in self._slots:
            self._slots[key] = self._progress.add_task(label, total=None, detail="")
        self._progress.update(
            self._slots[key],
            description=f"{label} · {phase.name}",
            completed=phase.done or 0,
            total=phase.total,
            detail=phase.detail,
        )

    def launch_over(self, key: str) -> None:
        """See Display."""
        if key in self._slots:
            self._progress.remove_task(self._slots.pop(key))

    def cell_over(self, line: str) -> None:
        """See Display."""
        self._progress.advance(self._sweep)
        self._progress.console.print(line, highlight=False, markup=False)

    def say(self, line: str) -> None:
        """See Display."""
        self._progress.console.print(line, highlight=False, markup=False)


class PlainDisplay:
    """One line per event, for logs and pipes."""

    def __init__(self, console: Console, *, total: int) -> None:
        self._console = console
        self._total = total
        self._done = 0
        self._last: dict[str, tuple[str, str | None, float]] = {}

    def launch(self, key: str, phase: Phase, label: str) -> None:
        """See Display."""
        name, cell, when = self._last.get(key, ("", None, 0.0))
        now = time.monotonic()
        if (name, cell) == (phase.name, phase.cell) and now - when < PLAIN_REPEAT_S:
            return
        self._last[key] = (phase.name, phase.cell, now)
        count = f" {phase.done}/{phase.total}" if phase.total is not None else ""
        self.say(f"{label} · {phase.name}{count} {phase.detail}".rstrip())

    def launch_over(self, key: str) -> None:
        """See Display."""
        self._last.pop(key, None)

    def cell_over(self, line: str) -> None:
        """See Display."""
        self._done += 1
        self.say(f"cell {self._done}/{self._total} {line}")

    def say(self, line: str) -> None:
        """See Display."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def show(*, total: int, console: Console | None = None) -> Iterator[Display]:
    """The display that fits where stderr goes."""
    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield PlainDisplay(console, total=total)
        return
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}", style="dim"),
    )
    with Progress(*columns, console=console) as progress:
        yield LiveDisplay(progress, total=total)
