r"""Agents that call a tool and say when they come back: hints through OpenAI's API.

    python -m sglang.launch_server --model-path M --tool-call-parser P --enable-hier-kv \
        --hier-kv-host-size 16 --hier-kv-disk-dir /kv --hier-kv-disk-size 100
    python examples/agents.py --url http://127.0.0.1:30000

P is the parser of the model's tool calls; without one SGLang answers with text.

Each agent looks some sections of a handbook up, one a turn, and then answers; while the tool of one
runs the others think. What the plugin is told (docs/hints.md): the handbook's table of contents,
which all agents begin with, is pinned; with each call of the tool, in how many seconds the agent is
back; with the last question, that its conversation ends. Printed is, for each turn, what was
called, and where the reused prompt tokens lay.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from openai import OpenAI, OpenAIError

HANDBOOK = Path(__file__).resolve().parent.parent / "docs" / "cost-model.md"
TASKS = ("a slow disk", "a long prompt", "the first request", "a busy store")
TIERS = ("device", "host", "disk", "remote")
PIN_S, FIRST_GUESS_S = 600, 5.0


def sections(handbook: Path) -> dict[str, str]:
    """Text of each section by its title."""
    parts = handbook.read_text().split("\n## ")[1:]
    return {title.strip(): text.strip() for title, _, text in (p.partition("\n") for p in parts)}


def tool(titles: Sequence[str]) -> dict[str, Any]:
    """The tool as OpenAI's API describes it."""
    title = {"type": "string", "enum": list(titles)}
    parameters = {
        "type": "object",
        "properties": {"title": title},
        "required": ["title"],
        "additionalProperties": False,
    }
    name, what = "read_section", "Returns a section of the handbook."
    function = {"name": name, "description": what, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


@dataclass
class Agents:
    """Some conversations with one model, and what of their prompts was reused."""

    client: OpenAI
    model: str
    texts: dict[str, str]
    chars: int
    total: Counter[str] = field(default_factory=Counter)

    def think(self, messages: list[Any], hints: dict[str, Any], **more: Any) -> Any:
        """One request; adds the model's message to the conversation, and returns it."""
        answer = self.client.chat.completions.create(
            model=self.model,
            messages=messages,
            temperature=0,
            extra_body={"custom_params": {"hier_kv_hints": hints}},
            **more,
        )
        assert answer.usage is not None
        found = getattr(answer.usage.prompt_tokens_details, "hier_kv", None) or {}
        self.total["prompt"] += answer.usage.prompt_tokens
        self.total.update({tier: found.get(tier, 0) for tier in TIERS})
        print(f"  {answer.usage.prompt_tokens} prompt tokens,", reused(found), f"({hints})")
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        return message

    def look_up(self, messages: list[Any], returns_in_s: float) -> None:
        """One turn: the model calls the tool, and the tool's answer joins the conversation."""
        message = self.think(
            messages,
            {"returns_in_s": round(returns_in_s, 2)},
            tools=[tool(list(self.texts))],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=256,
        )
        for call in message.tool_calls or ():
            title = json.loads(call.function.arguments)["title"]
            print(f"  {call.function.name}({title!r})")
            content = self.texts[title][: self.chars]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})


def reused(by_tier: dict[str, int]) -> str:
    """Reused tokens by tier, in words."""
    return ", ".join(f"{tier} {by_tier.get(tier, 0)}" for tier in TIERS)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the agents, turn by turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--turns", type=int, default=2, help="how often each calls the tool")
    parser.add_argument("--chars", type=int, default=1200, help="of a section, at most")
    parser.add_argument("--handbook", type=Path, default=HANDBOOK, help="with sections (## ...)")
    args = parser.parse_args(argv)
    key = os.environ.get("OPENAI_API_KEY", "-")
    client = OpenAI(base_url=f"{args.url}/v1", api_key=key)
    try:
        model = client.models.list().data[0].id
    except OpenAIError as error:
        why = " ".join(str(error.__cause__ or error).split())
        start = "start one as the head of this file says, or give its --url"
        parser.exit(2, f"{parser.prog}: no server answers at {args.url} ({why}); {start}\n")
    texts = sections(args.handbook)
    agents = Agents(client, model, texts, args.chars)
    contents = "You look things up in a handbook. Its sections are:\n" + "\n".join(texts)
    system = {"role": "system", "content": contents}
    print("the beginning of all prompts")
    agents.think([system, {"role": "user", "content": "Hello"}], {"pin_s": PIN_S}, max_tokens=1)
    chats = {t: [system, {"role": "user", "content": f"What about {t}?"}] for t in TASKS}
    round_s = FIRST_GUESS_S
    for turn in range(args.turns):
        began_s = time.monotonic()
        for task, messages in chats.items():
            print(f"turn {turn + 1}, {task}")
            agents.look_up(messages, round_s)
        round_s = time.monotonic() - began_s
    for task, messages in chats.items():
        print(f"answer, {task}")
        agents.think(messages, {"ends": True}, max_tokens=32)
    print(f"all: {agents.total['prompt']} prompt tokens,", reused(agents.total))


if __name__ == "__main__":
    main()
