"""The wiring to Ray: capacity, slots, and one stream of events from all of them. Nothing else imports Ray here."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError

from conf.schema import Config, HardwareKind
from workers.events import Event, LaunchSpec
from workers.slot import Slot

log = logging.getLogger(__name__)
OBJECT_STORE_BYTES = 256 * 2**20
ENGINE_SLOT = "engine_slot"
STOP_S = 20.0  # a server gets its grace, then its tree is killed


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLost:
    """The actor of a launch died without a last word (killed, node lost)."""

    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotClosed:
    """The event stream of a launch ended."""


@dataclass(slots=True, kw_only=True)
class _Running:
    launch: str
    actor: Any
    stream: Any


class Cluster:
    """Ray as the driver sees it: ``submit`` launches, ``events`` yields what they report."""

    def __init__(self, config: Config) -> None:
        self._own = config.ray.address is None
        if self._own:
            slots = config.hardware.engine_slots if config.hardware.kind is HardwareKind.cpu else 0
            ray.init(
                address="local",
                include_dashboard=False,
                configure_logging=False,
                log_to_driver=False,
                object_store_memory=OBJECT_STORE_BYTES,
                resources={ENGINE_SLOT: slots} if slots else None,
            )
        else:
            connect(str(config.ray.address))
        silence_raylet()
        self._running: dict[Any, _Running] = {}

    def capacity(self, config: Config) -> int:
        """How many launches of this shape fit at once.

        Raises:
            ValueError: no node can ever hold one; a request like that would wait for ever in Ray.
        """
        name, amount = resource(config)
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        per_node = [node["Resources"].get(name, 0.0) for node in nodes if node["Alive"]]
        fits = int(sum(have // amount for have in per_node))
        if fits < 1:
            most = max(per_node, default=0.0)
            remedy = (
                "start Ray with --resources='{\"engine_slot\": 1}' on a node that may run engines"
                if name == ENGINE_SLOT
                else "lower engine.tensor_parallel_size * engine.pipeline_parallel_size, add a node, or use hardware=cpu"
            )
            raise ValueError(
                f"engine {config.engine.name!r} needs {amount:g} {name} on one node, the largest node has {most:g}: {remedy}",
            )
        return fits

    def submit(self, spec: LaunchSpec) -> None:
        """Create a slot for the launch and start it."""
        config = spec.cells[0].config
        name, amount = resource(config)
        options: dict[str, Any] = {"num_gpus": amount} if name == "GPU" else {"resources": {name: amount}}
        actor = Slot.options(**options).remote()  # type: ignore[attr-defined]
        stream = actor.run.options(num_returns="streaming").remote(spec)
        self._running[stream] = _Running(launch=spec.key, actor=actor, stream=stream)

    @property
    def num_running(self) -> int:
        """Launches whose stream is open."""
        return len(self._running)

    def events(self, *, timeout_s: float) -> Iterator[tuple[str, Event | SlotLost | SlotClosed]]:
        """(launch key, event) of everything that is ready within the time-out."""
        if not self._running:
            return
        ready, _ = ray.wait(list(self._running), num_returns=1, timeout=timeout_s)
        for stream in ready:
            running = self._running[stream]
            yield running.launch, self._next(running)

    def _next(self, running: _Running) -> Event | SlotLost | SlotClosed:
        try:
            event: Event = ray.get(next(running.stream))
        except StopIteration:
            self._release(running)
            return SlotClosed()
        except RayError as error:
            self._release(running)
            return SlotLost(message=f"{type(error).__name__}: {first_line(error)}")
        return event

    def _release(self, running: _Running) -> None:
        self._running.pop(running.stream, None)
        ray.kill(running.actor)

    def stop_all(self) -> Iterator[tuple[str, Event | SlotLost | SlotClosed]]:
        """End every launch in order (its server is stopped and verified), after ``STOP_S`` by force.

        A supervisor's lifeline ends the server even then.
        """
        for running in self._running.values():
            ray.cancel(running.stream)
        deadline = time.monotonic() + STOP_S
        while self._running and time.monotonic() < deadline:
            yield from self.events(timeout_s=0.2)
        for running in list(self._running.values()):
            self._release(running)

    def close(self) -> None:
        """Leave Ray; a Ray started here ends with it."""
        for running in list(self._running.values()):
            self._release(running)
        ray.shutdown()


def resource(config: Config) -> tuple[str, float]:
    """The Ray resource that one engine of this cell takes, and how much of it."""
    if config.hardware.kind is HardwareKind.cuda:
        return "GPU", float(config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size)
    return ENGINE_SLOT, 1.0


def connect(address: str) -> None:
    """Join an existing cluster.

    Raises:
        ValueError: nothing answers at the address.
    """
    try:
        ray.init(address=address, configure_logging=False, log_to_driver=False)
    except (ConnectionError, RayError, ValueError) as error:
        raise ValueError(
            f"ray.address={address!r}: no Ray cluster answers ({first_line(error)}); start one with `ray start --head`, or leave ray.address unset",
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of an error's text."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def silence_raylet() -> None:
    """Send the raylet's texts about dead workers to our log: the driver reports each failure itself."""
    with contextlib.suppress(ImportError):
        from ray._private import worker

        worker.print_to_stdstream = lambda data, *_args, **_kwargs: log.debug("raylet: %s", data)
