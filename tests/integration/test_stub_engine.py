"""The stub engine does what its script says: what other tests rely on."""

import asyncio
import json

import pytest
from fakes import stub
from fakes.launching import stub_spec

from workers.server import Server

PROMPT = list(range(64))


def with_server(folder, script, work, *extra):
    """Run ``work(server)`` against a stub."""

    async def run():
        spec = stub_spec(folder, script, argv_for_port=lambda port: stub.argv(port, extra=extra))
        async with await Server.start(spec) as server:
            return await work(server)

    return asyncio.run(run())


async def stream(server, *, path="/v1/completions", **body):
    """Events of one streaming generation, without ``[DONE]``."""
    body = {
        "model": "stub",
        "max_tokens": 4,
        "stream": True,
        "stream_options": {"include_usage": True},
        **body,
    }
    answer = await server.call("POST", path, json_body=body, timeout_s=10)
    assert answer.status == 200, answer.text
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def metrics(server):
    """Series → value of /metrics."""
    lines = (await server.call("GET", "/metrics")).text.splitlines()
    return {
        line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")
    }


def series(name, **labels):
    pairs = {"engine": "0", "model_name": "stub", **labels}
    text = ",".join(f'{key}="{pairs[key]}"' for key in sorted(pairs))
    return f"vllm:{name}{{{text}}}"


def test_streams_have_vllms_shape_and_counters_follow(tmp_path):
    """Four tokens, one usage event; chat opens with a role-only chunk; /metrics counts both."""

    async def work(server):
        text = await stream(server, prompt=PROMPT)
        messages = [{"role": "user", "content": "one two three"}]
        chat = await stream(server, path="/v1/chat/completions", messages=messages)
        return text, chat, await metrics(server)

    text, chat, found = with_server(tmp_path, stub.Script(), work)
    assert [event["choices"][0]["text"] for event in text[:-1]] == [" the", " of", " and", " to"]
    assert [event["choices"][0]["finish_reason"] for event in text[:-1]] == [None, None, None, "length"]
    assert text[-1]["choices"] == []
    assert text[-1]["usage"] == {"prompt_tokens": 64, "total_tokens": 68, "completion_tokens": 4}
    assert chat[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chat[1]["choices"][0]["delta"] == {"content": " the"}
    assert found[series("generation_tokens_total")] == 2 + 4 + 4  # 2: readiness
    assert found[series("prompt_tokens_total")] == 4 + 64 + 3
    assert found[series("request_success_total", finished_reason="length")] == 3
    assert found[series("time_to_first_token_seconds_count")] == 3
    assert found[series("inter_token_latency_seconds_count")] == 1 + 3 + 3


def test_flags_are_honoured_in_what_is_reported(tmp_path):
    """64 MiB of fp8 in blocks of 32 are 182 blocks, 5,824 tokens."""
    extra = (
        "--kv-cache-dtype",
        "fp8",
        "--block-size",
        "32",
        "--no-enable-prefix-caching",
        "--max-model-len",
        "512",
    )

    async def work(server):
        page = (await server.call("GET", "/metrics")).text
        models = json.loads((await server.call("GET", "/v1/models")).body)
        return page, models

    page, models = with_server(tmp_path, stub.Script(), work, *extra)
    info = next(line for line in page.splitlines() if line.startswith("vllm:cache_config_info{"))
    for label in (
        'cache_dtype="fp8"',
        'num_gpu_blocks="182"',
        'kv_cache_size_tokens="5824"',
        'block_size="32"',
    ):
        assert label in info
    assert 'enable_prefix_caching="False"' in info
    assert models["data"][0]["max_model_len"] == 512


def test_lies_are_told_as_scripted(tmp_path):
    """Version, labels, dropped and renamed series."""
    script = stub.Script(
        version="0.31.9",
        cache_dtype="fp8",
        num_gpu_blocks=7,
        metrics_drop=("vllm:num_preemptions_total",),
        metrics_rename={"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"},
        log_lines=("Using Triton backend on V1 engine.",),
    )

    async def work(server):
        return json.loads((await server.call("GET", "/version")).body), (
            await server.call("GET", "/metrics")
        ).text

    version, page = with_server(tmp_path, script, work)
    assert version == {"version": "0.31.9"}
    assert 'cache_dtype="fp8"' in page
    assert 'num_gpu_blocks="7"' in page
    assert "vllm:num_preemptions_total" not in page
    assert "vllm:gpu_cache_usage_perc" in page
    assert "vllm:kv_cache_usage_perc" not in page
    assert "Using Triton backend on V1 engine." in (tmp_path / "server.log").read_text()


def test_lengths_reasons_and_faults_by_request(tmp_path):
    """Request 0 is short, 1 as asked, 2 empty, 3 fails after HTTP 200, 4 is refused, 5 is cut."""
    script = stub.Script(
        output_tokens=(2, None),
        empty_requests=(2,),
        error_requests=(3,),
        reject_requests=(4,),
        cut_requests=(5,),
    )

    async def work(server):
        short, full, empty, failed = [await stream(server, prompt=PROMPT) for _ in range(4)]
        body = {"prompt": PROMPT, "max_tokens": 4, "stream": True}
        refused = await server.call("POST", "/v1/completions", json_body=body, timeout_s=5)
        with pytest.raises(OSError):
            await server.call("POST", "/v1/completions", json_body=body, timeout_s=5)
        return short, full, empty, failed, refused

    short, full, empty, failed, refused = with_server(tmp_path, script, work)
    assert [len(short) - 1, short[-2]["choices"][0]["finish_reason"]] == [2, "stop"]
    assert [len(full) - 1, full[-2]["choices"][0]["finish_reason"]] == [4, "length"]
    assert [event["choices"][0]["text"] for event in empty if event["choices"]] == [""]
    assert len(failed) == 2
    assert failed[-1]["error"]["code"] == 500
    assert refused.status == 500


def test_more_requests_than_slots_wait_in_the_queue(tmp_path):
    """One at a time: the queue-time histogram, preemptions and the truth file tell what happened."""
    script = stub.Script(
        max_running=1, ttft_s=0.05, preemptions_per_request=2, truth_path=str(tmp_path / "truth")
    )

    async def work(server):
        await asyncio.gather(*(stream(server, prompt=[number] * 40, max_tokens=1) for number in range(3)))
        return await metrics(server)

    found = with_server(tmp_path, script, work)
    rows = [json.loads(line) for line in (tmp_path / "truth").read_text().splitlines()]
    waits = sorted(row["admitted_ns"] - row["received_ns"] for row in rows)
    assert waits[0] < waits[1] - 40e6 < waits[2] - 80e6
    assert found[series("num_preemptions_total")] == 4 * 2
    assert found[series("request_queue_time_seconds_sum")] > 0.05 + 0.1 - 0.01


def test_prefix_hits_and_compilation_are_what_they_say(tmp_path):
    """The second equal prompt hits whole blocks; only the first prompt of a length bucket pays for compilation."""
    script = stub.Script(compile_cost_s=0.2, truth_path=str(tmp_path / "truth"))

    async def work(server):
        before = await metrics(server)
        for _ in range(2):
            await stream(server, prompt=list(range(300)), max_tokens=1)
        return before, await metrics(server)

    before, after = with_server(tmp_path, script, work, "--block-size", "128")
    hits = series("prefix_cache_hits_total")
    assert after[hits] - before[hits] == 256
    rows = [json.loads(line) for line in (tmp_path / "truth").read_text().splitlines()]
    first, second = [row["token_ns"][0] - row["received_ns"] for row in rows]
    assert first > 200e6
    assert second < first - 100e6


def test_bytes_are_cut_and_reasoning_is_named_as_scripted(tmp_path):
    """Writes of 300 bytes change nothing in what arrives; two reasoning tokens under two names."""
    script = stub.Script(
        write_bytes=300,
        write_gap_s=0.0005,
        reasoning_tokens=2,
        reasoning_fields=("reasoning", "reasoning_content"),
    )

    async def work(server):
        return await stream(server, path="/v1/chat/completions", messages=[{"role": "user", "content": "x"}])

    deltas = [event["choices"][0]["delta"] for event in with_server(tmp_path, script, work)[1:-1]]
    assert [next(iter(delta)) for delta in deltas] == ["reasoning", "reasoning_content", "content", "content"]
