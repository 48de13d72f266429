r"""Chats on two servers behind SGLang's router, with one Redis for both.

    redis-server --port 6379 --save ''
    for port in 30001 30002; do
        python -m sglang.launch_server --model-path M --port $port --enable-hier-kv \
            --hier-kv-host-size 16 --hier-kv-remote-url redis://127.0.0.1:6379 &
    done
    pip install sglang-router==0.3.2
    python -m sglang_router.launch_router --port 30000 --policy cache_aware \
        --worker-urls http://127.0.0.1:30001 http://127.0.0.1:30002
    python examples/shared_store.py --url http://127.0.0.1:30000

The chats take turns. Printed is, for each turn, where its reused prompt tokens lay: `remote` are
those of a chat that came to another server than before. `cache_aware` keeps a chat where it was as
long as that server has no more to do than the other; with `random` half of the turns move.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

TEXT = Path(__file__).resolve().parent.parent / "docs" / "remote.md"
TIERS = ("device", "host", "disk", "remote")


def main(argv: Sequence[str] | None = None) -> None:
    """Has the chats take turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the router")
    parser.add_argument("--chats", type=int, default=5, help="how many")
    parser.add_argument("--turns", type=int, default=3, help="of each chat")
    parser.add_argument("--chars", type=int, default=800, help="that a turn adds to its chat")
    args = parser.parse_args(argv)
    key = os.environ.get("OPENAI_API_KEY", "-")
    client = OpenAI(base_url=f"{args.url}/v1", api_key=key)
    try:
        model = client.models.list().data[0].id
    except OpenAIError as error:
        why = " ".join(str(error.__cause__ or error).split())
        start = "start one as the head of this file says, or give its --url"
        parser.exit(
            2, f"{parser.prog}: no router with a server answers at {args.url} ({why}); {start}\n"
        )
    text, total = TEXT.read_text(), Counter[str]()
    chats: list[list[Any]] = [[] for _ in range(args.chats)]
    for turn in range(args.turns):
        for number, messages in enumerate(chats):
            start = args.chars * (turn * args.chats + number) % max(1, len(text) - args.chars)
            said = f"Chat {number}: {text[start : start + args.chars]}"
            messages.append({"role": "user", "content": said})
            answer = client.chat.completions.create(
                model=model, messages=messages, temperature=0, max_tokens=16
            )
            messages.append({"role": "assistant", "content": answer.choices[0].message.content})
            assert answer.usage is not None
            found = getattr(answer.usage.prompt_tokens_details, "hier_kv", None) or {}
            tokens = Counter({tier: found.get(tier, 0) for tier in TIERS})
            tokens["prompt"] = answer.usage.prompt_tokens
            print(f"turn {turn + 1}, chat {number + 1}: {line(tokens)}")
            total += tokens
    print(f"all: {line(total)}")


def line(tokens: Counter[str]) -> str:
    """Counts of tokens in words."""
    return f"{tokens['prompt']} prompt tokens, " + ", ".join(f"{t} {tokens[t]}" for t in TIERS)


if __name__ == "__main__":
    main()
