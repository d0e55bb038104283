"""Which GPU a server really sees. Ray is told of two GPUs on a host that may have none; the engine is the stub."""

import asyncio
import dataclasses
import json
import subprocess
import sys
from contextlib import contextmanager

import pytest
from fakes.composed import cells_of
from fakes.mlflow_store import FILTERS
from fakes.nvml import GIB, Device, Nvml
from fakes.stub import Script
from fakes.sweeps import environment, lab

from workers import clean, launch
from workers.events import CellFailed, CellFinished, CellSpec, LaunchFinished, LaunchSpec, Phase
from workers.telemetry import Devices

pytestmark = FILTERS
NAMES = ("GPU-11111111-2222-3333-4444-555555555555", "MIG-22222222-3333-4444-5555-666666666666")
SLOW = Script(ttft_s=1.0)  # so that two cells run at the same time

CLUSTER = """
import ray, sys
context = ray.init(address="local", include_dashboard=False, log_to_driver=False, num_cpus=2, num_gpus=2,
                   object_store_memory=2**27)
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


@contextmanager
def two_gpus(**variables):
    """A Ray cluster whose one node has two GPUs, started with these variables; its address."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER],
        env=environment() | {"RAY_USAGE_STATS_ENABLED": "0"} | variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        yield process.stdout.readline().strip()
        process.stdin.close()


@pytest.fixture
def place(tmp_path):
    made = lab(tmp_path)
    made.engine("a", SLOW)
    made.engine("b", SLOW)
    made.define(grid={"engine": ["a", "b"]})
    return made


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"CUDA_VISIBLE_DEVICES": ",".join(NAMES)}, set(NAMES)),
        ({"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}, {"0", "1"}),
    ],
    ids=["uuids", "noset"],
)
def test_two_cells_at_once_see_one_device_each(place, variables, expected):
    """Ids come from Ray's assignment, unchanged, whether Ray sets the variable itself or is told not to."""
    with two_gpus(**variables) as address:
        done = place.run(place.mine("+sweep=s", "hardware.kind=cuda", f"ray.address={address}"))
    assert done.stderr.count("· start") == 2, str(done)
    seen = {}
    for path in place.sweep().glob("*/evidence.json"):
        facts = {fact["name"]: fact["value"] for fact in json.loads(path.read_text())["facts"]}
        assert facts["process.environment"]["CUDA_VISIBLE_DEVICES"] == facts["process.devices"]
        assert facts["launch.devices"] == facts["process.devices"]
        assert facts["process.environment"]["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
        seen[path.parent.name] = facts["process.devices"]
    assert set(seen.values()) == expected, str(done)
    for result in place.results():
        names = [reason["name"] for reason in result["verdict"]["reasons"]]
        details = " ".join(reason["detail"] for reason in result["verdict"]["reasons"])
        assert "devices: assigned" not in details, (names, details)


def run(place, *, device_ids, **hardware):
    """One launch of a cuda cell in this process; everything it told."""
    place.engine("one")
    settings = [f"hardware.{key}={value}" for key, value in hardware.items()]
    (cell,) = cells_of(
        "--config-dir", str(place.root / "conf"), "model=stub", "+sweep=s", "hardware.kind=cuda", "engine=one",
        "hardware.start_timeout_s=30", *settings, f"cache_dir={place.root / 'cache'}",
    )  # fmt: skip
    config = dataclasses.replace(cell.config, engine=dataclasses.replace(cell.config.engine, name="one"))
    spec = LaunchSpec(key="l", cells=(CellSpec(key=cell.key, config=config),), base_env=environment())

    async def collect():
        return [event async for event in launch.run_launch(spec, device_ids=device_ids)]

    return asyncio.run(collect())


def one(events, kind):
    (event,) = [event for event in events if isinstance(event, kind)]
    return event


@pytest.mark.parametrize(
    ("ids", "cause", "text"),
    [((), "no_device", "no GPU assigned"), (("0", "1"), "wrong_devices", "asked for 1 GPU")],
)
def test_a_launch_without_exactly_its_devices_is_refused(place, ids, cause, text):
    failed = one(run(place, device_ids=ids), CellFailed)
    assert failed.cause == cause
    assert text in failed.message


def with_driver(monkeypatch, *devices):
    """Launches in this process look at these devices."""
    nvml = Nvml(*devices)
    original = Devices.open.__func__

    def opened(device_ids, *, nvml=nvml):
        return original(Devices, device_ids, nvml=nvml)

    monkeypatch.setattr(launch.Devices, "open", opened)
    return devices[0]


def test_a_foreign_process_keeps_a_launch_from_its_device(place, monkeypatch):
    """It is waited for, then the cell fails with the process's pid and name; no engine is started."""
    with_driver(monkeypatch, Device(uuid="GPU-1111", processes={2**22 + 9: "train.py"}))
    events = run(place, device_ids=("GPU-1111",), busy_wait_s=0.3)
    failed = one(events, CellFailed)
    assert failed.cause == "device_busy"
    assert f"pid {2**22 + 9} (train.py, 4.0 GiB)" in failed.message
    phases = [event for event in events if isinstance(event, Phase)]
    assert any(
        f"waiting up to 0.3 s: device GPU-1111 (H200) is used by pid {2**22 + 9}" in p.detail for p in phases
    )
    assert "start" not in {phase.name for phase in phases}


def test_memory_that_does_not_come_back_is_told(place, monkeypatch):
    """The cell counts, the launch names what its engine left."""
    device = with_driver(monkeypatch, Device(uuid="GPU-1111"))
    monkeypatch.setattr(clean, "RELEASE_WAIT_S", 0.2)
    original = launch.measure_cell

    async def measure(measurement):
        device.used = 60 * GIB
        return await original(measurement)

    monkeypatch.setattr(launch, "measure_cell", measure)
    events = run(place, device_ids=("GPU-1111",))
    assert one(events, CellFinished).payload["metrics"]["requests/failed"] == 0
    assert one(events, LaunchFinished).problem == "device GPU-1111 (H200) did not get 59.5 GiB back"
