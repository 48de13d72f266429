"""A chat that outgrows its context at OpenAI's endpoint: its oldest messages are cut."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from testkit.server import Server
from testkit.workload import load_texts, load_tokenizer

_NUM_TURNS, _TURN_TOKENS, _ANSWER_TOKENS = 5, 500, 8  # five turns are over the model's 2,048
_SYSTEM = "You answer questions on programming. Be brief and precise."
_TOKENIZER = load_tokenizer()


def talk(server: Server, number: int) -> Counter[str]:
    """One chat of a round, a turn behind the other; each has all messages of those before it.

    Args:
        server: who is asked; plain SGLang drops the newest tokens of what is too long.
        number: of the round; each chat comes in two rounds.

    Returns:
        Its turns by how they were answered, and the prompt tokens that were moved.

    Raises:
        ServerError, OSError: a request failed.
    """
    rng = random.Random(f"chat {number // 2}")
    texts, counts = load_texts(_TOKENIZER), Counter[str]()
    messages = [{"role": "system", "content": _SYSTEM}]
    for _ in range(_NUM_TURNS):
        text = rng.choice(texts)
        first = rng.randrange(max(1, len(text) - _TURN_TOKENS))
        said = _TOKENIZER.decode(text[first : first + _TURN_TOKENS]).replace("<|", "")
        messages.append({"role": "user", "content": said})
        body = {
            "model": "m", "messages": messages, "max_tokens": _ANSWER_TOKENS, "temperature": 0,
            "return_meta_info": True,
        }  # fmt: skip
        (choice,) = server.post("/v1/chat/completions", body)["choices"]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
        counts += _told(choice["meta_info"])
    return counts


def _told(meta: dict[str, Any]) -> Counter[str]:
    """What an answer says of how its prompt was cut, and of what moved with the cut."""
    report = (meta.get("cached_tokens_details") or {}).get("hier_kv") or {}
    cut = "cut" if report.get("dropped") else "whole"
    return Counter({f"turns of long chats, {cut}": 1, "tokens moved": report.get("moved", 0)})
