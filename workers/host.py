"""Facts of a process and of the host it runs on, read from ``/proc`` and the kernel."""

import os
import platform
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil

from workers.processes import listener_in_tree

# Environment variables that are evidence; names that smell of a secret never are.
_SHOWN = re.compile(
    r"VLLM_|CUDA|NVIDIA_|NCCL_|OMP_|KMP_|GOMP_|MKL_|HF_HUB_OFFLINE|TRANSFORMERS_OFFLINE|PYTHON|LD_PRELOAD|"
    r"LD_LIBRARY_PATH|TOKENIZERS_|TORCH|PYTORCH|TRITON_|NUMBA_|SERVELAB_"
)
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|API_KEY", re.IGNORECASE)


def command_line(pid: int, *, proc: Path = Path("/proc")) -> list[str] | None:
    """A process's own argument vector."""
    data = _read(proc / str(pid) / "cmdline")
    return [part.decode(errors="replace") for part in data.split(b"\0")[:-1]] if data else None


def process_environment(pid: int, *, proc: Path = Path("/proc")) -> dict[str, str] | None:
    """The environment a process was started with."""
    data = _read(proc / str(pid) / "environ")
    if data is None:
        return None
    pairs = (part.decode(errors="replace").partition("=") for part in data.split(b"\0") if part)
    return {name: value for name, _, value in pairs}


def shown(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that say how an engine runs, without secrets."""
    return {
        name: value
        for name, value in sorted(environment.items())
        if _SHOWN.match(name) and (not _SECRET.search(name) or name.startswith("TOKENIZERS_"))
    }


def affinity(pid: int) -> list[int] | None:
    """Logical CPUs a process may run on."""
    try:
        return sorted(os.sched_getaffinity(pid))
    except OSError:
        return None


def port_owned(port: int, *, pid: int) -> bool | None:
    """True if a listening port belongs to a process tree; None if the tree is gone."""
    return listener_in_tree(port, root=pid) if psutil.pid_exists(pid) else None


def venv_python(root: Path | None) -> str | None:
    """The Python version of a virtual environment."""
    data = _read(root / "pyvenv.cfg") if root is not None else None
    match = re.search(rb"^version(?:_info)?\s*=\s*([\d.]+)", data or b"", re.MULTILINE)
    return match[1].decode().rstrip(".") if match else None


def describe() -> dict[str, Any]:
    """Name, kernel, processor, cores, memory and NUMA nodes of this host."""
    nodes = list(Path("/sys/devices/system/node").glob("node[0-9]*"))
    return {
        "name": socket.gethostname(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu_model": _cpu_model(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_logical": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "numa_nodes": len(nodes) or None,
    }


def cpu_flags(*, cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set flags of this host's processor, lower case; empty where the kernel does not list them."""
    data = _read(cpuinfo) or b""
    match = re.search(rb"^(?:flags|Features)\s*:\s*(.*)$", data, re.MULTILINE)
    return frozenset(match[1].decode().lower().split()) if match else frozenset()


def _cpu_model() -> str | None:
    match = re.search(rb"^model name\s*:\s*(.*)$", _read(Path("/proc/cpuinfo")) or b"", re.MULTILINE)
    return match[1].decode().strip() if match else None


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None
