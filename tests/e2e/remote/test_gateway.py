"""A server behind SGLang's gateway (SMG), which makes the tokens and speaks gRPC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from testkit.remote.gateway import Gateway
from testkit.workload import load_texts, load_tokenizer
from tests.e2e.hier_server import PAGE, hier_args

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CHATS, CHAT_TOKENS, DEVICE_TOKENS = 6, 700, 1536


def test_what_left_the_device_is_reused_and_answers_are_the_same(tmp_path: Path) -> None:
    texts, tokenizer = load_texts(load_tokenizer()), load_tokenizer()
    chats = [
        [{"role": "user", "content": f"{number}: {tokenizer.decode(text[:CHAT_TOKENS])}"}]
        for number, text in zip(range(NUM_CHATS), texts * NUM_CHATS, strict=False)
    ]
    args = [*hier_args(tmp_path, disk_gb=0), "--max-total-tokens", str(DEVICE_TOKENS)]
    # In which rounding does not decide between two tokens, computed and behind a prefix.
    args += ["--dtype", "float32"]
    with Gateway([args], "cache_aware", PAGE, tmp_path) as gateway:
        computed = [gateway.chat(messages, 8) for messages in chats]
        loaded = [gateway.chat(messages, 8) for messages in chats]
    for before, after in zip(computed, loaded, strict=True):
        prompt = after["usage"]["prompt_tokens"]
        assert prompt * NUM_CHATS > 2 * DEVICE_TOKENS
        assert cached(after) >= (prompt - 1) // PAGE * PAGE > cached(before)
        assert content(after) == content(before)


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
