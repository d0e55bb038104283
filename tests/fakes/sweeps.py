"""Whole sweeps through the real command line, on stub engines: a user's configuration folder, and what came of it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from fakes import stub
from fakes.mlflow_store import runs_with_database
from fakes.stub import Script

REPOSITORY = Path(__file__).parents[2]
RECOVERING = Path(__file__).with_name("recovering_stub.py")
LIMIT_S = 120
SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
    "vocab_size": 1000,
}
# Small, fast, and tolerant of a busy host: what these sweeps are about is not precision.
BASE = {
    "hardware": {"start_timeout_s": 30, "stop_grace_s": 1},
    "kv": {"memory_bytes": 4 * 2**20},
    "workload": {"input": {"kind": "fixed", "value": 8}, "output": {"kind": "fixed", "value": 4}},
    "load": {
        "arrival": "constant",
        "rate_per_s": 40,
        "num_requests": 20,
        "duration_s": None,
        "scrape_interval_s": 0.1,
        "warmup": {"requests_per_shape": 0, "concurrent": 0},
        "limits": {
            "send_lag_p99_ms": 5000,
            "client_cpu_share": 10,
            "loop_delay_p99_ms": 5000,
            "client_server_ttft_ms": 5000,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Lab:
    """A user's folder: ``conf`` with engines, model and sweeps, ``runs``, ``cache``, and the tracking store."""

    root: Path

    @property
    def runs(self) -> Path:
        return self.root / "runs"

    @property
    def model(self) -> Path:
        return self.root / "model"

    def sweep(self, name: str = "s") -> Path:
        return self.runs / name

    def engine(self, name: str, script: Script | None = None, **values: Any) -> None:
        """``engine/NAME.yaml``: the stub as an engine installed by hand."""
        engine = {
            "name": name,
            "version": "0.32.0",
            "family": "v1",
            "executable": list(stub.COMMAND),
            "env": stub.environment(script or Script()),
        }
        self._write(f"engine/{name}.yaml", engine | values)

    def recovering_engine(self, name: str, script: Script, *, starts: int, lock: str | None = None) -> None:
        """An engine that follows its script for the first ``starts`` starts only; see ``recovering_stub.py``."""
        own = [str(self.root / f"{name}.starts"), lock or str(self.root / f"{name}.lock"), str(starts)]
        self.engine(name, script, executable=[sys.executable, str(RECOVERING), *own, *stub.COMMAND])

    def starts(self, name: str) -> list[str]:
        """What a recovering engine noted at each start."""
        return (self.root / f"{name}.starts").read_text().splitlines()

    def define(self, name: str = "s", *, grid: dict[str, Any] | None = None, **values: Any) -> None:
        """``sweep/NAME.yaml`` over small loads; ``values`` are merged into the base, section by section."""
        sections = {key: _merged(BASE.get(key, {}), values.get(key, {})) for key in {*BASE, *values}}
        sweep = {"name": name, "grid": grid or {}, "shuffle": False}
        self._write(f"sweep/{name}.yaml", {"sweep": sweep, **sections}, head="# @package _global_\n")

    def _write(self, name: str, values: Any, *, head: str = "") -> None:
        path = self.root / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(head + yaml.safe_dump(values, sort_keys=False))

    # --- commands ---

    def argv(self, *overrides: str) -> list[str]:
        """The command line with this lab's folders."""
        own = [f"runs_dir={self.runs}", f"cache_dir={self.root / 'cache'}"]
        return [sys.executable, "-m", "orchestrator", *overrides, *own]

    def mine(self, *overrides: str) -> list[str]:
        """As :meth:`argv`, with this lab's configuration folder and model."""
        return self.argv("--config-dir", str(self.root / "conf"), "model=stub", *overrides)

    def run(self, argv: list[str]) -> "Done":
        """Run a command to its end."""
        began = time.monotonic()
        done = subprocess.run(
            argv,
            cwd=REPOSITORY,
            env=environment(),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr, time.monotonic() - began)

    def start(self, argv: list[str]) -> "Started":
        """Start a command in a process group of its own, as a shell does."""
        out, err = self.root / "stdout.txt", self.root / "stderr.txt"
        with out.open("w") as stdout, err.open("w") as stderr:
            process = subprocess.Popen(
                argv, cwd=REPOSITORY, env=environment(), stdout=stdout, stderr=stderr, start_new_session=True
            )
        return Started(process, out, err)

    # --- what came of it ---

    def results(self, sweep: str = "s") -> list[dict[str, Any]]:
        """Every result of a sweep, in the order of its plan."""
        listed = json.loads((self.sweep(sweep) / "plan.json").read_text())["cells"]
        paths = [self.sweep(sweep) / cell["folder"] / "result.json" for cell in listed]
        return [json.loads(path.read_text(), parse_constant=_refuse) for path in paths if path.exists()]

    def servers(self) -> list[int]:
        """Living stub processes of this lab."""
        return [process.pid for process in psutil.process_iter() if str(self.model) in _command(process)]

    def client(self, database: str = "mlflow.db"):
        """A client of this lab's tracking store."""
        from mlflow import MlflowClient

        return MlflowClient(tracking_uri=f"sqlite:///{self.root / database}")

    def tracked(self, kind: str, *, database: str = "mlflow.db") -> list[Any]:
        """Runs of this lab's tracking store by kind: sweep, cell, superseded; oldest first."""
        client = self.client(database)
        experiment = client.get_experiment_by_name("servelab")
        found = client.search_runs(
            [experiment.experiment_id], filter_string=f"tags.`servelab.kind` = '{kind}'"
        )
        return sorted(found, key=lambda run: run.info.start_time)


@dataclass(frozen=True, slots=True)
class Done:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    def __str__(self) -> str:
        return f"exit {self.code} after {self.seconds:.1f} s\n{self.stdout}\n--- stderr\n{self.stderr}"


@dataclass(frozen=True, slots=True)
class Started:
    """A command that runs."""

    process: subprocess.Popen
    out: Path
    err: Path

    def wait_for(self, text: str, *, seconds: float = 60) -> None:
        """Wait until standard error matches a pattern."""
        deadline = time.monotonic() + seconds
        while not re.search(text, self.err.read_text()):
            assert time.monotonic() < deadline, f"no {text!r} within {seconds} s in\n{self.err.read_text()}"
            assert self.process.poll() is None, f"ended before {text!r}\n{self.err.read_text()}"
            time.sleep(0.05)

    def send(self, number: signal.Signals, *, group: bool = False) -> None:
        """Send a signal: to the whole group, as a terminal does, or to the process alone."""
        if group:
            os.killpg(self.process.pid, number)
        else:
            self.process.send_signal(number)

    def end(self, number: signal.Signals, *, seconds: float, group: bool = False) -> int:
        """Send a signal and wait for the end; the exit code."""
        self.send(number, group=group)
        return self.process.wait(seconds)

    def __str__(self) -> str:
        return self.out.read_text() + self.err.read_text()


def lab(folder: Path, *, database: bool = True) -> Lab:
    """An empty lab with a model folder; ``database``: with a migrated tracking store, which saves seconds."""
    made = Lab(folder)
    made.model.mkdir(parents=True)
    if database:
        runs_with_database(folder)
    (made.model / "config.json").write_text(json.dumps(SMOLLM2))
    (made.model / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "z": 999}}}))
    (made.model / "model.safetensors").write_bytes(b"\0" * 8)
    made._write("model/stub.yaml", {"name": "stub", "source": "path", "path": str(made.model)})
    return made


@contextmanager
def cluster(*, slots: int) -> Iterator[str]:
    """A Ray cluster that is there already, with so many engine slots; its address. It ends with the block."""
    code = (
        "import ray, sys\n"
        "context = ray.init(address='local', include_dashboard=False, log_to_driver=False, num_cpus=2,"
        f" object_store_memory=2**27, resources={{'engine_slot': {slots}}})\n"
        "print(context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment() | {"RAY_USAGE_STATS_ENABLED": "0"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()


def environment() -> dict[str, str]:
    """The environment of a command: the user's, without what could lead it elsewhere."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MLFLOW_", "RAY_", "COLUMNS"))
    }


def gone(pids: list[int], *, seconds: float) -> bool:
    """Wait until none of these processes is left."""
    deadline = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _merged(base: Any, values: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(values, dict):
        return values
    return base | {key: _merged(base.get(key), value) for key, value in values.items()}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
