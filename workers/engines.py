"""The command line and the environment of an engine: what a cell asks for, in the words of its engine's family.

What is written here is a request. Whether the server did it is for :mod:`workers.evidence` to say.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from conf.schema import Config, HardwareKind, ModelSource
from workers.capacity import num_blocks
from workers.families import Family, family
from workers.overlay import Plugin

ENTRY_POINT = ("-m", "vllm.entrypoints.openai.api_server")

UNQUANTISED = frozenset({"auto", "bfloat16", "float16", "float32"})

# Inherited variables that would change the engine without being part of the cell. ``engine.env`` may set any of them.
DROPPED_PREFIXES = (
    "RAY_",
    "VLLM_",
    "MLFLOW_",
    "HYDRA_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "NUMBA_",
    "TRITON_INTERPRET",
)
DROPPED = frozenset(
    {
        "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "SPT_NOENV", "PYTHONPATH", "PYTHONHOME", "PYTHONBREAKPOINT",
        "PYTHONSTARTUP", "PYTHONDONTWRITEBYTECODE", "PYTHONWARNINGS", "PYTHONHASHSEED", "VIRTUAL_ENV", "LD_PRELOAD", "TORCH_LOGS",
    }
)  # fmt: skip


class ServedModel(Protocol):
    """What a command needs to know of prepared weights."""

    @property
    def path(self) -> str:
        """Folder, or a model-hub name."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The model's ``config.json``; empty if not known yet."""


def command(
    config: Config,
    *,
    model: ServedModel,
    port: int,
    python: Path,
    host: str = "127.0.0.1",
    plugin: Plugin | None = None,
) -> list[str]:
    """The argument vector that starts the server of a cell.

    Raises:
        ValueError: for a setting that this engine cannot express, by the setting's name.
    """
    engine = config.engine
    start = list(engine.executable) if engine.executable is not None else [str(python), *ENTRY_POINT]
    served = [
        "--model",
        model.path,
        "--served-model-name",
        config.model.name,
        "--host",
        host,
        "--port",
        str(port),
    ]
    arguments = [*served, *_settings(config, model=model), *family(engine).constant_flags]
    _check_extra(engine.extra_args, arguments)
    return [*start, *arguments, *(plugin.arguments if plugin is not None else ()), *engine.extra_args]


def environment(
    config: Config, *, base: Mapping[str, str], device_ids: str | None, plugin: Plugin | None = None
) -> dict[str, str]:
    """The server's whole environment.

    Args:
        config: the cell; ``engine.env`` has the last word.
        base: the environment of the user's command (not of a Ray worker, which cuts thread counts).
        device_ids: what Ray assigned, passed through unchanged (indices, GPU or MIG UUIDs); None or "" on a CPU slot.
        plugin: what the engine's processes load of ours.

    Raises:
        ValueError: if a CUDA cell got no device, or not as many as it asked for.
    """
    own = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": _visible_devices(config, device_ids=device_ids),
    }
    if config.hardware.kind is HardwareKind.cuda:
        own["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # an index means what Ray and NVML mean, not the n-th fastest
    if config.model.source is not ModelSource.hub:
        own |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    whole = _inherited(base) | own | _selectors(config) | dict(config.engine.env)
    return whole if plugin is None else plugin.environment(whole)


def num_devices(config: Config) -> int:
    """Devices one server of this cell takes: tensor * pipeline parallel size."""
    return config.engine.tensor_parallel_size * config.engine.pipeline_parallel_size


def refused_by_host(config: Config, *, cpu_flags: frozenset[str]) -> str | None:
    """Why this host's processor cannot run a cell, in one sentence; None if nothing speaks against it.

    vLLM's CPU attention (read and run: 0.31, 0.32) refuses every quantised KV cache at start on an x86 processor
    without AVX-512 or AMX.
    """
    x86 = "sse2" in cpu_flags
    quantised = config.kv.dtype not in UNQUANTISED
    if config.hardware.kind is not HardwareKind.cpu or not x86 or not quantised:
        return None
    if {"avx512f", "amx_tile"} & cpu_flags:
        return None
    return (
        f"kv.dtype={config.kv.dtype} needs AVX-512 or AMX on a CPU host, and this processor has neither; "
        "run this cell on another host or leave the dtype out of the sweep"
    )


def kv_dtype_flag(config: Config) -> str:
    """The value of ``--kv-cache-dtype`` for ``kv.dtype``.

    Raises:
        ValueError: if the family has no name for this dtype and the model's own dtype is another one.
    """
    dtype = config.kv.dtype
    if dtype not in family(config.engine).kv_dtypes_as_auto:
        return dtype
    if dtype != config.model.dtype:
        raise ValueError(
            f"kv.dtype={dtype} with model.dtype={config.model.dtype}: {_who(config)} stores an unquantised KV cache "
            f"in the model's dtype only; set kv.dtype={config.model.dtype}"
        )
    return "auto"


def _settings(config: Config, *, model: ServedModel) -> list[str]:
    engine = config.engine
    valued: dict[str, Any] = {
        "model.dtype": config.model.dtype,
        "model.revision": config.model.revision if config.model.source is ModelSource.hub else None,
        "kv.dtype": kv_dtype_flag(config),
        "kv.block_size": config.kv.block_size,
        "engine.max_model_len": engine.max_model_len,
        "engine.max_num_seqs": engine.max_num_seqs,
        "engine.max_num_batched_tokens": engine.max_num_batched_tokens,
        "engine.tensor_parallel_size": _above_one(engine.tensor_parallel_size),
        "engine.pipeline_parallel_size": _above_one(engine.pipeline_parallel_size),
    }
    given = {setting: value for setting, value in valued.items() if value is not None}
    arguments = [part for setting, value in given.items() for part in (_flag(config, setting), str(value))]
    if config.sparsity.method != "dense":
        raise _refusal(config, "sparsity.method", config.sparsity.method)
    return [
        *arguments,
        *_memory(config, model=model),
        *_switches(config),
        *_policy(config),
        *_backend(config),
    ]


def _memory(config: Config, *, model: ServedModel) -> list[str]:
    tables = family(config.engine)
    flag = tables.flag("kv.memory_bytes", engine=config.engine)
    if flag is not None:
        return [flag, str(config.kv.memory_bytes)]
    blocks = num_blocks(
        model.config,
        memory_bytes=config.kv.memory_bytes,
        block_size=config.kv.block_size,
        kv_dtype=config.kv.dtype,
        model_dtype=config.model.dtype,
    )
    if not blocks:
        raise ValueError(
            f"kv.memory_bytes={config.kv.memory_bytes} cannot be given to {_who(config)}: it has no "
            f"--kv-cache-memory-bytes, and bytes per token of kv.dtype={config.kv.dtype} on this model are not known, "
            "so no number of blocks follows; use a newer engine or a model with a local config.json"
        )
    return [_flag(config, "kv.num_blocks"), str(blocks)]


def _switches(config: Config) -> list[str]:
    eager = [_flag(config, "engine.enforce_eager")] if config.engine.enforce_eager else []
    if config.kv.prefix_caching:
        return [*eager, _flag(config, "kv.prefix_caching")]
    off = family(config.engine).flag("kv.no_prefix_caching", engine=config.engine)
    return [*eager, off] if off is not None else eager


def _policy(config: Config) -> list[str]:
    flag = family(config.engine).flag("scheduler.policy", engine=config.engine)
    if flag is not None:
        return [flag, config.scheduler.policy]
    if config.scheduler.policy == "fcfs":  # the only policy of releases without the flag
        return []
    raise _refusal(config, "scheduler.policy", config.scheduler.policy)


def _backend(config: Config) -> list[str]:
    flag = family(config.engine).flag("engine.attention_backend", engine=config.engine)
    backend = config.engine.attention_backend
    return [flag, backend] if backend is not None and flag is not None else []


def _selectors(config: Config) -> dict[str, str]:
    """Variables that do what a flag does in later releases."""
    tables: Family = family(config.engine)
    chosen = dict(tables.environment)
    backend = config.engine.attention_backend
    has_flag = tables.flag("engine.attention_backend", engine=config.engine) is not None
    if backend is not None and not has_flag and tables.backend_variable is not None:
        chosen[tables.backend_variable] = backend
    return chosen


def _visible_devices(config: Config, *, device_ids: str | None) -> str:
    if config.hardware.kind is HardwareKind.cpu:
        return ""
    wanted = num_devices(config)
    ids = [part for part in (device_ids or "").split(",") if part.strip()]
    if not ids:
        raise ValueError(
            f"no GPU assigned: hardware.kind=cuda needs {wanted} (tensor * pipeline parallel size)"
        )
    if len(ids) != wanted:
        raise ValueError(f"{len(ids)} GPUs assigned ({device_ids}), but the engine uses {wanted}")
    return str(device_ids)


def _inherited(base: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in base.items()
        if name not in DROPPED and not name.startswith(DROPPED_PREFIXES)
    }


def _flag(config: Config, setting: str) -> str:
    flag = family(config.engine).flag(setting, engine=config.engine)
    if flag is None:
        raise _refusal(config, setting, "set")
    return flag


def _check_extra(extra: list[str], ours: list[str]) -> None:
    taken = {_positive(argument) for argument in ours if argument.startswith("--")}
    for argument in extra:
        if _positive(argument) in taken:
            raise ValueError(
                f"engine.extra_args repeats {argument}, which the cell's own settings give; set that setting"
            )


def _positive(argument: str) -> str:
    """A flag without its value and its negation: ``--no_x=1`` is ``--x``."""
    return argument.split("=", 1)[0].replace("_", "-").replace("--no-", "--", 1)


def _above_one(size: int) -> int | None:
    return size if size > 1 else None


def _who(config: Config) -> str:
    return f"engine {config.engine.name} (vLLM {config.engine.version}, family {config.engine.family})"


def _refusal(config: Config, setting: str, value: Any) -> ValueError:
    return ValueError(f"{setting}={value} cannot be expressed by {_who(config)}; leave it at its default")
