"""Which tracking store is used, whatever the shell says."""

import sqlite3
from pathlib import Path

import pytest

from orchestrator import address
from orchestrator.paths import RunPaths

RUNS = RunPaths(Path("/data/runs"))


@pytest.mark.parametrize(
    ("uri", "expected"),
    [
        (None, "sqlite:////data/mlflow.db"),
        ("sqlite:////x/my.db?timeout=9", "sqlite:////x/my.db?timeout=9"),
        ("http://host:5000", "http://host:5000"),
        ("https://u:p@host/mlflow", "https://u:p@host/mlflow"),
        ("postgresql+psycopg2://u:p@host/db", "postgresql+psycopg2://u:p@host/db"),
    ],
)
def test_addresses_that_can_be_used(uri, expected):
    assert address.resolve(uri, runs=RUNS) == expected


def test_relative_database_is_made_absolute():
    assert address.resolve("sqlite:///my.db", runs=RUNS) == f"sqlite:///{Path.cwd()}/my.db"


@pytest.mark.parametrize("uri", ["file:///x/mlruns", "./mlruns", "mlruns", "/x/mlruns"])
def test_plain_folder_is_refused_with_the_remedy(uri):
    with pytest.raises(
        ValueError, match=r"tracking\.uri must be a database or a server.*no longer takes plain folders"
    ):
        address.resolve(uri, runs=RUNS)


@pytest.mark.parametrize("uri", ["ftp://x", "sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_what_keeps_nothing_is_refused(uri):
    with pytest.raises(ValueError, match=r"tracking\.uri must"):
        address.resolve(uri, runs=RUNS)


def test_password_is_not_shown():
    assert address.shown("https://u:p@host/x") == "https://***@host/x"


def test_the_shells_choice_of_run_and_experiment_is_removed():
    """Credentials and time-outs of the user stay; telemetry is off."""
    environment = {
        "MLFLOW_RUN_ID": "p",
        "MLFLOW_EXPERIMENT_NAME": "x",
        "MLFLOW_TRACKING_URI": "http://elsewhere",
        "MLFLOW_TRACKING_TOKEN": "secret",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "7",
    }
    address.neutralise(environment)
    assert environment == address.QUIET | {
        "MLFLOW_TRACKING_TOKEN": "secret",
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "7",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    }


def test_database_file_is_found_in_its_address():
    assert address.sqlite_path("sqlite:////a b/x.db?timeout=3") == Path("/a b/x.db")
    assert address.sqlite_path("http://host") is None


def test_file_that_is_no_database_is_told(tmp_path):
    path = tmp_path / "x.db"
    path.write_bytes(b"no database" * 100)
    with pytest.raises(sqlite3.DatabaseError, match="not a database"):
        address.check_sqlite(path)


def test_folder_of_a_new_database_is_made(tmp_path):
    address.check_sqlite(tmp_path / "a" / "x.db")
    assert (tmp_path / "a").is_dir()
