"""Facts that only a server's log tells: attention backend, resolved configuration, KV size, thread binding, compilation.

Every wording known from vLLM 0.4 to 0.33 is tried on every log. A line that is not known gives no fact; nothing is
filled in from what was asked for.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

# What the log calls a backend → the name that ``--attention-backend`` takes.
BACKEND_PHRASES: Mapping[str, str] = {
    "flash attention": "FLASH_ATTN",
    "flashattention": "FLASH_ATTN",
    "flashattention-2": "FLASH_ATTN",
    "triton": "TRITON_ATTN",
    "triton attention": "TRITON_ATTN",
    "flashinfer": "FLASHINFER",
    "xformers": "XFORMERS",
    "torch sdpa": "TORCH_SDPA",
    "flexattention": "FLEX_ATTENTION",
    "flex attention": "FLEX_ATTENTION",
    "tree attention": "TREE_ATTN",
    "triton mla": "TRITON_MLA",
    "flashmla": "FLASHMLA",
    "cutlass mla": "CUTLASS_MLA",
    "cpu mla": "CPU_MLA",
    "flashattention mla": "FLASH_ATTN_MLA",
    "flash attention mla": "FLASH_ATTN_MLA",
    "flashinfer mla": "FLASHINFER_MLA",
    "aiter mla": "ROCM_AITER_MLA",
    "aiter flash attention": "ROCM_AITER_FA",
    "rocmflashattention": "ROCM_FLASH",
    "rocm/triton": "ROCM_ATTN",
    "blocksparseflashattention": "BLOCK_SPARSE_FLASH_ATTN",
    "dualchunkflashattention": "DUAL_CHUNK_FLASH_ATTN",
    "turboquant attention": "TURBOQUANT",
    "pallas": "PALLAS",
    "ipex": "IPEX",
}
_BACKEND_NAME = re.compile(
    r"[A-Z0-9_]*(?:ATTN|MLA|MLA_SPARSE|FLASHINFER|SDPA|ATTENTION|TURBOQUANT|XFORMERS|CUSTOM|AITER_FA)"
)

# Ways to name the backend in use; the first group is a name or a phrase. Tried on the text after the logger's prefix.
_USING = (
    re.compile(
        r"Using (?:AttentionBackendEnum\.)?([A-Za-z0-9_]+) attention backend out of potential backends"
    ),
    re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) backend out of potential backends"),
    re.compile(r"Using (?:AttentionBackendEnum\.)?([A-Z0-9_]+) backend \(selected via --attention-backend\)"),
    re.compile(r"Using (.+?) backend on V1 engine\.?\s*$"),
    re.compile(r"Using AttentionBackendEnum\.([A-Z0-9_]+) backend\.?\s*$"),
    re.compile(r"Using (.+?) backend\.\s*$"),
)
_REFUSED_ON_CPU = re.compile(r"Cannot use (?:AttentionBackendEnum\.|_Backend\.)?(.+?) backend on CPU")
_CONFIG = re.compile(r"Initializing an? (?:(V[01]) )?LLM engine \(v([^)]+)\) with config: (.*)")
_API_VERSION = re.compile(r"vLLM (?:API server )?version ([^\s,]+)|█\s+version (\S+)")
_NON_DEFAULT = re.compile(r"non-default args: (\{.*\})")
_NAMESPACE = re.compile(r"\bargs: Namespace\((.*)\)")
_KV_TOKENS = re.compile(r"(?:GPU|CPU|TPU|XPU|HPU|Neuron)? ?KV cache size: ([\d,]+) tokens")
_KV_BLOCKS = re.compile(r"# (?:GPU|cuda|cpu|CPU|rocm|xpu|tpu) blocks: (\d+)")
_CORES = re.compile(r"local_rank=(\d+), core ids=\[([\d, ]*)\]")
_RESERVED = re.compile(r"reserved_cpus=\[([\d, ]*)\]")
_SCHEDULER = re.compile(r"Using custom scheduler class (\S+?)\.? This scheduler interface")
_FLASH_VERSION = re.compile(r"Using FlashAttention version (\d+)")
_KV_LAYOUT = re.compile(r"Using (\w+) KV cache layout")

# Lines that mean that something was compiled or tuned when they were written.
_COMPILED = (
    re.compile(
        r"(?:JIT compilation|kernel compilation|autotun\w*( benchmark)?) during inference", re.IGNORECASE
    ),
    re.compile(r"(?:was|were|being) JIT[- ]compiled during inference", re.IGNORECASE),
    re.compile(r"Triton autotuning for function"),
    re.compile(r"Compiling a graph for|torch\.compile takes|Dynamo bytecode transform time|recompile_limit"),
    re.compile(r"Capturing (?:CUDA|cuda|cudagraph)|Graph capturing (?:finished|took)"),
    re.compile(
        r"flashinfer\.jit.*(?:Loading|Compiling|building) JIT ops|Start(?:ing)? JIT compil", re.IGNORECASE
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLog:
    """What a server's log says; None and empty: it does not say.

    Attributes:
        versions: every version it names, in order, without repeats.
        backends: attention backends in use, in the order of their lines, without repeats.
        refused_backends: backends it says it cannot use.
        config: the engine's resolved configuration as printed (``kv_cache_dtype``, ``enforce_eager``, …), as text.
        arguments: what it parsed from its command line, where that was printed.
        cores: compute cores by local rank (CPU builds).
    """

    versions: tuple[str, ...] = ()
    generation: str | None = None
    backends: tuple[str, ...] = ()
    refused_backends: tuple[str, ...] = ()
    config: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    kv_cache_tokens: int | None = None
    kv_cache_blocks: int | None = None
    kv_cache_layout: str | None = None
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    reserved_cores: tuple[int, ...] | None = None
    scheduler_class: str | None = None
    flash_attention_version: int | None = None

    @property
    def attention_backend(self) -> str | None:
        """The target model's backend: the first one named."""
        return self.backends[0] if self.backends else None

    @property
    def draft_attention_backend(self) -> str | None:
        """The draft model's backend: the next one named, unless the engine says that it has no draft model."""
        if len(self.backends) < 2 or self.config.get("speculative_config") == "None":
            return None
        return self.backends[1]


def parse_log(text: str) -> EngineLog:
    """All known facts of a log."""
    lines = text.splitlines()
    config_line = _first(_CONFIG, lines)
    refused = _unique(match[1] for match in _matches(_REFUSED_ON_CPU, lines))
    tokens, blocks = _first(_KV_TOKENS, lines), _first(_KV_BLOCKS, lines)
    reserved, scheduler = _first(_RESERVED, lines), _first(_SCHEDULER, lines)
    layout, flash = _first(_KV_LAYOUT, lines), _first(_FLASH_VERSION, lines)
    return EngineLog(
        versions=_versions(lines, config_line),
        generation=config_line[1] if config_line else None,
        backends=_backends(lines, refused=refused, generation=config_line[1] if config_line else None),
        refused_backends=refused,
        config=_pairs(_balanced(config_line[3])) if config_line else {},
        arguments=_arguments(lines),
        kv_cache_tokens=int(tokens[1].replace(",", "")) if tokens else None,
        kv_cache_blocks=int(blocks[1]) if blocks else None,
        kv_cache_layout=layout[1] if layout else None,
        cores={int(match[1]): _ids(match[2]) for match in _matches(_CORES, lines)},
        reserved_cores=_ids(reserved[1]) if reserved else None,
        scheduler_class=scheduler[1] if scheduler else None,
        flash_attention_version=int(flash[1]) if flash else None,
    )


def compilations(text: str) -> tuple[str, ...]:
    """Lines that say that something was compiled or tuned, shortened, without repeats."""
    hits = (line.strip() for line in text.splitlines() if any(pattern.search(line) for pattern in _COMPILED))
    return _unique(line[:300] for line in hits)


def backend_of(line: str) -> str | None:
    """The attention backend that one line says is in use, or None."""
    if "Using " not in line:
        return None
    for pattern in _USING:
        match = pattern.search(line)
        if match is not None:
            return _backend_name(match[1])
    return None


def _backend_name(phrase: str) -> str | None:
    named = BACKEND_PHRASES.get(phrase.strip().lower())
    if named is not None:
        return named
    return phrase if _BACKEND_NAME.fullmatch(phrase) else None


def _backends(lines: list[str], *, refused: tuple[str, ...], generation: str | None) -> tuple[str, ...]:
    found = _unique(name for line in lines if (name := backend_of(line)) is not None)
    if not found and refused and generation != "V0":
        # CPU builds that name no replacement have exactly one: earlier ones said "Using Torch SDPA backend."
        return ("CPU_ATTN",)
    return found


def _versions(lines: list[str], config_line: re.Match[str] | None) -> tuple[str, ...]:
    named = [match[1] or match[2] for match in _matches(_API_VERSION, lines)]
    return _unique([*named, *([config_line[2]] if config_line else [])])


def _arguments(lines: list[str]) -> Mapping[str, Any]:
    literal = _first(_NON_DEFAULT, lines)
    if literal is not None:
        try:
            parsed = ast.literal_eval(literal[1])
        except (ValueError, SyntaxError):
            return _pairs(literal[1].strip("{}").replace("': ", "=").replace("'", ""))
        return parsed if isinstance(parsed, dict) else {}
    namespace = _first(_NAMESPACE, lines)
    return _pairs(namespace[1]) if namespace else {}


def _pairs(text: str) -> dict[str, str]:
    """``a=1, b='x', c=F(d=2)`` → top-level pairs as text; nested ones stay inside their value."""
    pairs: dict[str, str] = {}
    for part in _split(text):
        name, found, value = part.strip().partition("=")
        if found and name.isidentifier():
            pairs.setdefault(name, value.strip().strip("'\""))
    return pairs


def _balanced(text: str) -> str:
    """Without the bracket that closes the sentence in releases before 0.6 and belongs to no pair."""
    return text.removesuffix(")") if text.count(")") > text.count("(") else text


def _split(text: str) -> Iterable[str]:
    """Parts between commas that are outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for index, char in enumerate(text):
        if quote:
            quote = "" if char == quote else quote
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == "," and depth == 0:
            yield text[start:index]
            start = index + 1
    yield text[start:]


def _ids(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part.strip())


def _matches(pattern: re.Pattern[str], lines: Iterable[str]) -> Iterable[re.Match[str]]:
    return (match for line in lines if (match := pattern.search(line)) is not None)


def _first(pattern: re.Pattern[str], lines: Iterable[str]) -> re.Match[str] | None:
    return next(iter(_matches(pattern, lines)), None)


def _unique(items: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(items))
