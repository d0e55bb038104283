"""Every setting of a cell and what confirms it: a reported fact, the run's own records, or nothing.

What nothing confirms cannot be an axis: two cells would be labelled as different without anybody knowing that they are.
"""

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from conf.keys import fields_of, get
from conf.schema import COMMAND_KEYS, Config
from workers.families import family
from workers.rules import RULES, Rule


class Proof(Enum):
    """What can say that a setting was honoured."""

    rule = "reported by the server"
    records = "the client's records"
    counters = "counters of the kernels"
    none = "nothing: cannot be an axis"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One key of a cell. ``text``: which record or counter confirms it, or why nothing does."""

    key: str
    proof: Proof
    rules: tuple[Rule, ...] = ()
    text: str = ""


# What the server itself must confirm; the rest of a cell is what the client does, and the client keeps records of it.
SERVER_SECTIONS = ("engine", "hardware", "model", "kv", "sparsity", "scheduler")

# A setting that another one's rule decides.
_DECIDED_BY = {"engine.commit": "engine.version"}

_COUNTED = {
    "sparsity.method": "metric sparsity/density below 1; unknown is evidence_missing, 1 is sparsity_without_effect"
}

# By section or key; the longest that matches speaks.
_RECORDED = {
    "workload": "records.parquet: prompt, tokens asked for and used, text of each request",
    "workload.name": "a label; the workload's hash stands in result.json",
    "workload.prompts": "arrivals.parquet: the prompts themselves, and their hash in result.json",
    "workload.path": "arrivals.parquet: the prompts themselves, and their hash in result.json",
    "workload.input": "records.parquet: prompt tokens asked for beside those of the server's usage (short_output)",
    "workload.output": "records.parquet: output tokens asked for beside those of the server's usage (short_output)",
    "workload.shared_prefix_tokens": "arrivals.parquet; prefix hits of the server's counters (warm_cache)",
    "load": "client.json and records.parquet: due, sent and token times of each request",
    "load.rate_per_s": "metrics rate/offered_per_s, rate/sent_per_s and rate/completed_per_s",
    "load.slo": "metric goodput/requests_per_s, recomputed from the records",
    "load.limits": "the verdict's reasons, each with its limit",
    "load.warmup": "records.parquet: rows of the phase warmup",
    "load.scrape_interval_s": "timeseries.parquet: the times of the scrapes; metric scrapes/failed",
    "load.trace": "arrivals.parquet: due times and lengths, and their hash in result.json",
    "seed": "arrivals.parquet: due times, lengths and prompts, and their hash in result.json",
    "repeat": "a counter of ours; it draws arrivals.parquet",
    "sentinel": "a counter of ours; same cell, first and last",
}

_UNCONFIRMED = {
    "engine.name": "it is a label; engine.version or engine.commit says what runs",
    "engine.requirements": "they are recorded with the environment's freeze and hash; choose engines by name",
    "engine.overrides": "they are recorded with the environment's freeze and hash; choose engines by name",
    "engine.env": "a variable that was given was not necessarily read; give it its own setting and a rule",
    "engine.extra_args": "a flag that was given was not necessarily honoured; give it its own setting and a rule",
    "engine.executable": "what it starts is confirmed by engine.version; choose engines by name",
    "hardware": "it says how this host is used, not what the server runs",
    "model.source": "choose models by name",
    "model.package": "the weights' hash is recorded; choose models by name",
    "sparsity": "no engine build reports it",
}

# Options of a group are told apart by this; what else they differ in must have a rule or come with another of these.
_IDENTITY = {
    "engine": "engine.name",
    "model": "model.name",
    "hardware": "hardware.kind",
    "sparsity": "sparsity.method",
}


def settings() -> tuple[Setting, ...]:
    """Every key of a cell, in the order of the schema."""
    return tuple(_setting(key) for key in _leaves(Config) if key.partition(".")[0] not in COMMAND_KEYS)


def check_axis(axis: str) -> None:
    """Refuse an axis that nothing can confirm.

    Raises:
        ValueError: names the axis, why, and what to do.
    """
    if axis.partition(".")[0] not in SERVER_SECTIONS:
        return
    setting = _setting(axis)
    if setting.proof is Proof.none:
        raise ValueError(
            f"{axis} cannot be an axis: no rule says which reported fact confirms it ({setting.text}); "
            "keep it equal in all cells, or add a rule to workers/rules.py"
        )


def check_options(configs: Sequence[Config], *, groups: Collection[str]) -> None:
    """Refuse a group axis whose options differ, under one name, by what nothing can confirm.

    Raises:
        ValueError: names the group and the keys.
    """
    for group in groups:
        seen: dict[Any, Config] = {}
        for config in {id(getattr(config, group)): config for config in configs}.values():
            identity = get(config, _IDENTITY[group]) if group in _IDENTITY else None
            first = seen.setdefault(identity, config)
            differ = [key for key in _unconfirmed_keys(group) if get(first, key) != get(config, key)]
            if differ:
                raise ValueError(
                    f"the options of the axis {group} differ in {', '.join(differ)}, which no rule confirms, and in "
                    f"nothing that tells them apart{_by_identity(group)}; keep them equal, or add a rule to "
                    "workers/rules.py"
                )


def check_environment(config: Config) -> None:
    """Refuse a variable that does what a setting does: the setting would be labelled, the variable would win.

    Raises:
        ValueError: names the variable and the setting.
    """
    tables = family(config.engine)
    doubles = dict.fromkeys(tables.environment, "engine.family")
    if tables.backend_variable is not None:
        doubles[tables.backend_variable] = "engine.attention_backend"
    for name in config.engine.env.keys() & doubles.keys():
        raise ValueError(
            f"engine.env.{name} cannot be set: {doubles[name]} says it, and newer engines do not read the variable; "
            f"set {doubles[name]}"
        )


def _by_identity(group: str) -> str:
    return f" ({_IDENTITY[group]})" if group in _IDENTITY else ""


def _unconfirmed_keys(group: str) -> Iterator[str]:
    return (
        key for key in _leaves(Config) if key.startswith(f"{group}.") and _setting(key).proof is Proof.none
    )


def _setting(key: str) -> Setting:
    rules = tuple(rule for rule in RULES if rule.setting == _DECIDED_BY.get(key, key))
    if rules:
        return Setting(key=key, proof=Proof.rule, rules=rules)
    if key in _COUNTED:
        return Setting(key=key, proof=Proof.counters, text=_COUNTED[key])
    if key.partition(".")[0] in SERVER_SECTIONS:
        return Setting(key=key, proof=Proof.none, text=_longest(key, _UNCONFIRMED))
    return Setting(key=key, proof=Proof.records, text=_longest(key, _RECORDED))


def _longest(key: str, texts: dict[str, str]) -> str:
    """The text of the key, or of the nearest section above it."""
    parts = key.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((texts[name] for name in names if name in texts), "no rule has been written for it")


def _leaves(section: Any, prefix: str = "") -> Iterable[str]:
    for name, (annotation, _) in fields_of(section).items():
        if dataclasses.is_dataclass(annotation):
            yield from _leaves(annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"
