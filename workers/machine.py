"""One look at this host for :mod:`workers.check`: reads, starts nothing, writes nothing."""

import importlib.metadata
import os
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from conf.schema import Config, Engine, HardwareKind, Model
from workers import clean, host, installer, ports
from workers.check import Build, Machine, Weights
from workers.environment import is_ready
from workers.errors import EnvironmentBrokenError
from workers.model import is_cached
from workers.telemetry import Devices, DeviceState, process_name

SHM = Path("/dev/shm")  # noqa: S108 - the mount itself
CLOCK_SOURCE = Path("/sys/devices/system/clocksource/clocksource0/current_clocksource")
MAX_BLOCKS = 64


def observe(configs: Sequence[Config], *, cache: Path, nvml: Any = None) -> Machine:
    """Everything that the check of these cells needs to know."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Machine(
        devices=_devices(nvml),
        cpu_flags=host.cpu_flags(),
        memory_available_bytes=psutil.virtual_memory().available,
        shm_free_bytes=shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        cache=cache,
        cache_free_bytes=shutil.disk_usage(existing(cache)).free,
        cache_problem=unwritable(cache),
        free_port_blocks=ports.num_free_blocks(up_to=MAX_BLOCKS),
        descriptors_soft=soft,
        descriptors_hard=hard,
        clock_resolution_s=time.clock_getres(time.CLOCK_MONOTONIC),
        clock_source=CLOCK_SOURCE.read_text().strip() if CLOCK_SOURCE.exists() else None,
        uv_problem=_uv_problem(),
        ray_version=_ray_version(),
        builds=_builds(configs, cache=cache),
        weights=_weights(configs, cache=cache),
        leftovers=tuple(f"pid {pid} ({process_name(pid)})" for pid in clean.leftovers()),
    )


def existing(path: Path) -> Path:
    """The path, or the closest folder above it that exists."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def unwritable(folder: Path) -> str | None:
    """Why files could not be made in a folder that may not exist yet; None if they could."""
    place = existing(folder)
    if not place.is_dir():
        return f"{place} is no folder"
    return None if os.access(place, os.W_OK | os.X_OK) else f"{place} cannot be written"


def _devices(nvml: Any) -> tuple[DeviceState, ...] | None:
    devices = Devices.open_all(nvml=nvml)
    if devices is None:
        return None
    try:
        return tuple(devices.states())
    finally:
        devices.close()


def _uv_problem() -> str | None:
    try:
        installer.uv_binary()
    except EnvironmentBrokenError as error:
        return str(error)
    return None


def _ray_version() -> str | None:
    """Read from its metadata: importing Ray takes a second."""
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None


def _builds(configs: Sequence[Config], *, cache: Path) -> tuple[Build, ...]:
    found = {(config.engine.name, config.hardware.kind): config.engine for config in configs}
    return tuple(_build(engine, kind=kind, cache=cache) for (_, kind), engine in found.items())


def _build(engine: Engine, *, kind: HardwareKind, cache: Path) -> Build:
    if engine.executable is not None and shutil.which(engine.executable[0]) is None:
        problem = f"engine.executable: there is no program {engine.executable[0]!r}"
        return Build(name=engine.name, kind=kind, ready=False, problem=problem)
    try:
        return Build(name=engine.name, kind=kind, ready=is_ready(engine, kind=kind, cache=cache))
    except ValueError as error:
        return Build(name=engine.name, kind=kind, ready=False, problem=str(error))


def _weights(configs: Sequence[Config], *, cache: Path) -> tuple[Weights, ...]:
    found = {(config.model.name, config.model.dtype): config.model for config in configs}
    return tuple(_weight(model, cache=cache) for model in found.values())


def _weight(model: Model, *, cache: Path) -> Weights:
    try:
        return Weights(name=model.name, cached=is_cached(model, cache=cache))
    except ValueError as error:
        return Weights(name=model.name, cached=False, problem=str(error))
