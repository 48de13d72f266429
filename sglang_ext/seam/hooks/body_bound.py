"""Refuses a body with a longer list of numbers than any prompt has tokens, as it comes in.

SGLang's front process reads a whole body, parses it and checks it before it looks at a prompt's
length, and serves nobody else meanwhile: seconds for tens of millions of token ids. Here the lists
are counted while they arrive. It guards against accidents: what else a body may have much of, texts
or many lists below the bound, takes as long. Pure ASGI, and imports no SGLang.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import numpy as np
import numpy.typing as npt

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

_PIECE_BYTES = 1 << 16  # counted in one go
# From a comma on, bytes that are left to the next piece: no number of a prompt is longer.
_MAX_NUMBER_BYTES = 64
# Lists within more others are counted as one. No body that SGLang takes is so deep.
_MAX_DEPTH = 63

_WHITE = b" \n\r\t"
_OPENS, _CLOSES, _COMMA, _POINT = 1, 2, 3, 4
_KINDS = np.zeros(256, np.int8)
_KINDS[list(b"[{")], _KINDS[list(b"]}")] = _OPENS, _CLOSES
_KINDS[list(b",")], _KINDS[list(b".")] = _COMMA, _POINT
# What an element that is not counted begins with, and what makes a fraction one of no whole number.
_IS_OTHER = np.isin(np.arange(256), list(b'"{'))
_IS_FRACTION = np.isin(np.arange(256), list(b"123456789eE"))


class NumberRun:
    """Counts the elements of each list of a body that could be tokens, or prompts, of a batch.

    All but texts, objects and numbers that are not whole: so lists within a list count, too, and
    `null`, of which no prompt consists but which takes the same time until it is refused.

    Attributes:
        longest: elements of the longest list so far.
    """

    def __init__(self) -> None:
        self.longest = 0
        self._pending = bytearray()  # too short to be counted yet
        self._in_text = False
        self._depth = 0
        # Of the list, or object, that is open at each depth.
        self._counts = np.zeros(_MAX_DEPTH + 1, np.int64)

    def add(self, text: bytes) -> None:
        """Goes on with the next part of a body."""
        for start in range(0, len(text), _PIECE_BYTES):
            self._pending += text[start : start + _PIECE_BYTES]
            if len(self._pending) >= _PIECE_BYTES:
                self._count(is_last=False)

    def finish(self) -> None:
        """The body has ended."""
        self._count(is_last=True)

    def _count(self, *, is_last: bool) -> None:
        piece = bytes(self._pending)
        self._pending.clear()
        if self._in_text and b'"' not in piece and b"\\" not in piece:
            return  # an image, say
        piece = piece.translate(None, _WHITE)  # also of texts, which are not looked at
        end = len(piece)
        if not is_last:
            # Also within a text: it is only looked at later.
            comma = piece.rfind(b",", end - _MAX_NUMBER_BYTES)
            end = comma if comma >= 0 else end
            end -= (end - len(piece[:end].rstrip(b"\\"))) % 2  # between a backslash and the next
        self._pending += piece[end:]
        if b"\\" in piece:
            piece = piece[:end].replace(b"\\\\", b"__").replace(b'\\"', b"__")
        if end:
            self._count_piece(np.frombuffer(piece, np.uint8, end))

    def _count_piece(self, piece: npt.NDArray[np.uint8]) -> None:
        in_text = ((piece == ord('"')).cumsum() + self._in_text) & 1
        self._in_text = bool(in_text[-1])
        kinds = np.where(in_text, 0, _KINDS[piece])
        places = np.flatnonzero(kinds)
        if not len(places):
            return
        kinds = kinds[places]
        opens = kinds == _OPENS
        depths = self._depth + (opens.astype(np.int64) - (kinds == _CLOSES)).cumsum()
        self._depth = max(0, int(depths[-1]))
        behind = np.append(piece, 0)[places + 1]
        amounts = opens + ((kinds == _COMMA) & ~_IS_OTHER[behind]).astype(np.int64)
        is_point = kinds == _POINT
        amounts[is_point] = -_are_fractions(piece, places[is_point]).astype(np.int64)
        self._enter(np.clip(depths, 0, _MAX_DEPTH), opens & (depths <= _MAX_DEPTH), amounts)

    def _enter(
        self,
        depths: npt.NDArray[np.int64],
        begins: npt.NDArray[np.bool_],
        amounts: npt.NDArray[np.int64],
    ) -> None:
        """Adds amounts to the lists of their depths, where `begins` says that another begins."""
        order = np.argsort(depths, kind="stable")
        depths, begins = depths[order], begins[order]
        is_new_depth = np.append(True, depths[1:] != depths[:-1])
        starts = np.flatnonzero(begins | is_new_depth)
        counts = np.add.reduceat(amounts[order], starts)
        counts += np.where(begins[starts], 0, self._counts[depths[starts]])
        self.longest = max(self.longest, int(counts.max()))
        self._counts[depths[starts]] = counts  # the last of each depth stays


def _are_fractions(
    piece: npt.NDArray[np.uint8], points: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Whether there is more than zeros behind decimal points."""
    others = np.flatnonzero(np.append(piece, 0) != ord("0"))
    behind = others[np.searchsorted(others, points, side="right")]
    found: npt.NDArray[np.bool_] = _IS_FRACTION[np.append(piece, 0)[behind]]
    return found


class BodyBound:
    """ASGI middleware around SGLang's app.

    A body that is too short to hold such a list passes untouched, and so does an upload of files.
    Another one is read first, as SGLang would, and handed on when it is whole. The rest of a
    refused one is read and dropped, for the client to read the answer.

    Args:
        app: the app.
        longest_tokens: numbers, or lists, that a list may have.
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
            if not message.get("more_body", False):
                run.finish()
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
            f"A list of numbers, or of lists, may have {self._longest} of them on this server "
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
