"""Which engines to start for which cells, in which order, and about how long that takes.

Cells that share everything the engine sees form one launch. Launches are shuffled in blocks, one block per repeat, so
that a machine that drifts does not drift along a factor; sentinel launches stay first and last.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from conf.schema import ArrivalKind, Config, Engine, HardwareKind, Load
from conf.validate import bounds
from orchestrator.expand import Cell
from orchestrator.identity import Memo, launch_key

# What a step takes, in seconds, by kind of hardware: measured on 2 cores with a 135M model and vLLM 0.32, and a
# guess for GPUs. The plan is an estimate; results carry the measured times.
ENVIRONMENT_S = {HardwareKind.cpu: 60.0, HardwareKind.cuda: 240.0}
ENGINE_START_S = {HardwareKind.cpu: 35.0, HardwareKind.cuda: 60.0}
ENGINE_STOP_S = 3.0
DRAIN_S = 5.0  # between the last arrival and the last answer
REQUEST_S = 2.0  # one request at warm-up, or in a burst
TRACE_S = 600.0  # a trace without num_requests or duration_s is not read for an estimate

# Launches printed in full; the rest is counted.
MAX_ROWS = 40

# Says whether an engine's environment is on disk already.
IsReady = Callable[[Engine, HardwareKind], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One running engine and the cells it serves, in order."""

    key: str
    label: str
    cells: tuple[Cell, ...]

    @property
    def estimate_s(self) -> float:
        """Start, warm-up and window of every cell, stop."""
        kind = self.cells[0].config.hardware.kind
        return ENGINE_START_S[kind] + sum(cell_s(cell.config) for cell in self.cells) + ENGINE_STOP_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Launches in the order in which they start."""

    launches: tuple[Launch, ...]
    environments: tuple[str, ...] = ()  # engines whose environment has to be built first
    environments_s: float = 0.0
    slots: int = 1

    @property
    def num_cells(self) -> int:
        """Cells over all launches."""
        return sum(len(launch.cells) for launch in self.launches)

    @property
    def estimate_s(self) -> float:
        """Environments, then the launches spread over the slots."""
        return self.environments_s + sum(launch.estimate_s for launch in self.launches) / self.slots


def plan(
    cells: Sequence[Cell], *, seed: int = 0, shuffle: bool = True, is_ready: IsReady | None = None
) -> Plan:
    """Group cells into launches and order them; the same cells and seed give the same order.

    ``is_ready`` lets the estimate leave out environments that are there; without it none is counted.
    """
    blocks = _blocks(_launches(cells))
    ordered = [
        launch
        for number, block in blocks.items()
        for launch in (_shuffled(block, seed=seed, block_number=number) if shuffle else block)
    ]
    missing = _missing(cells, is_ready) if is_ready else {}
    return Plan(
        launches=tuple(ordered),
        environments=tuple(missing),
        environments_s=sum(missing.values()),
        slots=cells[0].config.hardware.engine_slots if cells else 1,
    )


def cell_s(config: Config) -> float:
    """Seconds one cell takes on a running engine: warm-up, arrivals, drain."""
    return warmup_s(config) + window_s(config.load) + DRAIN_S


def warmup_s(config: Config) -> float:
    """Seconds of warm-up: one request after another per shape, then one batch."""
    warmup = config.load.warmup
    _, longest = bounds(config.workload.input)
    shapes = 1 + sum(edge < (longest or config.engine.max_model_len) for edge in warmup.shape_edges)
    return REQUEST_S * (warmup.requests_per_shape * shapes + math.ceil(warmup.concurrent / 4))


def window_s(load: Load) -> float:
    """Seconds of arrivals."""
    ends = [load.duration_s] if load.duration_s is not None else []
    if load.num_requests is not None:
        at_once = load.arrival is ArrivalKind.burst or math.isinf(load.rate_per_s)
        ends.append(load.num_requests * (REQUEST_S if at_once else 1 / load.rate_per_s))
    return min(ends, default=TRACE_S)


def render(plan: Plan) -> RenderableType:
    """The plan for ``dry_run``: launches in order with their cells and minutes, environments, the total."""
    table = Table(box=None, pad_edge=False)
    for name in ("#", "launch", "cells", "min"):
        table.add_column(name, justify="left" if name in {"launch", "cells"} else "right", overflow="fold")
    for number, launch in enumerate(plan.launches[:MAX_ROWS], start=1):
        table.add_row(str(number), launch.label, _cells_text(launch), f"{launch.estimate_s / 60:.1f}")
    hidden = len(plan.launches) - MAX_ROWS
    more = [Text(f"... and {hidden} more launches")] if hidden > 0 else []
    return Group(table, *more, Text(""), *(Text(line) for line in _totals(plan)))


def _totals(plan: Plan) -> list[str]:
    lines = []
    if plan.environments:
        minutes = f"{plan.environments_s / 60:.1f} min"
        lines.append(f"environments to build: {', '.join(plan.environments)} ({minutes})")
    launches = _count(len(plan.launches), "launch")
    lines.append(
        f"{_count(plan.num_cells, 'cell')} in {launches} on {_count(plan.slots, 'slot')}, "
        f"about {math.ceil(plan.estimate_s / 60)} min"
    )
    return lines


def _count(number: int, noun: str) -> str:
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{'' if number == 1 else plural}"


def _cells_text(launch: Launch) -> str:
    return " | ".join(_own_text(cell) or "one" for cell in launch.cells)


def _own_text(cell: Cell) -> str:
    return ", ".join(f"{axis}={value}" for axis, value in cell.axes.items() if _asked(axis))


def _label(cell: Cell) -> str:
    """The axes that the engine sees, or the engine's name."""
    config = cell.config
    parts = [str(value) for axis, value in cell.axes.items() if not _asked(axis)] or [config.engine.name]
    parts += [f"repeat {config.repeat}"] if config.repeat else []
    parts += [f"sentinel {config.sentinel}"] if config.sentinel is not None else []
    return " ".join(parts)


def _asked(axis: str) -> bool:
    return axis.partition(".")[0] in {"load", "workload", "seed"}


def _launches(cells: Iterable[Cell]) -> list[Launch]:
    memo: Memo = {}
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(launch_key(cell.config, memo=memo), []).append(cell)
    return [
        Launch(key=key, label=_label(members[0]), cells=tuple(members)) for key, members in groups.items()
    ]


def _blocks(launches: Iterable[Launch]) -> dict[int, list[Launch]]:
    """Launches by block, in order: the opening sentinel, one block per repeat, the closing sentinel."""
    blocks: dict[tuple[int, int], list[Launch]] = {}
    for launch in launches:
        config = launch.cells[0].config
        place = {None: 1, 0: 0}.get(config.sentinel, 2)
        blocks.setdefault((place, config.repeat), []).append(launch)
    return {number: blocks[block] for number, block in enumerate(sorted(blocks))}


T = TypeVar("T")


def _shuffled(block: Sequence[Launch], *, seed: int, block_number: int) -> list[Launch]:
    rng = np.random.default_rng([seed, block_number])
    return [
        Launch(key=launch.key, label=launch.label, cells=tuple(_permuted(launch.cells, rng)))
        for launch in _permuted(block, rng)
    ]


def _permuted(items: Sequence[T], rng: np.random.Generator) -> list[T]:
    return [items[position] for position in rng.permutation(len(items))]


def _missing(cells: Iterable[Cell], is_ready: IsReady) -> dict[str, float]:
    """Engine name → seconds to build its environment, for those that are not there."""
    engines = {(cell.config.engine.name, cell.config.hardware.kind): cell.config.engine for cell in cells}
    return {
        name: ENVIRONMENT_S[kind] for (name, kind), engine in engines.items() if not is_ready(engine, kind)
    }
