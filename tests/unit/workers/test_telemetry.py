"""Samples of a process tree and of devices that refuse."""

import os

from workers.telemetry import Devices, HostSampler, process_tree


def test_own_process_is_sampled():
    """CPU needs two samples; one sample has none, not 0."""
    times = iter([10.0, 11.0])
    sampler = HostSampler(os.getpid(), clock=lambda: next(times))
    first, second = sampler.sample(), sampler.sample()
    assert "server_cpu_cores" not in first
    assert second["server_cpu_cores"] >= 0
    assert second["server_rss_bytes"] > 1_000_000
    assert second["server_processes"] >= 1


def test_a_process_that_is_gone_leaves_host_values_only():
    sampler = HostSampler(2**22 + 1)
    assert set(sampler.sample()) == {"host_cpu_share", "host_available_bytes"}
    assert process_tree(2**22 + 1) == []


class Nvml:
    """A driver with one device that cannot tell its power."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 0, 1, 2

    class Reading:
        gpu, used, total = 50, 1000, 4000

    def __init__(self, *, works=True):
        self.works = works
        self.asked = []

    def nvmlInit(self):  # noqa: N802
        if not self.works:
            raise self.NVMLError

    def nvmlDeviceGetPowerUsage(self, handle):  # noqa: N802
        raise self.NVMLError

    nvmlDeviceGetEnforcedPowerLimit = nvmlDeviceGetMigMode = nvmlDeviceGetPowerUsage  # noqa: N815

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        self.asked.append(index)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        self.asked.append(uuid)
        return uuid

    def __getattr__(self, name):
        answers = {
            "Rates": self.Reading,
            "Memory": self.Reading,
            "Name": b"H200",
            "UUID": "GPU-1",
            "Version": "570",
        }
        return lambda *args: next((a for key, a in answers.items() if key in name), 7)


def test_devices_are_read_by_index_or_uuid():
    nvml = Nvml()
    devices = Devices.open("3,MIG-2222", nvml=nvml)
    assert nvml.asked == [3, "MIG-2222"]
    sample = devices.sample()
    assert sample["gpu0_util_share"] == 0.5
    assert sample["gpu1_memory_used_bytes"] == 1000
    assert "gpu0_power_w" not in sample


def test_device_facts_are_none_where_the_driver_refuses():
    facts = Devices.open("0", nvml=Nvml()).facts()
    assert facts[0]["name"] == "H200"
    assert facts[0]["mig"] is None
    assert facts[0]["power_limit_w"] is None


def test_no_driver_means_no_devices():
    assert Devices.open("0", nvml=Nvml(works=False)) is None
