"""Servers against the stub engine: readiness, failure classes, ports, death, logs."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from fakes import stub
from fakes.launching import stub_spec

from workers import processes
from workers import server as server_module
from workers.errors import EngineDiedError, EngineStartError
from workers.ports import port_is_free
from workers.server import Server, start_with_retries

BUSY = (
    "ValueError: Free memory on device cuda:0 (19.77/22.05 GiB) on startup is less than desired GPU memory "
    "utilization (0.9, 19.84 GiB)"
)


async def failure(spec) -> EngineStartError:
    """The error of a start that must fail."""
    with pytest.raises(EngineStartError) as caught:
        await Server.start(spec)
    return caught.value


def alive(pid):
    try:
        return psutil.Process(pid).status() not in {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    except psutil.NoSuchProcess:
        return False


def test_ready_means_a_generation_and_stop_leaves_nothing(tmp_path):
    """The stub has answered one generation before it counts as ready; after the stop its port is free."""

    async def run():
        async with await Server.start(stub_spec(tmp_path, stub.Script(children=1))) as server:
            state = json.loads((await server.call("GET", "/stub/state")).body)
            assert state["num_generations"] == 1
            assert server.alive()
            assert 0 < server.started_s < 10
            assert server.attempts == ()
            pids = [server.pid, server.supervisor_pid, server.guard_pid]
        return server, state, pids

    server, state, pids = asyncio.run(run())
    assert not server.alive()
    assert not any(map(alive, pids))
    assert processes.listeners(server.port) == []
    given = set(stub_spec(tmp_path).env) | {"VLLM_PORT"}
    assert set(state["environment"]) - {"LC_CTYPE"} == given  # LC_CTYPE: set by the interpreter itself
    assert state["environment"]["VLLM_PORT"] == str(server.internal_port)


def test_a_model_that_cannot_fit_fails_at_once(tmp_path):
    """The log's sentence decides the class; the failure follows the exit immediately; the last lines are kept."""
    text = "No available memory for the cache blocks."
    lines = "\n".join(f"line {i}" for i in range(40))
    script = stub.Script(exit_after_s=0.5, exit_code=1, exit_text=f"{lines}\n{text}")
    began = time.monotonic()
    error = asyncio.run(failure(stub_spec(tmp_path, script)))
    assert time.monotonic() - began < 0.5 + 2.0
    assert error.cause == "does_not_fit"
    assert not error.retryable
    assert error.log_tail.splitlines() == [*(f"line {i}" for i in range(21, 40)), text]
    assert f"ended with code 1 before it was ready: '{text}'" in str(error)
    assert str(tmp_path / "server.log") in str(error)


def test_a_model_that_cannot_fit_is_not_tried_again(tmp_path):
    """Neither waiting nor another port helps."""
    script = stub.Script(exit_code=1, exit_text="No available memory for the cache blocks.")
    attempts = []
    with pytest.raises(EngineStartError):
        asyncio.run(start_with_retries(stub_spec(tmp_path, script), busy_wait_s=5, attempts=attempts))
    assert [attempt.outcome for attempt in attempts] == ["does_not_fit"]


def test_a_busy_device_is_waited_for_and_tried_once_more(tmp_path):
    """Class device_busy: the start waits until the device is free, then tries a second and last time."""
    script = stub.Script(exit_code=1, exit_text=BUSY)
    asked = []

    def device_free():
        asked.append(time.monotonic())
        return True

    attempts = []
    spec = stub_spec(tmp_path, script)
    with pytest.raises(EngineStartError) as caught:
        asyncio.run(start_with_retries(spec, busy_wait_s=30, device_free=device_free, attempts=attempts))
    assert caught.value.cause == "device_busy"
    assert [attempt.outcome for attempt in attempts] == ["device_busy", "device_busy"]
    assert len(asked) == 1


def test_a_device_that_becomes_free_gives_a_server(tmp_path):
    """The second try succeeds; both are on record."""
    script = stub.Script(exit_code=1, exit_text=BUSY, exit_once=str(tmp_path / "was-busy"))

    async def run():
        async with await start_with_retries(stub_spec(tmp_path, script), busy_wait_s=0.1) as server:
            return [attempt.outcome for attempt in server.attempts]

    assert asyncio.run(run()) == ["device_busy", "ready"]


def test_a_silent_server_is_ended_at_the_limit(tmp_path):
    """Alive but never ready: class start_timeout, and the tree is gone, children that ignore TERM included."""
    lock = tmp_path / "memory"
    script = stub.Script(silent=True, children=1, children_ignore_sigterm=True, lock_path=str(lock))
    spec = stub_spec(tmp_path, script, start_timeout_s=1.0, stop_grace_s=0.3)
    began = time.monotonic()
    error = asyncio.run(failure(spec))
    assert error.cause == "start_timeout"
    assert 1.0 < time.monotonic() - began < 4.0
    assert "within 1 s" in str(error)
    with lock.with_name("memory.0").open("r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free
        assert not alive(int(file.read()))


def test_ready_at_ninety_percent_of_the_limit_succeeds(tmp_path):
    """/health answers 503 until then; that is no failure."""

    async def run():
        script = stub.Script(ready_after_s=5.1)
        async with await Server.start(stub_spec(tmp_path, script, start_timeout_s=6.0)) as server:
            return server.started_s

    assert 5.1 < asyncio.run(run()) < 6.0


@pytest.mark.parametrize(
    ("script", "cause", "text"),
    [
        (stub.Script(generation_status=500), "generation_failed", "HTTP 500"),
        (
            stub.Script(exit_code=1, exit_text="ModuleNotFoundError: No module named 'x'"),
            "environment_broken",
            "code 1",
        ),
        (stub.Script(exit_code=3), "died", "ended with code 3"),
        (stub.Script(exit_code=0), "died", "ended with code 0"),
    ],
)
def test_other_failures_have_their_class(tmp_path, script, cause, text):
    """A healthy answer without a generation is no readiness; a broken environment and a plain death are told apart."""
    error = asyncio.run(failure(stub_spec(tmp_path, script)))
    assert error.cause == cause
    assert text in str(error)


def test_a_generation_that_hangs_runs_into_the_limit(tmp_path):
    """/health is fine, but nothing is generated."""
    spec = stub_spec(tmp_path, stub.Script(generation_hangs=True), start_timeout_s=1.0)
    assert asyncio.run(failure(spec)).cause == "start_timeout"


def test_a_missing_program_or_log_folder_is_reported_at_once(tmp_path):
    """Not a time-out, but the reason."""
    spec = stub_spec(tmp_path, argv_for_port=lambda port: ["/nonexistent/python"])
    error = asyncio.run(failure(spec))
    assert error.cause == "environment_broken"
    assert "/nonexistent/python" in str(error)
    error = asyncio.run(failure(stub_spec(tmp_path, log_path=tmp_path / "none" / "server.log")))
    assert str(tmp_path / "none") in str(error)


def test_a_cancelled_start_leaves_nothing(tmp_path):
    """Whoever gives up waiting does not have to clean up."""

    async def run():
        task = asyncio.create_task(Server.start(stub_spec(tmp_path, stub.Script(silent=True))))
        while not processes.log_writers(tmp_path / "server.log"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert processes.log_writers(tmp_path / "server.log") == []


def test_eight_servers_together_share_no_port(tmp_path):
    """Each binds an HTTP and an internal port a second after its start: 16 different ports, no bind error."""
    script = stub.Script(internal_port=True, bind_delay_s=1.0)

    async def one(number):
        folder = tmp_path / str(number)
        folder.mkdir()
        return await Server.start(stub_spec(folder, script, start_timeout_s=30))

    async def run():
        servers = await asyncio.gather(*map(one, range(8)))
        ports = [server.port for server in servers]
        ports += [int(server.log_tail(99).partition("internal port ")[2].split()[0]) for server in servers]
        bases = [server.env["VLLM_PORT"] for server in servers]
        await asyncio.gather(*(server.stop() for server in servers))
        return ports, bases

    ports, bases = asyncio.run(run())
    assert len(set(ports)) == 16
    assert len(set(bases)) == 8
    assert "Errno 98" not in "".join(path.read_text() for path in tmp_path.glob("*/server.log"))


@pytest.mark.parametrize("answers", [False, True])
def test_a_port_grabbed_by_a_third_party_is_tried_once_more(tmp_path, answers):
    """Whether the intruder is silent or looks healthy, the second try uses another port and both are on record."""
    taken = []

    async def grab(port):
        if not taken:
            taken.append(port)
            handler = _healthy if answers else _mute
            taken.append(await asyncio.start_server(handler, "127.0.0.1", port))

    async def run():
        loop = asyncio.get_running_loop()
        grabbing = []

        def argv_for_port(port):
            grabbing.append(loop.create_task(grab(port)))
            return stub.argv(port)

        spec = stub_spec(tmp_path, stub.Script(bind_delay_s=0.6), argv_for_port=argv_for_port)
        async with await start_with_retries(spec, busy_wait_s=0) as server:
            await asyncio.gather(*grabbing)
            taken[1].close()
            return server.attempts, server.port

    attempts, port = asyncio.run(run())
    assert [attempt.outcome for attempt in attempts] == ["port_taken", "ready"]
    assert attempts[0].port == taken[0]
    assert attempts[1].port == port != taken[0]


async def _healthy(reader, writer):
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def _mute(reader, writer):
    await reader.read()
    writer.close()


def test_a_chatty_server_does_not_block(tmp_path):
    """2 MiB before it listens and 64 KiB per request: ready, 20 answers, every byte in the file."""
    line = "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'FLASHINFER']"
    script = stub.Script(chatty_bytes=2**20, chatty_bytes_per_request=2**16, backend_line=line)
    body = {"model": "stub", "prompt": [1, 2, 3], "max_tokens": 3}

    async def run():
        async with await Server.start(stub_spec(tmp_path, script)) as server:
            calls = [server.call("POST", "/v1/completions", json_body=body) for _ in range(20)]
            answers = await asyncio.gather(*calls)
        return [answer.status for answer in answers]

    assert asyncio.run(run()) == [200] * 20
    text = (tmp_path / "server.log").read_text()
    chatter = "INFO: a line nobody asked for, but somebody has to drain......."
    assert text.count(chatter) == 2 * (2**20 // 64) + 21 * (2**16 // 64)
    assert line in server_module.read_log(tmp_path / "server.log")


def test_a_death_during_work_ends_it_with_the_log(tmp_path):
    """The server is killed: waiting work is cancelled within a second, the error carries the end and the log."""
    cancelled = []

    async def work():
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def run():
        async with await Server.start(stub_spec(tmp_path)) as server:
            loop = asyncio.get_running_loop()
            loop.call_later(0.2, os.kill, server.pid, signal.SIGKILL)
            began = time.monotonic()
            with pytest.raises(EngineDiedError, match="killed by signal 9") as caught:
                await server.while_alive(work())
            assert time.monotonic() - began < 1.2
            assert await server.wait_ended() == -signal.SIGKILL
            assert not server.alive()
        return caught.value

    assert "POST /v1/completions" in asyncio.run(run()).log_tail
    assert cancelled == [True]


def test_work_that_ends_first_gives_its_result(tmp_path):
    """Nothing changes for a healthy server."""

    async def run():
        async with await Server.start(stub_spec(tmp_path)) as server:
            return await server.while_alive(asyncio.sleep(0, result=7))

    assert asyncio.run(run()) == 7


OWNER = """
import asyncio, sys
from pathlib import Path
sys.path[:0] = [{root!r}, {tests!r}]
from fakes import stub
from fakes.launching import stub_spec
from workers.server import Server

async def main():
    script = stub.Script(children=1, children_ignore_sigterm=True, ignore_sigterm=True)
    server = await Server.start(stub_spec(Path({folder!r}), script, stop_grace_s=0.5))
    print(server.pid, server.supervisor_pid, server.guard_pid, server.port, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_a_killed_owner_leaves_no_server(tmp_path):
    """SIGKILL of the owner: within three seconds server, detached child and watchers are gone, the port is free."""
    tests = Path(__file__).parents[1]
    code = OWNER.format(root=str(tests.parent), tests=str(tests), folder=str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        *pids, port = map(int, owner.stdout.readline().split())
        pids += [child.pid for child in psutil.Process(pids[0]).children()]
        assert len(pids) == 4
        owner.kill()
        owner.wait()
        end = time.monotonic() + 3.0
        while any(map(alive, pids)) and time.monotonic() < end:
            time.sleep(0.02)
    assert not any(map(alive, pids))
    assert processes.listening_sockets(port) == set()


def test_a_listener_of_another_program_is_not_ours(tmp_path):
    """Ownership is by process tree, not by an open port."""
    with contextlib.closing(socket.socket()) as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert processes.listeners(port) == [os.getpid()]
        assert processes.listener_in_tree(port, root=os.getpid())
        with subprocess.Popen(["sleep", "30"]) as process:
            assert not processes.listener_in_tree(port, root=process.pid)
            process.kill()
        assert not port_is_free(port)
