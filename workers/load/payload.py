"""The bytes of a request, made before the run."""

import json
from typing import Any

from conf.schema import Endpoint
from workers.load.client import LoadSpec
from workers.load.workload import Request

_PATHS = {Endpoint.completions: "/v1/completions", Endpoint.chat: "/v1/chat/completions"}


def http_request(request: Request, *, spec: LoadSpec) -> bytes:
    """Build one complete HTTP/1.1 request; ``x-request-id`` is ``<phase>-<index>``.

    Raises:
        ValueError: the endpoint cannot take this prompt.
    """
    host, port = spec.address
    body = json.dumps(_body(request, spec=spec), separators=(",", ":")).encode()
    head = (
        f"POST {_PATHS[spec.endpoint]} HTTP/1.1\r\nhost: {host}:{port}\r\n"
        "content-type: application/json\r\naccept: text/event-stream\r\n"
        f"x-request-id: {spec.phase}-{request.index}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _body(request: Request, *, spec: LoadSpec) -> dict[str, Any]:
    body = {
        "model": spec.model,
        **_prompt(request, endpoint=spec.endpoint),
        "max_tokens": request.num_output_tokens,
        "temperature": spec.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if spec.ignore_eos:
        body |= {"ignore_eos": True, "min_tokens": request.num_output_tokens}
    return body


def _prompt(request: Request, *, endpoint: Endpoint) -> dict[str, Any]:
    if endpoint is Endpoint.completions:
        return {
            "prompt": request.prompt_text if request.prompt_token_ids is None else request.prompt_token_ids
        }
    if request.prompt_text is None:
        raise ValueError(f"request {request.index} has token ids, the chat route takes text: use completions")
    return {"messages": [{"role": "user", "content": request.prompt_text}]}
