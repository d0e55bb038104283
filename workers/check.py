"""Is this machine fit for these cells? Pure: from what was observed to findings, each with how to mend it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from conf.schema import Config, HardwareKind, Load
from workers import clean, engines
from workers.telemetry import DeviceState

GIB = 2**30
# Sizes by kind of host, measured for CPU builds of 0.31 and 0.32, from the wheels' sizes for CUDA builds.
ENVIRONMENT_BYTES = {HardwareKind.cpu: 4 * GIB, HardwareKind.cuda: 12 * GIB}
MODEL_BYTES = GIB  # a small model, its package and its converted form
ENGINE_BYTES = 2 * GIB  # processes of one engine, without weights and KV cache
RUNS_BYTES = GIB // 2
SHM_BYTES = GIB // 2  # Ray's object store and an engine's message queues
SHM_PARALLEL_BYTES = 2 * GIB  # the same with several ranks
DESCRIPTOR_MARGIN = 64
CLOCK_RESOLUTION_S = 1e-6
SLOW_CLOCKS = frozenset({"hpet", "acpi_pm", "jiffies", "refined-jiffies"})


class Level(Enum):
    """How a finding bears on a run: it goes, it goes with a cost, it does not go."""

    ok = "ok"
    warn = "warn"
    bad = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the check."""

    level: Level
    name: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """An engine of the cells: whether its environment is there, or why it cannot be."""

    name: str
    kind: HardwareKind
    ready: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """A model of the cells; ``cached`` None: the engine resolves it itself when it starts."""

    name: str
    cached: bool | None
    problem: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What was seen of this host; None for what could not be read."""

    devices: tuple[DeviceState, ...] | None
    cpu_flags: frozenset[str]
    memory_available_bytes: int
    shm_free_bytes: int | None
    cache: Path
    cache_free_bytes: int | None
    cache_problem: str | None
    free_port_blocks: int
    descriptors_soft: int  # -1: without limit
    descriptors_hard: int
    clock_resolution_s: float
    clock_source: str | None
    uv_problem: str | None
    ray_version: str | None
    builds: tuple[Build, ...]
    weights: tuple[Weights, ...]
    leftovers: tuple[str, ...] = ()


def check(configs: Sequence[Config], machine: Machine) -> list[Finding]:
    """Everything that can be said about running these cells here."""
    return [
        devices(configs, machine),
        leftovers(machine),
        cpu(configs, machine),
        memory(configs, machine),
        shared_memory(configs, machine),
        disk(machine),
        ports(configs, machine),
        descriptors(configs, machine),
        clock(machine),
        uv(machine),
        ray(machine),
        *map(build, machine.builds),
        *map(weights, machine.weights),
    ]


def devices(configs: Sequence[Config], machine: Machine) -> Finding:
    """GPUs: enough of them, free of foreign processes and of their memory."""
    found = machine.devices
    need = max((engines.num_devices(config) for config in configs if _is_cuda(config)), default=0)
    if not need:
        text = "no GPU, none needed" if not found else f"{len(found)} GPU(s), not used with hardware=cpu"
        return _ok("devices", text)
    if found is None:
        return _bad("devices", "no NVIDIA driver answers", "install the driver, or use hardware=cpu")
    busy = [problem for state in found if (problem := clean.obstacle(state)) is not None]
    free = len(found) - len(busy)
    shown = "; ".join(map(_device_text, found))
    if free < need and busy:
        return _bad(
            "devices",
            f"{free} of {len(found)} free, a launch needs {need}: {'; '.join(busy)}",
            "end these processes",
        )
    if free < need:
        return _bad(
            "devices",
            f"{len(found)} GPU(s), a launch needs {need}",
            "lower engine.tensor_parallel_size * engine.pipeline_parallel_size, or give ray.address of a cluster",
        )
    if busy:
        return _warn(
            "devices",
            f"{free} of {len(found)} free; {'; '.join(busy)}",
            "end these processes to use every GPU",
        )
    return _ok("devices", shown)


def _device_text(state: DeviceState) -> str:
    used, total = state.memory_used_bytes, state.memory_total_bytes
    memory = (
        "" if used is None or total is None else f", {(total - used) / GIB:.0f} of {total / GIB:.0f} GiB free"
    )
    return f"{state.name or '?'} {state.uuid or '?'}{memory}"


def leftovers(machine: Machine) -> Finding:
    """Processes that engines of ended launches left."""
    if not machine.leftovers:
        return _ok("leftovers", "no process of an ended launch")
    text = f"left by an ended launch: {', '.join(machine.leftovers)}"
    return _warn("leftovers", text, "the next launch ends them")


def cpu(configs: Sequence[Config], machine: Machine) -> Finding:
    """Instruction sets against the cells' KV dtypes."""
    refused = [
        problem
        for config in configs
        if (problem := engines.refused_by_host(config, cpu_flags=machine.cpu_flags)) is not None
    ]
    if refused:
        problem, _, remedy = refused[0].partition("; ")
        return _bad("processor", f"{len(refused)} of {len(configs)} cells: {problem}", remedy)
    known = [
        name for name in ("avx2", "avx512f", "avx512_bf16", "amx_tile", "asimd") if name in machine.cpu_flags
    ]
    return _ok("processor", f"serves every KV dtype of the cells ({', '.join(known) or 'flags unknown'})")


def memory(configs: Sequence[Config], machine: Machine) -> Finding:
    """Main memory against KV cache and processes of all slots."""
    slots = num_slots(configs, machine)
    on_host = [config.kv.memory_bytes for config in configs if not _is_cuda(config)]
    need = slots * (max(on_host, default=0) + ENGINE_BYTES + MODEL_BYTES)
    text = f"{machine.memory_available_bytes / GIB:.1f} GiB available, about {need / GIB:.1f} needed by {slots} slot(s)"
    if machine.memory_available_bytes >= need:
        return _ok("memory", text)
    remedy = "lower kv.memory_bytes or hardware.engine_slots, or end other programs"
    if on_host and machine.memory_available_bytes < slots * max(on_host):
        return _bad("memory", text, remedy)
    return _warn("memory", text, remedy)


def shared_memory(configs: Sequence[Config], machine: Machine) -> Finding:
    """Room in ``/dev/shm``."""
    parallel = any(engines.num_devices(config) > 1 for config in configs)
    need = SHM_PARALLEL_BYTES if parallel else SHM_BYTES
    if machine.shm_free_bytes is None:
        return _warn("shared memory", "there is no /dev/shm", "mount a tmpfs on /dev/shm")
    text = f"{machine.shm_free_bytes / GIB:.1f} GiB free in /dev/shm, {need / GIB:.1f} wanted"
    if machine.shm_free_bytes >= need:
        return _ok("shared memory", text)
    return _warn("shared memory", text, "enlarge it (a container: --shm-size=2g)")


def disk(machine: Machine) -> Finding:
    """The cache folder: writable, with room for what is still to be built."""
    if machine.cache_problem is not None:
        return _bad(
            "cache", f"{machine.cache}: {machine.cache_problem}", "name another folder with cache_dir=FOLDER"
        )
    missing = sum(ENVIRONMENT_BYTES[build.kind] for build in machine.builds if not build.ready)
    need = RUNS_BYTES + missing + MODEL_BYTES * sum(weights.cached is False for weights in machine.weights)
    free = machine.cache_free_bytes
    text = f"{machine.cache}: {'?' if free is None else f'{free / GIB:.1f}'} GiB free, about {need / GIB:.1f} needed"
    if free is not None and free < need:
        return _bad("cache", text, "free disk space, or name a folder on another disk with cache_dir=FOLDER")
    return _ok("cache", text)


def ports(configs: Sequence[Config], machine: Machine) -> Finding:
    """Blocks of ports outside the ephemeral range, one for each slot."""
    need = num_slots(configs, machine)
    if machine.free_port_blocks >= need:
        return _ok("ports", f"a free block for each of {need} slot(s)")
    text = f"{machine.free_port_blocks} free block(s) of ports for {need} slot(s)"
    return _bad("ports", text, "stop other servers, or narrow net.ipv4.ip_local_port_range")


def descriptors(configs: Sequence[Config], machine: Machine) -> Finding:
    """The hard limit of open files against the streams of the largest load."""
    need = DESCRIPTOR_MARGIN + max(map(num_streams, (config.load for config in configs)), default=0)
    hard = machine.descriptors_hard
    text = f"limit {machine.descriptors_soft} (hard {hard if hard >= 0 else 'none'}), at most {need} needed"
    if hard < 0 or hard >= need:
        return _ok("descriptors", text)
    return _bad("descriptors", text, "raise it (ulimit -Hn) or set load.max_concurrency")


def num_streams(load: Load) -> int:
    """Most streams that a load can have open at once, as far as its settings tell."""
    counts = [load.num_requests] if load.num_requests is not None else []
    if load.duration_s is not None and math.isfinite(load.rate_per_s):
        counts.append(math.ceil(load.duration_s * load.rate_per_s))
    asked = min(counts, default=0)
    return min(asked, load.max_concurrency or asked)


def clock(machine: Machine) -> Finding:
    """The monotonic clock that every time stamp comes from."""
    text = f"{machine.clock_source or 'source unknown'}, resolution {machine.clock_resolution_s * 1e9:g} ns"
    if machine.clock_source in SLOW_CLOCKS or machine.clock_resolution_s > CLOCK_RESOLUTION_S:
        return _warn("clock", text, "let the kernel use tsc: reading this clock is slow or coarse")
    return _ok("clock", text)


def uv(machine: Machine) -> Finding:
    """The installer; needed as long as something is to be built."""
    if machine.uv_problem is None:
        return _ok("uv", "found")
    nothing_to_do = all(build.ready for build in machine.builds)
    return (_warn if nothing_to_do else _bad)("uv", machine.uv_problem, "")


def ray(machine: Machine) -> Finding:
    """Ray, which gives slots to launches."""
    if machine.ray_version is None:
        return _bad("ray", "is not installed", "install this project again: pip install -e .")
    return _ok("ray", machine.ray_version)


def build(engine: Build) -> Finding:
    """One engine's environment."""
    name = f"engine {engine.name}"
    if engine.problem is not None:
        return _bad(name, engine.problem, "")
    if engine.ready:
        return _ok(name, "ready")
    size = ENVIRONMENT_BYTES[engine.kind] / GIB
    return _warn(name, "not built yet", f"its first launch builds it: some minutes, about {size:.0f} GiB")


def weights(model: Weights) -> Finding:
    """One model's weights."""
    name = f"model {model.name}"
    if model.problem is not None:
        return _bad(name, model.problem, "")
    if model.cached is None:
        return _warn(
            name, "resolved by the engine at its start", "needs the hub or the hub's cache on this host"
        )
    if model.cached:
        return _ok(name, "ready")
    return _warn(name, "not fetched yet", "the first launch fetches and converts it")


def num_slots(configs: Sequence[Config], machine: Machine) -> int:
    """Engines at the same time on this host."""
    on_cpu = [config.hardware.engine_slots for config in configs if not _is_cuda(config)]
    on_cuda = [
        max(1, len(machine.devices or ()) // engines.num_devices(config))
        for config in configs
        if _is_cuda(config)
    ]
    return max([1, *on_cpu, *on_cuda])


def render(findings: Iterable[Finding]) -> str:
    """One line each, the remedy below its finding."""
    found = list(findings)
    width = max((len(finding.name) for finding in found), default=0)
    lines = []
    for finding in found:
        lines.append(f"{finding.level.value:<5} {finding.name:<{width}}  {finding.text}")
        if finding.remedy and finding.level is not Level.ok:
            lines.append(f"{'':<5} {'':<{width}}  → {finding.remedy}")
    return "\n".join(lines)


def _is_cuda(config: Config) -> bool:
    return config.hardware.kind is HardwareKind.cuda


def _ok(name: str, text: str) -> Finding:
    return Finding(level=Level.ok, name=name, text=text)


def _warn(name: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.warn, name=name, text=text, remedy=remedy)


def _bad(name: str, text: str, remedy: str) -> Finding:
    return Finding(level=Level.bad, name=name, text=text, remedy=remedy)
