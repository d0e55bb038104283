"""Warm-up: every shape that will be measured has been seen, in words that will not be."""

import pytest

from conf.schema import Length, Load, PromptSource, Warmup, Workload
from workers.load.warmup import shape_bucket, warmup_requests
from workers.load.workload import Request, build_requests

EDGES = [256, 1024, 4096]


def measured(*lengths):
    return [
        Request(
            index=i,
            due_ns=i,
            prompt_token_ids=(3 + i,) * length,
            num_prompt_tokens=length,
            num_output_tokens=100,
        )
        for i, length in enumerate(lengths)
    ]


def warm(requests, *, per_shape=1, concurrent=0, edges=EDGES):
    settings = Warmup(requests_per_shape=per_shape, concurrent=concurrent, shape_edges=edges)
    return warmup_requests(requests, settings, seed=0, repeat=0, vocab_size=1_000)


@pytest.mark.parametrize(("length", "bucket"), [(1, 0), (256, 0), (257, 1), (1024, 1), (4096, 2), (4097, 3)])
def test_an_edge_belongs_to_the_bucket_below_it(length, bucket):
    assert shape_bucket(length, EDGES) == bucket


def test_every_bucket_that_occurs_is_covered_by_its_longest_prompt():
    """Case B6: prompts of 10, 200, 300, 900, 4000 tokens -> 200, 900 and 4000 warm three buckets."""
    assert [r.num_prompt_tokens for r in warm(measured(10, 4000, 200, 300, 900))] == [200, 900, 4000]


def test_buckets_that_do_not_occur_cost_nothing():
    assert [r.num_prompt_tokens for r in warm(measured(5000, 6000))] == [6000]


def test_each_shape_is_sent_as_often_as_asked_each_in_its_own_group():
    found = warm(measured(10, 300), per_shape=2)
    assert [(r.due_ns, r.num_prompt_tokens) for r in found] == [(0, 10), (1, 10), (2, 300), (3, 300)]


def test_the_batch_is_one_group_of_the_measured_lengths_at_the_end():
    found = warm(measured(10, 300, 20), concurrent=4)
    assert [(r.due_ns, r.num_prompt_tokens) for r in found[2:]] == [(2, 10), (2, 300), (2, 20), (2, 10)]


def test_zero_of_both_is_no_warm_up():
    assert warm(measured(10, 300), per_shape=0) == []
    assert warm([], per_shape=3, concurrent=3) == []


def test_requests_are_numbered_and_answers_kept_short():
    found = warm(measured(10, 300), concurrent=2)
    assert [r.index for r in found] == [0, 1, 2, 3]
    assert {r.num_output_tokens for r in found} == {16}


@pytest.mark.parametrize("prompts", [PromptSource.random, PromptSource.written])
def test_no_warm_up_prompt_is_a_measured_one_or_sent_twice(prompts):
    """Nor do they begin alike: the first 8 ids or characters differ from those of every measured prompt."""
    work = Workload(name="w", prompts=prompts, input=Length(value=32))
    requests = build_requests(work, Load(num_requests=50), seed=0, repeat=0, vocab_size=49_152)
    found = warm(requests, per_shape=3, concurrent=8)
    begins = {(request.prompt_token_ids or request.prompt_text)[:8] for request in requests}
    prompts = [request.prompt_token_ids or request.prompt_text for request in found]
    assert len(set(prompts)) == len(found)
    assert not begins & {prompt[:8] for prompt in prompts}


def test_ids_are_exactly_as_long_as_they_say():
    for request in warm(measured(7, 300), concurrent=2):
        assert len(request.prompt_token_ids) == request.num_prompt_tokens


def test_text_finds_its_bucket_by_its_size():
    """Four characters count as a token: 1,200 characters are a prompt of about 300 tokens."""
    texts = [
        Request(index=i, due_ns=0, prompt_text="x" * size, num_output_tokens=5)
        for i, size in enumerate((40, 1200))
    ]
    assert [len(r.prompt_text) for r in warm(texts)] == [len("Warm-up 0.\n") + 40, len("Warm-up 1.\n") + 1200]


def test_a_text_that_happens_to_be_measured_is_changed_again():
    texts = [
        Request(index=i, due_ns=0, prompt_text=t, num_output_tokens=5)
        for i, t in enumerate(["A", "Warm-up 0.\nA"])
    ]
    found = {r.prompt_text for r in warm(texts, per_shape=0, concurrent=2)}
    assert not found & {"A", "Warm-up 0.\nA"}


def test_same_seed_same_warm_up():
    assert warm(measured(10, 300), concurrent=3) == warm(measured(10, 300), concurrent=3)
