"""Requests before the measured window, so that no measured request is the first of its shape."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace

from conf.schema import Warmup
from workers.load.prompts import random_prompts
from workers.load.workload import Request, stream_of

# Enough decode steps to have run them once; longer answers would only take time.
MAX_OUTPUT_TOKENS = 16
# Rough size of a token where only the text is known; it decides the bucket, nothing that is reported.
CHARACTERS_PER_TOKEN = 4


def warmup_requests(
    requests: Sequence[Request], warmup: Warmup, *, seed: int, repeat: int, vocab_size: int | None
) -> list[Request]:
    """Choose warm-up requests for the shapes that occur in ``requests``.

    A shape bucket holds the prompt lengths up to an edge of ``shape_edges`` (and above the edge before). For every
    bucket that occurs, ``requests_per_shape`` prompts of its longest measured length come one after the other;
    then a batch of ``concurrent`` prompts of the measured lengths in turn comes at once. Requests with the same
    ``due_ns`` (0, 1, 2 ...) form a group, and a group starts when the one before is answered.
    No prompt equals, or begins like, a measured one.
    """
    if not requests:
        return []
    longest = _longest_of_buckets(requests, warmup.shape_edges)
    alone = [request for request in longest for _ in range(warmup.requests_per_shape)]
    batch = [requests[i % len(requests)] for i in range(warmup.concurrent)]
    models = [replace(request, due_ns=group) for group, request in enumerate(alone)]
    models += [replace(request, due_ns=len(alone)) for request in batch]
    fresh = _fresh_prompts(models, measured=requests, seed=seed, repeat=repeat, vocab_size=vocab_size)
    return [
        replace(request, index=index, num_output_tokens=min(request.num_output_tokens, MAX_OUTPUT_TOKENS))
        for index, request in enumerate(fresh)
    ]


def shape_bucket(num_prompt_tokens: int, edges: Sequence[int]) -> int:
    """Find the bucket of a prompt length: 0 up to the first edge, ``len(edges)`` above the last."""
    return bisect_left(sorted(edges), num_prompt_tokens)


def _longest_of_buckets(requests: Sequence[Request], edges: Sequence[int]) -> list[Request]:
    longest: dict[int, Request] = {}
    for request in sorted(requests, key=_num_tokens):
        longest[shape_bucket(_num_tokens(request), edges)] = request
    return list(longest.values())


def _num_tokens(request: Request) -> int:
    if request.num_prompt_tokens is not None:
        return request.num_prompt_tokens
    return max(1, len(request.prompt_text or "") // CHARACTERS_PER_TOKEN)


def _fresh_prompts(
    models: Sequence[Request],
    *,
    measured: Sequence[Request],
    seed: int,
    repeat: int,
    vocab_size: int | None,
) -> list[Request]:
    texts = {request.prompt_text for request in measured}
    ids = [request.prompt_token_ids for request in measured if request.prompt_token_ids is not None]
    if not ids:
        return [
            replace(model, prompt_text=_fresh_text(model.prompt_text or "", number=number, taken=texts))
            for number, model in enumerate(models)
        ]
    prompts = random_prompts(
        [_num_tokens(model) for model in models],
        stream=stream_of("warmup", seed=seed, repeat=repeat),
        vocab_size=vocab_size,
        avoid=ids,
    )
    return [
        replace(model, prompt_token_ids=prompt.token_ids)
        for model, prompt in zip(models, prompts, strict=True)
    ]


def _fresh_text(text: str, *, number: int, taken: set[str | None]) -> str:
    fresh = f"Warm-up {number}.\n{text}"
    while fresh in taken:
        fresh = f"Warm-up {fresh}"
    return fresh
