"""The script of the stub engine: what it should do, and how to start it.

A test builds a :class:`Script`, puts ``environment(script)`` into the server's environment and uses ``COMMAND``
(or :func:`argv`) as the executable; ``stub_engine.py`` reads the script back. Without a script the stub behaves
like a healthy vLLM 0.32 server that honours the flags it is given.

Requests are counted from 0 in order of receipt, streaming generations only (a readiness generation does not stream
and is not counted). ``EVERY`` in a tuple of request numbers means all of them.
"""

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path

EVERY = -1
VARIABLE = "STUB_SCRIPT"
STUB = Path(__file__).with_name("stub_engine.py")
COMMAND = [sys.executable, str(STUB)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Everything the stub can be told. Defaults: fast, healthy, honest."""

    # --- start ---
    bind_delay_s: float = 0.0  # before the HTTP port (and the internal port) is bound
    start_delay_s: float = 0.0  # between bind and listen
    ready_after_s: float = 0.0  # /health answers 503 for so long after listening
    silent: bool = False  # alive, prints nothing, never listens
    exit_after_s: float = 0.0  # with exit_code: time until the failure
    exit_code: int | None = None  # exit at start with this code ...
    exit_text: str = ""  # ... and this text on stderr
    exit_once: str | None = None  # with exit_code: only if this file is missing; the failing stub creates it
    internal_port: bool = (
        False  # also probe a port from VLLM_PORT upwards at start and bind it after bind_delay_s
    )
    chatty_bytes: int = 0  # written to stdout and again to stderr before listening
    generation_status: int = 200  # HTTP status of every generation; other than 200 = an error body
    generation_hangs: bool = False  # /health is fine, a generation never answers

    # --- processes and signals ---
    children: int = 0  # forked children, each in a session of its own
    child_title: str = "VLLM::EngineCor"  # PR_SET_NAME of the children
    children_ignore_sigterm: bool = False
    leave_children: bool = False  # on SIGTERM the main process exits and leaves its children alone
    lock_path: str | None = None  # child i holds an exclusive flock on "<lock_path>.<i>" for its life
    ignore_sigterm: bool = False  # the main process
    die_after_requests: int | None = None  # os._exit once so many streams have ended
    die_mid_request: int | None = None  # os._exit after the first token of this request
    die_after_s: float | None = None  # os._exit so long after listening
    die_code: int = 1
    die_text: str = "EngineDeadError: EngineCore encountered an issue."

    # --- what it says about itself ---
    version: str = "0.32.0"
    cache_dtype: str | None = (
        None  # label of cache_config_info; None: the flag's value, "auto" without a flag
    )
    block_size: int | None = None  # None: the flag's value
    num_gpu_blocks: int | None = None  # None: computed from memory, dtype and block size
    kv_cache_memory_bytes: int | None = None
    max_model_len: int | None = None
    log_lines: tuple[str, ...] = ()  # extra lines before "Available routes"
    backend_line: str | None = (
        None  # None: names the backend of --attention-backend, nothing without the flag
    )
    metrics_drop: tuple[str, ...] = ()  # names (as in "# TYPE NAME") that are not exposed
    metrics_rename: dict[str, str] = dataclasses.field(default_factory=dict)  # whole names
    metrics_status: int = 200
    metric_engines: int = 1  # more: extra series engine="1".. with zeros under every name

    # --- what its processes say through the plugin (only with --middleware) ---
    engine_route: bool = True  # False: 404
    engine_error: str | None = None  # instead of the worker's report
    engine_backend: str | None = None  # None: --attention-backend, CPU_ATTN without the flag
    engine_kv_tensor_dtype: str | None = None  # None: what the flag means
    engine_kv_bytes_per_token: int | None = None  # per layer; None: what the flag means
    engine_plugin_sha256: str | None = None  # of the worker; None: what was loaded
    engine_vllm: str | None = None  # of the worker; None: version
    engine_pid: int | None = None  # of the worker; None: the stub's own
    engine_queue_class: str | None = None  # None: that of --scheduling-policy
    engine_marks: bool = True  # leave a file per process, as the plugin does

    # --- timing of a generation ---
    ttft_s: float = 0.005  # from admission to the first token
    itl_s: float = 0.001
    prefill_s_per_token: float = 0.0  # added to the first token, per uncached prompt token
    role_at_s: float | None = None  # chat: role-only chunk so long after receipt; None: with the first token
    max_running: int | None = None  # None: --max-num-seqs; the rest waits in the queue
    compile_cost_s: float = 0.0  # added to the first token of the first request of each prompt-length bucket
    compile_buckets: tuple[int, ...] = (256, 1024, 4096)  # upper edges, prompt tokens
    jit_line_at: int | None = None  # request at which a line about JIT compilation is logged
    chatty_bytes_per_request: int = 0  # to stdout, when a generation is received
    preemptions_per_request: int = 0  # counted when the first token is out
    reset_counters_at: int | None = None  # all counters and histograms start again when this request arrives

    # --- content of a generation ---
    words: tuple[str, ...] = (" the", " of", " and", " to", " in", " is", " for", " that")
    output_tokens: tuple[int | None, ...] = (None,)  # cycled over requests; None: as many as asked for
    finish_reason: str | None = None  # None: "length" when as long as asked for, else "stop"
    tokens_per_chunk: int = 1
    reasoning_tokens: int = 0  # chat: so many first tokens are reasoning
    reasoning_fields: tuple[str, ...] = ("reasoning",)  # names cycled over the reasoning chunks
    # A request for logprobs is answered by repeating what followed the prompt's last word earlier in the prompt, as a
    # language model does; probe_words: cycles these instead.
    probe_words: tuple[str, ...] | None = None
    probe_logprob: float = -0.1  # of every token that is so generated; other tokens are at -4 and less
    usage: str = "final"  # "final": own last event when asked for | "last_chunk" | "none"
    usage_extra_tokens: int = 0  # completion tokens claimed beyond those sent
    prompt_tokens_factor: float = 1.0  # claimed prompt tokens / real ones
    write_bytes: int | None = None  # cut what is sent into writes of so many bytes, spaced by write_gap_s
    write_gap_s: float = 0.001

    # --- faults by request number ---
    empty_requests: tuple[int, ...] = ()  # a stream without any token
    reject_requests: tuple[int, ...] = ()  # HTTP 500
    error_requests: tuple[int, ...] = ()  # HTTP 200, then an error event after fault_after_tokens
    cut_requests: tuple[int, ...] = ()  # connection closed after fault_after_tokens
    stall_requests: tuple[int, ...] = ()  # nothing more is sent for stall_s after fault_after_tokens
    fault_after_tokens: int = 1
    stall_s: float = 3600.0

    # --- truth ---
    truth_path: str | None = (
        None  # JSON lines, one per stream: received_ns, admitted_ns, token_ns (monotonic clock)
    )


def hits(numbers: tuple[int, ...], index: int | None) -> bool:
    """Whether request ``index`` is among ``numbers``; uncounted requests (None) never are."""
    return index is not None and (index in numbers or EVERY in numbers)


def environment(script: Script) -> dict[str, str]:
    """The variables that carry a script to the stub."""
    return {VARIABLE: json.dumps(dataclasses.asdict(script))}


def from_json(text: str) -> Script:
    """Read a script back; an unknown key raises ``TypeError``."""
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in json.loads(text).items()}
    return Script(**values)


def argv(
    port: int, *, model: str = "stub-model", name: str = "stub", extra: tuple[str, ...] = ()
) -> list[str]:
    """A command line as an engine adapter would write it."""
    where = ["--host", "127.0.0.1", "--port", str(port)]
    return [*COMMAND, "--model", model, "--served-model-name", name, *where, *extra]
