"""From the route's answer to facts, and from facts to findings; expected values by hand."""

import json

import pytest

from conf.schema import Config, Engine, Kv, Model
from workers import engine_process, engines
from workers.evidence import Evidence, Fact
from workers.overlay import MIDDLEWARE, Overlay, Plugin, plugin_for
from workers.rules import findings

SMOLLM2 = {
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "hidden_size": 576,
}
SHA = "a" * 64
LAYER = {
    "backend": "CPU_ATTN",
    "impl_class": "x.Impl",
    "kv_tensor_dtype": "bfloat16",
    "kv_bytes_per_token": 768.0,
}


def worker(*, layers=({**LAYER, "num_layers": 30},), **changes):
    """91 blocks of 32 tokens, 23,040 bytes each: 67,092,480 bytes of 64 MiB."""
    own = {"pid": 3, "plugin_sha256": SHA, "vllm": "0.32.0", "rank": 0, "num_layers": 30, "num_blocks": 91}
    return own | {"block_size": 32, "kv_bytes_held": 67_092_480, "layers": list(layers)} | changes


CORE = {"pid": 2, "plugin_sha256": SHA, "vllm": "0.32.0", "scheduler_class": "s.Scheduler"}


def facts(*, workers=(), core=None, tree=(1, 2, 3), marks=None):
    body = {
        "api_server": {"pid": 1, "plugin_sha256": SHA, "vllm": "0.32.0"},
        "engine_core": core or CORE | {"queue_class": "q.FCFSRequestQueue"},
        "workers": list(workers) or [worker()],
    }
    named = engine_process.named_facts(engine_process.parse(json.dumps(body)), tree=tree, marks=marks)
    return [
        Fact(name=name, value=value, source=source, time_s=0.0)
        for source, values in named
        for name, value in values.items()
    ]


def evidence(**options) -> Evidence:
    """An honest server, its plugin, and what its processes say."""
    served = {
        "server.version": "0.32.0", "server.model": "m", "server.kv_cache_dtype": "bfloat16",
        "server.kv_cache_memory_bytes": 2**26, "server.kv_cache_tokens": 2912, "server.kv_cache_blocks": 91,
        "server.block_size": 32, "server.prefix_caching": False, "server.max_model_len": 1024,
        "launch.plugin_sha256": SHA,
    }  # fmt: skip
    own = [Fact(name=name, value=value, source="GET x", time_s=0.0) for name, value in served.items()]
    return Evidence(facts=(*own, *facts(**options)))


def named(found, **kv) -> list[str]:
    config = Config(engine=Engine(name="e", version="0.32.0"), model=Model(name="m"), kv=Kv(**kv))
    return [
        ("missing " if one.missing else "") + one.setting
        for one in findings(config, found, model_config=SMOLLM2)
    ]


def test_honest_processes_meet_every_rule():
    assert named(evidence()) == []


def test_each_rank_is_a_source_of_its_own():
    """A second rank on another backend cannot hide behind the first."""
    other = worker(rank=1, pid=4, layers=[{**LAYER, "backend": "FLASH_ATTN", "num_layers": 30}])
    found = Evidence(facts=tuple(facts(workers=[worker(), other], tree=(1, 2, 3, 4))))
    assert {fact.source: fact.value for fact in found.known("server.attention_backend")} == {
        "engine process worker 0 (pid 3)": "CPU_ATTN",
        "engine process worker 1 (pid 4)": "FLASH_ATTN",
    }


def test_bytes_per_token_add_up_over_unlike_layers():
    """4 boundary layers of 768 bytes and 26 of 204: 8,376."""
    layers = [
        {**LAYER, "num_layers": 4},
        {**LAYER, "kv_tensor_dtype": "uint8", "kv_bytes_per_token": 204.0, "num_layers": 26},
    ]
    found = Evidence(facts=tuple(facts(workers=[worker(layers=layers)])))
    assert found.value("engine.kv_bytes_per_token") == 8376
    assert found.value("engine.kv_tensor_dtype") == "bfloat16, uint8"
    assert found.value("server.kv_cache_dtype") is None


def test_tensors_smaller_than_the_budget_are_named():
    """One block of 32 x 23,040 bytes may be lost to rounding, two may not."""
    block = 32 * 23040
    assert named(evidence(workers=[worker(kv_bytes_held=2**26 - block)])) == []
    assert named(evidence(workers=[worker(kv_bytes_held=2**26 - 2 * block)])) == ["kv.memory_bytes"]


def test_a_process_outside_the_tree_is_named():
    assert named(evidence(tree=(1, 2))) == ["plugin"]


def test_a_process_without_a_mark_is_named(tmp_path):
    for pid in (1, 2, 3):
        (tmp_path / f"{pid}.json").write_text(json.dumps({"pid": pid, "plugin_sha256": SHA}))
    (tmp_path / "9.json").write_text("torn")
    assert named(evidence(marks=tmp_path)) == []
    (tmp_path / "3.json").unlink()
    assert named(evidence(marks=tmp_path)) == ["plugin"]


def test_what_a_worker_could_not_tell_is_missing_with_its_reason():
    config = Config(engine=Engine(name="e", version="0.32.0"), model=Model(name="m"))
    found = evidence(workers=[{"pid": 3, "error": "AttributeError: kv_cache_config"}])
    alone, untold = findings(config, found, model_config=SMOLLM2)
    assert untold.missing
    assert "engine.kv_tensor_dtype" in untold.detail
    assert "AttributeError: kv_cache_config" in untold.detail
    # Without the worker's word one source is left for the dtype.
    assert alone.missing
    assert alone.detail.startswith("kv.dtype: ")


@pytest.mark.parametrize(
    "text", [None, "", "not json", "[]", '{"workers": 3}', '{"workers": [1], "engine_core": "x"}']
)
def test_any_other_answer_is_none_of_the_facts(text):
    reports = engine_process.parse(text)
    values = [
        v for _, named_ in engine_process.named_facts(reports, tree=(1,), marks=None) for v in named_.values()
    ]
    assert set(values) == {None}


# --- how a launch takes it ---


@pytest.fixture
def plugin(tmp_path):
    return Plugin(overlay=Overlay(path=tmp_path / "o", sha256=SHA), marks=tmp_path / "m", flag="--middleware")


class Weights:
    path, config = "/m", SMOLLM2


def test_command_and_environment_with_the_plugin(plugin, tmp_path):
    config = Config(engine=Engine(name="e", version="0.32.0"), model=Model(name="m"))
    command = engines.command(config, model=Weights(), port=1, python=tmp_path, plugin=plugin)
    assert command[-2:] == ["--middleware", MIDDLEWARE]
    env = engines.environment(config, base={"PYTHONPATH": "/mine"}, device_ids=None, plugin=plugin)
    assert env["PYTHONPATH"] == str(tmp_path / "o")
    assert env["SERVELAB_MARKS"] == str(tmp_path / "m")
    assert "VLLM_PLUGINS" not in env


def test_a_cells_own_path_and_plugins_are_kept(plugin, tmp_path):
    own = {"PYTHONPATH": "/patched", "VLLM_PLUGINS": "theirs"}
    config = Config(engine=Engine(name="e", version="0.32.0", env=own), model=Model(name="m"))
    env = engines.environment(config, base={}, device_ids=None, plugin=plugin)
    assert env["PYTHONPATH"] == f"{tmp_path / 'o'}:/patched"
    assert env["VLLM_PLUGINS"] == "theirs,servelab"


@pytest.mark.parametrize(("family", "version", "loads"), [("v0", "0.8.5", False), ("v1", "0.32.0", True)])
def test_only_families_with_middleware_load_it(tmp_path, family, version, loads):
    engine = Engine(name="e", version=version, family=family)
    assert (plugin_for(engine, cache=tmp_path, folder=tmp_path) is not None) is loads
