"""One HTTP GET over asyncio streams: all that evidence and scraping need, at a few hundred microseconds each."""

import asyncio
from urllib.parse import urlsplit


class HttpGetError(Exception):
    """A GET did not give a complete answer with status 200; ``status`` is None if there was none at all."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def http_get(url: str, *, timeout_s: float = 5.0) -> bytes:
    """The body of a 200 answer.

    Raises:
        HttpGetError: for any other status, a broken or cut answer, no connection, or no answer in time.
    """
    try:
        async with asyncio.timeout(timeout_s):
            head, body = await _exchange(url)
    except TimeoutError:
        raise HttpGetError(f"GET {url}: no complete answer within {timeout_s} s") from None
    except OSError as error:
        raise HttpGetError(f"GET {url}: {error}") from error
    return _body(url, head=head, body=body)


async def _exchange(url: str) -> tuple[bytes, bytes]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        target = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        request = f"GET {target} HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n\r\n"
        writer.write(request.encode())
        await writer.drain()
        head, _, body = (await reader.read(-1)).partition(b"\r\n\r\n")
    finally:
        writer.close()
    return head, body


def _body(url: str, *, head: bytes, body: bytes) -> bytes:
    first, *lines = head.decode("latin-1").split("\r\n")
    fields = {
        name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    words = first.split()
    if len(words) < 2 or not words[1].isdigit():
        raise HttpGetError(f"GET {url}: not an HTTP answer: {first[:80]!r}")
    if words[1] != "200":
        raise HttpGetError(f"GET {url}: status {words[1]}", status=int(words[1]))
    if fields.get("transfer-encoding", "").lower() == "chunked":
        return _unchunked(url, body)
    expected = fields.get("content-length")
    if expected is not None and len(body) != int(expected):
        raise HttpGetError(f"GET {url}: {len(body)} of {expected} bytes came", status=200)
    return body


def _unchunked(url: str, body: bytes) -> bytes:
    pieces: list[bytes] = []
    rest = body
    while True:
        size_line, found, rest = rest.partition(b"\r\n")
        size = _chunk_size(size_line)
        if not found or size is None or len(rest) < size + 2:
            raise HttpGetError(f"GET {url}: the chunked answer was cut", status=200)
        if size == 0:
            return b"".join(pieces)
        pieces.append(rest[:size])
        rest = rest[size + 2 :]


def _chunk_size(line: bytes) -> int | None:
    try:
        return int(line.split(b";", 1)[0], 16)
    except ValueError:
        return None
