"""Rebuild the tracking store's view of finished cells from the runs folder."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.schema import Tracking
from orchestrator import store
from orchestrator.paths import CellPaths, RunPaths, SweepPaths, holds_sweep
from orchestrator.tracking import Tracker, TrackingUnavailableError

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
    """Log one sweep's missing cells and end its run."""
    with store.sole_owner(paths):
        found = _find(paths, tracker)
        parent = tracker.sweep_status(paths.name)
        tracker.close_stale(paths.name)
        added = 0
        if found.missing or parent in {None, "RUNNING"}:
            tracker.take_up(paths.name, params={"sweep": paths.name})
            added = _add(found, tracker)
            whole = not found.unfinished and not found.problems
            counts = _counts(found.results.values(), unfinished=found.unfinished)
            tracker.finish_sweep(status="FINISHED" if whole else "KILLED", counts=counts)
    before = len(found.results) - len(found.missing)
    return Relogged(added=added, before=before, unfinished=found.unfinished, problems=found.problems)


def log_missing(paths: SweepPaths, tracker: Tracker) -> int:
    """Within a running sweep: log what the store missed, now or in an earlier command; returns the number of cells.

    Leaves everything as it is if the store still fails.
    """
    try:
        return _add(_find(paths, tracker), tracker)
    except TrackingUnavailableError:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """A sweep on disk: results by cell, those that the store lacks, number of cells without one, damaged files."""

    results: Mapping[CellPaths, Mapping[str, Any]]
    missing: Mapping[CellPaths, Mapping[str, Any]]
    unfinished: int
    problems: tuple[str, ...]


def _find(paths: SweepPaths, tracker: Tracker) -> _Found:
    results: dict[CellPaths, dict[str, Any]] = {}
    problems: list[str] = []
    unfinished = 0
    for cell in paths.cells():
        try:
            result = store.read_result(cell.result)
        except store.DamagedFileError as error:
            problems.append(str(error))
            continue
        if result is None:
            unfinished += 1
        else:
            results[cell] = result
    logged = tracker.logged_cells(paths.name)
    missing = {cell: result for cell, result in results.items() if _identity(result) not in logged}
    return _Found(results=results, missing=missing, unfinished=unfinished, problems=tuple(problems))


def _identity(result: Mapping[str, Any]) -> tuple[str, str]:
    return str(result.get("cell_key")), str(result.get("started_at"))


def _add(found: _Found, tracker: Tracker) -> int:
    return sum(tracker.finish_cell(None, result, cell) is not None for cell, result in found.missing.items())


def _counts(results: Collection[Mapping[str, Any]], *, unfinished: int) -> dict[str, int]:
    states = [store.state(result) for result in results]
    counts = {name: states.count(name) for name in ("valid", "invalid", "failed")}
    done = counts["valid"] + counts["invalid"]
    return counts | {"not_started": unfinished, "done": done, "total": len(states) + unfinished}
