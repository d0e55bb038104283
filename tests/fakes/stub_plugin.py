"""The plugin's side of the stub: what a vLLM that loaded it would report, from the sources that were staged for it."""

import os
import sys

ROUTE = "/servelab/evidence"
NUM_LAYERS = 30
TENSOR_DTYPES = {"fp8": "uint8", "fp8_e4m3": "uint8", "turboquant_4bit_nc": "uint8"}
QUEUES = {"fcfs": "FCFSRequestQueue", "priority": "PriorityRequestQueue"}


def load(args, script):
    """The hash of the staged sources, or None without ``--middleware``; a plugin that is not there ends the server."""
    if not args.middleware:
        return None
    from servelab_kernels.engine.marks import mark
    from servelab_kernels.engine.source import LOADED_SHA256

    if script.engine_marks:
        mark()
    return LOADED_SHA256


def reports(args, script, cache, *, plugin_sha256, per_token):
    """The answer of the route; the stub is all three processes."""
    process = {
        "pid": os.getpid(),
        "plugin_sha256": plugin_sha256,
        "vllm": script.version,
        "torch": "2.13.0+cpu",
        "cuda": None,
        "python": sys.version.split()[0],
        "numpy": "2.3.5",
        "torch_threads": 1,
        "affinity": sorted(os.sched_getaffinity(0)),
    }
    queue = script.engine_queue_class or QUEUES[args.scheduling_policy]
    core = process | {
        "scheduler_class": "vllm.v1.core.sched.scheduler.Scheduler",
        "queue_class": f"vllm.v1.core.sched.request_queue.{queue}",
        "policy": args.scheduling_policy,
        "num_blocks": cache.num_blocks,
    }
    return {
        "api_server": process,
        "engine_core": core,
        "workers": [_worker(args, script, cache, process, per_token)],
    }


def _worker(args, script, cache, process, per_token):
    own = {
        "pid": script.engine_pid or process["pid"],
        "plugin_sha256": script.engine_plugin_sha256 or process["plugin_sha256"],
        "vllm": script.engine_vllm or process["vllm"],
    }
    if script.engine_error is not None:
        return {"pid": own["pid"], "error": script.engine_error}
    each = script.engine_kv_bytes_per_token or per_token / NUM_LAYERS
    layer = {
        "backend": script.engine_backend or args.attention_backend or "CPU_ATTN",
        "backend_class": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackend",
        "impl_class": "vllm.v1.attention.backends.cpu_attn.CPUAttentionBackendImpl",
        "kv_cache_dtype": args.kv_cache_dtype,
        "kv_tensor_dtype": script.engine_kv_tensor_dtype
        or TENSOR_DTYPES.get(args.kv_cache_dtype, "bfloat16"),
        "kv_tensor_shape": [[cache.num_blocks, 3, cache.block_size, 128]],
        "kv_bytes_per_token": each,
        "num_layers": NUM_LAYERS,
        "names": ["model.layers.0.self_attn.attn"],
    }
    return (
        process
        | own
        | {
            "rank": 0,
            "worker_class": "vllm.v1.worker.cpu_worker.CPUWorker",
            "num_layers": NUM_LAYERS,
            "num_blocks": cache.num_blocks,
            "block_size": cache.block_size,
            "kv_bytes_held": int(each * NUM_LAYERS * cache.num_tokens),
            "layers": [layer],
        }
    )
