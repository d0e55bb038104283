"""What every test of the tracking store needs: a migrated database without the seconds that migrating takes."""

import functools
import os
import tempfile
from pathlib import Path

import pytest

from orchestrator import address
from orchestrator.paths import RunPaths

# MLflow and its dependencies warn about each other's coming changes, and MLflow leaves closing its pooled SQLite
# connections to the garbage collector; nothing in this project can be done about either.
FILTERS = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


def own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening a tracker changes the process environment; the test gets its own back at its end."""
    for name in (*address.AMBIENT, *address.QUIET, *address.PATIENCE):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def runs_with_database(folder: Path) -> RunPaths:
    """A runs folder beside a database that has its tables and no experiment of ours."""
    folder.mkdir(parents=True, exist_ok=True)
    runs = RunPaths(folder / "runs")
    runs.database.write_bytes(_migrated())
    return runs


@functools.cache
def _migrated() -> bytes:
    os.environ.update(address.QUIET)
    from mlflow import MlflowClient

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mlflow.db"
        MlflowClient(tracking_uri=f"sqlite:///{path}").get_experiment_by_name("none")
        return path.read_bytes()
