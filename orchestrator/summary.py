"""The end of a sweep on the terminal: the result table, the failures, and where the time went."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from analysis.noise import Floor, Run, Spread, noise_floor

PHASES = ("environment_s", "model_s", "start_s", "probe_s", "warmup_s", "measured_s", "stop_s")
PHASE_NAMES = {
    "environment_s": "environments",
    "model_s": "model",
    "start_s": "engine starts",
    "probe_s": "output probes",
    "warmup_s": "warm-up",
    "measured_s": "measured",
    "stop_s": "engine stops",
}
COLUMNS = (
    ("TTFT p50 ms", "ttft_ms/p50"),
    ("TTFT p99 ms", "ttft_ms/p99"),
    ("TPOT mean ms", "tpot_ms/mean"),
    ("E2EL mean ms", "e2el_ms/mean"),
    ("preempt.", "preemptions/total"),
    ("KV tokens", "kv_cache/tokens"),
)
FILE_WIDTH = 160
UNKNOWN = "-"
MARKER = {"valid": "valid", "invalid": "INVALID", "failed": "FAILED"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CellOutcome:
    """One cell's result as the summary needs it."""

    axes: Mapping[str, Any]
    result: Mapping[str, Any]
    folder: Path

    @property
    def state(self) -> str:
        """valid, invalid or failed."""
        if self.result["outcome"] != "done":
            return "failed"
        return "valid" if self.result["verdict"]["valid"] else "invalid"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeSpent:
    """Seconds of slot time by phase; ``rest_s`` is what no phase accounts for."""

    phases: Mapping[str, float]
    wall_s: float
    num_slots: int

    @property
    def rest_s(self) -> float:
        """Slot seconds outside of every phase: the orchestrator's own overhead and idle slots."""
        return max(0.0, self.wall_s * self.num_slots - sum(self.phases.values()))


def add_timing(total: Mapping[str, float], timing: Mapping[str, float | None]) -> dict[str, float]:
    """The sum, phase by phase; a phase that did not happen adds nothing."""
    return {phase: total.get(phase, 0.0) + (timing.get(phase) or 0.0) for phase in PHASES}


def outcome_line(outcome: CellOutcome) -> str:
    """One line for one ended cell: axes, main figures, verdict."""
    axes = " ".join(f"{key}={value}" for key, value in outcome.axes.items()) or outcome.folder.name
    if outcome.state == "failed":
        error = outcome.result["error"]
        return f"{axes}: FAILED ({error['class']}) {error['message']} · log: {outcome.folder / 'server.log'}"
    metrics = outcome.result["metrics"]
    figures = (
        f"ttft_p50={number(metrics.get('ttft_ms/p50'))} ms tpot={number(metrics.get('tpot_ms/mean'))} ms"
    )
    return f"{axes}: {MARKER[outcome.state]} {figures}{reasons(outcome)}"


def reasons(outcome: CellOutcome) -> str:
    """`` · name, name`` of the verdict, and whether the run was saturated; empty when there is nothing to say."""
    names = list(dict.fromkeys(reason["name"] for reason in outcome.result["verdict"]["reasons"]))
    if outcome.result["metrics"].get("run/saturated") == 1.0:
        names.append("saturated")
    return f" · {', '.join(names)}" if names else ""


def number(value: float | None) -> str:
    """A figure with about three digits; a dash for unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def result_table(outcomes: Sequence[CellOutcome]) -> Table:
    """Axes, latencies, preemptions, KV tokens and verdict, one row per cell."""
    axes = list(dict.fromkeys(axis for outcome in outcomes for axis in outcome.axes))
    table = Table(title=None, header_style="bold", expand=False)
    for axis in axes:
        table.add_column(axis.rsplit(".", 1)[-1], overflow="fold")
    for title, _ in COLUMNS:
        table.add_column(title, justify="right")
    table.add_column("verdict", overflow="fold")
    for outcome in outcomes:
        metrics = outcome.result.get("metrics") or {}
        row = [str(outcome.axes.get(axis, "")) for axis in axes]
        row += [number(metrics.get(key)) for _, key in COLUMNS]
        row.append(verdict_cell(outcome))
        table.add_row(*row, style=None if outcome.state == "valid" else "yellow")
    return table


def verdict_cell(outcome: CellOutcome) -> str:
    """The verdict with its reasons; a failure with its class."""
    if outcome.state == "failed":
        return f"FAILED {outcome.result['error']['class']}"
    return MARKER[outcome.state] + reasons(outcome)


def print_summary(
    outcomes: Sequence[CellOutcome],
    *,
    time_spent: TimeSpent,
    links: Sequence[str],
    not_started: int,
    console: Console | None = None,
) -> None:
    """Print the table, every failure with its class and log path, the time table and the links."""
    console = console or wide_console()
    if outcomes:
        console.print(result_table(outcomes))
    for outcome in outcomes:
        if outcome.state == "failed":
            console.print(outcome_line(outcome), markup=False, highlight=False, soft_wrap=True)
    for note in notes(outcomes):
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    for line in noise_lines(outcomes):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if not_started:
        console.print(f"{not_started} cell{'' if not_started == 1 else 's'} not started")
    console.print(time_line(time_spent), markup=False, highlight=False, soft_wrap=True)
    for link in links:
        console.print(link, markup=False, highlight=False, soft_wrap=True)


def notes(outcomes: Sequence[CellOutcome]) -> list[str]:
    """Every warning once, with the cell it is about, or with the number of cells that share it."""
    cells: dict[str, list[str]] = {}
    for outcome in outcomes:
        for warning in outcome.result.get("warnings", ()):
            cells.setdefault(warning, []).append(outcome.folder.name)
    return [
        f"note: {names[0] if len(names) == 1 else f'{len(names)} cells'}: {warning}"
        for warning, names in cells.items()
    ]


def noise_lines(outcomes: Sequence[CellOutcome]) -> list[str]:
    """The spread between launches of identical cells, one line per group; none for a sweep without such cells."""
    runs = [
        Run(
            asked=outcome.axes,
            workload_hash=outcome.result.get("workload_hash"),
            metrics=outcome.result["metrics"],
        )
        for outcome in outcomes
        if outcome.state == "valid"
    ]
    return [noise_line(floor) for floor in noise_floor(runs)]


def noise_line(floor: Floor) -> str:
    """How far identical launches lie apart; a difference between arms below that is none."""
    axes = " ".join(f"{key}={value}" for key, value in floor.asked.items()) or "one cell"
    figures = ", ".join(
        f"{name} {spread_text(spread)}"
        for name, spread in (("TTFT p50", floor.ttft), ("TPOT mean", floor.tpot))
        if spread is not None
    )
    return f"noise floor, {floor.launches} launches of {axes}: {figures or UNKNOWN}"


def spread_text(spread: Spread) -> str:
    """``512 ms, CV 2.1 %, max/min 1.06``."""
    return f"{number(spread.mean_ms)} ms, CV {spread.cv * 100:.1f} %, max/min {spread.max_over_min:.2f}"


def wide_console() -> Console:
    """stdout; where it is no terminal, wide enough for a table that is read later."""
    console = Console()
    return console if console.is_terminal else Console(width=FILE_WIDTH)


def time_line(spent: TimeSpent) -> str:
    """Where the time went, in seconds and shares of all slot time."""
    total = spent.wall_s * spent.num_slots
    parts = [*((PHASE_NAMES[name], spent.phases.get(name, 0.0)) for name in PHASES), ("rest", spent.rest_s)]
    shown = [f"{name} {seconds:.0f} s ({seconds / total:.0%})" for name, seconds in parts if total > 0]
    return f"time: {spent.wall_s:.0f} s on {spent.num_slots} slot(s): " + ", ".join(shown)
