"""Evidence and verdict about a stub that lies in one thing at a time."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import stub
from fakes.launching import stub_spec
from fakes.stub import Script

from conf.schema import Config, Engine, Kv, Model
from workers import engines, families
from workers.evidence import Source, collect
from workers.rules import findings
from workers.scrape import Scraper, server_metrics, server_window
from workers.server import Server
from workers.telemetry import HostSampler

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
}


def cell(*, kv=None, **engine) -> Config:
    return Config(
        engine=Engine(**({"name": "e", "version": "0.32.0", "executable": list(stub.COMMAND)} | engine)),
        model=Model(name="stub"),
        kv=Kv(**(kv or {})),
    )


def on_server(folder: Path, script: Script, config: Config, work):
    """Run ``work(server, source)`` against a stub started with the command of a cell."""
    model = SimpleNamespace(path="/models/m", config=SMOLLM2)

    def argv(port):
        return engines.command(config, model=model, port=port, python=Path("python"))

    async def run():
        async with await Server.start(stub_spec(folder, script, argv_for_port=argv)) as server:
            source = Source(
                base_url=server.base_url,
                family=families.family(config.engine),
                pid=server.pid,
                log_path=server.log_path,
            )
            return await work(server, source)

    return asyncio.run(run())


def found(folder, script, config):
    async def work(_server, source):
        return findings(config, await collect(source), model_config=SMOLLM2)

    return [
        ("missing " if one.missing else "") + one.setting for one in on_server(folder, script, config, work)
    ]


def test_an_honest_server_meets_every_rule(tmp_path):
    assert found(tmp_path, Script(), cell()) == []


@pytest.mark.parametrize(
    ("lie", "settings"),
    [
        ({"version": "0.31.0"}, ["engine.version", "engine.version"]),
        ({"cache_dtype": "fp8"}, ["kv.dtype"]),
        ({"num_gpu_blocks": 182}, ["kv.dtype"]),
        ({"kv_cache_memory_bytes": 2**30}, ["kv.memory_bytes", "kv.dtype"]),
        ({"max_model_len": 2048}, ["engine.max_model_len"]),
        ({"metrics_status": 500}, ["missing kv.dtype", "missing kv.memory_bytes", "missing kv.block_size",
                                   "missing kv.prefix_caching"]),
    ],
)  # fmt: skip
def test_a_lie_is_named(tmp_path, lie, settings):
    assert found(tmp_path, Script(**lie), cell()) == settings


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Using AttentionBackendEnum.FLASH_ATTN backend.", ["engine.attention_backend"]),
        ("Using AttentionBackendEnum.TRITON_ATTN backend.", []),
        ("nothing known", ["missing engine.attention_backend"]),
        ("Cannot use AttentionBackendEnum.TRITON_ATTN backend on CPU.", ["engine.attention_backend"]),
    ],
)
def test_the_backend_in_use_counts(tmp_path, line, expected):
    """Requested TRITON_ATTN, effective whatever the log says (C1)."""
    assert found(tmp_path, Script(backend_line=line), cell(attention_backend="TRITON_ATTN")) == expected


def test_labels_alone_do_not_make_a_dtype(tmp_path):
    """The label echoes int8_per_token_head, the blocks are those of bfloat16."""
    config = cell(kv={"dtype": "int8_per_token_head"})
    assert found(tmp_path, Script(), config) == ["kv.dtype"]


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("0.1.dev7557+g977180c", []),
        ("0.1.dev7557+gdeadbee", ["engine.version", "engine.version"]),
        ("0.9.2", ["engine.version"]),
    ],
)
def test_a_patched_build_is_known_by_its_commit(tmp_path, version, expected):
    """C4: the commit decides, the number is not compared."""
    config = cell(name="patched-a", version="0.1.dev7557", commit="977180c")
    assert found(tmp_path, Script(version=version), config) == expected


def test_a_window_counts_what_was_served(tmp_path):
    """Three requests of 64 prompt and 4 output tokens, one preemption each."""
    config = cell()

    async def work(server, source):
        scraper = Scraper(
            server.base_url, family=source.family, interval_s=0.05, host=HostSampler(server.pid)
        )
        before, stop = await scraper.snapshot(), asyncio.Event()
        sampling = asyncio.create_task(scraper.run(stop))
        for _ in range(3):
            body = {"model": "stub", "prompt": list(range(64)), "max_tokens": 4, "stream": True}
            answer = await server.call("POST", "/v1/completions", json_body=body, timeout_s=10)
            assert answer.status == 200
        after = await scraper.snapshot()
        stop.set()
        await sampling
        window = server_window(before, after, family=source.family, jit_events=())
        return window, server_metrics(window, scraper.rows(start_ns=before.t_ns)), scraper.failed

    window, metrics, failed = on_server(tmp_path, Script(preemptions_per_request=1), config, work)
    assert failed == 0
    assert not window.restarted
    assert metrics["preemptions/total"] == 3
    assert metrics["server/completed"] == 3
    assert metrics["server/prompt_tokens"] == 192
    assert metrics["server/generation_tokens"] == 12
    assert window.histograms["ttft"].count == 3
    assert metrics["running/max"] is not None
    assert metrics["server_rss_bytes/max"] > 0


def test_a_server_that_starts_its_counters_again_has_restarted(tmp_path):
    async def work(server, source):
        scraper = Scraper(server.base_url, family=source.family, interval_s=1.0)
        body = {"model": "stub", "prompt": list(range(64)), "max_tokens": 4, "stream": True}
        await server.call("POST", "/v1/completions", json_body=body, timeout_s=10)
        before = await scraper.snapshot()
        await server.call("POST", "/v1/completions", json_body=body, timeout_s=10)
        after = await scraper.snapshot()
        return server_window(before, after, family=source.family, jit_events=())

    window = on_server(tmp_path, Script(reset_counters_at=1), cell(), work)
    assert window.restarted
    assert window.counters["preemptions"] is None
