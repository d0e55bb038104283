"""From what was seen of a host to findings: what goes, what costs, what does not go, and how to mend it."""

from dataclasses import replace
from pathlib import Path

import pytest
from fakes.cells import fake_config

from conf.schema import Engine, Hardware, HardwareKind, Kv, Load
from workers import check
from workers.check import GIB, Build, Level, Machine, Weights
from workers.telemetry import DeviceProcess, DeviceState

CPU = HardwareKind.cpu
GOOD = Machine(
    devices=None,
    cpu_flags=frozenset({"sse2", "avx2", "avx512f"}),
    memory_available_bytes=16 * GIB,
    shm_free_bytes=4 * GIB,
    cache=Path("/cache"),
    cache_free_bytes=50 * GIB,
    cache_problem=None,
    free_port_blocks=64,
    descriptors_soft=1024,
    descriptors_hard=4096,
    clock_resolution_s=1e-9,
    clock_source="tsc",
    uv_problem=None,
    ray_version="2.60.0",
    builds=(Build(name="vllm_0_32", kind=CPU, ready=True),),
    weights=(Weights(name="m", cached=True),),
)
PROCESS = DeviceProcess(pid=77, name="train.py", memory_bytes=20 * GIB)


def gpu(*processes, used=GIB // 2):
    return DeviceState(
        uuid="GPU-1",
        name="H200",
        memory_used_bytes=used,
        memory_total_bytes=139 * GIB,
        processes=processes,
    )


def cuda(tensor_parallel_size=1):
    engine = Engine(name="e", version="0.32.0", tensor_parallel_size=tensor_parallel_size)
    return fake_config(engine=engine, hardware=Hardware(kind=HardwareKind.cuda))


def findings(*configs, **changes):
    """Name → finding of these cells on the good machine with changes."""
    return {f.name: f for f in check.check(configs or (fake_config(),), replace(GOOD, **changes))}


def test_a_good_machine_is_all_ok():
    assert {finding.level for finding in findings().values()} == {Level.ok}


@pytest.mark.parametrize(
    ("name", "level", "changes", "text"),
    [
        ("memory", "warn", {"memory_available_bytes": GIB}, "1.0 GiB available"),
        ("memory", "bad", {"memory_available_bytes": 2**20}, "needed by 1 slot"),
        ("shared memory", "warn", {"shm_free_bytes": 2**26}, "0.1 GiB free"),
        ("shared memory", "warn", {"shm_free_bytes": None}, "there is no /dev/shm"),
        ("cache", "bad", {"cache_problem": "/cache cannot be written"}, "cannot be written"),
        ("cache", "bad", {"cache_free_bytes": 2**20}, "0.0 GiB free"),
        ("ports", "bad", {"free_port_blocks": 0}, "0 free block"),
        ("descriptors", "bad", {"descriptors_hard": 70}, "hard 70"),
        ("clock", "warn", {"clock_source": "hpet"}, "hpet"),
        ("clock", "warn", {"clock_resolution_s": 1e-3}, "1e+06 ns"),
        ("uv", "warn", {"uv_problem": "no uv"}, "no uv"),
        ("ray", "bad", {"ray_version": None}, "not installed"),
        ("leftovers", "warn", {"leftovers": ("pid 5 (x)",)}, "pid 5 (x)"),
        ("model m", "warn", {"weights": (Weights(name="m", cached=False),)}, "not fetched"),
        ("model m", "warn", {"weights": (Weights(name="m", cached=None),)}, "resolved by the engine"),
        ("model m", "bad", {"weights": (Weights(name="m", cached=False, problem="no folder"),)}, "no folder"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(name, level, changes, text):
    config = fake_config(kv=Kv(memory_bytes=2**26), load=Load(num_requests=100))
    found = findings(config, **changes)[name]
    assert (found.level.value, text in found.text) == (level, True), found


def test_an_engine_to_build_needs_disk_and_the_installer():
    missing = {"builds": (Build(name="e", kind=CPU, ready=False),)}
    assert findings(**missing)["engine e"].level is Level.warn
    assert findings(**missing, cache_free_bytes=3 * GIB)["cache"].level is Level.bad
    assert findings(**missing, uv_problem="no uv")["uv"].level is Level.bad
    broken = Build(name="e", kind=CPU, ready=False, problem="engine.requirements.cpu is empty")
    assert findings(builds=(broken,))["engine e"].level is Level.bad


def test_kv_dtypes_that_this_processor_refuses_are_counted():
    """Two cells, one of them fp8, on a processor without AVX-512."""
    found = findings(fake_config(), fake_config(kv=Kv(dtype="fp8")), cpu_flags=frozenset({"sse2", "avx2"}))
    assert found["processor"].level is Level.bad
    assert found["processor"].text.startswith("1 of 2 cells: kv.dtype=fp8 needs AVX-512 or AMX")
    assert found["processor"].remedy.startswith("run this cell on another host")


@pytest.mark.parametrize(
    ("config", "devices", "level", "text"),
    [
        (fake_config(), None, "ok", "no GPU, none needed"),
        (fake_config(), (gpu(PROCESS),), "ok", "not used with hardware=cpu"),
        (cuda(), None, "bad", "no NVIDIA driver answers"),
        (cuda(), (gpu(),), "ok", "H200 GPU-1, 138 of 139 GiB free"),
        (cuda(), (gpu(PROCESS),), "bad", "pid 77 (train.py, 20.0 GiB)"),
        (cuda(), (gpu(PROCESS), gpu()), "warn", "1 of 2 free; device GPU-1 (H200) is used by pid 77"),
        (cuda(), (gpu(used=30 * GIB),), "bad", "30.0 of 139.0 GiB in use"),
        (cuda(tensor_parallel_size=2), (gpu(),), "bad", "1 GPU(s), a launch needs 2"),
    ],
)
def test_devices(config, devices, level, text):
    found = findings(config, devices=devices)["devices"]
    assert (found.level.value, text in found.text) == (level, True), found


@pytest.mark.parametrize(
    ("load", "expected"),
    [
        (Load(num_requests=40, duration_s=None), 40),
        (Load(rate_per_s=2.5, duration_s=30), 75),
        (Load(rate_per_s=2, duration_s=30, num_requests=24), 24),
        (Load(rate_per_s=float("inf"), duration_s=30, num_requests=24), 24),
        (Load(num_requests=400, max_concurrency=8), 8),
    ],
)
def test_most_streams_of_a_load(load, expected):
    assert check.num_streams(load) == expected


def test_lines_say_how_to_mend():
    text = check.render([check._ok("a", "fine"), check._bad("longer", "broken", "mend it")])
    assert text == "ok    a       fine\nbad   longer  broken\n              → mend it"
