"""Refuses a body with a list of more numbers than any prompt may have tokens, as it comes in.

SGLang's front process reads a whole body, parses it and checks it before it looks at a prompt's
length, and serves nobody else meanwhile: seconds for tens of millions of token ids. Here the list
is counted while it arrives. Pure ASGI, and imports no SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

# What a JSON list of whole numbers consists of. A list of floats is no prompt.
_NUMBERS = b"0123456789-, \n\r\t"
# Looked at in one go; a list within one piece is too short to be looked at.
_PIECE_BYTES = 1 << 16


class NumberRun:
    """Counts the numbers of a list that is still open at the end of the text so far.

    Lists that lie within one piece are not counted: they cost the server nothing.
    """

    def __init__(self) -> None:
        self._in_list = False
        self._num_commas = 0
        self.longest = 0  # numbers of the longest list

    def add(self, text: bytes) -> None:
        """Goes on with the next part of a body."""
        for start in range(0, len(text), _PIECE_BYTES):
            self._add_piece(text[start : start + _PIECE_BYTES])

    def _add_piece(self, piece: bytes) -> None:
        rest = piece.lstrip(_NUMBERS)
        self._num_commas += piece.count(b",", 0, len(piece) - len(rest))
        if self._in_list:
            self.longest = max(self.longest, self._num_commas + 1)
        if rest:
            others = rest.rstrip(_NUMBERS)
            self._in_list = others.endswith(b"[")  # numbers in a text are not in a list
            self._num_commas = rest.count(b",", len(others))


class BodyBound:
    """ASGI middleware around SGLang's app.

    A body that is too short to hold such a list passes untouched, and so does an upload of files.
    Another one is read first, as SGLang would, and handed on when it is whole. The rest of a
    refused one is read and dropped, for the client to read the answer.

    Args:
        app: the app.
        longest_tokens: numbers that a list may have.
        advice: explains the limit inside the error message.
    """

    def __init__(self, app: App, *, longest_tokens: int, advice: str) -> None:
        self._app = app
        self._longest = longest_tokens
        self._advice = advice

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] != "http" or not self._may_be_too_long(scope):
            await self._app(scope, receive, send)
            return
        run, parts = NumberRun(), list[Message]()
        while True:
            message = await receive()
            parts.append(message)
            run.add(message.get("body", b""))
            if run.longest > self._longest:
                parts.clear()
                await self._refuse(message, receive, send)
                return
            if not message.get("more_body", False):
                break
        parts.reverse()

        async def replay() -> Message:
            return parts.pop() if parts else await receive()

        await self._app(scope, replay, send)

    def _may_be_too_long(self, scope: Message) -> bool:
        headers = dict(scope["headers"])
        if headers.get(b"content-type", b"").startswith(b"multipart/"):
            return False
        length = headers.get(b"content-length", b"")
        if length.isdigit():
            return int(length) >= 2 * self._longest  # a digit and a comma
        return b"transfer-encoding" in headers or scope.get("http_version") == "2"

    async def _refuse(self, message: Message, receive: Receive, send: Send) -> None:
        while message.get("more_body", False):
            message = await receive()
        text = (
            f"A list of numbers may have {self._longest} of them on this server "
            f"({self._advice}), got more; send less of the conversation."
        )
        error = {"message": text, "type": "invalid_request_error", "param": None, "code": 413}
        body = json.dumps({"error": error}).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ]
        await send({"type": "http.response.start", "status": 413, "headers": headers})
        await send({"type": "http.response.body", "body": body})
