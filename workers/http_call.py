"""One HTTP exchange with a server on this host: for readiness and evidence, never for measured requests."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where a request goes."""

    host: str
    port: int
    method: str
    path: str

    def __str__(self) -> str:
        return f"{self.method} http://{self.host}:{self.port}{self.path}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status and decoded body."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        """The body as text; bytes that are no UTF-8 are shown as replacement characters."""
        return self.body.decode(errors="replace")


async def call(target: Target, *, json_body: Mapping[str, Any] | None = None, timeout_s: float) -> Answer:
    """Send one request on a connection of its own and read the whole answer.

    Raises:
        OSError: refused, reset, too late (``TimeoutError``), or an answer that is not HTTP.
    """
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(target.host, target.port)
        try:
            writer.write(_request(target, json_body))
            return await _read_answer(reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
            raise ConnectionError(f"{target}: the answer is not HTTP: {error}") from error
        finally:
            writer.close()


def _request(target: Target, json_body: Mapping[str, Any] | None) -> bytes:
    body = b"" if json_body is None else json.dumps(json_body).encode()
    lines = [
        f"{target.method} {target.path} HTTP/1.1",
        f"Host: {target.host}:{target.port}",
        "Connection: close",
        "Accept: */*",
    ]
    if json_body is not None:
        lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _read_answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    version, status, *_ = head[0].split(" ", 2)
    if not version.startswith("HTTP/1."):
        raise ValueError(head[0][:80])
    headers = {
        key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in head[1:])
    }
    if headers.get("transfer-encoding", "").lower() == "chunked":
        return Answer(status=int(status), body=await _read_chunks(reader))
    if "content-length" in headers:
        return Answer(status=int(status), body=await reader.readexactly(int(headers["content-length"])))
    return Answer(status=int(status), body=await reader.read())


async def _read_chunks(reader: asyncio.StreamReader) -> bytes:
    body = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        body += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(body)
