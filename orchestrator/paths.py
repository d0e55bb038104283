"""Every path of the runs folder, in one place.

runs/<sweep>/sweep.yaml  plan.json  events.jsonl  tracking.json
runs/<sweep>/<cell>/cell.yaml  evidence.json  arrivals.parquet  records.parquet  timeseries.parquet
                    server.log  environment.txt  client.json  result.json  attempts/<n>/
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

CELL_FILE = "cell.yaml"
RESULT_FILE = "result.json"


class _Cell(Protocol):
    @property
    def folder(self) -> str: ...


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The runs folder and what lies beside it. ``root`` may be relative to the working directory."""

    root: Path

    def sweep(self, name: str) -> "SweepPaths":
        """The folder of one sweep."""
        return SweepPaths(self.root, name)

    def sweeps(self) -> Iterator["SweepPaths"]:
        """Every sweep on disk, by name."""
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        return (self.sweep(folder.name) for folder in folders if holds_sweep(folder))

    @property
    def database(self) -> Path:
        """The default tracking store, absolute."""
        return self.root.absolute().parent / "mlflow.db"

    @property
    def artifacts(self) -> Path:
        """Where a local tracking store keeps artifacts, absolute."""
        return self.root.absolute().parent / "mlartifacts"


@dataclass(frozen=True, slots=True)
class SweepPaths:
    """The folder of one sweep below ``runs_dir``.

    Raises:
        ValueError: ``name`` is not one plain folder name.
    """

    runs_dir: Path
    name: str

    def __post_init__(self) -> None:
        if self.name in {"", ".", ".."} or "/" in self.name or "\0" in self.name:
            raise ValueError(
                f"sweep.name must be one folder name, got {self.name!r} (no '/', not '.' or '..')"
            )

    @property
    def root(self) -> Path:
        return self.runs_dir / self.name

    @property
    def sweep_yaml(self) -> Path:
        """Grid and base configuration, for people."""
        return self.root / "sweep.yaml"

    @property
    def plan_json(self) -> Path:
        return self.root / "plan.json"

    @property
    def events(self) -> Path:
        """Attempts with their causes, one JSON object a line, appended as they happen."""
        return self.root / "events.jsonl"

    @property
    def tracking(self) -> Path:
        """The identity under which the tracking store knows this folder."""
        return self.root / "tracking.json"

    @property
    def lock(self) -> Path:
        return self.root / ".lock"

    def cell(self, cell: _Cell | str) -> "CellPaths":
        """The folder of a cell, given the cell or its folder name."""
        return CellPaths(self.root / (cell if isinstance(cell, str) else cell.folder))

    def cells(self) -> Iterator["CellPaths"]:
        """Every cell on disk, by folder name."""
        folders = sorted(self.root.iterdir()) if self.root.is_dir() else []
        return (CellPaths(folder) for folder in folders if (folder / CELL_FILE).is_file())


@dataclass(frozen=True, slots=True)
class CellPaths:
    """The folder of one cell."""

    root: Path

    @property
    def name(self) -> str:
        return self.root.name

    @property
    def cell_yaml(self) -> Path:
        """The resolved cell; can be run again from here."""
        return self.root / CELL_FILE

    @property
    def result(self) -> Path:
        """Written last; the cell is finished when it is there."""
        return self.root / RESULT_FILE

    @property
    def evidence(self) -> Path:
        return self.root / "evidence.json"

    @property
    def arrivals(self) -> Path:
        return self.root / "arrivals.parquet"

    @property
    def records(self) -> Path:
        return self.root / "records.parquet"

    @property
    def timeseries(self) -> Path:
        return self.root / "timeseries.parquet"

    @property
    def server_log(self) -> Path:
        return self.root / "server.log"

    @property
    def environment(self) -> Path:
        """The freeze of the engine environment."""
        return self.root / "environment.txt"

    @property
    def client(self) -> Path:
        """What the load generator says about itself."""
        return self.root / "client.json"

    @property
    def attempts(self) -> Path:
        """What earlier attempts left behind, in numbered folders."""
        return self.root / "attempts"


def holds_sweep(folder: Path) -> bool:
    """True if the folder is one sweep rather than a folder of sweeps."""
    return (folder / "sweep.yaml").is_file() or any(folder.glob(f"*/{CELL_FILE}"))
