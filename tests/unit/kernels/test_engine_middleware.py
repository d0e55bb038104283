"""The one route, the check before the start, and everything else handed on untouched."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from kernels.engine import middleware
from kernels.engine.middleware import ROUTE, EvidenceMiddleware


class Client:
    """An engine client; each answer is a text, or an error to raise, or None to hang."""

    def __init__(self, *, worker='{"pid": 2}', core='{"pid": 1}'):
        self.worker, self.core = worker, core
        self.engine_core = SimpleNamespace(call_utility_async=self._core)

    async def collective_rpc(self, method, timeout):  # noqa: ASYNC109 - vLLM names it
        assert method == "servelab_worker_report"
        return [await answer(self.worker)]

    async def _core(self, method):
        assert method == "servelab_core_report"
        return await answer(self.core)


async def answer(value):
    if isinstance(value, Exception):
        raise value
    if value is None:
        await asyncio.Event().wait()
    return value


@pytest.fixture(autouse=True)
def own(monkeypatch):
    monkeypatch.setattr(middleware, "process_report", lambda: {"pid": 0})
    monkeypatch.setattr(middleware, "WAIT_S", 0.01)


def ask(client, *, kind="http", path=ROUTE):
    """Messages sent, and whether the request was handed on."""
    sent, handed_on = [], []

    async def app(scope, receive, send):
        handed_on.append(scope)

    async def receive():
        return {"type": "lifespan.startup"}

    async def send(message):
        sent.append(message)

    scope = {"type": kind, "path": path, "app": SimpleNamespace(state=SimpleNamespace(engine_client=client))}
    asyncio.run(EvidenceMiddleware(app)(scope, receive, send))
    return sent, bool(handed_on)


def test_the_route_merges_all_processes():
    sent, handed_on = ask(Client())
    assert not handed_on
    assert sent[0]["status"] == 200
    body = json.loads(sent[1]["body"])
    assert body == {"api_server": {"pid": 0}, "engine_core": {"pid": 1}, "workers": [{"pid": 2}]}


def test_every_other_request_is_handed_on_without_a_question():
    assert ask(None, path="/v1/completions") == ([], True)
    assert ask(None, kind="websocket") == ([], True)


@pytest.mark.parametrize("problem", [RuntimeError("Method is not implemented."), None])
def test_a_process_that_does_not_answer_is_an_error_beside_the_others(problem):
    """Refused, or silent beyond the limit."""
    sent, _ = ask(Client(worker=problem))
    body = json.loads(sent[1]["body"])
    assert body["engine_core"] == {"pid": 1}
    assert body["workers"][0]["error"]


def test_a_server_with_the_plugin_in_all_processes_starts():
    assert ask(Client(), kind="lifespan") == ([], True)


def test_a_report_that_goes_wrong_does_not_stop_the_start():
    """The method is there; that its facts are not is for the verdict to say."""
    assert ask(Client(worker='{"pid": 2, "error": "KeyError"}'), kind="lifespan") == ([], True)


@pytest.mark.parametrize(
    "client",
    [
        Client(worker=RuntimeError("no method")),
        Client(core=None),
    ],
)
def test_a_plugin_that_is_missing_somewhere_stops_the_start(client):
    sent, handed_on = ask(client, kind="lifespan")
    assert not handed_on
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "plugin" in sent[0]["message"]
