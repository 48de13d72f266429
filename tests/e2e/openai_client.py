"""What the `openai` package's client is told of what was reused, in each of four ways to ask."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from testkit.server import Server
from testkit.workload import load_tokenizer
from tests.e2e.hier_server import real_prompts

SYSTEM = "You answer questions on programming. Be brief and precise."
WAYS = ("chat", "streamed chat", "completion", "streamed completion")


@contextmanager
def connect(server: Server) -> Iterator[openai.OpenAI]:
    """A client with a connection for each request.

    SGLang closes an idle one after five seconds, which is when the client would still take it.
    """
    alone = httpx.Client(limits=httpx.Limits(max_keepalive_connections=0))
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=alone) as client:
        yield client


def text_of(num_tokens: int, seed: int) -> str:
    """About as many tokens of the bundled texts."""
    (tokens,) = real_prompts([num_tokens], seed=seed)
    text: str = load_tokenizer().decode(tokens)
    return text.replace("<|", "")


def through(
    client: openai.OpenAI, way: str, num_tokens: int, seed: int, **custom_params: Any
) -> tuple[Any, Any]:
    """Asks about a text, in one of `WAYS`; returns the usage and the header `x-hier-kv`."""
    common: dict[str, Any] = {"model": "m", "max_tokens": 4, "temperature": 0}
    common |= {"stream": True, "stream_options": {"include_usage": True}} if "str" in way else {}
    common |= {"extra_body": {"custom_params": custom_params}} if custom_params else {}
    if "chat" in way:
        create: Any = client.chat.completions.with_raw_response.create
        raw = create(messages=chat_about(num_tokens, seed), **common)
    else:
        create = client.completions.with_raw_response.create
        raw = create(prompt=text_of(num_tokens, seed), **common)
    parsed = raw.parse()
    usages = [one.usage for one in (list(parsed) if "str" in way else [parsed]) if one.usage]
    return usages[-1], json.loads(raw.headers.get("x-hier-kv", "{}"))


def chat_about(num_tokens: int, seed: int) -> Any:
    """Messages of a system prompt and a text."""
    text = text_of(num_tokens, seed)
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]


def seen(usage: openai.types.CompletionUsage | None) -> tuple[int, dict[str, Any]]:
    """Cached tokens, and what the extension says: `hier_kv` of `prompt_tokens_details`."""
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    extra = usage.prompt_tokens_details.model_extra
    cached = usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    return cached, (extra or {}).get("hier_kv") or {}
