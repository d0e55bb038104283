"""The Ray actor that owns one engine: it runs launches and streams their events to the driver."""

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

import ray

from workers.events import Event, LaunchSpec
from workers.launch import run_launch


@ray.remote(num_cpus=0, max_restarts=0, max_task_retries=0)
class Slot:
    """One engine slot. Created per launch, so that a dead actor costs one launch and nothing is inherited."""

    async def run(self, spec: LaunchSpec) -> AsyncIterator[Event]:
        """Run one launch; cancellation (``stop`` or a lost driver) ends the server with it."""
        self._task = asyncio.current_task()
        async for event in run_launch(spec, device_ids=assigned_devices()):
            yield event

    def place(self) -> dict[str, str]:
        """Node, assigned devices and interpreter of this slot."""
        context = ray.get_runtime_context()
        return {
            "node_id": context.get_node_id(),
            "devices": ",".join(assigned_devices()),
            "python": sys.executable,
        }


def assigned_devices() -> Sequence[str]:
    """The device ids that Ray assigned to this actor, as text and unchanged (indices, GPU- or MIG-names)."""
    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
