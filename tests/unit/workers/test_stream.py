"""Framing, token events and counts of one streamed response; all times worked by hand, in ms after ``due`` = 0."""

import itertools
import json
import time

import pytest

from workers.load.stream import ParsedStream, ResponseScanner, parse_stream

MS = 1_000_000
HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(value) -> bytes:
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def delta(*, finish=None, usage=None, **fields) -> bytes:
    choice = {"index": 0, "delta": fields, "finish_reason": finish}
    return event({"id": "x", "choices": [choice]} | ({"usage": usage} if usage else {}))


ROLE = delta(role="assistant", content="")


def content(text, **kw) -> bytes:
    return delta(content=text, **kw)


def reasoning(text) -> bytes:
    return delta(reasoning_content=text)


def usage_of(prompt: int, completion: int) -> dict:
    return {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}


def usage(prompt: int, completion: int) -> bytes:
    return event({"id": "x", "choices": [], "usage": usage_of(prompt, completion)})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(*timed, end: bytes = END, **options) -> ParsedStream:
    """Parse a chunked response whose events arrive at the given ms, one read each."""
    reads = [(0, HEAD), *((int(ms * MS), chunk(data)) for ms, data in timed)]
    last = reads[-1][0]
    return parse_stream([*reads, (last, end)] if end else reads, **options)


def ttft(parsed) -> float:
    return parsed.token_ns[0] / MS


def itl(parsed) -> list[float]:
    return [(b - a) / MS for a, b in itertools.pairwise(parsed.token_ns)]


def tpot(parsed) -> float | None:
    n = parsed.num_output_tokens
    return None if n is None or n <= 1 else (parsed.token_ns[-1] - parsed.token_ns[0]) / MS / (n - 1)


def test_role_only_opening_chunk_is_not_the_first_token():
    """A1: the clock stops at the first generated token."""
    got = stream((5, ROLE), (200, content("A")), (220, content("B")), (240, content("C")), (240, DONE))
    assert (ttft(got), itl(got), tpot(got), got.num_output_tokens) == (200, [20, 20], 20, 3)
    assert (got.error, got.text) == (None, "ABC")


def test_role_chunk_before_the_end_of_prefill_makes_no_gap():
    """A1: prefill that follows the role chunk is in no ITL."""
    got = stream((900, ROLE), (2200, content("A")), (2220, content("B")), (2240, content("C")), (2240, DONE))
    assert (ttft(got), max(itl(got))) == (2200, 20)


THREE = ((100, content("x")), (150, content("y")), (200, content("z")))


def test_closing_usage_event_counts_and_is_no_token():
    """A3a: n comes from the server; the tail before the usage event is in no ITL."""
    got = stream(*THREE, (260, usage(9, 3)), (270, DONE))
    assert (got.error, got.num_output_tokens, got.num_output_tokens_source, got.num_prompt_tokens) == (
        None,
        3,
        "server",
        9,
    )
    assert (ttft(got), itl(got), tpot(got), got.done_ns) == (100, [50, 50], 50, 270 * MS)


def test_usage_may_hang_on_the_last_content_chunk():
    """A3b: same numbers as with a closing usage event."""
    got = stream(*THREE[:2], (200, content("z", usage=usage_of(9, 3))), (270, DONE))
    assert (got.error, got.num_output_tokens, got.num_prompt_tokens) == (None, 3, 9)
    assert (ttft(got), itl(got), tpot(got)) == (100, [50, 50], 50)


@pytest.mark.parametrize(
    "count", [None, lambda text: 1 + len(text)], ids=["events", "tokenizer with a start token"]
)
def test_without_usage_the_client_counts_and_says_so(count):
    """A3c: 3, not 4 (start token of the text) and not 6 (start token of every chunk)."""
    got = stream(*THREE, (270, DONE), count_tokens=count)
    assert (got.num_output_tokens, got.num_output_tokens_source, got.num_output_tokens_client) == (
        3,
        "client",
        3,
    )


def test_a_count_that_differs_from_the_servers_keeps_both():
    """A3d: the server's n enters TPOT, the client's stays visible."""
    got = stream(*THREE, (260, usage(9, 4)), (270, DONE))
    assert (got.num_output_tokens, got.num_output_tokens_client) == (4, 3)
    assert tpot(got) == pytest.approx(33.333, abs=0.001)


def a4_bytes() -> bytes:
    parts = (ROLE, content("é "), content("漢字"), usage(9, 2), DONE)
    return HEAD + b"".join(map(chunk, parts)) + END


def a4_cuts():
    raw = a4_bytes()
    yield "one read", [raw]
    yield "one byte at a time", [raw[i : i + 1] for i in range(len(raw))]
    for i in range(1, len(raw)):
        yield f"cut at {i}", [raw[:i], raw[i:]]


def test_result_does_not_depend_on_how_the_bytes_were_cut():
    """A4: one read, one byte at a time, and cut in two at every offset of head, framing and characters."""
    for name, parts in a4_cuts():
        got = parse_stream([(i, part) for i, part in enumerate(parts)])
        assert (got.error, got.text, got.num_output_tokens, len(got.token_ns)) == (None, "é 漢字", 2, 2), name


def test_the_end_of_a_response_is_found_for_every_cut():
    """A4: the scanner sees the end exactly with the last byte."""
    for name, parts in a4_cuts():
        scanner = ResponseScanner()
        ends = [scanner.feed(part) for part in parts]
        assert (ends[-1], any(ends[:-1]), scanner.keep_alive) == (True, False, True), name


def test_an_event_bears_the_stamp_of_the_read_that_completed_it():
    """A cut inside an event delays it to the second read; two events in one read share its stamp."""
    first, second = chunk(content("a")), chunk(content("b") + content("c"))
    got = parse_stream([(10, HEAD + first[:20]), (20, first[20:] + second), (30, chunk(DONE) + END)])
    assert got.token_ns == (20, 20, 20)
    assert got.done_ns == 30


@pytest.mark.parametrize("line", [b"\r\n", b"\r", b"\n"])
def test_line_ends_comments_and_other_fields(line):
    """SSE allows three line ends, comments, other fields and data over several lines."""
    body = (
        b": ping\n\n"
        b"event: x\nid: 4\n" + content("a") + b'data: {"choices":\ndata: []}\n\n' + content("b") + DONE
    )
    got = stream((1, body.replace(b"\n", line)))
    assert (got.error, got.text, got.num_output_tokens) == (None, "ab", 2)


def test_reasoning_tokens_are_tokens():
    """A6: TTFT at the first token of any channel, first answer apart; both names of the field."""
    other = delta(reasoning="t2")
    events = ((100, ROLE), (300, reasoning("t1")), (350, other), (400, content("a")), (450, content("b")))
    got = stream(*events, (450, usage(9, 4)), (450, DONE))
    assert (ttft(got), got.first_answer_ns, got.num_output_tokens) == (300, 400 * MS, 4)
    assert (itl(got), tpot(got), got.text) == ([50, 50, 50], 50, "ab")


def test_a_reply_that_ends_while_reasoning_has_a_first_token_and_no_answer():
    """A6: TTFT is not null when the limit ends the reply during thinking."""
    got = stream((100, ROLE), (300, reasoning("t1")), (350, reasoning("t2")), (350, usage(9, 2)), (350, DONE))
    assert (ttft(got), got.first_answer_ns, got.error) == (300, None, None)


def test_replies_with_no_token_or_one_token():
    """A8: no placeholder values; a reply without a token is a failure, one token has no TPOT."""
    r1 = stream(*((ms, content("t")) for ms in (200, 300, 400, 500, 600)), (600, DONE))
    r2 = stream((100, ROLE), (110, DONE))
    r3 = stream((300, content("t")), (300, DONE))
    r4 = stream(*((ms, content("t")) for ms in (400, 500, 600, 700, 800)), (800, DONE))
    assert (r2.error, r2.token_ns, r2.num_output_tokens) == ("no token in the reply", (), None)
    assert [ttft(r) for r in (r1, r3, r4)] == [200, 300, 400]
    assert [tpot(r) for r in (r1, r2, r3, r4)] == [100, None, None, 100]


def test_a_blank_chunk_is_a_token_event_if_the_server_counted_it():
    """Half a character decodes to an empty text: 3 chunks and 3 tokens."""
    got = stream((10, content("")), (20, content("é")), (30, content("b")), (30, usage(9, 3)), (40, DONE))
    assert got.token_ns == (10 * MS, 20 * MS, 30 * MS)


def test_a_blank_chunk_is_no_token_event_if_the_server_did_not_count_it():
    """An empty chunk before the end of prefill and an empty closing chunk: 4 chunks, 2 tokens."""
    blank, end = content(""), delta(content="", finish="stop")
    got = stream(
        (10, blank), (20, content("a")), (30, content("b")), (40, end), (40, usage(9, 2)), (40, DONE)
    )
    assert (got.token_ns, got.num_output_tokens_client) == ((20 * MS, 30 * MS), 2)
    assert got.finish_reason == "stop"


def test_token_ids_in_a_chunk_are_counted():
    """A chunk that lists its token ids carries that many tokens."""
    choice = {"index": 0, "text": "", "token_ids": [4, 5], "finish_reason": None}
    last = {"index": 0, "text": "ab", "token_ids": [6], "finish_reason": "length"}
    got = stream((10, event({"choices": [choice]})), (20, event({"choices": [last]})), (20, DONE))
    assert (got.token_ns, got.num_output_tokens_client) == ((10 * MS, 20 * MS), 3)


def test_completions_chunks():
    """The text route has ``text`` beside the choice's other fields."""
    choices = [
        {"index": 0, "text": t, "finish_reason": f} for t, f in (('"', None), (" \\", None), ("b", "length"))
    ]
    got = stream(
        *((10 * i, event({"choices": [c], "usage": None})) for i, c in enumerate(choices, 1)), (30, DONE)
    )
    assert (got.error, got.text, got.finish_reason, got.token_ns) == (
        None,
        '" \\b',
        "length",
        (10 * MS, 20 * MS, 30 * MS),
    )


def test_quotes_and_backslashes_after_plain_texts():
    """Texts that need JSON are read as JSON also behind events that did not."""
    texts = ["a", "b", 'say "text":"x"', "\\", "\n", "é", '"', "z"]
    got = stream(*((i, content(t)) for i, t in enumerate(texts)), (9, DONE))
    assert (got.text, len(got.token_ns)) == ("".join(texts), 8)


def test_error_object_after_status_200():
    """The stamps stay, the server's sentence is the error, also when [DONE] follows."""
    broken = event({"error": {"message": "engine is\n dead", "type": "InternalServerError", "code": 500}})
    got = stream((10, content("a")), (20, broken), (20, DONE))
    assert got.error == "the server reported an error in the stream: engine is dead"
    assert (got.token_ns, got.http_status) == ((10 * MS,), 200)


def test_refused_request():
    """Another status than 200 is a failure with the server's sentence."""
    body = json.dumps({"error": {"message": "max_tokens is too large", "code": 400}}).encode()
    got = parse_stream(
        [(5, b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(body)), (6, body)]
    )
    assert (got.error, got.http_status) == ("the server answered HTTP 400: max_tokens is too large", 400)


def test_a_cut_stream_is_a_failure_that_keeps_its_stamps():
    """The connection ends inside a chunk: whole events count, the reply does not."""
    part = chunk(content("c"))[:-10]
    got = parse_stream([(1, HEAD + chunk(content("a"))), (2, chunk(content("b")) + part)])
    assert (got.error, got.token_ns, got.text) == ("the stream was cut after 2 token events", (1, 2), "ab")


def test_the_clients_reason_explains_a_cut():
    """Timed out, reset: what the client knows is the sentence."""
    got = stream((1, content("a")), end=b"", transport_error="timed out after 5 s")
    assert (got.error, len(got.token_ns)) == ("timed out after 5 s", 1)
    assert parse_stream([], transport_error="timed out after 5 s").error == "timed out after 5 s"
    assert parse_stream([]).error == "the connection was closed before a response came"


def test_a_stream_without_an_end_is_not_a_success():
    """A proxy can end a body properly although the engine died."""
    got = stream((1, content("a")))
    assert got.error == "the stream ended without [DONE] and without a finish reason after 1 token events"


def test_a_finished_stream_survives_a_reset_behind_it():
    """[DONE] came: a missing last chunk changes nothing."""
    assert stream((1, content("a")), (2, DONE), end=b"", transport_error="reset").error is None


@pytest.mark.parametrize("data", [b"data: {oops\n\n", b"data: [1]\n\n", b'data: {"choices":[7]}\n\n'])
def test_nonsense_is_an_error_and_no_exception(data):
    """One sentence, stamps kept."""
    got = stream((1, content("a")), (2, data), (3, DONE))
    assert "an event" in got.error
    assert got.token_ns == (MS,)


def test_not_http():
    """Another protocol on the port."""
    assert parse_stream([(1, b"SSH-2.0-OpenSSH_9\r\n")]).error.startswith("malformed response: ")


def test_body_that_ends_with_the_connection_and_interim_responses():
    """No framing header: the body goes on to the end; 100 Continue is skipped."""
    raw = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n\r\n" + content("a") + usage(9, 1) + DONE
    got = parse_stream([(1, raw)])
    assert (got.error, got.text) == (None, "a")


def test_a_hundred_thousand_events_parse_quickly():
    """1,000 streams of 100 events; the limit leaves room for a busy machine."""
    events = [event({"id": "cmpl-1", "object": "text_completion", "model": "m", "usage": None,
                     "choices": [{"index": 0, "text": f" word{i}", "logprobs": None, "finish_reason": None}]})
              for i in range(100)]  # fmt: skip
    reads = [
        (0, HEAD),
        *((i, chunk(data)) for i, data in enumerate(events)),
        (101, chunk(usage(9, 100) + DONE) + END),
    ]
    started = time.process_time()
    parsed = [parse_stream(reads) for _ in range(1000)]
    cpu_s = time.process_time() - started
    assert all(got.error is None and got.num_output_tokens == 100 for got in parsed)
    assert cpu_s < 1.5
    print(f"{cpu_s:.2f} s CPU per 100k events")
