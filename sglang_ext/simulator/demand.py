"""How fast a device has to be for traffic: prompt tokens a second, without reuse and with all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sglang_ext.simulator.types import Conversation, TraceRequest


@dataclass(frozen=True)
class Demand:
    """Prompt tokens a second, of the whole traffic.

    Attributes:
        prompt_tokens_per_s: that are asked for.
        new_tokens_per_s: of them, that no size spares: nobody has asked for them before.
    """

    prompt_tokens_per_s: float
    new_tokens_per_s: float

    @property
    def possible(self) -> float:
        """Share of the prompt tokens that room for everything spares."""
        return 1 - self.new_tokens_per_s / self.prompt_tokens_per_s

    def load(self, prefill_tokens_per_s: float, hit_rate: float = 0.0) -> float:
        """Share of the time in which the device computes prompts; above 1 it cannot keep up.

        Args:
            prefill_tokens_per_s: of the device.
            hit_rate: share of the prompt tokens that are not computed.
        """
        return self.prompt_tokens_per_s * (1 - hit_rate) / prefill_tokens_per_s


def of_conversations(chats: Sequence[Conversation], page_tokens: int, chats_per_s: float) -> Demand:
    """What chats ask for that begin at a rate.

    Args:
        chats: some of them.
        page_tokens: only whole pages are reused.
        chats_per_s: how many begin in a second.
    """
    prompt = new = 0
    for chat in chats:
        context = chat.prefix_tokens
        for turn in chat.turns:
            prompt += context + turn.new_tokens
            new += context % page_tokens + turn.new_tokens
            context += turn.new_tokens + turn.output_tokens
    return Demand(prompt / len(chats) * chats_per_s, new / len(chats) * chats_per_s)


def of_requests(requests: Iterable[TraceRequest], page_tokens: int, span_s: float) -> Demand:
    """What the requests of a trace ask for, in so many seconds."""
    seen: set[int] = set()
    prompt = new = 0
    for request in requests:
        ids = request.page_ids.tolist()
        num_seen = next((at for at, page in enumerate(ids) if page not in seen), len(ids))
        seen.update(ids)
        prompt += request.input_tokens
        new += request.input_tokens - min(num_seen * page_tokens, request.input_tokens - 1)
    return Demand(prompt / span_s, new / span_s)
