"""Which cores an engine computes on, and which are left for the load generator.

vLLM's CPU build binds its compute threads to one logical CPU per physical core (x86), one NUMA node per rank, and
leaves the last core of each rank to its scheduler and API processes (``VLLM_CPU_OMP_THREADS_BIND=auto``). The same
rule is applied here, so that the load generator runs where no compute thread does. What the engine really bound is
evidence (``server.cores``), read from its log.
"""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from conf.schema import Config, HardwareKind

BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"
RESERVED_VARIABLE = "VLLM_CPU_NUM_OF_RESERVED_CPU"
_ONE_PER_CORE = frozenset({"x86_64", "AMD64", "s390x"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Core:
    """One logical CPU this process may use."""

    id: int
    physical: tuple[int, int]  # package, core
    node: int


def topology(*, root: Path = Path("/sys/devices/system/cpu")) -> list[Core]:
    """The logical CPUs this process may use, in order."""
    return [_core(root / f"cpu{cpu}", cpu) for cpu in sorted(os.sched_getaffinity(0))]


def engine_cores(
    config: Config, *, cores: Sequence[Core], machine: str = platform.machine()
) -> tuple[int, ...] | None:
    """Cores the engine's compute threads will be bound to; None if it binds none (CUDA, ``nobind``)."""
    if config.hardware.kind is not HardwareKind.cpu:
        return None
    binding = config.engine.env.get(BIND_VARIABLE, "auto")
    if binding == "nobind":
        return None
    if binding != "auto":
        return tuple(sorted({core for part in binding.split("|") for core in _id_list(part)}))
    ranks = config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size
    return _automatic(config, cores=cores, ranks=ranks, machine=machine)


def client_cores(
    config: Config, *, cores: Sequence[Core], machine: str = platform.machine()
) -> tuple[int, ...] | None:
    """Cores for the load generator: none that computes and no sibling of one; None if there is no such core.

    Beside an engine on a GPU, whose host threads are not bound, it is the last quarter of the cores.
    """
    taken = engine_cores(config, cores=cores, machine=machine)
    if taken is None and config.hardware.kind is HardwareKind.cuda:
        return tuple(core.id for core in cores[-max(1, len(cores) // 4) :])
    if taken is None:
        return None
    busy = {core.physical for core in cores if core.id in taken}
    return tuple(core.id for core in cores if core.physical not in busy) or None


def _automatic(config: Config, *, cores: Sequence[Core], ranks: int, machine: str) -> tuple[int, ...]:
    nodes = sorted({core.node for core in cores})
    chosen = [
        _usable([core for core in cores if core.node == node], machine=machine) for node in nodes[:ranks]
    ]
    reserved = int(config.engine.env.get(RESERVED_VARIABLE, ranks))
    if sum(len(ids) for ids in chosen) <= reserved:
        return tuple(sorted(id_ for ids in chosen for id_ in ids))
    per_rank = [
        reserved // ranks + (1 if rank >= ranks - reserved % ranks else 0) for rank in range(len(chosen))
    ]
    kept = [ids[: len(ids) - spared] for ids, spared in zip(chosen, per_rank, strict=True)]
    return tuple(sorted(id_ for ids in kept for id_ in ids))


def _usable(cores: Sequence[Core], *, machine: str) -> list[int]:
    """One logical CPU per physical core (the last sibling) where cores have siblings, else all."""
    if machine not in _ONE_PER_CORE:
        return sorted(core.id for core in cores)
    last = {core.physical: core.id for core in sorted(cores, key=lambda core: core.id)}
    return sorted(last.values())


def _core(folder: Path, cpu: int) -> Core:
    package = _number(folder / "topology" / "physical_package_id", default=0)
    core = _number(folder / "topology" / "core_id", default=cpu)
    nodes = sorted(int(path.name[4:]) for path in folder.glob("node[0-9]*"))
    return Core(id=cpu, physical=(package, core), node=nodes[0] if nodes else 0)


def _number(path: Path, *, default: int) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return default


def _id_list(text: str) -> list[int]:
    """``0,2-4`` → 0, 2, 3, 4."""
    ids: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        ids.extend(range(int(first), int(last or first) + 1))
    return ids
