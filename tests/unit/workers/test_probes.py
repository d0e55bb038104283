"""Output sanity by hand-worked numbers: agreement, teacher-forced loss, and the judgement with and without a reference."""

import asyncio
import json
import math

import pytest

from conf.schema import Config, Engine, Kv, Model, Sparsity
from workers import probes
from workers.http_call import Answer
from workers.model import PreparedModel
from workers.probes import (
    PROBES,
    Judgement,
    Probed,
    Reference,
    Reply,
    compare,
    continues,
    decoded_mean,
    degeneration,
    find_reference,
    is_unquantised,
    judge_answers,
    parse,
    probe_launch,
    reference_key,
    write_reference,
)


def reply(text, logprobs=-0.1, *, top=None):
    """One token per word; ``logprobs``: one for all, or each; ``top``: the other tokens at each place."""
    tokens = tuple(f" {word}" for word in text.split())
    each = tuple(logprobs) if isinstance(logprobs, list) else (logprobs,) * len(tokens)
    others = top or [{}] * len(tokens)
    pairs = zip(tokens, each, others, strict=True)
    tops = tuple({token: value} | more for token, value, more in pairs)
    return Reply(text=f" {text}", tokens=tokens, logprobs=each, top=tops)


GOOD = tuple(reply(text) for text in ("five six seven", "the quiet lake", "river stone ."))
BAD = tuple(reply(text) for text in ("- - _", "she _ her", "- a -"))


def probed(replies, *, reference=None, unquantised=False):
    known = None if reference is None else Reference(replies=reference, source="r")
    return Probed(replies=replies, reference=known, unquantised=unquantised)


def judged(replies, *, limit_nats=1.0, **values):
    return judge_answers(probed(replies, **values), limit_nats=limit_nats)


# --- the loss ---


def test_the_same_tokens_lose_the_difference_of_their_logprobs():
    """(0.3 - 0.2) and (0.5 - 0.1) over the two decoded tokens: 0.25; the first token is prefill's and not scored."""
    known, here = reply("a b c", [-0.1, -0.2, -0.1]), reply("a b c", [-2.0, -0.3, -0.5])
    found = compare([here], [known])
    assert found.lost_nats == pytest.approx(0.25)
    assert (found.scored_tokens, found.agreement) == (2, (3,))


def test_the_first_token_that_differs_is_scored_and_nothing_after_it():
    """b: 0; x instead of c: the reference's c at -0.1 has -0.7 here: 0.6. Mean of two: 0.3."""
    known = reply("a b c d", [-0.1, -0.2, -0.1, -0.1])
    here = reply("a b x d", [-0.1, -0.2, -0.6, -9.0], top=[{}, {}, {" c": -0.7}, {}])
    found = compare([here], [known])
    assert found.lost_nats == pytest.approx(0.3)
    assert (found.scored_tokens, found.agreement) == (2, (2,))


def test_a_token_outside_of_the_top_counts_as_the_last_of_it():
    """At least 4.0 - 0.1 lost; never more is claimed than is known."""
    known = reply("a b", [-0.1, -0.1])
    here = reply("a x", [-0.1, -1.0], top=[{}, {" y": -2.0, " z": -4.0}])
    assert compare([here], [known]).lost_nats == pytest.approx(3.9)


def test_a_different_first_token_is_all_that_can_be_scored():
    known, here = reply("a b", [-0.5, -0.1]), reply("x b", [-0.4, -0.1], top=[{" a": -0.6}, {}])
    found = compare([here], [known])
    assert found.lost_nats == pytest.approx(0.1)
    assert (found.scored_tokens, found.agreement) == (1, (0,))


def test_tokens_of_all_probes_are_pooled():
    """Losses 0.1 and 0.1 of one probe, 0.7 of the other: 0.9 / 3, not the mean of two means."""
    known = [reply("a b c", -0.1), reply("a b", -0.1)]
    here = [reply("a b c", -0.2), reply("a x", [-0.1, -0.5], top=[{}, {" b": -0.8}])]
    assert compare(here, known).lost_nats == pytest.approx(0.3)


def test_a_short_answer_is_scored_as_far_as_it_goes():
    """An engine that stops early has nothing to score after that; an answer of one token nothing at all."""
    known = reply("a b c", -0.1)
    assert compare([reply("a b", -0.2)], [known]).scored_tokens == 1
    alone = compare([reply("a", -0.2)], [known])
    assert (alone.scored_tokens, alone.lost_nats) == (0, 0.0)


def test_the_mean_leaves_out_what_prefill_gave():
    assert decoded_mean([reply("a b c", [-9.0, -0.2, -0.4]), reply("a b", [-9.0, -0.6])]) == pytest.approx(
        -0.4
    )
    assert decoded_mean([]) is None


# --- judged by the reference ---


def test_small_losses_pass_and_garbage_is_named():
    """An honest quantisation loses some tenths; garbage several nats; the numbers are in the detail."""
    slightly = tuple(reply(text, -0.25) for text in ("five six seven", "the quiet lake", "river stone ."))
    assert judged(slightly, reference=GOOD) == Judgement()
    garbage = tuple(reply(text, top=[{" z": -4.1}] * 3) for text in ("five - -", "the her _", "river - a"))
    problem = judged(garbage, reference=GOOD).problem
    assert problem is not None
    assert "lose 4.00 nats per token" in problem
    assert "limit 1, 3 tokens scored, agreement 1/1/1 of 16" in problem
    assert "' five - -'" in problem


def test_the_limit_is_the_cells():
    slightly = tuple(reply(text, -0.25) for text in ("five six seven", "the quiet lake", "river stone ."))
    assert judged(slightly, reference=GOOD, limit_nats=0.1).problem is not None
    assert judged(BAD, limit_nats=math.inf) == Judgement()


def test_a_strange_model_is_measured_by_its_own_reference():
    """Random weights babble; with their own answers as the reference that is what they should do."""
    assert judged(BAD, reference=BAD) == Judgement()


# --- judged without one ---


@pytest.mark.parametrize("unquantised", [True, False])
def test_known_continuations_stand_in_for_a_reference(unquantised):
    assert judged(GOOD, unquantised=unquantised) == Judgement()
    assert judged((*GOOD[:2], BAD[2]), unquantised=unquantised) == Judgement()
    problem = judged(BAD, unquantised=unquantised).problem
    assert problem is not None
    assert "none of 3 probes" in problem


def test_one_known_continuation_is_too_little_for_a_quantised_cache():
    replies = (GOOD[0], *BAD[1:])
    assert judged(replies, unquantised=True) == Judgement()
    found = judged(replies)
    assert found.problem is None
    assert found.unknown is not None
    assert "no reference of this model" in found.unknown


def test_degenerate_output_is_named():
    """Unlikely even to the engine itself; one token for ever; bytes that are no text."""
    unlikely = tuple(reply("five six seven", -3.5) for _ in range(3))
    assert "mean logprob of -3.50 nats" in (degeneration(unlikely) or "")
    assert degeneration([reply("no no no")] * 3) == "every answer repeats a single token"
    assert degeneration([reply("no no no"), *GOOD[:2]]) is None
    broken = Reply(text="\ufffd\x00ab\ufffd", tokens=("a", "b"), logprobs=(-1.0, -1.0), top=({}, {}))
    assert degeneration([broken]) == "60% of the characters cannot be printed"
    assert degeneration(GOOD) is None


@pytest.mark.parametrize(
    ("text", "known"),
    [
        (" five six\n", True),
        (" five, Six seven", True),
        ("five-six", True),
        (" five seven", False),
        ("", False),
    ],
)
def test_words_are_compared_and_not_marks(text, known):
    assert continues(Reply(text=text, tokens=(), logprobs=(), top=()), PROBES[0]) is known


def test_an_unanswered_probe_is_an_unknown():
    found = judge_answers(Probed(unknown="HTTP 400: no logprobs"), limit_nats=1.0)
    assert found == Judgement(unknown="output: HTTP 400: no logprobs")
    assert set(Probed(unknown="x").metrics().values()) == {None}


def test_metrics_and_file_carry_the_numbers():
    found = probed(GOOD, reference=GOOD)
    assert found.metrics() == {
        "probe/mean_logprob": pytest.approx(-0.1),
        "probe/reference_logprob": pytest.approx(-0.1),
        "probe/lost_nats": pytest.approx(0.0),
        "probe/agreement_tokens": 3.0,
    }
    stored = json.loads(found.to_json())
    assert stored["replies"][0]["text"] == " five six seven"
    assert stored["comparison"]["agreement"] == [3, 3, 3]


# --- references ---


def cell(**values) -> Config:
    return Config(**({"engine": Engine(name="e", version="0.32.0"), "model": Model(name="m")} | values))


WEIGHTS = PreparedModel(path="/m", sha256="ab" * 32, vocab_size=None, config={})


def test_a_reference_belongs_to_weights_and_probes(tmp_path, monkeypatch):
    write_reference(tmp_path / "references" / "k.json", key="k", replies=GOOD, recorded_from="bf16")
    found = find_reference("k", cache=tmp_path)
    assert found is not None
    assert found.replies == GOOD
    assert find_reference("other", cache=tmp_path) is None
    monkeypatch.setattr(probes, "VERSION", probes.VERSION + 1)
    assert find_reference("k", cache=tmp_path) is None


def test_hub_models_are_known_by_name_and_revision():
    hub = PreparedModel(path="o/n", sha256=None, vocab_size=None, config={})
    assert reference_key(cell(), WEIGHTS) == WEIGHTS.sha256
    assert reference_key(cell(), hub) != reference_key(cell(model=Model(name="m", revision="v2")), hub)


def test_only_full_caches_and_full_attention_make_references():
    assert is_unquantised(cell())
    assert is_unquantised(cell(kv=Kv(dtype="auto")))
    assert not is_unquantised(cell(kv=Kv(dtype="fp8")))
    assert not is_unquantised(cell(sparsity=Sparsity(method="blasst")))


def test_the_default_model_ships_with_its_reference():
    """Recorded from a real engine; the answers pass without any reference too."""
    shipped = [json.loads(path.read_text()) for path in sorted(probes.SHIPPED.glob("*.json"))]
    assert [stored["version"] for stored in shipped] == [probes.VERSION]
    found = find_reference(shipped[0]["model"], cache=probes.SHIPPED / "nowhere")
    assert found is not None
    assert judged(found.replies) == Judgement()
    assert [len(reply.tokens) for reply in found.replies] == [probes.NUM_TOKENS] * len(PROBES)


def launched(monkeypatch, replies, *, cache, config=None):
    async def ask(*_args, **_values):
        if isinstance(replies, Exception):
            raise replies
        return replies

    monkeypatch.setattr(probes, "ask", ask)
    return asyncio.run(probe_launch(config or cell(), base_url="http://h:1", model=WEIGHTS, cache=cache))


def test_the_first_sane_unquantised_launch_records(monkeypatch, tmp_path):
    assert launched(monkeypatch, BAD, cache=tmp_path).reference is None
    assert launched(monkeypatch, GOOD, cache=tmp_path, config=cell(kv=Kv(dtype="fp8"))).reference is None
    assert launched(monkeypatch, GOOD, cache=tmp_path).reference is None
    found = launched(monkeypatch, BAD, cache=tmp_path, config=cell(kv=Kv(dtype="fp8")))
    assert found.reference is not None
    assert found.reference.replies == GOOD


def test_later_launches_leave_the_reference_alone(monkeypatch, tmp_path):
    launched(monkeypatch, GOOD, cache=tmp_path)
    again = tuple(reply(text, -0.2) for text in ("five six seven", "the quiet lake", "river stone ."))
    launched(monkeypatch, again, cache=tmp_path)
    assert launched(monkeypatch, again, cache=tmp_path).metrics()["probe/lost_nats"] == pytest.approx(0.1)


def test_an_engine_that_does_not_answer_raises_nothing(monkeypatch, tmp_path):
    found = launched(monkeypatch, ConnectionResetError("reset"), cache=tmp_path)
    assert found.unknown == "the probes were not answered: reset"
    found = launched(monkeypatch, TimeoutError(), cache=tmp_path)
    assert found.unknown == "the probes were not answered: no answer within 120 s"


# --- what the server says ---


def body(**changes):
    logprobs = {"tokens": [" a", " b"], "token_logprobs": [-0.5, -1], "top_logprobs": [{" a": -0.5}, None]}
    return {"choices": [{"text": " a b", "logprobs": logprobs | changes}]}


def test_a_completion_with_logprobs_is_read():
    found = parse(Answer(status=200, body=json.dumps(body()).encode()))
    assert found == Reply(text=" a b", tokens=(" a", " b"), logprobs=(-0.5, -1.0), top=({" a": -0.5}, {}))


@pytest.mark.parametrize(
    ("status", "content", "says"),
    [
        (400, {"error": "max_logprobs"}, "HTTP 400"),
        (200, {"choices": []}, "not a completion with logprobs"),
        (200, {"choices": [{"text": "a", "logprobs": None}]}, "not a completion with logprobs"),
        (200, body(token_logprobs=[None, -1.0]), "not a completion with logprobs"),
        (200, body(token_logprobs=[math.nan, -1.0]), "not numbers"),
        (200, body(tokens=[" a"]), "do not fit"),
        (200, body(tokens=[], token_logprobs=[], top_logprobs=[]), "do not fit"),
    ],
)
def test_another_answer_says_what_it_was(status, content, says):
    with pytest.raises(ValueError, match=says):
        parse(Answer(status=status, body=json.dumps(content).encode()))
