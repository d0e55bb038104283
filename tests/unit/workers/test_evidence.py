"""Facts with their sources, gathered from a server that answers and from one that does not."""

import asyncio
import json
import os

import pytest

from workers import evidence
from workers.engine_log import parse_log
from workers.evidence import Evidence, Fact, Source, collect, log_facts
from workers.families import FAMILIES
from workers.http_call import Answer


def fact(name, value, source="s"):
    return Fact(name=name, value=value, source=source, time_s=1.0)


def test_the_first_source_that_knows_speaks():
    found = Evidence(facts=(fact("v", None, "a"), fact("v", "1", "b"), fact("v", "2", "c"), fact("w", None)))
    assert found.value("v") == "1"
    assert [known.source for known in found.known("v")] == ["b", "c"]
    assert found.values() == {"v": "1", "w": None}
    assert found.value("unheard of") is None


def test_round_trip_is_strict_json():
    found = Evidence(facts=(fact("server.cores", [[0, 1]]), fact("x", None)))
    assert Evidence.from_json(found.to_json()) == found
    with pytest.raises(ValueError, match="not JSON compliant"):
        Evidence(facts=(fact("x", float("inf")),)).to_json()


METRICS = (
    'vllm:cache_config_info{block_size="32",cache_dtype="auto",enable_prefix_caching="False",engine="0",'
    'kv_cache_dtype_skip_layers="[]",kv_cache_memory_bytes="67108864",kv_cache_size_tokens="2912",'
    'num_gpu_blocks="91"} 1.0\n'
)
LOG = (
    "Initializing a V1 LLM engine (v0.32.0) with config: model='/m', dtype=torch.bfloat16, max_seq_len=1024, "
    "tensor_parallel_size=1, quantization=None, enforce_eager=True, kv_cache_dtype=auto, enable_prefix_caching=False\n"
    "non-default args: {'model': '/m'}\n"
)


def server(monkeypatch, tmp_path, *, answers, log=LOG, **options) -> Source:
    async def call(target, *, timeout_s):
        answer = answers.get(target.path)
        if answer is None:
            raise ConnectionRefusedError
        return (
            Answer(status=200, body=answer.encode())
            if isinstance(answer, str)
            else Answer(status=answer, body=b"")
        )

    monkeypatch.setattr(evidence, "call", call)
    path = tmp_path / "server.log"
    path.write_text(log)
    return Source(
        base_url="http://127.0.0.1:1", family=FAMILIES["v1"], pid=os.getpid(), log_path=path, **options
    )


def test_a_server_that_answers(monkeypatch, tmp_path):
    answers = {
        "/version": '{"version": "0.1.dev7557+g977180c"}',
        "/v1/models": json.dumps({"data": [{"id": "m", "root": "/m", "max_model_len": 1024}]}),
        "/metrics": METRICS,
    }
    freeze = "torch==2.13.0+cpu\nvllm-cpu==0.32.0\n-e .\n"
    found = asyncio.run(
        collect(
            server(monkeypatch, tmp_path, answers=answers, freeze=freeze, freeze_sha256="ab", device_ids="3")
        )
    )
    values = found.values()
    expected = {
        "server.version": "0.1.dev7557+g977180c",
        "server.commit": "977180c",
        "server.model": "m",
        "server.max_model_len": 1024,
        "server.kv_cache_dtype": "auto",
        "server.kv_cache_tokens": 2912,
        "server.kv_cache_blocks": 91,
        "server.block_size": 32,
        "server.kv_cache_memory_bytes": 67108864,
        "server.prefix_caching": False,
        "server.dtype": "bfloat16",
        "server.enforce_eager": True,
        "server.tensor_parallel_size": 1,
        "server.quantization": None,
        "server.scheduling_policy": "fcfs",
        "server.attention_backend": None,
        "environment.torch": "2.13.0+cpu",
        "environment.vllm": "0.32.0",
        "environment.sha256": "ab",
        "launch.devices": "3",
    }
    assert {name: values[name] for name in expected} == expected
    assert [known.source for known in found.known("server.kv_cache_dtype")] == [
        "metrics vllm:cache_config_info",
        "server log",
    ]
    assert [known.value for known in found.known("server.version")] == ["0.1.dev7557+g977180c", "0.32.0"]
    assert values["process.command_line"]
    assert found.to_json()


@pytest.mark.parametrize(
    "answers", [{}, {"/version": "not json", "/v1/models": 500, "/metrics": 404}, {"/version": "[]"}]
)
def test_a_server_that_does_not_answer_is_full_of_none(monkeypatch, tmp_path, answers):
    values = asyncio.run(collect(server(monkeypatch, tmp_path, answers=answers, log=""))).values()
    for name in ("server.version", "server.model", "server.kv_cache_dtype", "server.kv_cache_tokens"):
        assert values[name] is None


def test_a_scrape_that_exists_is_used(monkeypatch, tmp_path):
    source = server(monkeypatch, tmp_path, answers={}, metrics_text=METRICS)
    assert asyncio.run(collect(source)).value("server.kv_cache_blocks") == 91


def test_policy_is_unknown_without_the_servers_own_arguments():
    assert log_facts(parse_log(""))["server.scheduling_policy"] is None
    named = log_facts(parse_log("non-default args: {'scheduling_policy': 'priority'}"))
    assert named["server.scheduling_policy"] == "priority"
