"""What engine processes report through the staged plugin, by a stub that lies in one thing at a time."""

import asyncio
from types import SimpleNamespace

import pytest
from fakes import stub
from fakes.launching import stub_spec
from fakes.stub import Script

from conf.schema import Config, Engine, Kv, Model
from workers import engines, families
from workers.evidence import Source, collect
from workers.overlay import plugin_for
from workers.rules import findings
from workers.server import Server

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


def observed(folder, script, config):
    """Evidence of a stub that was started with the command and the environment of a cell."""
    plugin = plugin_for(config.engine, cache=folder / "cache", folder=folder)
    model = SimpleNamespace(path="/models/m", config=SMOLLM2)
    spec = stub_spec(folder, script)
    env = engines.environment(config, base=spec.env, device_ids=None, plugin=plugin)

    def argv(port):
        return engines.command(config, model=model, port=port, python="python", plugin=plugin)

    async def run():
        async with await Server.start(stub_spec(folder, argv_for_port=argv, env=env)) as server:
            source = Source(
                base_url=server.base_url,
                family=families.family(config.engine),
                pid=server.pid,
                log_path=server.log_path,
                plugin=plugin,
            )
            return server.pid, await collect(source)

    return asyncio.run(run())


def found(folder, script, config):
    _, evidence = observed(folder, script, config)
    return [
        ("missing " if one.missing else "") + one.setting
        for one in findings(config, evidence, model_config=SMOLLM2)
    ]


def test_an_honest_server_meets_every_rule_and_tells_what_it_holds(tmp_path):
    """30 layers x 768 bytes = 23,040 a token; the log names no backend, the process does."""
    pid, evidence = observed(tmp_path, Script(), cell())
    assert findings(cell(), evidence, model_config=SMOLLM2) == []
    values = evidence.values()
    assert values["server.attention_backend"] == "CPU_ATTN"
    assert values["engine.kv_tensor_dtype"] == "bfloat16"
    assert values["engine.kv_bytes_per_token"] == 23040
    assert values["engine.num_layers"] == 30
    assert values["engine.pids"] == [pid, pid, pid]
    assert values["engine.plugin_sha256"] == values["launch.plugin_sha256"]
    sources = [fact.source for fact in evidence.known("server.version")]
    assert sources[0] == "GET /version"
    assert f"engine process worker 0 (pid {pid})" in sources


@pytest.mark.parametrize(
    ("lie", "expected"),
    [
        ({"engine_route": False}, ["missing plugin"]),
        ({"engine_error": "KeyError: 'x'"}, ["missing plugin"]),
        ({"engine_kv_tensor_dtype": "uint8"}, ["kv.dtype"]),
        ({"engine_kv_tensor_dtype": "float16"}, ["kv.dtype", "kv.dtype"]),
        ({"engine_kv_bytes_per_token": 384}, ["kv.dtype", "kv.memory_bytes", "kv.memory_bytes"]),
        ({"engine_plugin_sha256": "0" * 64}, ["plugin", "plugin"]),
        ({"engine_pid": 1}, ["plugin", "plugin"]),
        ({"engine_marks": False}, ["plugin"]),
        ({"engine_vllm": "0.31.0"}, ["engine.version"]),
        ({"engine_queue_class": "PriorityRequestQueue"}, ["scheduler.policy"]),
    ],
)  # fmt: skip
def test_a_lie_is_named(tmp_path, lie, expected):
    assert found(tmp_path, Script(**lie), cell()) == expected


def test_the_backend_of_the_layers_counts_beside_the_log(tmp_path):
    """The log repeats the flag, the layers hold another backend."""
    config = cell(attention_backend="FLASH_ATTN")
    assert found(tmp_path, Script(), config) == []
    assert found(tmp_path, Script(engine_backend="CPU_ATTN"), config) == ["engine.attention_backend"]


def test_labels_and_blocks_of_fp8_over_tensors_of_bfloat16(tmp_path):
    """Label, log and number of blocks say fp8; what the layers hold does not."""
    config = cell(kv={"dtype": "fp8"})
    assert found(tmp_path, Script(), config) == []
    lie = Script(engine_kv_tensor_dtype="bfloat16", engine_kv_bytes_per_token=768)
    assert found(tmp_path, lie, config) == [
        "kv.dtype", "kv.dtype", "kv.dtype", "kv.memory_bytes", "kv.memory_bytes",
    ]  # fmt: skip


def test_a_family_without_middleware_is_not_asked_and_says_so(tmp_path):
    config = cell(family="v0", version="0.8.5")
    _, evidence = observed(tmp_path, Script(version="0.8.5"), config)
    assert "v0" in evidence.value("launch.plugin")
    assert not [one for one in findings(config, evidence, model_config=SMOLLM2) if one.setting == "plugin"]
    assert evidence.value("engine.pids") is None
