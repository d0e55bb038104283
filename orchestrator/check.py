"""``check=true``: can these cells run on this machine, and what would have to be mended?"""

import json
import re
import socket
import sqlite3
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from conf.schema import Config
from orchestrator import address
from orchestrator.expand import Cell
from orchestrator.paths import RunPaths
from workers import check, machine
from workers.cache import cache_root
from workers.check import Finding, Level

EXIT_BAD = 1
TIMEOUT_S = 1.0
DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}


def check_machine(cells: Sequence[Cell], config: Config) -> int:
    """Print one line per thing that a run needs; returns the exit code, 1 if something is bad."""
    configs = [cell.config for cell in cells]
    findings = check.check(configs, machine.observe(configs, cache=cache_root(config.cache_dir)))
    findings += [tracking(config), *ray_address(config.ray.address)]
    bad = sum(finding.level is Level.bad for finding in findings)
    print(check.render(findings))
    print(f"{bad} bad: these cells cannot all run here" if bad else f"ready for {len(cells)} cell(s)")
    return EXIT_BAD if bad else 0


def tracking(config: Config) -> Finding:
    """Whether the tracking store answers, without MLflow, whose import takes seconds; creates nothing."""
    uri = address.resolve(config.tracking.uri, runs=RunPaths(Path(config.runs_dir).absolute()))
    problem = tracking_problem(uri)
    shown = address.shown(uri)
    if problem is None:
        return Finding(level=Level.ok, name="tracking", text=shown)
    remedy = "start it, or choose another with tracking.uri"
    return Finding(level=Level.bad, name="tracking", text=f"{shown}: {problem}", remedy=remedy)


def tracking_problem(uri: str) -> str | None:
    """Why a resolved address cannot be used; None if it answers or nothing here can tell."""
    path = address.sqlite_path(uri)
    parts = urlsplit(uri)
    try:
        if path is not None:
            return _database_problem(path)
        if parts.scheme in {"http", "https"}:
            return _server_problem(uri)
        port = parts.port or DEFAULT_PORTS.get(parts.scheme.partition("+")[0])
        if parts.hostname and port:
            socket.create_connection((parts.hostname, port), timeout=TIMEOUT_S).close()
    except (OSError, sqlite3.Error) as error:
        return str(getattr(error, "reason", error))
    return None


def _database_problem(path: Path) -> str | None:
    if not path.exists():
        return machine.unwritable(path.parent)
    address.check_sqlite(path)
    return None


def _server_problem(uri: str) -> str | None:
    """MLflow's servers answer ``OK`` on ``/health``; one behind a path or a login may answer otherwise."""
    anonymous = re.sub(r"//[^@/]*@", "//", uri)
    try:
        with urllib.request.urlopen(f"{anonymous.rstrip('/')}/health", timeout=TIMEOUT_S):  # noqa: S310 - http(s) only
            return None
    except urllib.error.HTTPError as error:
        return None if error.code < 500 else f"answers HTTP {error.code}"


def ray_address(given: str | None) -> list[Finding]:
    """Whether something listens where an existing Ray cluster is said to be."""
    host, _, port = (given or "").removeprefix("ray://").rpartition(":")
    if given is None or not port.isdigit():
        return []
    try:
        socket.create_connection((host, int(port)), timeout=TIMEOUT_S).close()
    except OSError as error:
        text = f"{json.dumps(given)}: {error}"
        remedy = "start one with `ray start --head`, or leave ray.address unset"
        return [Finding(level=Level.bad, name="ray.address", text=text, remedy=remedy)]
    return [Finding(level=Level.ok, name="ray.address", text=f"{given} answers")]
