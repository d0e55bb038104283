"""What one engine process really holds, as JSON text.

A report is called over vLLM's RPC. An answer that msgpack cannot encode, or a raised error in the wrong place, stops
the engine's output thread and every request hangs: reports are plain text and never raise.
"""

import functools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from typing import Any

from .source import LOADED_SHA256

Report = Callable[[Any], dict[str, Any]]

SAMPLE_LAYERS = 3  # names shown of a group of equal layers


def _as_text(report: Report) -> Callable[[Any], str]:
    """The report as JSON text; whatever goes wrong becomes its ``error``."""

    @functools.wraps(report)
    def text(self: Any) -> str:
        try:
            return json.dumps(report(self), default=str)
        except Exception as error:  # noqa: BLE001 - an error that leaves here ends the engine
            return json.dumps({"pid": os.getpid(), "error": f"{type(error).__name__}: {error}"})

    return text


def process_report() -> dict[str, Any]:
    """Versions, sources, threads and cores of this process."""
    import torch
    import vllm

    numpy = sys.modules.get("numpy")
    return {
        "pid": os.getpid(),
        "plugin_sha256": LOADED_SHA256,
        "vllm": str(vllm.__version__),
        "torch": str(torch.__version__),
        "cuda": None if torch.version.cuda is None else str(torch.version.cuda),
        "python": platform.python_version(),
        "numpy": None if numpy is None else str(numpy.__version__),
        "torch_threads": torch.get_num_threads(),
        "affinity": sorted(os.sched_getaffinity(0)),
    }


@_as_text
def worker_report(self: Any) -> dict[str, Any]:
    """Method of ``WorkerBase``: the attention layers of this rank and the KV cache that they hold."""
    layers = self.vllm_config.compilation_config.static_forward_context
    attention = {name: layer for name, layer in layers.items() if hasattr(layer, "kv_cache")}
    config = self.model_runner.kv_cache_config
    block_sizes = {group.kv_cache_spec.block_size for group in config.kv_cache_groups}
    block_size = block_sizes.pop() if len(block_sizes) == 1 else None
    num_tokens = None if block_size is None else config.num_blocks * block_size
    return process_report() | {
        "rank": self.rank,
        "worker_class": _name(type(self)),
        "num_layers": len(attention),
        "num_blocks": config.num_blocks,
        "block_size": block_size,
        "kv_bytes_held": _bytes_held(tensor for layer in attention.values() for tensor in _tensors(layer)),
        "layers": _grouped(attention, num_tokens=num_tokens),
    }


@_as_text
def core_report(self: Any) -> dict[str, Any]:
    """Method of ``EngineCore``: the live scheduler."""
    scheduler = self.scheduler
    policy = getattr(scheduler, "policy", None)
    return process_report() | {
        "scheduler_class": _name(type(scheduler)),
        "queue_class": _name(type(scheduler.waiting)),
        "policy": None if policy is None else str(getattr(policy, "value", policy)),
        "num_blocks": scheduler.kv_cache_config.num_blocks,
        "max_num_seqs": getattr(scheduler, "max_num_running_reqs", None),
        "max_num_batched_tokens": getattr(scheduler, "max_num_scheduled_tokens", None),
    }


def _grouped(attention: dict[str, Any], *, num_tokens: int | None) -> list[dict[str, Any]]:
    """Layers that are alike in everything but their name are one entry."""
    groups: dict[str, tuple[dict[str, Any], list[str]]] = {}
    for name, layer in attention.items():
        described = _layer(layer, num_tokens=num_tokens)
        _, names = groups.setdefault(json.dumps(described, sort_keys=True), (described, []))
        names.append(name)
    return [
        described | {"num_layers": len(names), "names": names[:SAMPLE_LAYERS]}
        for described, names in groups.values()
    ]


def _layer(layer: Any, *, num_tokens: int | None) -> dict[str, Any]:
    tensors = _tensors(layer)
    backend = getattr(layer, "attn_backend", None)
    impl = getattr(layer, "impl", None)
    held = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return {
        "backend": None if backend is None else str(backend.get_name()),
        "backend_class": None if backend is None else _name(backend),
        "impl_class": None if impl is None else _name(type(impl)),
        "kv_cache_dtype": str(getattr(layer, "kv_cache_dtype", None)),
        "kv_tensor_dtype": "+".join(sorted({_dtype(tensor) for tensor in tensors})) or None,
        "kv_tensor_shape": [list(tensor.shape) for tensor in tensors],
        "kv_bytes_per_token": held / num_tokens if num_tokens and held else None,
    }


def _tensors(layer: Any) -> list[Any]:
    """The KV tensors of a layer; some releases keep one per pipeline stage in a list."""
    cache = layer.kv_cache
    return list(cache) if isinstance(cache, list | tuple) else [cache]


def _bytes_held(tensors: Iterable[Any]) -> int:
    """Layers may share a tensor: each place in memory counts once."""
    places = {tensor.data_ptr(): tensor.numel() * tensor.element_size() for tensor in tensors}
    return sum(places.values())


def _dtype(tensor: Any) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _name(kind: Any) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
