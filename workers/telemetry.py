"""What the host does while an engine is measured: CPU and memory of the server's process tree, and its devices.

A value that cannot be read is left out of the sample; nothing is ever filled in with 0.
"""

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

REFRESH_SAMPLES = (
    20  # the process tree is walked again every so many samples; walking /proc is the costly part
)


class HostSampler:
    """Samples of a server's process tree and of its devices.

    Names: ``server_cpu_cores`` (CPU seconds per second of the tree since the last sample), ``server_rss_bytes``,
    ``server_processes``, ``host_cpu_share`` (of all cores), ``host_available_bytes``, and per device ``I``:
    ``gpuI_util_share``, ``gpuI_memory_used_bytes``, ``gpuI_sm_clock_mhz``, ``gpuI_memory_clock_mhz``,
    ``gpuI_power_w``, ``gpuI_temperature_c``.
    """

    def __init__(
        self, pid: int, *, devices: "Devices | None" = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._pid = pid
        self._devices = devices
        self._clock = clock
        self._tree: list[psutil.Process] = []
        self._cpu: dict[int, float] = {}
        self._last_s: float | None = None
        self._count = 0
        psutil.cpu_percent(interval=None)  # the first call only starts the count

    def sample(self) -> dict[str, float]:
        """Everything that can be read now."""
        if self._count % REFRESH_SAMPLES == 0:
            self._tree = process_tree(self._pid)
        self._count += 1
        found = self._server() | {
            "host_cpu_share": psutil.cpu_percent(interval=None) / 100,
            "host_available_bytes": float(psutil.virtual_memory().available),
        }
        return found | (self._devices.sample() if self._devices is not None else {})

    def _server(self) -> dict[str, float]:
        now_s = self._clock()
        cpu: dict[int, float] = {}
        rss = 0
        for process in self._tree:
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    rss += process.memory_info().rss
            except psutil.Error:
                continue
            cpu[process.pid] = times.user + times.system
        used = {"server_rss_bytes": float(rss), "server_processes": float(len(cpu))} if cpu else {}
        if self._last_s is not None and cpu and now_s > self._last_s:
            spent = sum(value - self._cpu[pid] for pid, value in cpu.items() if pid in self._cpu)
            used["server_cpu_cores"] = spent / (now_s - self._last_s)
        self._cpu, self._last_s = cpu, now_s
        return used


def process_tree(pid: int) -> list[psutil.Process]:
    """A process and all its descendants that are alive."""
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProcess:
    """A process that computes on a device. Another container's is seen by its pid alone, if at all."""

    pid: int
    name: str | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """Who uses a device now; None for what the driver refuses to say."""

    uuid: str | None
    name: str | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None
    processes: tuple[DeviceProcess, ...] | None


class Devices:
    """NVIDIA devices by the ids a server was given."""

    def __init__(self, nvml: Any, handles: Sequence[Any]) -> None:
        self._nvml = nvml
        self._handles = handles

    @classmethod
    def open(cls, device_ids: str, *, nvml: Any = None) -> "Devices | None":
        """Devices of a ``CUDA_VISIBLE_DEVICES`` value, or None where NVML does not work."""
        library = nvml if nvml is not None else importlib.import_module("pynvml")
        try:
            library.nvmlInit()
            handles = [_handle(library, part.strip()) for part in device_ids.split(",") if part.strip()]
        except library.NVMLError:
            return None
        return cls(library, handles)

    @classmethod
    def open_all(cls, *, nvml: Any = None) -> "Devices | None":
        """Every device of this host, or None where NVML does not work."""
        library = nvml if nvml is not None else importlib.import_module("pynvml")
        try:
            library.nvmlInit()
            count = library.nvmlDeviceGetCount()
            handles = [library.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
        except library.NVMLError:
            return None
        return cls(library, handles)

    def close(self) -> None:
        """Let the driver's library go."""
        self._nvml.nvmlShutdown()

    def sample(self) -> dict[str, float]:
        """Readings of every device; a reading the driver refuses is left out."""
        found: dict[str, float] = {}
        for index, handle in enumerate(self._handles):
            for name, read in _READINGS.items():
                try:
                    found[f"gpu{index}_{name}"] = float(read(self._nvml, handle))
                except self._nvml.NVMLError:
                    continue
        return found

    def facts(self) -> list[dict[str, Any]]:
        """Name, UUID, memory, driver and persistent state of every device; None for what the driver refuses."""
        return [
            {name: _or_none(self._nvml, read, handle) for name, read in _FACTS.items()}
            for handle in self._handles
        ]

    def states(self) -> list[DeviceState]:
        """Memory and computing processes of every device, now."""
        return [_state(self._nvml, handle) for handle in self._handles]


def _state(nvml: Any, handle: Any) -> DeviceState:
    memory = _or_none(nvml, lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle), handle)
    found = _or_none(nvml, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle), handle)
    return DeviceState(
        uuid=_or_none(nvml, _FACTS["uuid"], handle),
        name=_or_none(nvml, _FACTS["name"], handle),
        memory_used_bytes=None if memory is None else int(memory.used),
        memory_total_bytes=None if memory is None else int(memory.total),
        processes=None if found is None else tuple(_process(nvml, process) for process in found),
    )


def _process(nvml: Any, process: Any) -> DeviceProcess:
    pid, used = int(process.pid), process.usedGpuMemory
    return DeviceProcess(
        pid=pid,
        name=process_name(pid)
        or _or_none(nvml, lambda nvml, pid: _text(nvml.nvmlSystemGetProcessName(pid)), pid),
        memory_bytes=None if used is None else int(used),
    )


def process_name(pid: int) -> str | None:
    """The short name that a process has given itself; None if it cannot be seen."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return None


_READINGS: dict[str, Callable[[Any, Any], float]] = {
    "util_share": lambda nvml, handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
    "memory_used_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).used,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_w": lambda nvml, handle: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
}
_FACTS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, handle: _text(nvml.nvmlDeviceGetName(handle)),
    "uuid": lambda nvml, handle: _text(nvml.nvmlDeviceGetUUID(handle)),
    "memory_bytes": lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle).total,
    "driver": lambda nvml, _handle: _text(nvml.nvmlSystemGetDriverVersion()),
    "cuda_driver": lambda nvml, _handle: nvml.nvmlSystemGetCudaDriverVersion(),
    "mig": lambda nvml, handle: bool(nvml.nvmlDeviceGetMigMode(handle)[0]),
    "power_limit_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
    "max_sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
}


def _handle(nvml: Any, device_id: str) -> Any:
    """A device by index or by UUID; MIG names are UUIDs too."""
    if device_id.isdigit():
        return nvml.nvmlDeviceGetHandleByIndex(int(device_id))
    return nvml.nvmlDeviceGetHandleByUUID(device_id)


def _or_none(nvml: Any, read: Callable[[Any, Any], Any], handle: Any) -> Any:
    try:
        return read(nvml, handle)
    except nvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
