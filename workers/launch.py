"""One launch: environment → model → server → evidence → cells → stop, as a stream of events.

Effects live here; every decision (command, verdict, metrics) is a pure function somewhere else.
"""

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from conf.schema import Config, HardwareKind
from workers import clean, engine_log, engines, host
from workers.cache import cache_root
from workers.cores import client_cores, topology
from workers.environment import EngineBuild, build_environment
from workers.errors import ClientLimitError, EngineDiedError, EngineStartError, NotDrainedError, ServelabError
from workers.events import CellFailed, CellFinished, CellSpec, Event, LaunchFinished, LaunchSpec, Phase
from workers.measure import Measurement, measure_cell
from workers.model import PreparedModel, prepare_model
from workers.overlay import Plugin, plugin_for
from workers.probes import Probed, probe_launch
from workers.server import Server, ServerSpec, log_tail, start_with_retries
from workers.telemetry import Devices, DeviceState

Emit = Callable[[Event], None]
# Paid once per launch, told with each of its cells.
SHARED_PHASES = ("environment_s", "model_s", "start_s", "probe_s")


async def run_launch(spec: LaunchSpec, *, device_ids: Sequence[str]) -> AsyncIterator[Event]:
    """Run one launch and yield what happens; closing the iterator stops the server and waits for its end."""
    events: asyncio.Queue[Event | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def emit(event: Event | None) -> None:
        loop.call_soon_threadsafe(events.put_nowait, event)

    launch = _Launch(spec, device_ids=device_ids, emit=emit)
    task = asyncio.create_task(launch.run())
    task.add_done_callback(lambda _: emit(None))
    try:
        while (event := await events.get()) is not None:
            yield event
        await task
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


class _Launch:
    def __init__(self, spec: LaunchSpec, *, device_ids: Sequence[str], emit: Emit) -> None:
        self._spec = spec
        self._device_ids = tuple(device_ids)
        self._emit = emit
        self._left: list[CellSpec] = list(spec.cells)
        self._measuring = False
        self._timing: dict[str, float] = {}
        self._plugin: Plugin | None = None
        self._probed: Probed | None = None
        self._hold = contextlib.ExitStack()
        self._folder = self._hold.enter_context(clean.launch_folder())
        self._unclean: str | None = None  # what the engine left, once it has ended

    @property
    def _config(self) -> Config:
        return self._spec.cells[0].config

    @property
    def _log_path(self) -> Path:
        return self._folder / clean.LOG_NAME

    async def run(self) -> None:
        problem = None
        try:
            await self._serve()
        except Exception as error:  # noqa: BLE001 - the one broad catch: whatever it is becomes failure records
            problem = None if self._left else str(error)
            # A cell that was being measured takes the blame alone; the others have not been tried.
            self._fail(self._left[:1] if self._measuring else self._left, error)
        finally:
            self._emit(LaunchFinished(timing=dict(self._timing), problem=problem or self._unclean))
            self._hold.close()

    async def _serve(self) -> None:
        check_devices(self._config, self._device_ids)
        check_host(self._config)
        with self._phase("environment"):
            build = await asyncio.to_thread(self._build)
        with self._phase("model"):
            model = await asyncio.to_thread(self._prepare, build)
        devices = self._devices()
        before = await self._clean_start(devices)
        server = await self._start(build, model, devices)
        try:
            self._probed = await self._probe(server, model)
            await self._measure_all(server, build, model)
        finally:
            with self._phase("stop"):
                await asyncio.shield(server.stop())
                await self._clean_end(devices, before)

    def _build(self) -> EngineBuild:
        return build_environment(
            self._config.engine,
            kind=self._config.hardware.kind,
            cache=cache_root(self._config.cache_dir),
            progress=lambda text: self._emit(Phase(name="environment", detail=text)),
        )

    def _prepare(self, build: EngineBuild) -> PreparedModel:
        return prepare_model(
            self._config.model,
            build=build,
            cache=cache_root(self._config.cache_dir),
            progress=lambda text: self._emit(Phase(name="model", detail=text)),
        )

    def _devices(self) -> Devices | None:
        """The assigned devices; None on a CPU slot, and where no driver tells about them."""
        devices = Devices.open(",".join(self._device_ids)) if self._device_ids else None
        if devices is not None:
            self._hold.callback(devices.close)
        return devices

    async def _clean_start(self, devices: Devices | None) -> Sequence[DeviceState]:
        """Nothing of an earlier launch is left, and nobody else is on the devices; returns how they are."""
        hardware = self._config.hardware
        with self._phase("clean"):
            await clean.end_leftovers(grace_s=hardware.stop_grace_s, say=self._say_clean)
            if devices is None:
                return ()
            return await clean.wait_free(devices, wait_s=hardware.busy_wait_s, say=self._say_clean)

    def _say_clean(self, text: str) -> None:
        self._emit(Phase(name="clean", detail=text))

    async def _clean_end(self, devices: Devices | None, before: Sequence[DeviceState]) -> None:
        if devices is not None:
            self._unclean = (
                "; ".join(await clean.wait_released(devices, before, wait_s=clean.RELEASE_WAIT_S)) or None
            )

    async def _start(self, build: EngineBuild, model: PreparedModel, devices: Devices | None) -> Server:
        config = self._config
        plugin = await asyncio.to_thread(
            plugin_for, config.engine, cache=cache_root(config.cache_dir), folder=self._folder
        )
        self._plugin = plugin
        spec = ServerSpec(
            argv_for_port=lambda port: engines.command(
                config, model=model, port=port, python=build.python, plugin=plugin
            ),
            env=engines.environment(
                config, base=self._spec.base_env, device_ids=",".join(self._device_ids), plugin=plugin
            ),
            log_path=self._log_path,
            cwd=self._folder,
            start_timeout_s=config.hardware.start_timeout_s,
            stop_grace_s=config.hardware.stop_grace_s,
            model=config.model.name,
        )
        with self._phase("start"):
            return await start_with_retries(
                spec,
                busy_wait_s=config.hardware.busy_wait_s,
                device_free=None if devices is None else lambda: not clean.obstacles(devices),
            )

    async def _probe(self, server: Server, model: PreparedModel) -> Probed:
        cache = cache_root(self._config.cache_dir)
        asked = probe_launch(self._config, base_url=server.base_url, model=model, cache=cache)
        with self._phase("probe"):
            return await server.while_alive(asked)

    async def _measure_all(self, server: Server, build: EngineBuild, model: PreparedModel) -> None:
        self._measuring = True
        while self._left:
            try:
                self._emit(await self._measure(server, build, model))
            except (ValueError, ClientLimitError) as error:  # of this cell alone: the server can go on
                self._fail(self._left[:1], error)
            self._left.pop(0)

    async def _measure(self, server: Server, build: EngineBuild, model: PreparedModel) -> CellFinished:
        cell = self._left[0]
        measurement = Measurement(
            cell=cell,
            server=server,
            build=build,
            model=model,
            device_ids=self._device_ids,
            client_cores=free_cores(self._config, server.log_path),
            folder=self._folder / cell.key,
            emit=self._emit,
            plugin=self._plugin,
            probed=self._probed,
        )
        before = dict(self._timing)
        finished = await measure_cell(measurement)
        own = finished.payload["timing"]
        self._timing |= {phase: self._timing.get(phase, 0.0) + seconds for phase, seconds in own.items()}
        shared = {phase: before[phase] for phase in SHARED_PHASES}
        return replace(finished, payload={**finished.payload, "timing": shared | own})

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self._emit(Phase(name=name))
        began = time.monotonic()
        try:
            yield
        finally:
            key = f"{name}_s"
            self._timing[key] = self._timing.get(key, 0.0) + time.monotonic() - began

    def _fail(self, cells: Sequence[CellSpec], error: Exception) -> None:
        """All of these cells carry the cause and the log."""
        cause = error.cause if isinstance(error, ServelabError) else type(error).__name__
        tail = getattr(error, "log_tail", "") or log_tail(self._log_path)
        files = {"server.log": self._log_path.read_bytes()} if self._log_path.exists() else {}
        for cell in cells:
            self._emit(
                CellFailed(
                    cell=cell.key,
                    cause=cause,
                    message=str(error).removesuffix(f"; log: {self._log_path}"),
                    log_tail=tail,
                    traceback="".join(traceback.format_exception(error)),
                    retryable=isinstance(error, EngineDiedError | NotDrainedError),
                    timing=dict(self._timing),
                    files=files,
                ),
            )


def free_cores(config: Config, log_path: Path) -> frozenset[int] | None:
    """Cores for the load generator: away from the engine where there are such, None = any.

    A CPU engine says in its log which cores it computes on; beside a GPU engine it is the last quarter of the cores.
    """
    if config.hardware.kind is HardwareKind.cuda:
        return frozenset(client_cores(config, cores=topology()) or ()) or None
    log = engine_log.parse_log(log_path.read_text(errors="replace"))
    taken = {core for cores in log.cores.values() for core in cores}
    return frozenset(os.sched_getaffinity(0)) - taken or None


def check_host(config: Config) -> None:
    """Refuse what this host's processor cannot run, before anything is built or started.

    Raises:
        EngineStartError: cause ``refused_by_host``.
    """
    problem = engines.refused_by_host(config, cpu_flags=host.cpu_flags())
    if problem is not None:
        raise EngineStartError(problem, cause="refused_by_host")


def check_devices(config: Config, device_ids: Sequence[str]) -> None:
    """A CUDA launch must hold exactly the devices it asked for.

    Raises:
        EngineStartError: cause ``no_device`` (none assigned) or ``wrong_devices`` (another number).
    """
    if config.hardware.kind is not HardwareKind.cuda:
        return
    need = config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size
    if not device_ids:
        raise EngineStartError(
            f"no GPU assigned: engine {config.engine.name!r} needs {need}; check `ray status` for free GPUs",
            cause="no_device",
        )
    if len(device_ids) != need:
        raise EngineStartError(
            f"engine {config.engine.name!r} asked for {need} GPU(s) and was assigned {list(device_ids)}",
            cause="wrong_devices",
        )
