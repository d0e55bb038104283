"""Engine families: what one generation of vLLM calls its flags, metrics and routes.

``v0`` (0.4 to 0.8, V0 engine), ``v1_early`` (0.8 to 0.10, V1 engine), ``v1`` (0.11 and later). A family is data; the
code that uses it is the same for all. Log wordings are in :mod:`workers.engine_log`: they identify themselves, so
every wording is tried on every log.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from packaging.version import InvalidVersion, Version

from conf.schema import Engine

# Quantity → names by which any release exposed it, newest first. Counters are given without ``_total``.
# Two names of one quantity never add up: the first one present is read (some releases expose both).
_GAUGES_V1 = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
}
_COUNTERS_V1 = {
    "preemptions": ("vllm:num_preemptions",),
    "prefix_queries": ("vllm:prefix_cache_queries", "vllm:gpu_prefix_cache_queries"),
    "prefix_hits": ("vllm:prefix_cache_hits", "vllm:gpu_prefix_cache_hits"),
    "prompt_tokens": ("vllm:prompt_tokens",),
    "generation_tokens": ("vllm:generation_tokens",),
    "completed": ("vllm:request_success",),
}
# ``vllm:request_time_per_output_token_seconds`` is a mean per request: another quantity, never a stand-in.
_HISTOGRAMS_V1 = {
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "e2el": ("vllm:e2e_request_latency_seconds",),
    "queue": ("vllm:request_queue_time_seconds",),
    "prefill": ("vllm:request_prefill_time_seconds",),
    "decode": ("vllm:request_decode_time_seconds",),
    "prefilled_tokens": ("vllm:request_prefill_kv_computed_tokens",),
}

_FLAGS_V0 = {
    "model.dtype": "--dtype",
    "model.revision": "--revision",
    "kv.dtype": "--kv-cache-dtype",
    "kv.block_size": "--block-size",
    "kv.num_blocks": "--num-gpu-blocks-override",
    "kv.prefix_caching": "--enable-prefix-caching",
    "engine.max_model_len": "--max-model-len",
    "engine.max_num_seqs": "--max-num-seqs",
    "engine.max_num_batched_tokens": "--max-num-batched-tokens",
    "engine.enforce_eager": "--enforce-eager",
    "engine.tensor_parallel_size": "--tensor-parallel-size",
    "engine.pipeline_parallel_size": "--pipeline-parallel-size",
    "scheduler.policy": "--scheduling-policy",
}
_FLAGS_V1_EARLY = _FLAGS_V0 | {"kv.no_prefix_caching": "--no-enable-prefix-caching"}
_FLAGS_V1 = _FLAGS_V1_EARLY | {
    "kv.memory_bytes": "--kv-cache-memory-bytes",
    "engine.attention_backend": "--attention-backend",
    "plugin": "--middleware",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One generation of vLLM as tables.

    Attributes:
        flags: setting → command-line flag; a setting without one cannot be expressed. ``plugin`` loads the middleware
            of our own plugin; without it the engine's processes are not asked.
        since: setting → first release that has the flag (only where it is younger than the family).
        constant_flags: always given.
        environment: variables that select this generation.
        backend_variable: environment variable that chooses the attention backend, where no flag does.
        kv_dtypes: spellings of ``kv.dtype`` that differ from the flag's; ``bfloat16`` was ``auto`` before it had a name.
        gauges, counters, histograms: quantity → metric names, newest first.
        routes: what is asked → HTTP path.
    """

    name: str
    flags: Mapping[str, str]
    since: Mapping[str, str] = field(default_factory=dict)
    constant_flags: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    backend_variable: str | None = None
    kv_dtypes_as_auto: frozenset[str] = frozenset()
    gauges: Mapping[str, tuple[str, ...]]
    counters: Mapping[str, tuple[str, ...]]
    histograms: Mapping[str, tuple[str, ...]]
    info: str = "vllm:cache_config_info"
    routes: Mapping[str, str] = field(
        default_factory=lambda: {
            "health": "/health",
            "version": "/version",
            "models": "/v1/models",
            "metrics": "/metrics",
            "completions": "/v1/completions",
            "chat": "/v1/chat/completions",
        }
    )

    def flag(self, setting: str, *, engine: Engine) -> str | None:
        """The flag of a setting in this release, or None if this release cannot express it."""
        since = self.since.get(setting)
        if since is not None and not at_least(engine, since):
            return None
        return self.flags.get(setting)


FAMILIES: Mapping[str, Family] = {
    "v0": Family(
        name="v0",
        flags=_FLAGS_V0,
        since={"scheduler.policy": "0.6.3"},
        constant_flags=("--disable-log-requests",),
        environment={"VLLM_USE_V1": "0"},
        backend_variable="VLLM_ATTENTION_BACKEND",
        kv_dtypes_as_auto=frozenset({"bfloat16", "float16", "float32"}),
        gauges=_GAUGES_V1
        | {"swapped": ("vllm:num_requests_swapped",), "kv_usage": ("vllm:gpu_cache_usage_perc",)},
        counters=_COUNTERS_V1,
        histograms=_HISTOGRAMS_V1,
    ),
    "v1_early": Family(
        name="v1_early",
        flags=_FLAGS_V1_EARLY,
        constant_flags=("--disable-log-requests",),
        environment={"VLLM_USE_V1": "1"},
        backend_variable="VLLM_ATTENTION_BACKEND",
        kv_dtypes_as_auto=frozenset({"bfloat16", "float16", "float32"}),
        gauges=_GAUGES_V1,
        counters=_COUNTERS_V1,
        histograms=_HISTOGRAMS_V1,
    ),
    "v1": Family(
        name="v1",
        flags=_FLAGS_V1,
        since={"engine.attention_backend": "0.13"},
        backend_variable="VLLM_ATTENTION_BACKEND",
        kv_dtypes_as_auto=frozenset({"float32"}),
        gauges=_GAUGES_V1,
        counters=_COUNTERS_V1,
        histograms=_HISTOGRAMS_V1,
    ),
}


def family(engine: Engine) -> Family:
    """The tables of an engine.

    Raises:
        ValueError: for an unknown ``engine.family``.
    """
    try:
        return FAMILIES[engine.family]
    except KeyError:
        raise ValueError(
            f"engine.family must be one of {', '.join(FAMILIES)}, got {engine.family!r}"
        ) from None


def at_least(engine: Engine, release: str) -> bool:
    """True if an engine has what ``release`` brought.

    An engine pinned by commit is a checkout whose version number says nothing; its family alone speaks for it.
    """
    if engine.commit is not None:
        return True
    try:
        return Version(engine.version) >= Version(release)
    except InvalidVersion:
        return True
