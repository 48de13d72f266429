"""A program in SGLang's own language: a conversation with a state that is forked for each question.

    python -m sglang.launch_server --model-path M --enable-hier-kv --hier-kv-host-size 16
    python examples/sglang_program.py --url http://127.0.0.1:30000 docs/hints.md docs/quotas.md

It has each file summed up, forks that conversation, asks each fork a question of its own, and joins
the answers. All of that is done twice. Printed is, for each file and pass, where the reused prompt
tokens lay: forks find what they share on the device, and the second pass finds in DRAM or on disk
what has left the device since.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sglang as sgl

DOCS = Path(__file__).resolve().parent.parent / "docs"
FILES = [DOCS / name for name in ("hints.md", "quotas.md", "streaming.md")]
QUESTIONS = ("Whom is it for?", "What does it cost?", "What may go wrong?")
TIERS = ("device", "host", "disk", "remote")


@sgl.function
def review(s: Any, text: str) -> list[dict[str, Any]]:
    """Sums a text up and asks about it; returns what the server said of each request."""
    s += sgl.system("You review documents. Be brief.")
    s += sgl.user(text + "\nSum this up.")
    s += sgl.assistant(sgl.gen("summary", max_tokens=32, temperature=0))
    forks = s.fork(len(QUESTIONS))
    for fork, question in zip(forks, QUESTIONS, strict=True):
        fork += sgl.user(question)
        fork += sgl.assistant(sgl.gen("answer", max_tokens=16, temperature=0))
    forks.join()
    answers = [
        f"{question} {fork['answer']}" for question, fork in zip(QUESTIONS, forks, strict=True)
    ]
    s += sgl.user("\n".join([*answers, "So is it worth reading?"]))
    s += sgl.assistant(sgl.gen("verdict", max_tokens=16, temperature=0))
    metas = [s.get_meta_info("summary"), s.get_meta_info("verdict")]
    return [*metas, *(fork.get_meta_info("answer") for fork in forks)]


def tokens_by_tier(metas: Sequence[dict[str, Any]]) -> Counter[str]:
    """Prompt tokens of some requests, and those reused of them, by where they lay."""
    total: Counter[str] = Counter()
    for meta in metas:
        report = (meta.get("cached_tokens_details") or {}).get("hier_kv") or {}
        total["prompt"] += meta["prompt_tokens"]
        total.update({tier: report.get(tier, 0) for tier in TIERS})
    return total


def line(tokens: Counter[str]) -> str:
    """These counts in words."""
    return f"{tokens['prompt']} prompt tokens, " + ", ".join(f"{t} {tokens[t]}" for t in TIERS)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the program on each file, twice."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--chars", type=int, default=3000, help="of each file, at most")
    parser.add_argument("files", nargs="*", type=Path, default=FILES, help="texts to review")
    args = parser.parse_args(argv)
    try:
        backend = sgl.RuntimeEndpoint(args.url, api_key=os.environ.get("OPENAI_API_KEY"))
    except (OSError, RuntimeError) as error:
        start = "start one as the head of this file says, or give its --url"
        parser.exit(2, f"{parser.prog}: no server answers at {args.url} ({error}); {start}\n")
    for number in (1, 2):
        total: Counter[str] = Counter()
        for file in args.files:
            state = review.run(text=file.read_text()[: args.chars], backend=backend)
            tokens = tokens_by_tier(state.ret_value)
            print(f"pass {number}, {file.name}: {line(tokens)}")
            total += tokens
        print(f"pass {number}, all: {line(total)}")


if __name__ == "__main__":
    main()
