"""Every path of the runs folder comes from one place."""

from pathlib import Path

import pytest

from orchestrator.paths import RunPaths, SweepPaths, holds_sweep


def test_cell_files_lie_in_the_cells_folder():
    cell = RunPaths(Path("runs")).sweep("ttft_grid").cell("a-1f")
    assert cell.result == Path("runs/ttft_grid/a-1f/result.json")
    assert cell.cell_yaml == Path("runs/ttft_grid/a-1f/cell.yaml")
    assert cell.timeseries == Path("runs/ttft_grid/a-1f/timeseries.parquet")
    assert cell.attempts == Path("runs/ttft_grid/a-1f/attempts")
    assert cell.name == "a-1f"


def test_tracking_store_lies_beside_the_runs_folder(tmp_path):
    """Absolute, since the store may be opened from another working directory."""
    paths = RunPaths(tmp_path / "runs")
    assert paths.database == tmp_path / "mlflow.db"
    assert paths.artifacts == tmp_path / "mlartifacts"
    assert RunPaths(Path("runs")).database == Path.cwd() / "mlflow.db"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/etc"])
def test_sweep_name_that_leaves_the_runs_folder_is_refused(name):
    with pytest.raises(ValueError, match=r"sweep\.name must be one folder name"):
        SweepPaths(Path("runs"), name)


def test_sweeps_and_cells_on_disk_are_found_in_order(tmp_path):
    """A folder without sweep.yaml or a cell is no sweep, one without cell.yaml no cell."""
    runs = RunPaths(tmp_path)
    for sweep, cell in (("b", "y"), ("b", "x"), ("a", "z")):
        folder = runs.sweep(sweep).cell(cell).root
        folder.mkdir(parents=True)
        (folder / "cell.yaml").touch()
    (tmp_path / "b" / "notes").mkdir()
    (tmp_path / "empty").mkdir()
    assert [sweep.name for sweep in runs.sweeps()] == ["a", "b"]
    assert [cell.name for cell in runs.sweep("b").cells()] == ["x", "y"]
    assert holds_sweep(tmp_path / "a")
    assert not holds_sweep(tmp_path)


def test_missing_runs_folder_holds_nothing(tmp_path):
    runs = RunPaths(tmp_path / "none")
    assert list(runs.sweeps()) == []
    assert list(runs.sweep("x").cells()) == []
