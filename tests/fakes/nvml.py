"""A driver library with made-up devices, processes and memory; tests change them while code looks."""

from dataclasses import dataclass, field
from types import SimpleNamespace

GIB = 2**30


@dataclass
class Device:
    """One device; ``processes``: pid → name as the driver knows it."""

    uuid: str = "GPU-1111"
    name: str = "H200"
    used: int = GIB // 2
    total: int = 139 * GIB
    processes: dict[int, str] = field(default_factory=dict)


class Nvml:
    """What :mod:`workers.telemetry` asks of pynvml, answered from :class:`Device` objects."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices, works=True):
        self.devices = list(devices)
        self.works = works

    def nvmlInit(self):  # noqa: N802
        if not self.works:
            raise self.NVMLError

    def nvmlShutdown(self):  # noqa: N802
        pass

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.devices)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        found = [device for device in self.devices if device.uuid == uuid]
        if not found:
            raise self.NVMLError
        return found[0]

    def nvmlDeviceGetUUID(self, device):  # noqa: N802
        return device.uuid

    def nvmlDeviceGetName(self, device):  # noqa: N802
        return device.name.encode()

    def nvmlDeviceGetMemoryInfo(self, device):  # noqa: N802
        return SimpleNamespace(used=device.used, total=device.total)

    def nvmlDeviceGetComputeRunningProcesses(self, device):  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=4 * GIB) for pid in device.processes]

    def nvmlSystemGetProcessName(self, pid):  # noqa: N802
        names = [device.processes[pid] for device in self.devices if pid in device.processes]
        if not names:
            raise self.NVMLError
        return names[0]

    def __getattr__(self, name):
        """Everything else is refused, as a driver refuses what a device does not have."""
        if not name.lower().startswith("nvml"):
            raise AttributeError(name)

        def refuse(*_):
            raise self.NVMLError

        return refuse
