"""What the engine's own processes report through the plugin, as facts.

``GET /servelab/evidence`` merges the API server, the engine core and every worker. Each process is a source of its
own, so that two ranks which differ cannot both pass.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.engine.marks import read_marks
from kernels.engine.middleware import ROUTE

SOURCE = "engine process"

__all__ = ["ROUTE", "Reports", "named_facts", "parse"]

Named = Mapping[str, Any]

_QUEUES = {"FCFSRequestQueue": "fcfs", "PriorityRequestQueue": "priority"}
_PLAIN_DTYPES = frozenset({"bfloat16", "float16", "float32"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Reports:
    """The parsed answer of the route; a process that did not report is an empty mapping."""

    api_server: Named
    engine_core: Named
    workers: tuple[Named, ...]

    @property
    def all(self) -> tuple[Named, ...]:
        """Every process."""
        return (self.api_server, self.engine_core, *self.workers)

    @property
    def pids(self) -> list[int]:
        """Those that said who they are."""
        return [process["pid"] for process in self.all if isinstance(process.get("pid"), int)]


def parse(text: str | None) -> Reports:
    """The answer of the route; anything else than that is empty."""
    try:
        body = json.loads(text or "{}")
    except json.JSONDecodeError:
        body = {}
    body = _mapping(body)
    workers = body.get("workers")
    return Reports(
        api_server=_mapping(body.get("api_server")),
        engine_core=_mapping(body.get("engine_core")),
        workers=tuple(_mapping(worker) for worker in workers)
        if isinstance(workers, list) and workers
        else ({},),
    )


def named_facts(reports: Reports, *, tree: Iterable[int], marks: Path | None) -> Iterator[tuple[str, Named]]:
    """Source → facts. ``tree``: pids of the server's process tree; ``marks``: the plugin's folder of this launch."""
    yield _source("API server", reports.api_server), _of_process(reports.api_server)
    yield _source("core", reports.engine_core), _of_core(reports.engine_core)
    for worker in reports.workers:
        yield _source(f"worker {worker.get('rank', '')}".strip(), worker), _of_worker(worker)
    yield f"{SOURCE}es", _of_all(reports, tree=frozenset(tree), marks=marks)


def _of_process(process: Named) -> Named:
    return {
        "server.version": process.get("vllm"),
        "engine.plugin_sha256": process.get("plugin_sha256"),
        "engine.error": process.get("error"),
    }


def _of_core(core: Named) -> Named:
    queue = str(core.get("queue_class", "")).rpartition(".")[2]
    return {
        **_of_process(core),
        "server.scheduling_policy": _QUEUES.get(queue),
        "server.max_num_seqs": core.get("max_num_seqs"),
        "server.max_num_batched_tokens": core.get("max_num_batched_tokens"),
        "engine.scheduler_class": core.get("scheduler_class"),
        "engine.queue_class": core.get("queue_class"),
        "engine.core_threads": core.get("torch_threads"),
        "engine.core_affinity": core.get("affinity"),
    }


def _of_worker(worker: Named) -> Named:
    layers = [_mapping(layer) for layer in worker.get("layers") or ()]
    dtype = _joined(layer.get("kv_tensor_dtype") for layer in layers)
    backend = _joined(_backend(layer) for layer in layers)
    return {
        **_of_process(worker),
        "server.attention_backend": backend,
        "server.kv_cache_dtype": dtype if dtype in _PLAIN_DTYPES else None,
        "server.kv_cache_blocks": worker.get("num_blocks"),
        "server.block_size": worker.get("block_size"),
        "engine.attention_impl": _joined(layer.get("impl_class") for layer in layers),
        "engine.num_layers": worker.get("num_layers"),
        "engine.layers": layers or None,
        "engine.kv_tensor_dtype": dtype,
        "engine.kv_bytes_per_token": _bytes_per_token(layers),
        "engine.kv_bytes_held": worker.get("kv_bytes_held"),
        "engine.worker_class": worker.get("worker_class"),
        "engine.torch": worker.get("torch"),
        "engine.cuda": worker.get("cuda"),
        "engine.python": worker.get("python"),
        "engine.numpy": worker.get("numpy"),
        "engine.worker_threads": worker.get("torch_threads"),
        "engine.worker_affinity": worker.get("affinity"),
    }


def _of_all(reports: Reports, *, tree: frozenset[int], marks: Path | None) -> Named:
    pids = reports.pids
    return {
        "engine.pids": pids or None,
        "engine.pids_in_tree": set(pids) <= tree if pids else None,
        "engine.pids_marked": _marked(reports, marks) if pids and marks is not None else None,
    }


def _marked(reports: Reports, marks: Path) -> bool:
    """Every process that answered left a file with the same pid and sources, before anybody asked."""
    left = {(mark.get("pid"), mark.get("plugin_sha256")) for mark in read_marks(marks)}
    said = {
        (one["pid"], one["plugin_sha256"]) for one in reports.all if {"pid", "plugin_sha256"} <= one.keys()
    }
    return said <= left


def _bytes_per_token(layers: list[Named]) -> float | None:
    """Over all layers of this worker."""
    held = [(layer.get("kv_bytes_per_token"), layer.get("num_layers")) for layer in layers]
    if not held or any(part is None for layer in held for part in layer):
        return None
    return float(sum(each * count for each, count in held))  # type: ignore[operator]


def _backend(layer: Named) -> str | None:
    """Releases before 0.12 append the engine's generation."""
    name = layer.get("backend")
    return None if name is None else str(name).removesuffix("_VLLM_V1").removesuffix("_V1")


def _joined(values: Iterable[Any]) -> str | None:
    """The one value of all layers; layers that differ are listed."""
    found = sorted({str(value) for value in values if value is not None})
    return ", ".join(found) or None


def _source(role: str, process: Named) -> str:
    return f"{SOURCE} {role} (pid {process.get('pid', 'unknown')})"


def _mapping(value: Any) -> Named:
    return value if isinstance(value, dict) else {}
