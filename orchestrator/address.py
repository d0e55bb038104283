"""Which tracking store a command uses, and the process environment under which it is used. No MLflow import."""

import re
import sqlite3
from collections.abc import MutableMapping
from pathlib import Path
from urllib.parse import urlsplit

from orchestrator.paths import RunPaths

SERVERS = ("http", "https", "databricks")
DATABASES = ("postgresql", "mysql", "mssql")
# Variables that would choose another run, experiment or store than the configuration does.
AMBIENT = (
    "MLFLOW_RUN_ID", "MLFLOW_EXPERIMENT_ID", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI",
    "MLFLOW_TRACKING_DIR", "MLFLOW_REGISTRY_DIR", "MLFLOW_RUN_CONTEXT", "MLFLOW_ENABLE_ASYNC_LOGGING",
    "MLFLOW_TRUNCATE_LONG_VALUES", "MLFLOW_ALLOW_FILE_STORE",
)  # fmt: skip
# No reports to third parties; no links and bars between the lines of a sweep.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}
# A store that hangs must not hold up a sweep for the minutes that MLflow's own defaults allow.
PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "20"}


def resolve(uri: str | None, *, runs: RunPaths) -> str:
    """The address with relative parts made absolute; None means ``mlflow.db`` beside the runs folder.

    Raises:
        ValueError: a plain folder, a database in memory, or something that is no address.
    """
    if uri is None:
        return f"sqlite:///{runs.database}"
    scheme = urlsplit(uri).scheme.partition("+")[0]
    if scheme == "sqlite":
        return _absolute(uri)
    if scheme in SERVERS or scheme in DATABASES or uri == "databricks":
        return uri
    raise ValueError(
        f"tracking.uri must be a database or a server, such as sqlite:////folder/mlflow.db or http://host:5000,"
        f" got {shown(uri)!r}"
        + (
            ": MLflow no longer takes plain folders; leave it out to use mlflow.db"
            if scheme in {"", "file"}
            else ""
        ),
    )


def sqlite_path(uri: str) -> Path | None:
    """The file behind a resolved SQLite address; None for any other."""
    return Path(uri.partition("?")[0].partition(":///")[2]) if uri.startswith("sqlite") else None


def check_sqlite(path: Path) -> None:
    """Make sure that the file can be opened as a database and written.

    Raises:
        sqlite3.Error: it cannot; the message says why.
        OSError: its folder cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=5.0, isolation_level=None)
    try:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("SELECT count(*) FROM sqlite_master")
        connection.execute("ROLLBACK")
    finally:
        connection.close()


def shown(uri: str) -> str:
    """The address without user name and password."""
    return re.sub(r"//[^@/]*@", "//***@", uri)


def neutralise(environment: MutableMapping[str, str]) -> None:
    """Remove what would redirect tracking, silence MLflow, and bound its patience unless the user has."""
    for name in AMBIENT:
        environment.pop(name, None)
    environment.update(QUIET)
    for name, value in PATIENCE.items():
        environment.setdefault(name, value)


def _absolute(uri: str) -> str:
    head, _, rest = uri.partition(":///")
    name, query, options = rest.partition("?")
    if not name or ":memory:" in name:
        raise ValueError(f"tracking.uri must name a file, such as sqlite:////folder/mlflow.db, got {uri!r}")
    return f"{head}:///{Path(name).expanduser().absolute()}{query}{options}"
