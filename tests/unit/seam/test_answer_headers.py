"""The header of answers over HTTP: in time for a stream, and once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

from sglang_ext.seam.hooks.answers import HEADER, AnswerReports, around_generate
from sglang_ext.seam.hooks.body_bound import App, Message, Receive, Send

REPORT = {"device": 0, "host": 64, "disk": 0, "remote": 0}
START = {"type": "http.response.start", "status": 200, "headers": [(b"x-own", b"1")]}


async def outputs(*_: Any) -> AsyncGenerator[dict[str, Any]]:
    """What SGLang's front process knows of a request's first tokens."""
    yield {"meta_info": {"cached_tokens_details": {"hier_kv": REPORT}}}


def answered(app: App) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(AnswerReports(app)({"type": "http"}, receive, send))
    return sent


async def opened_before_its_first_token(scope: Message, receive: Receive, send: Send) -> None:
    """As SGLang answers `/v1/messages`."""
    await send(START)
    async for _ in around_generate(outputs, None, SimpleNamespace()):
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def test_a_stream_that_is_opened_early_has_the_header_of_its_first_tokens() -> None:
    start, *bodies = answered(opened_before_its_first_token)
    (own, (name, value)) = start["headers"]
    assert own == (b"x-own", b"1")
    assert (name, json.loads(value)) == (HEADER, REPORT)
    assert [each["body"] for each in bodies] == [b"a", b""]


def test_an_answer_without_a_report_is_sent_as_it_is() -> None:
    async def health(scope: Message, receive: Receive, send: Send) -> None:
        await send(START)
        await send({"type": "http.response.body", "body": b"ok"})

    assert answered(health) == [START, {"type": "http.response.body", "body": b"ok"}]
