"""The answers of an HTTP server, whole and cut."""

import pytest

from workers.http_get import HttpGetError, _body


def body(head: str, data: bytes) -> bytes:
    return _body("http://h/x", head=head.encode(), body=data)


def test_plain_and_chunked_answers():
    assert body("HTTP/1.1 200 OK\r\nContent-Length: 3", b"abc") == b"abc"
    assert body("HTTP/1.0 200 OK", b"abc") == b"abc"
    assert (
        body("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"2\r\nab\r\n1;x=y\r\nc\r\n0\r\n\r\n") == b"abc"
    )


@pytest.mark.parametrize(
    ("head", "data", "status"),
    [
        ("HTTP/1.1 404 Not Found", b"", 404),
        ("HTTP/1.1 200 OK\r\nContent-Length: 4", b"abc", 200),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"5\r\nab", 200),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked", b"zz\r\n", 200),
        ("", b"", None),
        ("SSH-2.0", b"", None),
    ],
)
def test_anything_else_is_an_error(head, data, status):
    """A cut answer is not a short one."""
    with pytest.raises(HttpGetError) as raised:
        body(head, data)
    assert raised.value.status == status
