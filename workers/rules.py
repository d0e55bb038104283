"""Requested against reported: one table of which fact must confirm which setting.

Every source that knows a fact is compared, with the request and with each other, so that two sources which disagree
cannot both pass, even about a setting that the cell leaves to the engine. A fact that no source gives, or fewer than a
rule needs, makes the run ``evidence_missing`` where the rule requires it, and always where the setting is swept. Names a
server prints for itself (its log repeats the command line) are never enough where it can be asked otherwise.
"""

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conf.schema import Config, HardwareKind, ModelSource
from workers import engine_process
from workers.capacity import bytes_per_token
from workers.engines import num_devices
from workers.evidence import Evidence, Fact
from workers.families import family
from workers.versions import commit_of, same_commit, same_release

_PLAIN_DTYPES = frozenset({"bfloat16", "float16", "float32"})
_CODES = frozenset(
    {"uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"}
)  # of quantised K and V
# Every engine process that loaded the plugin tells these; without one of them a run says less than it must.
_OF_PROCESSES = (
    "engine.plugin_sha256", "engine.pids", "engine.num_layers", "engine.kv_tensor_dtype", "engine.kv_bytes_per_token",
    "engine.kv_bytes_held", "engine.scheduler_class", "server.attention_backend",
)  # fmt: skip
_FP8_NAMES = frozenset({"fp8", "fp8_e4m3"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One setting and the fact that must confirm it.

    Attributes:
        requested: what a cell asks for; None: nothing, and the rule does not apply.
        agrees: whether a reported value is what was asked for.
        required: whether a cell needs to know the fact at all; a swept setting always does.
        alike: whether two sources say the same.
        sources: how many independent sources must agree.
        compares: the comparison in words, for people.
    """

    setting: str
    fact: str
    requested: Callable[[Config], Any]
    agrees: Callable[[Config, Any], bool]
    required: Callable[[Config], bool]
    alike: Callable[[Any, Any], bool]
    sources: Callable[[Config], int]
    compares: str = "equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirmation:
    """A setting that was asked for and the independent sources that agree with it."""

    setting: str
    fact: str
    requested: Any
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One rule that was not met; ``missing`` if the fact is not known."""

    setting: str
    detail: str
    missing: bool = False


def _equal(requested: Callable[[Config], Any]) -> Callable[[Config, Any], bool]:
    return lambda config, reported: bool(reported == requested(config))


def _rule(
    setting: str,
    fact: str,
    requested: Callable[[Config], Any],
    *,
    agrees: Callable[[Config, Any], bool] | None = None,
    required: Callable[[Config], bool] = lambda _config: True,
    alike: Callable[[Any, Any], bool] = lambda one, other: bool(one == other),
    sources: Callable[[Config], int] = lambda _config: 1,
    compares: str = "equal",
) -> Rule:
    return Rule(
        setting=setting,
        fact=fact,
        requested=requested,
        agrees=agrees or _equal(requested),
        required=required,
        alike=alike,
        sources=sources,
        compares=compares,
    )


def _never(_config: Config) -> bool:
    return False


def _on_cuda(config: Config) -> bool:
    return config.hardware.kind is HardwareKind.cuda


def _budgeted_in_bytes(config: Config) -> bool:
    return family(config.engine).flag("kv.memory_bytes", engine=config.engine) is not None


def _on_v1(config: Config) -> bool:
    return config.engine.family == "v1"


def _two(_config: Config) -> int:
    return 2


def _two_of_release(config: Config) -> int:
    """The log of a patched build may print a bare number, which says nothing of its commit."""
    return 2 if config.engine.commit is None else 1


def _two_on_cuda(config: Config) -> int:
    """CPU builds have one backend and do not always log it; families without the plugin have their log alone."""
    return 2 if _on_cuda(config) and family(config.engine).flag("plugin", engine=config.engine) else 1


def _same_build(one: str, other: str) -> bool:
    commits = commit_of(one), commit_of(other)
    if commits[0] is not None and commits[1] is not None:
        return same_commit(commits[0], commits[1])
    return same_release(one, other) or same_release(other, one)


def _alike_dtypes(one: str, other: str) -> bool:
    """``auto`` beside a plain dtype is the model's; whether it is the one asked for is for the rule to say."""
    plain = _PLAIN_DTYPES | {"auto"}
    pair = {one, other}
    return one == other or pair <= _FP8_NAMES or ("auto" in pair and pair <= plain)


def _shared_name(one: str, other: str) -> bool:
    """A log names one backend, a process those of all its layers."""
    return bool(set(one.split(", ")) & set(other.split(", ")))


def _served_root(config: Config) -> str | None:
    """What ``GET /v1/models`` must give as root; the V0 engine's first releases gave the served name there."""
    if config.engine.family == "v0":
        return None
    return {ModelSource.path: config.model.path, ModelSource.hub: config.model.id}.get(config.model.source)


def _version_agrees(config: Config, reported: str) -> bool:
    if config.engine.commit is None:
        return same_release(config.engine.version, reported)
    commit = commit_of(reported)
    return commit is not None and same_commit(config.engine.commit, commit)


def _kv_dtype_agrees(config: Config, reported: str) -> bool:
    """``auto`` is the model's dtype, so it confirms a cell that asked for that dtype by name, and no other."""
    asked = config.kv.dtype
    if asked in _FP8_NAMES:
        return reported in _FP8_NAMES
    return reported == asked or (reported == "auto" and asked == config.model.dtype)


def _tensor_dtype_agrees(config: Config, reported: str) -> bool:
    """Plain dtypes are stored as themselves; a quantised cache keeps codes in at least some layers."""
    asked = config.model.dtype if config.kv.dtype == "auto" else config.kv.dtype
    if asked in _PLAIN_DTYPES:
        return reported == asked
    return bool(_CODES.intersection(reported.replace("+", ", ").split(", ")))


RULES: tuple[Rule, ...] = (
    _rule(
        "engine.version",
        "server.version",
        lambda config: config.engine.commit or config.engine.version,
        agrees=_version_agrees,
        alike=_same_build,
        sources=_two_of_release,
        compares="same release (build suffixes allowed); with engine.commit: same commit, numbers ignored",
    ),
    _rule(
        "engine.family",
        "server.generation",
        lambda config: "V0" if config.engine.family == "v0" else "V1",
        required=lambda config: config.engine.family == "v1_early",
        compares="equal; v1_early and v1 are both V1 (a release that has both may fall back silently)",
    ),
    _rule("model.name", "server.model", lambda config: config.model.name),
    _rule(
        "engine.python",
        "environment.python",
        lambda config: config.engine.python,
        agrees=lambda config, reported: f"{reported}.".startswith(f"{config.engine.python}."),
        required=_never,
        compares="same minor version",
    ),
    _rule("model.dtype", "server.dtype", lambda config: config.model.dtype, required=_never),
    _rule(
        "model.path",
        "server.model_root",
        lambda config: _served_root(config) if config.model.source is ModelSource.path else None,
        required=_never,
    ),
    _rule(
        "model.id",
        "server.model_root",
        lambda config: _served_root(config) if config.model.source is ModelSource.hub else None,
        required=_never,
    ),
    _rule("model.revision", "server.model_revision", lambda config: config.model.revision, required=_never),
    _rule(
        "kv.dtype",
        "server.kv_cache_dtype",
        lambda config: config.kv.dtype,
        agrees=_kv_dtype_agrees,
        alike=_alike_dtypes,
        sources=_two,
        compares="equal; fp8 = fp8_e4m3; auto counts as the model's dtype",
    ),
    _rule(
        "kv.dtype",
        "engine.kv_tensor_dtype",
        lambda config: config.kv.dtype,
        agrees=_tensor_dtype_agrees,
        required=_never,
        compares="what the layers' tensors hold: a plain dtype as itself, a quantised one as codes of one byte",
    ),
    _rule(
        "kv.memory_bytes",
        "server.kv_cache_memory_bytes",
        lambda config: config.kv.memory_bytes if _budgeted_in_bytes(config) else None,
    ),
    _rule("kv.block_size", "server.block_size", lambda config: config.kv.block_size),
    _rule(
        "kv.prefix_caching", "server.prefix_caching", lambda config: config.kv.prefix_caching, required=_on_v1
    ),
    _rule("engine.max_model_len", "server.max_model_len", lambda config: config.engine.max_model_len),
    _rule(
        "engine.max_num_seqs",
        "server.max_num_seqs",
        lambda config: config.engine.max_num_seqs,
        required=_never,
    ),
    _rule(
        "engine.max_num_batched_tokens",
        "server.max_num_batched_tokens",
        lambda config: config.engine.max_num_batched_tokens,
        required=_never,
    ),
    _rule(
        "engine.enforce_eager",
        "server.enforce_eager",
        lambda config: config.engine.enforce_eager,
        required=_never,
    ),
    _rule(
        "engine.attention_backend",
        "server.attention_backend",
        lambda config: config.engine.attention_backend,
        alike=_shared_name,
        sources=_two_on_cuda,
    ),
    _rule(
        "engine.tensor_parallel_size",
        "server.tensor_parallel_size",
        lambda config: config.engine.tensor_parallel_size,
        required=lambda config: config.engine.tensor_parallel_size > 1,
    ),
    _rule(
        "engine.pipeline_parallel_size",
        "server.pipeline_parallel_size",
        lambda config: config.engine.pipeline_parallel_size,
        required=lambda config: config.engine.pipeline_parallel_size > 1,
    ),
    _rule(
        "scheduler.policy",
        "server.scheduling_policy",
        lambda config: config.scheduler.policy,
        required=lambda config: config.scheduler.policy != "fcfs",
    ),
    _rule(
        "hardware.kind",
        "server.device",
        lambda config: config.hardware.kind.value,
        agrees=lambda config, reported: str(reported).split(":", 1)[0] == config.hardware.kind.value,
        required=_never,
        compares="device kind",
    ),
    _rule(
        "port",
        "process.port_owned",
        lambda _config: True,
        required=_never,
        compares="the port belongs to our process tree",
    ),
)


def findings(
    config: Config,
    evidence: Evidence,
    *,
    model_config: Mapping[str, Any],
    swept: Collection[str] = (),
) -> list[Finding]:
    """Every rule that a run does not meet; ``swept`` names the settings that are axes, which must be confirmed."""
    found = [finding for rule in RULES for finding in _apply(rule, config, evidence, swept=swept)]
    checked = (check(config, evidence, model_config=model_config) for check in CHECKS)
    return [*found, *(finding for findings_of_one in checked for finding in findings_of_one)]


def confirmations(config: Config, evidence: Evidence) -> list[Confirmation]:
    """For every setting that was asked for: which independent sources say that it is so."""
    return [
        Confirmation(
            setting=rule.setting,
            fact=rule.fact,
            requested=rule.requested(config),
            sources=_agreeing(rule, config, evidence.known(rule.fact)),
        )
        for rule in RULES
        if rule.requested(config) is not None
    ]


def confirmed_by(config: Config, evidence: Evidence) -> dict[str, list[str]]:
    """Setting → the independent sources that confirm it, over all of its rules; none: an empty list."""
    sources: dict[str, list[str]] = {}
    for one in confirmations(config, evidence):
        known = sources.setdefault(one.setting, [])
        known += [source for source in one.sources if source not in known]
    return sources


def _agreeing(rule: Rule, config: Config, known: Sequence[Fact]) -> tuple[str, ...]:
    """Independent sources, without repeats: all processes of the engine are one."""
    kinds = (_kind(fact.source) for fact in known if rule.agrees(config, fact.value))
    return tuple(dict.fromkeys(kinds))


def _kind(source: str) -> str:
    return engine_process.SOURCE if source.startswith(engine_process.SOURCE) else source


def _apply(rule: Rule, config: Config, evidence: Evidence, *, swept: Collection[str]) -> list[Finding]:
    asked, known = rule.requested(config), evidence.known(rule.fact)
    known = [fact for fact in known if not _is_release_beside_commit(rule, config, fact)]
    if asked is None:
        return _contradiction(rule, known)
    required = rule.required(config) or (rule.setting in swept and not _known_otherwise(rule, evidence))
    if not known:
        return [_missing(rule.setting, rule.fact)] if required else []
    wrong = [
        Finding(setting=rule.setting, detail=_differs(rule, config, asked, fact))
        for fact in known
        if not rule.agrees(config, fact.value)
    ]
    return wrong or _contradiction(rule, known) or _too_few(rule, config, known)


def _known_otherwise(rule: Rule, evidence: Evidence) -> bool:
    """Another rule of the same setting has its fact: engines without the plugin tell less, but enough."""
    return any(evidence.known(other.fact) for other in RULES if other.setting == rule.setting)


def _contradiction(rule: Rule, known: Sequence[Fact]) -> list[Finding]:
    """Two sources of one fact that exclude each other, whatever was asked for."""
    pairs = itertools.combinations(known, 2)
    one_of = next(((one, other) for one, other in pairs if not rule.alike(one.value, other.value)), None)
    if one_of is None:
        return []
    said = " and ".join(f"{fact.value} ({fact.source})" for fact in one_of)
    return [Finding(setting=rule.setting, detail=f"{rule.setting}: the sources disagree: {said}")]


def _too_few(rule: Rule, config: Config, known: Sequence[Fact]) -> list[Finding]:
    agreeing, needed = _agreeing(rule, config, known), rule.sources(config)
    if len(agreeing) >= needed:
        return []
    detail = f"{rule.setting}: {rule.fact} is confirmed by {', '.join(agreeing)} alone, {needed} sources are needed"
    return [Finding(setting=rule.setting, detail=detail, missing=True)]


def _is_release_beside_commit(rule: Rule, config: Config, fact: Fact) -> bool:
    """A patched build may print a bare number in its log; the commit must come from the server's own answer."""
    return (
        rule.fact == "server.version"
        and config.engine.commit is not None
        and not fact.source.startswith("GET ")
        and commit_of(fact.value) is None
    )


def _differs(rule: Rule, config: Config, asked: Any, fact: Fact) -> str:
    if rule.fact == "server.version" and config.engine.commit is not None:
        commit = commit_of(str(fact.value))
        said = f"commit {commit}" if commit else "no commit (an unpatched engine)"
        return f"engine {config.engine.name} is commit {asked}, the server says {said}: {fact.value} ({fact.source})"
    return f"{rule.setting}: asked for {asked}, the server says {fact.value} ({fact.source})"


def _missing(setting: str, fact: str) -> Finding:
    return Finding(setting=setting, detail=f"{setting}: {fact} could not be read", missing=True)


def _devices(
    config: Config,
    evidence: Evidence,
    *,
    model_config: Mapping[str, Any],  # noqa: ARG001 - as all checks
) -> list[Finding]:
    """On CUDA the process must see exactly the devices that its slot was assigned."""
    if not _on_cuda(config):
        return []
    assigned, seen = evidence.value("launch.devices"), evidence.value("process.devices")
    if assigned is None or seen is None:
        return [_missing("devices", "launch.devices" if assigned is None else "process.devices")]
    if seen != assigned or len(seen.split(",")) != num_devices(config):
        detail = (
            f"devices: assigned {assigned!r} for {num_devices(config)}, the server's process sees {seen!r}"
        )
        return [Finding(setting="devices", detail=detail)]
    return []


def _engine_processes(
    config: Config,  # noqa: ARG001 - as all checks
    evidence: Evidence,
    *,
    model_config: Mapping[str, Any],  # noqa: ARG001 - as all checks
) -> list[Finding]:
    """Where the plugin was staged, every engine process runs exactly it, belongs to our server, and tells all."""
    staged = evidence.value("launch.plugin_sha256")
    if staged is None:
        return []
    missing = [name for name in _OF_PROCESSES if not any(_from_process(f) for f in evidence.known(name))]
    errors = [f"{fact.value} ({fact.source})" for fact in evidence.known("engine.error")]
    problems = [
        f"other sources: {str(fact.value)[:12]} instead of {staged[:12]} ({fact.source})"
        for fact in evidence.known("engine.plugin_sha256")
        if fact.value != staged
    ]
    pids = evidence.value("engine.pids")
    if evidence.value("engine.pids_in_tree") is False:
        problems.append(f"an answer came from outside our server's process tree (pids {pids})")
    if evidence.value("engine.pids_marked") is False:
        problems.append(f"a process that answered never installed the plugin (pids {pids})")
    found = [Finding(setting="plugin", detail=f"plugin: {problem}") for problem in problems]
    if missing:
        text = f"plugin: the engine's processes did not tell {', '.join(missing)}"
        found.append(Finding(setting="plugin", detail="; ".join([text, *errors]), missing=True))
    return found


def _from_process(fact: Fact) -> bool:
    return fact.source.startswith(engine_process.SOURCE)


def _held(config: Config, evidence: Evidence, *, model_config: Mapping[str, Any]) -> list[Finding]:
    """The tensors of every worker: bytes per token are those of the dtype, and all of them fill the budget."""
    per_token = _bytes_per_token_and_device(config, model_config=model_config)
    found = [
        Finding(
            setting="kv.dtype",
            detail=f"kv.dtype: {config.kv.dtype} takes {per_token} bytes per token, the layers hold {fact.value:g} "
            f"({fact.source})",
        )
        for fact in evidence.known("engine.kv_bytes_per_token")
        if per_token is not None and fact.value != per_token
    ]
    return [*found, *(_unfilled(config, evidence) if config.engine.pipeline_parallel_size == 1 else ())]


def _unfilled(config: Config, evidence: Evidence) -> list[Finding]:
    """Within one block: a budget is divided into whole blocks."""
    per_token, size = evidence.value("engine.kv_bytes_per_token"), evidence.value("server.block_size")
    tokens, budget = evidence.value("server.kv_cache_tokens"), config.kv.memory_bytes
    if per_token is None or size is None:
        return []
    said = [(fact.value, f"the tensors hold {fact.value}") for fact in evidence.known("engine.kv_bytes_held")]
    if tokens is not None:
        said.append(
            (tokens * per_token, f"{tokens} tokens of {per_token:g} bytes are {tokens * per_token:g}")
        )
    return [
        Finding(setting="kv.memory_bytes", detail=f"kv.memory_bytes: asked for {budget} bytes, {text}")
        for held, text in said
        if abs(held - budget) > per_token * size
    ]


def _capacity(config: Config, evidence: Evidence, *, model_config: Mapping[str, Any]) -> list[Finding]:
    """Blocks x bytes per token must be the budget, within one block: a dtype cannot be claimed without its bytes."""
    blocks, size = evidence.value("server.kv_cache_blocks"), evidence.value("server.block_size")
    tokens = evidence.value("server.kv_cache_tokens")
    if blocks is None and tokens is None:
        return [_missing("kv.memory_bytes", "server.kv_cache_blocks")]
    per_token = _bytes_per_token_and_device(config, model_config=model_config)
    if per_token is None or not size:
        return []
    held = blocks if blocks is not None else tokens // size
    expected = config.kv.memory_bytes // (per_token * size)
    if abs(held - expected) <= 1:
        return []
    detail = (
        f"kv.dtype: {config.kv.memory_bytes} bytes hold {expected * size} tokens of {config.kv.dtype} "
        f"({per_token} bytes each), the server reports {held * size}"
    )
    return [Finding(setting="kv.dtype", detail=detail)]


def _bytes_per_token_and_device(config: Config, *, model_config: Mapping[str, Any]) -> int | None:
    if config.engine.pipeline_parallel_size > 1:
        return None  # stages hold different numbers of layers
    ranks = config.engine.tensor_parallel_size
    kv_heads = model_config.get("num_key_value_heads") or model_config.get("num_attention_heads") or 0
    if kv_heads % ranks and ranks % max(kv_heads, 1):
        return None
    share = (
        dict(model_config) | {"num_key_value_heads": max(1, kv_heads // ranks)} if ranks > 1 else model_config
    )
    return bytes_per_token(share, kv_dtype=config.kv.dtype, model_dtype=config.model.dtype)


# What no single setting asks for, but every run must stand.
CHECKS = (_devices, _capacity, _engine_processes, _held)
