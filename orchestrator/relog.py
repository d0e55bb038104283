"""Rebuild the tracking store's view of finished cells from the runs folder."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Tracking
from orchestrator import store
from orchestrator.paths import CellPaths, RunPaths, SweepPaths, holds_sweep
from orchestrator.tracking import Tracker

EXIT_INCOMPLETE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Relogged:
    """Numbers of cells of one sweep: logged now, logged before, without a result, and those that could not be."""

    added: int
    before: int
    unfinished: int
    problems: tuple[str, ...] = ()

    def sentence(self) -> str:
        text = f"{self.added} logged, {self.before} logged before, {self.unfinished} without a result"
        return "; ".join((text, *self.problems))


def relog(runs_folder: Path, tracking: Tracking) -> int:
    """Log every finished cell that is missing in the tracking store; a second time adds nothing.

    ``runs_folder`` is one sweep's folder or a folder of sweeps. Returns the exit code: 1 if something stays missing.

    Raises:
        ValueError: there is no sweep in that folder.
        TrackingUnavailableError: the store does not answer.
        SweepBusyError: the sweep is running.
    """
    folder = runs_folder.absolute()
    runs = RunPaths(folder.parent if holds_sweep(folder) else folder)
    sweeps = [runs.sweep(folder.name)] if holds_sweep(folder) else list(runs.sweeps())
    if not sweeps:
        raise ValueError(
            f"relog must name a runs folder or a sweep in it, found no sweep.yaml or cell in {folder}"
        )
    with Tracker.open(tracking, runs_dir=runs.root) as tracker:
        done = {paths.name: relog_sweep(paths, tracker) for paths in sweeps}
    for name, counts in done.items():
        print(f"{name}: {counts.sentence()}")
    return EXIT_INCOMPLETE if tracker.not_logged or any(counts.problems for counts in done.values()) else 0


def relog_sweep(paths: SweepPaths, tracker: Tracker) -> Relogged:
    """Log one sweep's missing cells."""
    with store.sole_owner(paths):
        results, problems = _read(paths)
        logged = tracker.logged_cells(paths.name)
        missing = {
            cell: result
            for cell, result in results.items()
            if (str(result.get("cell_key")), str(result.get("started_at"))) not in logged
        }
        unfinished = sum(1 for _ in paths.cells()) - len(results) - len(problems)
        parent = tracker.sweep_status(paths.name)
        tracker.close_stale(paths.name)
        added = 0
        if missing or parent in {None, "RUNNING"}:
            tracker.take_up(paths.name, params={"sweep": paths.name})
            added = sum(
                tracker.finish_cell(None, result, cell) is not None for cell, result in missing.items()
            )
            counts = _counts(results.values(), unfinished=unfinished)
            tracker.finish_sweep(status="KILLED" if unfinished or problems else "FINISHED", counts=counts)
    before = len(results) - len(missing)
    return Relogged(added=added, before=before, unfinished=unfinished, problems=tuple(problems))


def _read(paths: SweepPaths) -> tuple[dict[CellPaths, dict[str, Any]], list[str]]:
    """Results by cell, and a sentence for each that is damaged."""
    results: dict[CellPaths, dict[str, Any]] = {}
    problems: list[str] = []
    for cell in paths.cells():
        try:
            result = store.read_result(cell.result)
        except store.DamagedFileError as error:
            problems.append(str(error))
            continue
        if result is not None:
            results[cell] = result
    return results, problems


def _counts(results: Collection[Mapping[str, Any]], *, unfinished: int) -> dict[str, int]:
    states = [store.state(result) for result in results]
    counts = {name: states.count(name) for name in ("valid", "invalid", "failed")}
    done = counts["valid"] + counts["invalid"]
    return counts | {"not_started": unfinished, "done": done, "total": len(states) + unfinished}
