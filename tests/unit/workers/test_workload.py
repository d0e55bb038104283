"""The requests of a run: equal for equal cells, refused where settings contradict each other."""

import json
import math
from dataclasses import replace

import pytest

from conf.schema import (
    ArrivalKind,
    Endpoint,
    Length,
    LengthKind,
    Load,
    PromptSource,
    Trace,
    TraceFormat,
    Workload,
)
from workers.load.workload import (
    STREAMS,
    Request,
    arrivals_sha256,
    build_requests,
    check_fit,
    read_arrivals,
    stream_of,
    write_arrivals,
)


def workload(**fields):
    return Workload(**({"name": "test", "input": Length(value=16), "output": Length(value=4)} | fields))


def build(work=None, load=None, *, seed=1, repeat=0, vocab_size=1_000, **kwargs):
    load = load or Load(num_requests=20, rate_per_s=5)
    return build_requests(work or workload(), load, seed=seed, repeat=repeat, vocab_size=vocab_size, **kwargs)


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 1_000 * i, "input_length": 10 + i, "output_length": 3 + i} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return Trace(path=str(path), format=TraceFormat.mooncake)


RANDOM_LENGTHS = {
    "input": Length(kind=LengthKind.uniform, min=5, max=50),
    "output": Length(kind=LengthKind.lognormal, value=8, sigma=0.5, max=30),
}


class TestSameCellSameRequests:
    @pytest.mark.parametrize("prompts", [PromptSource.random, PromptSource.written])
    def test_two_cells_that_differ_in_the_engine_ask_the_same(self, prompts):
        """Case B1, test 3: offsets and prompts are equal byte for byte."""
        work = workload(prompts=prompts, **RANDOM_LENGTHS)
        first, again = build(work), build(work)
        assert first == again
        assert arrivals_sha256(first) == arrivals_sha256(again)

    def test_the_file_is_the_same_byte_for_byte(self, tmp_path):
        for name in ("a", "b"):
            write_arrivals(tmp_path / name, build(workload(**RANDOM_LENGTHS)))
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_the_draws_are_pinned(self):
        """A change of this hash changes every stored workload; it belongs into the change log."""
        requests = build(workload(**RANDOM_LENGTHS), Load(num_requests=20, rate_per_s=5), seed=42)
        assert arrivals_sha256(requests) == PINNED

    @pytest.mark.parametrize("changed", [{"seed": 2}, {"repeat": 1}])
    def test_seed_and_repeat_change_arrivals_lengths_and_prompts(self, changed):
        work = workload(**RANDOM_LENGTHS)
        first, other = build(work), build(work, **changed)
        assert [r.due_ns for r in first] != [r.due_ns for r in other]
        assert [r.num_prompt_tokens for r in first] != [r.num_prompt_tokens for r in other]
        assert not {r.prompt_token_ids for r in first} & {r.prompt_token_ids for r in other}

    def test_rates_of_a_sweep_ask_the_same_prompts(self):
        """For equal durations the higher rate asks the prompts of the lower one, and then more."""
        slow = build(workload(**RANDOM_LENGTHS), Load(duration_s=10, rate_per_s=2))
        fast = build(workload(**RANDOM_LENGTHS), Load(duration_s=10, rate_per_s=8))
        assert len(slow) < len(fast)
        strip = [replace(request, due_ns=0) for request in fast[: len(slow)]]
        assert [replace(request, due_ns=0) for request in slow] == strip

    def test_streams_do_not_depend_on_each_other(self):
        """Other output lengths leave arrivals and prompts as they are."""
        first, other = build(), build(workload(output=RANDOM_LENGTHS["output"]))
        assert [(r.due_ns, r.prompt_token_ids) for r in first] == [
            (r.due_ns, r.prompt_token_ids) for r in other
        ]

    def test_every_stream_has_its_own_randomness(self):
        states = {tuple(stream_of(name, seed=0, repeat=0).generate_state(4)) for name in STREAMS}
        assert len(states) == len(STREAMS)


class TestBuild:
    def test_requests_are_numbered_in_order_of_their_due_times(self):
        requests = build()
        assert [request.index for request in requests] == list(range(20))
        assert [request.due_ns for request in requests] == sorted(request.due_ns for request in requests)

    def test_random_prompts_have_ids_and_exact_lengths(self):
        request = build()[0]
        assert (request.num_prompt_tokens, request.num_output_tokens, request.prompt_text) == (16, 4, None)
        assert len(request.prompt_token_ids) == 16

    @pytest.mark.parametrize("endpoint", list(Endpoint))
    def test_written_prompts_have_text_and_a_length_only_the_server_knows(self, endpoint):
        request = build(workload(prompts=PromptSource.written, endpoint=endpoint), vocab_size=None)[0]
        assert request.prompt_text
        assert request.prompt_token_ids is None
        assert request.num_prompt_tokens is None

    def test_prompts_of_a_file(self, tmp_path):
        path = tmp_path / "mt.jsonl"
        path.write_text('{"turns": ["Why?"]}\n')
        work = workload(prompts=PromptSource.file, path=str(path))
        assert [r.prompt_text for r in build(work, Load(num_requests=1))] == ["Why?"]

    def test_a_burst_is_due_at_once_with_different_prompts(self):
        requests = build(load=Load(num_requests=5, rate_per_s=math.inf))
        assert {request.due_ns for request in requests} == {0}
        assert len({request.prompt_token_ids for request in requests}) == 5

    def test_a_trace_gives_times_and_both_lengths(self, trace):
        by_trace = Length(kind=LengthKind.trace)
        requests = build(
            workload(input=by_trace, output=by_trace), Load(arrival=ArrivalKind.trace, trace=trace)
        )
        found = [(r.due_ns, r.num_prompt_tokens, r.num_output_tokens) for r in requests]
        assert found == [(0, 10, 3), (10**9, 11, 4), (2 * 10**9, 12, 5), (3 * 10**9, 13, 6)]

    def test_lengths_of_a_trace_with_other_arrivals(self, trace):
        work = workload(output=Length(kind=LengthKind.trace))
        requests = build(work, Load(num_requests=2, rate_per_s=1, trace=trace))
        assert [request.num_output_tokens for request in requests] == [3, 4]


class TestRefusals:
    @pytest.mark.parametrize(
        ("work", "load", "message"),
        [
            ({"endpoint": Endpoint.chat}, {}, "token ids, which the chat route does not take"),
            (
                {"prompts": PromptSource.written, "shared_prefix_tokens": 4},
                {},
                "=4 needs workload.prompts=random",
            ),
            ({"prompts": PromptSource.file}, {}, "workload.path must be set"),
            ({"input": Length(kind=LengthKind.trace)}, {}, "load.trace.path must be set"),
            ({}, {"arrival": ArrivalKind.trace}, "load.trace.path must be set"),
        ],
    )
    def test_contradictions_name_the_key(self, work, load, message):
        with pytest.raises(ValueError, match=message):
            build(workload(**work), Load(num_requests=2, **load))

    def test_requests_that_do_not_fit_are_named_and_never_clipped(self, trace):
        """Rows need 13, 15, 17, 19 tokens of 16: two do not fit, the first is request 2."""
        by_trace = Length(kind=LengthKind.trace)
        work, load = workload(input=by_trace, output=by_trace), Load(arrival=ArrivalKind.trace, trace=trace)
        message = r"2 of 4 requests do not fit engine.max_model_len=16; the first is request 2: 12 prompt \+ 5 output"
        with pytest.raises(ValueError, match=message):
            build(work, load, max_model_len=16)

    def test_a_request_of_exactly_the_limit_fits(self):
        assert len(build(max_model_len=20)) == 20

    def test_unknown_prompt_length_is_checked_by_its_output(self):
        text = Request(index=0, due_ns=0, prompt_text="Why?", num_output_tokens=16)
        check_fit([text], max_model_len=17)
        with pytest.raises(ValueError, match="1 of 1 requests do not fit"):
            check_fit([text], max_model_len=16)


@pytest.mark.parametrize("prompts", [PromptSource.random, PromptSource.written])
def test_requests_come_back_from_their_file(tmp_path, prompts):
    requests = build(workload(prompts=prompts))
    write_arrivals(tmp_path / "arrivals.parquet", requests)
    assert read_arrivals(tmp_path / "arrivals.parquet") == requests


def test_hash_sees_every_field():
    base = Request(index=0, due_ns=0, prompt_token_ids=(3, 4), num_prompt_tokens=2, num_output_tokens=1)
    changes = (
        {"due_ns": 1},
        {"prompt_token_ids": (3, 5)},
        {"prompt_token_ids": None, "prompt_text": "a"},
        {"num_output_tokens": 2},
        {"num_prompt_tokens": None},
        {"index": 1},
    )
    assert len({arrivals_sha256([replace(base, **change)]) for change in ({}, *changes)}) == 7


PINNED = "b52f05bf7fde7c9856ae172ff1d1a14f045d68ec04a8016a2ee7218af5eff356"
