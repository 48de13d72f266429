r"""Questions on documents that come again and again: retrieval in front of OpenAI's API.

    python -m sglang.launch_server --model-path M --enable-hier-kv \
        --hier-kv-host-size 16 --hier-kv-disk-dir /kv --hier-kv-disk-size 100
    python examples/documents.py --url http://127.0.0.1:30000

For each question it looks for the document that has most of the question's words, and asks the
model with that document in front: its KV is reused whatever is asked. The questions are the titles
of the documents' sections, in turn. Printed is, for each question, what was retrieved, and where
the reused prompt tokens lay: `usage.prompt_tokens_details.hier_kv` of the answer
(docs/client-report.md).
"""

from __future__ import annotations

import argparse
import os
import re
from collections import Counter
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path

from openai import OpenAI, OpenAIError

DOCS = Path(__file__).resolve().parent.parent / "docs"
NAMES = ("hints.md", "lookahead.md", "cost-model.md", "waiting-queue.md", "truncation.md")
TIERS = ("device", "host", "disk", "remote")


def words(text: str) -> set[str]:
    """What is compared of two texts."""
    return set(re.findall(r"[a-z]{3,}", text.lower()))


def retrieve(question: str, documents: dict[str, str]) -> str:
    """Name of the document with most of the question's words; the first of several."""
    asked = words(question)
    return max(documents, key=lambda name: len(asked & words(documents[name])))


def questions(files: Sequence[Path]) -> list[str]:
    """Titles of sections: the first of each file, then the second, and so on."""
    titles = [re.findall(r"^## (.+)$", file.read_text(), re.MULTILINE) for file in files]
    return [title for title in chain(*zip_longest(*titles)) if title is not None]


def main(argv: Sequence[str] | None = None) -> None:
    """Asks the questions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--chars", type=int, default=3500, help="of each document, at most")
    parser.add_argument("--questions", type=int, default=15, help="how many")
    files = [DOCS / name for name in NAMES]
    parser.add_argument("files", nargs="*", type=Path, default=files, help="with titles (## ...)")
    args = parser.parse_args(argv)
    key = os.environ.get("OPENAI_API_KEY", "-")
    client = OpenAI(base_url=f"{args.url}/v1", api_key=key)
    try:
        model = client.models.list().data[0].id
    except OpenAIError as error:
        why = " ".join(str(error.__cause__ or error).split())
        start = "start one as the head of this file says, or give its --url"
        parser.exit(2, f"{parser.prog}: no server answers at {args.url} ({why}); {start}\n")
    documents = {file.name: file.read_text()[: args.chars] for file in args.files}
    total: Counter[str] = Counter()
    for title in questions(args.files)[: args.questions]:
        name = retrieve(title, documents)
        answer = client.chat.completions.create(
            model=model,
            messages=[
                {"role": "system", "content": f"Answer from this document.\n\n{documents[name]}"},
                {"role": "user", "content": f"What does it say about: {title}?"},
            ],
            temperature=0,
            max_tokens=24,
        )
        assert answer.usage is not None
        found = getattr(answer.usage.prompt_tokens_details, "hier_kv", None) or {}
        tokens = Counter({tier: found.get(tier, 0) for tier in TIERS})
        tokens["prompt"] = answer.usage.prompt_tokens
        print(f"{title!r} in {name}: {line(tokens)}")
        total += tokens
    print(f"all: {line(total)}")


def line(tokens: Counter[str]) -> str:
    """Counts of tokens in words."""
    return f"{tokens['prompt']} prompt tokens, " + ", ".join(f"{t} {tokens[t]}" for t in TIERS)


if __name__ == "__main__":
    main()
