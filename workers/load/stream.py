"""From the raw bytes of one HTTP/1.1 response, each read time-stamped, to token events.

Pure functions, used after a run is over: ``reads`` is a list of ``(ns, bytes)`` exactly as the socket gave them.
How the network cut the bytes changes only the stamps, never the events.

A *token event* is an SSE event that carries at least one generated token of any channel. A role-only opening
chunk, a keep-alive comment and the closing usage chunk are none. A chunk with an empty text is decided by the
server's own count: see :func:`_resolve_blanks`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

Reads = Sequence[tuple[int, bytes]]

_BLANK_LINE = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))")
_TEXT_FIELD = re.compile(rb'"(?:text|content|reasoning|reasoning_content)"\s*:\s*"')
_ANSWER_KEYS = ("text", "content", "refusal")
_REASONING_KEYS = ("reasoning_content", "reasoning")
_TEXT_KEYS = (*_ANSWER_KEYS, *_REASONING_KEYS)
_MAX_MESSAGE_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedStream:
    """What one response said and when; stamps are on the clock of the reads (ns)."""

    http_status: int | None = None  # None: no complete response head came
    token_ns: tuple[int, ...] = ()  # one stamp for each token event
    first_answer_ns: int | None = None  # first token event that is not reasoning
    done_ns: int | None = None  # last read
    num_prompt_tokens: int | None = None  # server's usage
    num_output_tokens: int | None = None  # the server's count, else the client's; None: no token
    num_output_tokens_source: str | None = None  # "server" | "client"
    num_output_tokens_client: int | None = None
    finish_reason: str | None = None
    text: str = ""  # the answer, without reasoning
    error: str | None = None  # one sentence; None: a complete answer with at least one token


class ResponseScanner:
    """Finds the head, the body pieces and the end of one response, looking at every byte once.

    ``pieces`` are ``(start, end)`` offsets of body bytes in the response; ``complete`` is True when the
    response's own framing says so (never for a body that ends with the connection).
    """

    __slots__ = ("_base", "_buffer", "chunked", "complete", "headers", "length", "pieces", "status")

    def __init__(self) -> None:
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.chunked = False
        self.length: int | None = None  # content-length
        self.pieces: list[tuple[int, int]] = []
        self.complete = False
        self._base = 0  # offset of the buffer's first byte in the response
        self._buffer = b""

    @property
    def keep_alive(self) -> bool:
        """True if the connection can carry another request: complete, nothing left over, no ``close``."""
        return self.complete and not self._buffer and self.headers.get("connection", "").lower() != "close"

    def feed(self, data: bytes) -> bool:
        """Take more bytes; return ``complete``.

        Raises:
            ValueError: the bytes are not HTTP/1.1.
        """
        self._buffer += data
        while self.status is None:
            if not self._scan_head():
                return False
        if self.chunked:
            self._scan_chunks()
        elif self.length is not None and len(self._buffer) >= self.length:
            self._end_piece(self.length)
        return self.complete

    def body_pieces(self) -> list[tuple[int, int]]:
        """The pieces so far, with the bytes of an unfinished last one."""
        if self.complete or self.status is None:
            return self.pieces
        skip = self._buffer.find(b"\r\n") + 2 if self.chunked else 0
        if self.chunked and skip < 2:
            return self.pieces
        tail = (self._base + skip, self._base + len(self._buffer))
        return [*self.pieces, tail] if tail[1] > tail[0] else self.pieces

    def _scan_head(self) -> bool:
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if self._buffer and not self._buffer.startswith(b"HTTP/1."[: len(self._buffer)]):
                raise ValueError(f"the response starts with {self._buffer[:20]!r}, not with HTTP/1.1")
            return False
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        status = _status(first)
        self._advance(end + 4)
        if 100 <= status < 200:
            return True  # interim response: the real head follows
        self.status = status
        self.headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(":") for x in lines)
        }
        self.chunked = "chunked" in self.headers.get("transfer-encoding", "").lower()
        length = self.headers.get("content-length")
        self.length = int(length) if length is not None else None
        return True

    def _scan_chunks(self) -> None:
        buffer, position, base, size_of = self._buffer, 0, self._base, len(self._buffer)
        while (line_end := buffer.find(b"\r\n", position)) >= 0:
            size = int(buffer[position:line_end].partition(b";")[0], 16)
            if size == 0:
                end = buffer.find(b"\r\n\r\n", line_end)  # directly, or after trailer lines
                self.complete = end >= 0
                position = end + 4 if self.complete else position
                break
            start = line_end + 2
            if start + size + 2 > size_of:
                break
            self.pieces.append((base + start, base + start + size))
            position = start + size + 2
        self._advance(position)

    def _end_piece(self, length: int) -> None:
        self.pieces.append((self._base, self._base + length))
        self._advance(length)
        self.complete = True

    def _advance(self, count: int) -> None:
        self._base += count
        self._buffer = self._buffer[count:]


def parse_stream(
    reads: Reads,
    *,
    transport_error: str | None = None,
    count_tokens: Callable[[str], int] | None = None,
) -> ParsedStream:
    """Parse one response; never raises on what a server can send: the result carries the error.

    Args:
        reads: ``(ns, bytes)`` of each read of the socket, in order.
        transport_error: what the client knows about how the connection ended (timed out, reset); used when the
            response itself does not explain the failure.
        count_tokens: a tokenizer's length of a text, used for the client's count instead of the number of token
            events. It sees the whole answer once, less what it makes of the empty text, so that a start token
            is not counted.
    """
    raw = b"".join([data for _, data in reads])
    done_ns = reads[-1][0] if reads else None
    scanner = ResponseScanner()
    try:
        scanner.feed(raw)
    except ValueError as error:
        return ParsedStream(done_ns=done_ns, error=f"malformed response: {error}")
    if scanner.status is None:
        reason = transport_error or "the connection was closed before a response came"
        return ParsedStream(done_ns=done_ns, error=reason)
    pieces = scanner.body_pieces()
    body = b"".join([raw[start:end] for start, end in pieces])
    if (refusal := _refusal(scanner, body)) is not None:
        return ParsedStream(http_status=scanner.status, done_ns=done_ns, error=refusal)
    events, ends = _split_events(body, whole=scanner.complete)
    content = _Content()
    for event, ns in zip(events, _stamps(reads, pieces, ends), strict=True):
        content.add(event, ns)
    return _result(content, scanner=scanner, done_ns=done_ns, cut=transport_error, count_tokens=count_tokens)


def _refusal(scanner: ResponseScanner, body: bytes) -> str | None:
    """What the server said instead of a stream; None if it streams."""
    if scanner.status != 200:
        return f"the server answered HTTP {scanner.status}: {_message_of(body)}"
    if scanner.headers.get("content-type", "").startswith("application/json"):
        return f"the server answered without a stream: {_message_of(body)}"
    return None


def _status(line: str) -> int:
    version, _, rest = line.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"the status line is {line[:40]!r}")
    return int(rest[:3])


def _split_events(body: bytes, *, whole: bool) -> tuple[list[bytes], list[int]]:
    """SSE events and the offset just behind each; an unfinished last one counts only if the body is whole."""
    if b"\r" in body:
        matches = list(_BLANK_LINE.finditer(body))
        ends = [match.end() for match in matches]
        starts = [0, *ends[:-1]] if ends else []
        events = [body[start : match.start()] for start, match in zip(starts, matches, strict=True)]
        rest = body[ends[-1] :] if ends else body
    else:
        *events, rest = body.split(b"\n\n")
        ends = list(accumulate(len(event) + 2 for event in events))
    if whole and rest.strip():
        events.append(rest)
        ends.append(len(body))
    return events, ends


def _stamps(reads: Reads, pieces: list[tuple[int, int]], ends: list[int]) -> list[int]:
    """For each offset in the body, the stamp (ns) of the read that brought the byte before it."""
    if not ends:
        return []
    bounds = np.array(pieces, dtype=np.int64)
    piece_ends: npt.NDArray[np.int64] = np.cumsum(bounds[:, 1] - bounds[:, 0])
    offsets = np.array(ends, dtype=np.int64)
    piece = np.searchsorted(piece_ends, offsets)
    in_response = bounds[piece, 1] - (piece_ends[piece] - offsets)
    read_ends = np.cumsum([len(data) for _, data in reads])
    read_ns = np.array([ns for ns, _ in reads], dtype=np.int64)
    stamps: list[int] = read_ns[np.searchsorted(read_ends, in_response)].tolist()
    return stamps


def _data_of(event: bytes) -> bytes:
    """The event's data lines, joined; empty for comments and other fields."""
    if event.startswith(b"data: ") and b"\n" not in event and b"\r" not in event:
        return event[6:]
    values = [line[5:].removeprefix(b" ") for line in event.splitlines() if line.startswith(b"data:")]
    return b"\n".join(values)


class _Content:
    """Collects what the events of one response carry.

    Most events of a stream differ in nothing but their text. Once one of them was parsed, an event with the same
    bytes before and behind the text is read without JSON; exact, because a JSON string without quotes and
    backslashes is its own value.
    """

    __slots__ = ("_prefix", "_suffix", "_template_is_answer", "answers", "counts", "done", "error", "finish_reason",
                 "stamps", "texts", "usage")  # fmt: skip

    def __init__(self) -> None:
        self.stamps: list[int] = []  # token events, and chunks with an empty text
        self.counts: list[int] = []  # tokens of each; 0: an empty text, undecided
        self.answers: list[bool] = []  # False: reasoning
        self.texts: list[str] = []
        self.usage: dict[str, Any] = {}
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.done = False
        self._prefix: bytes | None = None
        self._suffix = b""
        self._template_is_answer = True

    def add(self, event: bytes, ns: int) -> None:
        prefix = self._prefix
        if prefix is not None and event.startswith(prefix) and event.endswith(self._suffix):
            text = event[len(prefix) : len(event) - len(self._suffix)]
            if text and b'"' not in text and b"\\" not in text:
                self._add_text(text.decode("utf-8", "replace"), ns, is_answer=self._template_is_answer)
                return
        data = _data_of(event)
        if data.strip() == b"[DONE]":
            self.done = True
        elif data.strip():
            self._add_json(event, data, ns)

    def _add_text(self, text: str, ns: int, *, is_answer: bool) -> None:
        self.stamps.append(ns)
        self.counts.append(1)
        self.answers.append(is_answer)
        if is_answer:
            self.texts.append(text)

    def _add_json(self, event: bytes, data: bytes, ns: int) -> None:
        try:
            chunk = json.loads(data)
        except ValueError:
            self.error = self.error or f"an event is not JSON: {data[:80].decode('utf-8', 'replace')!r}"
            return
        if not isinstance(chunk, dict):
            self.error = (
                self.error or f"an event is not a JSON object: {data[:80].decode('utf-8', 'replace')!r}"
            )
            return
        if chunk.get("error") or chunk.get("object") == "error":
            self.error = self.error or f"the server reported an error in the stream: {_message(chunk)}"
            return
        try:
            self._add_chunk(event, chunk, ns)
        except (AttributeError, TypeError):
            self.error = (
                self.error or f"an event has an unknown shape: {data[:80].decode('utf-8', 'replace')!r}"
            )

    def _add_chunk(self, event: bytes, chunk: dict[str, Any], ns: int) -> None:
        usage = chunk.get("usage")
        self.usage = usage if isinstance(usage, dict) and usage else self.usage
        choices = chunk.get("choices") or []
        for choice in choices:
            self._add_choice(choice, ns)
        if len(choices) == 1 and not usage:
            self._learn(event, choices[0])

    def _add_choice(self, choice: dict[str, Any], ns: int) -> None:
        delta = choice.get("delta") or choice
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        answer = "".join(delta.get(key) or "" for key in _ANSWER_KEYS)
        reasoning = next((delta[key] for key in _REASONING_KEYS if delta.get(key)), "")
        token_ids = choice.get("token_ids")
        carries = bool(answer or reasoning or token_ids or delta.get("tool_calls"))
        is_blank = "role" not in delta and token_ids is None and any(key in delta for key in _TEXT_KEYS)
        if not carries and not is_blank:
            return
        is_answer = bool(answer or delta.get("tool_calls") or not _names_reasoning(delta))
        self.stamps.append(ns)
        self.counts.append(len(token_ids) if token_ids else int(carries))
        self.answers.append(is_answer)
        self.texts.append(answer)

    def _learn(self, event: bytes, choice: dict[str, Any]) -> None:
        """Remember what surrounds the text of an ordinary event."""
        delta = choice.get("delta") or choice
        fields = [key for key in _TEXT_KEYS if delta.get(key)]
        matches = list(_TEXT_FIELD.finditer(event))
        ordinary = len(fields) == 1 and len(matches) == 1 and event.startswith(b"data: ")
        if not ordinary or choice.get("finish_reason") or choice.get("token_ids") or delta.get("tool_calls"):
            return
        start = matches[0].end()
        end = event.find(b'"', start)
        if event[start:end] != delta[fields[0]].encode() or b"\n" in event:
            return
        self._prefix, self._suffix = event[:start], event[end:]
        self._template_is_answer = fields[0] in _ANSWER_KEYS


def _names_reasoning(delta: dict[str, Any]) -> bool:
    return any(delta.get(key) is not None for key in _REASONING_KEYS)


def _resolve_blanks(content: _Content, num_server_tokens: int | None) -> list[int]:
    """Positions of the token events among the collected chunks.

    A chunk with an empty text may carry a token (half a character, an end token) or nothing. The server's count
    decides: they are token events if there are tokens for all of them, and none is if there are not, or if the
    server gave no count.
    """
    counts = content.counts
    num_blank = counts.count(0)
    if num_blank and num_server_tokens is not None and sum(counts) + num_blank <= num_server_tokens:
        content.counts = counts = [count or 1 for count in counts]
    return [position for position, count in enumerate(counts) if count]


def _result(
    content: _Content,
    *,
    scanner: ResponseScanner,
    done_ns: int | None,
    cut: str | None,
    count_tokens: Callable[[str], int] | None,
) -> ParsedStream:
    num_server = _count(content.usage, "completion_tokens")
    kept = _resolve_blanks(content, num_server)
    token_ns = tuple(content.stamps[position] for position in kept)
    text = "".join(content.texts)
    num_client = count_tokens(text) - count_tokens("") if count_tokens else sum(content.counts)
    counted = num_server if num_server is not None else num_client or None
    error = content.error or _end_error(content, complete=scanner.complete, cut=cut, num_events=len(kept))
    return ParsedStream(
        http_status=scanner.status,
        token_ns=token_ns,
        first_answer_ns=next(
            (content.stamps[position] for position in kept if content.answers[position]), None
        ),
        done_ns=done_ns,
        num_prompt_tokens=_count(content.usage, "prompt_tokens"),
        num_output_tokens=counted,
        num_output_tokens_source=None if counted is None else "client" if num_server is None else "server",
        num_output_tokens_client=num_client,
        finish_reason=content.finish_reason,
        text=text,
        error=error,
    )


def _count(usage: dict[str, Any], key: str) -> int | None:
    value = usage.get(key)
    return value if isinstance(value, int) else None


def _end_error(content: _Content, *, complete: bool, cut: str | None, num_events: int) -> str | None:
    finished = content.finish_reason is not None or bool(content.usage)
    if not content.done and not (complete and finished):
        end = "was cut" if not complete else "ended without [DONE] and without a finish reason"
        return cut or f"the stream {end} after {num_events} token events"
    return None if num_events else "no token in the reply"


def _message_of(body: bytes) -> str:
    try:
        return _message(json.loads(body))
    except ValueError:
        return body[:_MAX_MESSAGE_CHARS].decode("utf-8", "replace").strip() or "no explanation"


def _message(answer: Any) -> str:
    """The sentence inside the error shapes of OpenAI-compatible servers."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return " ".join(str(error).split())[:_MAX_MESSAGE_CHARS]
