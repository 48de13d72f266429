"""A chat with images as clients of the OpenAI endpoint have it, and what its answers say."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from testkit.images.vision_model import picture
from testkit.server import Server
from tests.e2e.images.image_prompts import words

NUM_TOKENS = 8
Message = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """An answer.

    Attributes:
        text: of it.
        logprobs: of its tokens.
        num_prompt: tokens of the chat before it.
        cached: how many of these were reused.
        tiers: the same by tier; empty from a server without the plugin.
    """

    text: str
    logprobs: tuple[float, ...]
    num_prompt: int
    cached: int
    tiers: dict[str, Any]


def questions() -> list[Message]:
    """What a user says in each turn: of one picture, of nothing, of another picture."""
    first, third = (
        {"type": "image_url", "image_url": {"url": picture(seed, width=width, height=7)}}
        for seed, width in ((900, 9), (901, 12))
    )
    return [
        {"role": "user", "content": [_text(910, 50), first, _text(911, 40)]},
        {"role": "user", "content": words(912, 60)},
        {"role": "user", "content": [third, _text(913, 30)]},
    ]


def _text(seed: int, count: int) -> dict[str, str]:
    return {"type": "text", "text": words(seed, count)}


@contextmanager
def client_of(server: Server) -> Iterator[openai.OpenAI]:
    """A client of a server's."""
    # A connection for each request: SGLang closes an idle one after five seconds.
    alone = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=alone) as client:
        yield client


def converse(
    server: Server, replies: Sequence[str] = (), *, streamed: bool, **extra: Any
) -> list[Said]:
    """All turns of the chat, one after the other.

    Args:
        server: asked.
        replies: what the assistant is said to have answered; else what it answers now.
        streamed: answers come in pieces.
        extra: fields of SGLang's.
    """
    chat: list[Message] = []
    found = []
    with client_of(server) as client:
        for turn, question in enumerate(questions()):
            chat.append(question)
            said = _say(client, chat, streamed, extra)
            found.append(said)
            reply = replies[turn] if replies else said.text
            chat.append({"role": "assistant", "content": reply})
    return found


def _say(client: openai.OpenAI, chat: list[Message], streamed: bool, extra: Any) -> Said:
    common: Any = {"model": "m", "max_tokens": NUM_TOKENS, "temperature": 0, "logprobs": True}
    body = {"ignore_eos": True, **extra}
    if streamed:
        common |= {"stream": True, "stream_options": {"include_usage": True}}
    create: Any = client.chat.completions.create
    answer = create(messages=chat, extra_body=body, **common)
    pieces = list(answer) if streamed else [answer]
    text, usage = "", None
    logprobs: list[Any] = []
    for piece in pieces:
        for choice in piece.choices:
            message = choice.delta if streamed else choice.message
            text += message.content or ""
            logprobs += [] if choice.logprobs is None else choice.logprobs.content
        usage = piece.usage or usage
    assert usage is not None
    details = usage.prompt_tokens_details
    tiers = {} if details is None else (details.model_extra or {}).get("hier_kv") or {}
    return Said(
        text=text,
        logprobs=tuple(token.logprob for token in logprobs),
        num_prompt=usage.prompt_tokens,
        cached=0 if details is None else details.cached_tokens,
        tiers={tier: num for tier, num in tiers.items() if num},
    )
