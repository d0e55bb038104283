"""What an engine must not find, and must not leave: devices by a made-up driver, folders by their lock."""

import asyncio
import os

import pytest
from fakes.nvml import GIB, Device, Nvml

from workers import clean
from workers.errors import EngineStartError
from workers.telemetry import Devices

NO_PID = 2**22 + 7  # above pid_max: nobody here has it


def devices_of(*devices):
    return Devices.open_all(nvml=Nvml(*devices))


def test_a_foreign_process_blocks_by_pid_and_name():
    """The name that the process has here, else the driver's, else a word that nobody can see it."""
    device = Device(processes={NO_PID: "python3", os.getpid(): "ignored"}, used=8 * GIB)
    (problem,) = clean.obstacles(devices_of(device))
    assert problem.startswith(f"device GPU-1111 (H200) is used by pid {NO_PID} (python3, 4.0 GiB), pid ")
    hidden = clean.process_text(clean.DeviceProcess(pid=5, name=None, memory_bytes=None))
    assert hidden == "pid 5 (name not visible here)"


def test_memory_without_a_visible_process_blocks_too():
    """Idle devices hold some memory; more than that belongs to somebody, also when the driver shows no process."""
    (problem,) = clean.obstacles(devices_of(Device(used=40 * GIB)))
    assert "has 40.0 of 139.0 GiB in use, by no process that can be seen here" in problem
    assert clean.obstacles(devices_of(Device(used=2 * GIB), Device(used=GIB, total=8 * GIB))) == []
    assert clean.obstacles(devices_of(Device(used=2 * GIB, total=8 * GIB))) != []


def test_a_busy_device_is_waited_for_and_then_refused():
    said = []
    device = Device(processes={NO_PID: "train.py"})
    with pytest.raises(EngineStartError, match=rf"pid {NO_PID} \(train.py.*hardware.busy_wait_s") as caught:
        asyncio.run(clean.wait_free(devices_of(device), wait_s=0.01, say=said.append))
    assert caught.value.cause == "device_busy"
    assert len(said) == 1


def test_a_device_that_becomes_free_is_taken():
    """The wait ends with the foreign process, well before its limit."""
    device = Device(processes={NO_PID: "train.py"})
    (state,) = asyncio.run(
        clean.wait_free(devices_of(device), wait_s=5, say=lambda _: device.processes.clear())
    )
    assert state.processes == ()


def test_after_a_launch_memory_and_processes_are_as_before():
    device = Device(used=GIB)
    devices = devices_of(device)
    before = devices.states()
    assert asyncio.run(clean.wait_released(devices, before, wait_s=0)) == []
    device.used = 70 * GIB
    (problem,) = asyncio.run(clean.wait_released(devices, before, wait_s=0))
    assert problem == "device GPU-1111 (H200) did not get 69.0 GiB back"
    device.processes = {NO_PID: "VLLM::EngineCor"}
    (problem,) = asyncio.run(clean.wait_released(devices, before, wait_s=0.01))
    assert f"is still used by pid {NO_PID} (VLLM::EngineCor" in problem


def test_a_driver_that_refuses_is_no_obstacle():
    """Unknown is None, not zero and not busy."""
    nvml = Nvml(Device())

    def refuse(*_):
        raise Nvml.NVMLError

    nvml.nvmlDeviceGetMemoryInfo = nvml.nvmlDeviceGetComputeRunningProcesses = refuse
    devices = Devices.open_all(nvml=nvml)
    (state,) = devices.states()
    assert (state.memory_used_bytes, state.processes) == (None, None)
    assert clean.obstacle(state) is None
    assert clean.unreleased(state, state) is None


def test_a_folder_is_held_as_long_as_its_launch():
    with clean.launch_folder() as folder:
        assert not clean.owner_is_gone(folder)
    assert not folder.exists()


def test_only_a_launch_folder_can_be_abandoned(tmp_path):
    """Without our lock file nothing is known of a folder, so nothing in it is ever ended."""
    assert not clean.owner_is_gone(tmp_path)
    (tmp_path / clean.LOCK_NAME).touch()
    assert clean.owner_is_gone(tmp_path)
