"""The admin endpoint for the stored pages of a prompt: `POST /hier_kv/steer`.

It stands among SGLang's own admin endpoints and is guarded as they are: by the admin key where the
server has one, else by its API key. It asks for that key itself, too: with several tokenizer
workers SGLang asks nobody for its admin key. What it is asked for reaches all schedulers in
SGLang's own request for their state, so all ranks of a group do it in the same step.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Awaitable, Callable
from typing import Any

from sglang_ext.hints.steering_request import parse_body, to_text
from sglang_ext.seam.hooks.body_bound import Message, Receive, Send
from sglang_ext.seam.reuse_report import DETAILS_KEY

PATH = "/hier_kv/steer"
# A request for the schedulers' state with such an id carries what they are to do.
CARRIER = "hier-kv-steer:"
_OK, _BAD, _UNAUTHORIZED, _UNAVAILABLE = 200, 400, 401, 503


def add_steering(app: Any, manager: Any) -> None:
    """Adds the endpoint to SGLang's app.

    Args:
        app: SGLang's `FastAPI`, before it serves.
        manager: SGLang's `TokenizerManager`.
    """
    from sglang.srt.managers.io_struct import GetInternalStateReq
    from sglang.srt.utils.auth import AuthLevel, auth_level

    async def steer(request: Any) -> Json:
        if not has_key(manager.server_args, request.headers.get("authorization", "")):
            return Json(_UNAUTHORIZED, {"error": "Unauthorized"})
        status, answer = await answer_to(
            manager, request.json, lambda carrier: GetInternalStateReq(rid=carrier)
        )
        return Json(status, answer)

    if all(getattr(route, "path", "") != PATH for route in app.routes):
        endpoint = auth_level(AuthLevel.ADMIN_OPTIONAL)(steer)
        app.router.add_route(PATH, endpoint, methods=["POST"])


def has_key(server_args: Any, authorization: str) -> bool:
    """Whether a request may steer: it has the admin key, or the API key where there is no other.

    Args:
        server_args: SGLang's.
        authorization: the request's header, empty for none; each character a byte of it.
    """
    key = server_args.admin_api_key or server_args.api_key
    if not key:
        return True
    scheme, _, given = authorization.partition(" ")
    is_key = hmac.compare_digest(given.encode("latin-1"), key.encode())
    return scheme.lower() == "bearer" and is_key


class Json:
    """An answer, as ASGI takes it.

    Args:
        status: of HTTP.
        content: what is answered.
    """

    def __init__(self, status: int, content: dict[str, Any]) -> None:
        self._status, self._body = status, json.dumps(content).encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Sends it."""
        headers = [(b"content-type", b"application/json")]
        headers.append((b"content-length", str(len(self._body)).encode()))
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


async def answer_to(
    manager: Any, read: Callable[[], Awaitable[Any]], make_request: Callable[[str], Any]
) -> tuple[int, dict[str, Any]]:
    """Does what a body asks for; returns the status and the answer.

    Args:
        manager: SGLang's `TokenizerManager`.
        read: reads the body as JSON.
        make_request: makes SGLang's request for the schedulers' state, with an id.
    """
    try:
        steering, prompt = parse_body(await read())
        token_ids = await _tokens_of(manager, prompt)
    except (ValueError, RecursionError) as error:
        return _BAD, {"error": str(error)}
    manager.auto_create_handle_loop()
    carrier = make_request(CARRIER + to_text(steering, token_ids))
    answers = await manager.get_internal_state_communicator(carrier)
    states = [answer.internal_state for answer in answers]
    done = [each for state in states if (each := state.get(DETAILS_KEY, {}).get("steered"))]
    errors = [each["error"] for each in done if "error" in each]
    if errors or not done:
        return _UNAVAILABLE, {"error": errors[0] if errors else "no scheduler has done it."}
    return _OK, {"schedulers": done}


async def _tokens_of(manager: Any, prompt: str | list[int]) -> list[int]:
    if isinstance(prompt, str):
        ids, _ = await manager._tokenize_texts(prompt)
        prompt = [int(each) for each in ids]
    if len(prompt) > manager.context_len:
        raise ValueError(
            f"the prompt must have at most the {manager.context_len} tokens of the context, got "
            f"{len(prompt)}."
        )
    return prompt
