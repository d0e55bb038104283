"""What every family's parsers read from what its releases really say: log, /version, /v1/models and /metrics.

The texts under ``golden/`` are ours, after the wording of each release's sources. A text is only as good as its
reading: where a build runs here, tests/engine/test_engine_versions.py asks the real server.
"""

import asyncio
import os
from pathlib import Path

import pytest

from conf.schema import Config, Engine, Hardware, HardwareKind, Kv, Model, Scheduler
from workers import evidence, prometheus
from workers.evidence import Source, collect
from workers.families import FAMILIES
from workers.http_call import Answer
from workers.prometheus import HistogramDelta
from workers.rules import findings

GOLDEN = Path(__file__).parent / "golden"
LLAMA_3_8B = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
SMALL = {"num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576}

VERSIONS = {
    "0.4.1": "v0", "0.8.5-v0": "v0", "0.8.5": "v1_early", "0.25.0": "v1", "0.31.0": "v1", "0.32.0": "v1",
    "0.33.0": "v1",
}  # fmt: skip

# Facts every release gives of the served model are equal in all texts; the rest is told apart here.
FACTS = {
    "0.4.1": {
        "server.version": "0.4.1",
        "server.generation": None,
        "server.attention_backend": "XFORMERS",
        "server.kv_cache_dtype": "auto",
        "server.kv_cache_blocks": 512,
        "server.kv_cache_tokens": None,
        "server.kv_cache_memory_bytes": None,
        "server.block_size": 16,
        "server.max_model_len": 2048,
        "server.model_root": "m",
        "server.scheduling_policy": "fcfs",
        "server.max_num_seqs": 256,
        "server.pipeline_parallel_size": None,
        "server.device": "cuda",
    },
    "0.8.5-v0": {
        "server.version": "0.8.5",
        "server.generation": "V0",
        "server.attention_backend": "FLASH_ATTN",
        "server.kv_cache_blocks": 512,
        "server.kv_cache_tokens": None,
        "server.block_size": 16,
        "server.scheduling_policy": "priority",
        "server.chunked_prefill": False,
        "server.pipeline_parallel_size": 1,
    },
    "0.8.5": {
        "server.version": "0.8.5",
        "server.generation": "V1",
        "server.attention_backend": "FLASH_ATTN",
        "server.kv_cache_blocks": 512,
        "server.kv_cache_tokens": 8192,
        "server.scheduling_policy": "fcfs",
        "server.chunked_prefill": True,
    },
    "0.25.0": {
        "server.version": "0.25.0",
        "server.generation": "V1",
        "server.attention_backend": "TURBOQUANT",
        "server.flash_attention_version": 2,
        "server.kv_cache_dtype": "turboquant_4bit_nc",
        "server.kv_cache_skipped_layers": "['0', '1', '30', '31']",
        "server.kv_cache_blocks": 724,
        "server.kv_cache_tokens": 23168,
        "server.kv_cache_memory_bytes": 1074790400,
        "server.block_size": 32,
        "server.scheduling_policy": "priority",
        "server.max_num_seqs": 256,
    },
    "0.31.0": {
        "server.version": "0.31.0",
        "server.attention_backend": None,
        "server.kv_cache_dtype": "bfloat16",
        "server.kv_cache_blocks": 91,
        "server.kv_cache_tokens": 2912,
        "server.kv_cache_layout": "LBHNC",
        "server.max_num_seqs": 64,
        "server.cores": [[0]],
        "server.reserved_cores": [1],
        "server.device": "cpu",
    },
    "0.32.0": {
        "server.version": "0.32.0",
        "server.attention_backend": "CPU_ATTN",
        "server.attention_backends_refused": ["FLASH_ATTN"],
        "server.kv_cache_dtype": "auto",
        "server.kv_cache_tokens": 2912,
        "server.max_num_seqs": None,
        "server.device": "cpu",
    },
    "0.33.0": {
        "server.version": "0.33.0",
        "server.attention_backend": "FLASHINFER",
        "server.kv_cache_dtype": "fp8",
        "server.kv_cache_blocks": 512,
        "server.kv_cache_tokens": 8192,
        "server.kv_cache_layout": "NHD",
        "server.scheduler_class": "servelab_kernels.scheduler.Aging",
        "server.max_num_batched_tokens": 4096,
        "server.max_num_seqs": 128,
        "server.device": "cuda",
    },
}
SHARED = {
    "server.model": "m",
    "server.dtype": "bfloat16",
    "server.enforce_eager": True,
    "server.tensor_parallel_size": 1,
    "server.prefix_caching": False,
    "server.quantization": None,
    "server.seed": 0,
}


def text(version, name):
    return (GOLDEN / version / name).read_text(encoding="utf-8")


@pytest.fixture
def read(monkeypatch):
    """All facts that evidence reads from one release's texts."""

    def reader(version):
        answers = {
            "/version": text(version, "version.json"),
            "/v1/models": text(version, "models.json"),
            "/metrics": text(version, "metrics.txt"),
        }

        async def call(target, *, timeout_s):
            return Answer(status=200, body=answers[target.path].encode())

        monkeypatch.setattr(evidence, "call", call)
        source = Source(
            base_url="http://127.0.0.1:1",
            family=FAMILIES[VERSIONS[version]],
            pid=os.getpid(),
            log_path=GOLDEN / version / "start.log",
        )
        return asyncio.run(collect(source))

    return reader


@pytest.mark.parametrize("version", VERSIONS)
def test_facts(version, read):
    values = read(version).values()
    expected = FACTS[version] | SHARED
    assert {name: values[name] for name in expected} == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_version_and_dtype_come_from_two_sources(version, read):
    """Otherwise no run of that release could ever be valid."""
    found = read(version)
    assert {fact.source for fact in found.known("server.version")} == {"GET /version", "server log"}
    assert len({fact.source for fact in found.known("server.kv_cache_dtype")}) == 2


def samples(version):
    return prometheus.parse(text(version, "metrics.txt"))


@pytest.mark.parametrize("version", VERSIONS)
def test_gauges(version):
    """3 running, 2 waiting (the breakdown by reason does not count again), 31 % of the KV cache."""
    found = prometheus.gauges(samples(version), family=FAMILIES[VERSIONS[version]])
    assert (found["running"], found["waiting"]) == (3, 2)
    assert (found["kv_usage_max"], found["kv_usage_mean"]) == (0.31, 0.31)
    if version == "0.4.1":
        assert found["swapped"] == 1


COUNTED = {"prompt_tokens": 640, "generation_tokens": 480, "preemptions": 7, "completed": 10}
WITHOUT_PREFIX = COUNTED | {"prefix_queries": None, "prefix_hits": None}
COUNTERS = dict.fromkeys(("0.25.0", "0.31.0", "0.32.0", "0.33.0"), COUNTED | {"prefix_queries": 640, "prefix_hits": 0}) | {
    # 0.4.1 counts neither preemptions nor completed requests; what is absent is unknown, never 0.
    "0.4.1": WITHOUT_PREFIX | {"preemptions": None, "completed": None},
    "0.8.5-v0": WITHOUT_PREFIX,
    "0.8.5": COUNTED | {"prefix_queries": 40, "prefix_hits": 0},  # in blocks
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_counters(version):
    """4 aborted requests are not completed; external prefix queries and tokens by source are other quantities."""
    found = prometheus.counters(samples(version), family=FAMILIES[VERSIONS[version]])
    assert {name: found.get(name) for name in COUNTERS[version]} == COUNTERS[version]


HISTOGRAMS = {
    "ttft": HistogramDelta(sum=2.5, count=10),
    "itl": HistogramDelta(sum=9.4, count=470),
    "e2el": HistogramDelta(sum=12.0, count=10),
    "queue": HistogramDelta(sum=0.5, count=10),
    "prefill": HistogramDelta(sum=2.0, count=10),
    "decode": HistogramDelta(sum=9.5, count=10),
    "prefilled_tokens": HistogramDelta(sum=800.0, count=10),
}
ABSENT = {
    "0.4.1": {"queue", "prefill", "decode", "prefilled_tokens"},
    "0.8.5-v0": {"prefilled_tokens"},
    "0.8.5": {"prefilled_tokens"},
}


@pytest.mark.parametrize("version", VERSIONS)
def test_histograms(version):
    """From an idle server to this scrape; the mean per request does not stand in for the inter-token latency."""
    family = FAMILIES[VERSIONS[version]]
    after = samples(version)
    before = [
        prometheus.Sample(
            name=one.name, labels=one.labels, value=one.value if "_created" in one.name else 0.0
        )
        for one in after
    ]
    found = prometheus.window(before, after, family=family).histograms
    absent = ABSENT.get(version, set())
    assert found == {name: None if name in absent else delta for name, delta in HISTOGRAMS.items()}


@pytest.mark.parametrize("version", [v for v, family in VERSIONS.items() if family == "v1"])
def test_nothing_that_a_current_release_should_export_is_missing(version):
    assert prometheus.missing(samples(version), family=FAMILIES["v1"]) == []


def cell(version, *, model=None, kv=None, scheduler="fcfs", cuda=True, **engine) -> Config:
    named = {
        "name": version,
        "version": version.removesuffix("-v0"),
        "family": VERSIONS[version],
        "max_model_len": 2048,
    }
    return Config(
        engine=Engine(**(named | engine)),
        hardware=Hardware(kind=HardwareKind.cuda if cuda else HardwareKind.cpu),
        model=Model(name="m"),
        kv=Kv(**({"block_size": 16} | (kv or {}))),
        scheduler=Scheduler(policy=scheduler),
    )  # fmt: skip


OF_THE_HOST = ("devices", "port")  # of a process, not of a text
MIB = 2**20
SMALL_CELL = {"max_model_len": 1024, "cuda": False, "kv": {"block_size": 32}}
# Llama-3.1-8B: 131,072 bytes a token in bf16, so that 512 blocks of 16 are 1 GiB.
CELLS = {
    "0.4.1": (cell("0.4.1", kv={"memory_bytes": 1024 * MIB}), LLAMA_3_8B, []),
    "0.8.5-v0": (
        cell("0.8.5-v0", kv={"memory_bytes": 1024 * MIB}, scheduler="priority", attention_backend="FLASH_ATTN"),
        LLAMA_3_8B,
        [],
    ),
    "0.8.5": (
        cell("0.8.5", kv={"memory_bytes": 1024 * MIB}, attention_backend="XFORMERS"),
        LLAMA_3_8B,
        ["engine.attention_backend"],
    ),
    # The bytes of a 4-bit token are not known to this project's arithmetic here, so the label stands alone.
    "0.25.0": (
        cell("0.25.0", scheduler="priority", kv={"dtype": "turboquant_4bit_nc", "block_size": 32,
                                                 "memory_bytes": 1074790400}),
        LLAMA_3_8B,
        [],
    ),
    "0.31.0": (cell("0.31.0", max_num_seqs=64, **SMALL_CELL), SMALL, []),
    "0.32.0": (
        cell("0.32.0", attention_backend="FLASH_ATTN", **SMALL_CELL),
        SMALL,
        ["engine.attention_backend"],
    ),
    "0.33.0": (
        cell("0.33.0", max_num_seqs=128, max_num_batched_tokens=4096, attention_backend="FLASHINFER",
             kv={"dtype": "fp8", "memory_bytes": 512 * MIB}),
        LLAMA_3_8B,
        ["missing engine.attention_backend"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_a_cell_is_judged_by_what_its_release_says(version, read):
    """Honest cells meet every rule; the backends that were replaced are named.

    Without our plugin the log is the only source of a backend, which is one too few on CUDA where it was asked for.
    """
    config, model_config, expected = CELLS[version]
    found = findings(config, read(version), model_config=model_config)
    named = [
        ("missing " if one.missing else "") + one.setting for one in found if one.setting not in OF_THE_HOST
    ]
    assert named == expected


def test_an_engine_that_fell_back_to_its_predecessor_is_a_mismatch(read):
    """0.8.5 was asked for its V1 engine and says that it runs V0."""
    config = cell("0.8.5", kv={"memory_bytes": 1024 * MIB}, scheduler="priority")
    found = findings(config, read("0.8.5-v0"), model_config=LLAMA_3_8B)
    assert [one.setting for one in found if one.setting not in OF_THE_HOST] == ["engine.family"]
    assert "asked for V1, the server says V0" in found[0].detail
