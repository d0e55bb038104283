"""Run one stored cell again and set old and new side by side, with every drift named."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from conf.schema import Config, Rerun
from orchestrator import store
from orchestrator.expand import Cell
from orchestrator.paths import RESULT_FILE, SweepPaths
from orchestrator.run import run_sweep
from orchestrator.summary import COLUMNS, UNKNOWN, number, wide_console

# Facts whose change means that the re-run measured something else; pids, ports and times differ by nature.
DRIFT_FACTS = (
    "server.version",
    "server.commit",
    "server.attention_backend",
    "server.dtype",
    "server.kv_cache_dtype",
    "server.kv_cache_tokens",
    "server.kv_cache_blocks",
    "server.block_size",
    "server.prefix_caching",
    "server.max_model_len",
    "environment.sha256",
    "environment.torch",
    "host.name",
    "host.kernel",
    "host.cpu_model",
    "device0.name",
    "device0.driver",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One thing that differs between the original run and the new one."""

    name: str
    old: Any
    new: Any


def rerun(cell: Cell, config: Config, *, original: Path) -> int:
    """Run ``cell`` (loaded from ``original``, a cell.yaml) and compare with the result stored beside that file.

    Returns the exit code of the run; a drift is named, not an error.
    """
    before = store.read_result(original.parent / RESULT_FILE)
    code = run_sweep([cell], replace(config, rerun=Rerun.all))
    paths = SweepPaths(Path(config.runs_dir), str(config.sweep.name))
    after = store.read_result(paths.cell(cell).result)
    print_comparison(before, after, original=original)
    return code


def drifts(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Drift]:
    """What differs: the workload hash, the metrics version, and every fact in ``DRIFT_FACTS``."""
    found = [
        Drift(name=name, old=old.get(name), new=new.get(name))
        for name in ("workload_hash", "cell_key", "metrics_version")
        if old.get(name) != new.get(name)
    ]
    before, after = old.get("server") or {}, new.get("server") or {}
    found += [
        Drift(name=name, old=before.get(name), new=after.get(name))
        for name in DRIFT_FACTS
        if before.get(name) != after.get(name)
    ]
    return found


def comparison_table(old: Mapping[str, Any], new: Mapping[str, Any]) -> Table:
    """The main figures of both runs and their ratio."""
    table = Table(header_style="bold")
    for title in ("", "original", "again", "ratio"):
        table.add_column(title, justify="right" if title else "left")
    for title, key in COLUMNS:
        before, after = (old.get("metrics") or {}).get(key), (new.get("metrics") or {}).get(key)
        table.add_row(title, number(before), number(after), ratio(before, after))
    return table


def ratio(before: float | None, after: float | None) -> str:
    """``after / before`` with two decimals; a dash when it is not defined."""
    return UNKNOWN if before is None or after is None or before == 0 else f"{after / before:.2f}"


def print_comparison(
    old: Mapping[str, Any] | None,
    new: Mapping[str, Any] | None,
    *,
    original: Path,
    console: Console | None = None,
) -> None:
    """Print old beside new, then each drift; say so when there is nothing to compare with."""
    console = console or wide_console()
    if old is None or new is None:
        missing = f"no {RESULT_FILE} beside {original}" if old is None else "the new run left no result"
        console.print(f"nothing to compare: {missing}", markup=False, highlight=False, soft_wrap=True)
        return
    console.print(comparison_table(old, new))
    for line in drift_lines(drifts(old, new)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def drift_lines(found: Sequence[Drift]) -> list[str]:
    """One sentence per drift, or the sentence that there is none."""
    if not found:
        return ["same workload, same engine facts as the original"]
    return [f"drift: {drift.name} was {drift.old!r}, is {drift.new!r}" for drift in found]
