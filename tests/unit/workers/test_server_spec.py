"""What a server is started with, and what counts as its first generation."""

import json
from pathlib import Path

import pytest

from workers.http_call import Answer
from workers.server import Server, ServerSpec, _generation_problem, log_tail, read_log


def spec(folder: Path, **changes) -> ServerSpec:
    values = {
        "argv_for_port": lambda port: ["engine", "--port", str(port)],
        "env": {"A": "1"},
        "log_path": folder / "server.log",
        "cwd": folder,
        "model": "m",
        "start_timeout_s": 1.0,
        "stop_grace_s": 1.0,
        "ports_folder": folder,
    }
    return ServerSpec(**(values | changes))


def test_the_environment_is_the_given_one_and_a_port_base(tmp_path, monkeypatch):
    """Nothing is inherited; each launch scans for internal ports from a number of its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    first, second = Server.reserve(spec(tmp_path)), Server.reserve(spec(tmp_path))
    assert set(first.env) == {"A", "VLLM_PORT"}
    assert first.argv == ["engine", "--port", str(first.port)]
    assert len({first.port, second.port, int(first.env["VLLM_PORT"]), int(second.env["VLLM_PORT"])}) == 4
    first._hold.close()
    second._hold.close()


def answer(body, status=200):
    return Answer(status=status, body=json.dumps(body).encode())


def test_a_completion_with_a_token_is_ready():
    """Text and at least one counted token."""
    assert (
        _generation_problem(answer({"choices": [{"text": " a"}], "usage": {"completion_tokens": 1}})) is None
    )


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (answer({"error": "x"}, status=500), "HTTP 500"),
        (answer({"choices": [{"text": ""}], "usage": {"completion_tokens": 0}}), "without a token"),
        (answer({"detail": "hello"}), "something else than a completion"),
        (answer([]), "something else than a completion"),
        (Answer(status=200, body=b"<html>"), "something else than a completion"),
    ],
)
def test_anything_else_is_a_problem_with_a_sentence(reply, text):
    """A 200 of /health proves nothing; only a generated token does."""
    assert text in _generation_problem(reply)


def test_the_tail_is_that_of_this_launch(tmp_path):
    """Lines of an earlier try in the same file are not shown again."""
    log = tmp_path / "server.log"
    log.write_text("old\n")
    offset = log.stat().st_size
    log.write_text("old\n" + "".join(f"line {i}\n" for i in range(30)))
    tail = log_tail(log, 20, offset=offset).splitlines()
    assert tail == [f"line {i}" for i in range(10, 30)]
    assert log_tail(log, 99, offset=offset).splitlines()[0] == "line 0"


def test_a_missing_log_is_empty(tmp_path):
    """Before the server has written anything there is nothing to show."""
    assert log_tail(tmp_path / "none") == ""
    assert read_log(tmp_path / "none") == ""
