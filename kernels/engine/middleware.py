"""One JSON route on vLLM's own HTTP server that merges what its processes report; nothing is done per request."""

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from .plugin import CORE_METHOD, WORKER_METHOD
from .report import process_report

ROUTE = "/servelab/evidence"
RPC_TIMEOUT_S = 5.0  # given to vLLM, which waits for its workers
WAIT_S = 7.0  # for the answer of the engine core, whatever vLLM does with its own limit

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class EvidenceMiddleware:
    """``--middleware servelab_kernels.engine.middleware.EvidenceMiddleware``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer the one route, check the installation before the server starts, hand on the rest."""
        if scope["type"] == "http" and scope["path"] == ROUTE:
            await _reply(send, await collect(scope["app"].state.engine_client))
            return
        if scope["type"] == "lifespan":
            problem = _problem(await collect(scope["app"].state.engine_client))
            if problem is not None:
                await receive()
                text = f"the servelab plugin is not installed everywhere: {problem}"
                await send({"type": "lifespan.startup.failed", "message": text})
                return
        await self._app(scope, receive, send)


async def collect(engine_client: Any) -> dict[str, Any]:
    """The reports of the API server, the engine core and every worker; a failed one is an ``error``."""
    workers, core = await asyncio.gather(
        _asked(lambda: engine_client.collective_rpc(WORKER_METHOD, timeout=RPC_TIMEOUT_S)),
        _asked(lambda: engine_client.engine_core.call_utility_async(CORE_METHOD)),
    )
    return {
        "api_server": process_report(),
        "engine_core": core if isinstance(core, dict) else json.loads(core),
        "workers": [workers] if isinstance(workers, dict) else [json.loads(text) for text in workers],
    }


async def _asked(ask: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await asyncio.wait_for(ask(), WAIT_S)
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is the answer
        return {"error": f"{type(error).__name__}: {error}"}


def _problem(found: dict[str, Any]) -> str | None:
    """Which process cannot be asked. One that answers with an error of its own (and its pid) is for the verdict."""
    reports = [found["engine_core"], *found["workers"]]
    return next(
        (str(report["error"]) for report in reports if "error" in report and "pid" not in report), None
    )


async def _reply(send: Send, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})
