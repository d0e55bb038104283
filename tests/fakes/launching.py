"""Server specifications that start the stub engine."""

import os
from pathlib import Path

from fakes import stub

from workers.server import ServerSpec


def stub_spec(folder: Path, script: stub.Script | None = None, **changes) -> ServerSpec:
    """A spec with short times; ``changes`` replace its fields. Log, working folder and ports live in ``folder``."""
    cwd = folder / "cwd"
    cwd.mkdir(exist_ok=True)
    values = {
        "argv_for_port": stub.argv,
        "env": {"PATH": os.environ["PATH"], **stub.environment(script or stub.Script())},
        "log_path": folder / "server.log",
        "cwd": cwd,
        "model": "stub",
        "start_timeout_s": 15.0,
        "stop_grace_s": 1.0,
        "ports_folder": None,
    }
    return ServerSpec(**(values | changes))
