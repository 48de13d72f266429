"""What is asked of a server: chats by their rate and lengths, or the requests of a trace."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from sglang_ext.simulator.demand import Demand, of_conversations, of_requests
from sglang_ext.simulator.trace import Line
from sglang_ext.simulator.types import Conversation, TraceRequest, Turn, Workload
from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS

_SEED = 11
# So many chats live at a time in the simulation, at most: with fewer chats, and as many times less
# memory, the share of hits is the same.
_MAX_LIVE = 100.0
_MIN_CHATS = 200
# What a size takes to simulate goes by the pages of all prompts, by turns, and by chats. Beyond so
# many pages fewer chats are simulated, and then longer pages, of which a prompt has enough still.
_MOST_PROMPT_PAGES = 600_000
_LEAST_CHATS = 40
_PAGES_OF_A_PROMPT = 64
_LIVES = 3.5  # the simulation lasts so many lives of a chat, of which the first ones warm up
_WARM_UP_SHARE = 0.4
# A server is taken to be fast enough for its traffic: without reuse it would be busy half the time.
_LOAD = 0.5
_MOST_TURNS = 20_000
# In virtual time, which is counted in seconds from the first chat on: a token's still has to count.
LEAST_CHATS_PER_HOUR, MOST_CHATS_PER_HOUR = 1e-6, 1e9
_LONGEST_LIFE_S = 1e9


@dataclass(frozen=True)
class Chats:
    """Traffic of chats. All are means; lengths vary by half, think times and starts by chance.

    Attributes:
        per_hour: chats that begin in an hour.
        turns: of a chat.
        system_tokens: at the start of every chat, the same for all.
        first_tokens: of the first question, with what only this chat has (a document).
        turn_tokens: of each later question.
        answer_tokens: of each answer.
        think_s: from an answer to the next question.
    """

    per_hour: float
    turns: float = 5.0
    system_tokens: int = 0
    first_tokens: int = 500
    turn_tokens: int = 200
    answer_tokens: int = 300
    think_s: float = 60.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value, name = getattr(self, field.name), field.name
            if name == "per_hour":
                continue
            least = 1.0 if name in ("turns", "first_tokens", "answer_tokens") else 0.0
            if math.isfinite(value) and value >= least:
                continue
            raise ValueError(
                f"--{name.replace('_', '-')} must be a number of at least {least:g}, got "
                f"{value:g}; leave it out for {field.default:g}"
            )
        if not LEAST_CHATS_PER_HOUR <= self.per_hour <= MOST_CHATS_PER_HOUR:
            raise ValueError(
                f"--chats-per-hour must be from {LEAST_CHATS_PER_HOUR:g} to "
                f"{MOST_CHATS_PER_HOUR:g}, got {self.per_hour:g}; say how many chats begin in an "
                "hour"
            )


@dataclass(frozen=True)
class Traffic:
    """A workload for the simulator, and the server that it is given to.

    Attributes:
        workload: what is asked.
        page_tokens: tokens of a page in the simulation.
        scale: memory and speed of the machine in the simulation for those in reality.
        tokens: in reality, of what is worth keeping at a time.
        warmup_turns: turns that are not measured.
        prefill_tokens_per_s: of the simulated server.
        decode_tokens_per_s: of each request.
        batch: requests that it runs at a time.
        demand: what is asked for, in reality.
    """

    workload: Workload
    page_tokens: int
    scale: float
    tokens: float
    warmup_turns: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    batch: int
    demand: Demand

    @property
    def load(self) -> float:
        """Of the device with room for everything: share of the time in which it prefills."""
        return self.demand.load(self.prefill_tokens_per_s / self.scale, self.demand.possible)


def of_chats(
    chats: Chats, page_tokens: int, decode_tokens_per_s: float, kv_bytes_per_token: int = 1
) -> Traffic:
    """Chats that begin by chance at a rate, long enough for a steady state.

    Args:
        chats: the chats.
        page_tokens: of the server; pages of long prompts are longer in the simulation.
        decode_tokens_per_s: of each request.
        kv_bytes_per_token: no page is longer than a record may be.

    Raises:
        ValueError: they are more than can be simulated, or last longer.
    """
    life_s = chats.turns * (chats.think_s + chats.answer_tokens / decode_tokens_per_s)
    if life_s > _LONGEST_LIFE_S:
        raise ValueError(
            f"a chat would last {life_s:.3g} s, at most {_LONGEST_LIFE_S:g} can be simulated; give "
            "a shorter --think-s, fewer --answer-tokens, or a larger --decode-tokens-per-s"
        )
    per_s = chats.per_hour / 3600
    live = max(per_s * life_s, 1e-6)
    scale = min(1.0, _MAX_LIVE / live)
    wanted = int(max(_MIN_CHATS, _LIVES * live * scale))
    count, page_tokens = _affordable(chats, wanted, page_tokens, kv_bytes_per_token)
    if count < wanted:
        scale = min(scale, count / _LIVES / live)
    workload = _conversations(chats, count, per_s * scale)
    prompt = sum(_prompt_tokens(each) for each in workload)
    turns = sum(len(each.turns) for each in workload)
    span_s = workload[-1].start_s + life_s
    later = (chats.turns - 1) / 2 * (chats.turn_tokens + chats.answer_tokens)
    context = chats.first_tokens + chats.answer_tokens + later
    return Traffic(
        workload,
        page_tokens,
        scale,
        live * context + chats.system_tokens,
        int(_WARM_UP_SHARE * turns),
        max(prompt / span_s / _LOAD, 1.0),
        decode_tokens_per_s,
        _batch(turns * chats.answer_tokens / span_s, decode_tokens_per_s),
        of_conversations(workload, page_tokens, per_s),
    )


def _affordable(
    chats: Chats, count: int, page_tokens: int, kv_bytes_per_token: int
) -> tuple[int, int]:
    """How many chats to simulate, and with how many tokens a page.

    Raises:
        ValueError: there would be too many turns or pages.
    """
    # The turns of a chat are geometric: with a mean of N there are N * N prompts' worth of turns.
    later = (chats.turns - 1) * (chats.turn_tokens + chats.answer_tokens)
    tokens = chats.turns * (chats.system_tokens + chats.first_tokens + later)
    most_page_tokens = min(
        (MAX_RECORD_BLOCKS - 1) * BLOCK_BYTES // kv_bytes_per_token,
        tokens / chats.turns / _PAGES_OF_A_PROMPT,
    )
    few = min(count, _LEAST_CHATS)
    while few * tokens > _MOST_PROMPT_PAGES * page_tokens and 2 * page_tokens <= most_page_tokens:
        page_tokens *= 2
    most = min(_MOST_PROMPT_PAGES * page_tokens / tokens, _MOST_TURNS / chats.turns)
    if most < few:
        raise ValueError(
            f"{few} chats are simulated at the least, with {_MOST_TURNS:,} turns and prompts of "
            f"{_MOST_PROMPT_PAGES:,} pages of {page_tokens} tokens at most; these would have "
            f"{few * chats.turns:,.0f} turns and {few * tokens / page_tokens:,.0f} pages; give "
            "shorter chats, or a larger --page-size"
        )
    return min(count, int(most)), page_tokens


def of_trace(
    lines: Sequence[Line], block_tokens: int, page_bytes_at_most: float, decode_tokens_per_s: float
) -> Traffic:
    """The requests of a trace, at its times.

    Args:
        lines: the trace.
        block_tokens: tokens of one of its blocks.
        page_bytes_at_most: bytes of a token's KV, to cut blocks that are too long for a record.
        decode_tokens_per_s: of each request.
    """
    page_tokens = block_tokens
    while page_tokens * page_bytes_at_most + BLOCK_BYTES > MAX_RECORD_BLOCKS * BLOCK_BYTES:
        if page_tokens % 2:
            raise ValueError("blocks of the trace are too long for a page; give shorter ones")
        page_tokens //= 2
    parts = np.arange(block_tokens // page_tokens)
    requests = []
    for line in lines:
        pages = (line.hash_ids[:, None] * len(parts) + parts).reshape(-1)
        whole = pages[: line.input_tokens // page_tokens]  # a server stores whole pages
        requests.append(TraceRequest(line.arrival_s, whole, line.input_tokens, line.output_tokens))
    distinct = len({page for each in requests for page in each.page_ids.tolist()})
    if not distinct:
        raise ValueError(f"no prompt of the trace has a whole page of {page_tokens} tokens")
    span_s = max(lines[-1].arrival_s - lines[0].arrival_s, 1.0)
    prompt = sum(line.input_tokens for line in lines)
    output = sum(line.output_tokens for line in lines)
    return Traffic(
        requests,
        page_tokens,
        1.0,
        float(distinct * page_tokens),
        0,
        max(prompt / span_s / _LOAD, 1.0),
        decode_tokens_per_s,
        _batch(output / span_s, decode_tokens_per_s),
        of_requests(requests, page_tokens, span_s),
    )


def with_prefill(traffic: Traffic, tokens_per_s: float) -> Traffic:
    """The same for a server of a given speed; one of part of the traffic has that part of it."""
    return replace(traffic, prefill_tokens_per_s=tokens_per_s * traffic.scale)


def _batch(tokens_per_s: float, decode_tokens_per_s: float) -> int:
    return max(24, math.ceil(2 * tokens_per_s / decode_tokens_per_s / (1 - _LOAD)))


def _conversations(chats: Chats, count: int, per_s: float) -> list[Conversation]:
    rng = np.random.default_rng(_SEED)
    starts = np.cumsum(rng.exponential(1 / per_s, count)).tolist()
    made = []
    for start_s in starts:
        num = int(rng.geometric(1 / chats.turns))
        think = rng.exponential(chats.think_s, num).tolist()
        vary = rng.uniform(0.5, 1.5, (num, 2)).tolist()
        turns = tuple(
            Turn(
                max(1, round((chats.turn_tokens if at else chats.first_tokens) * vary[at][0])),
                max(1, round(chats.answer_tokens * vary[at][1])),
                think[at],
            )
            for at in range(num)
        )
        shared = 0 if chats.system_tokens else -1
        made.append(Conversation(start_s, turns, shared, chats.system_tokens))
    return made


def _prompt_tokens(chat: Conversation) -> int:
    total, context = 0, chat.prefix_tokens
    for turn in chat.turns:
        context += turn.new_tokens
        total += context
        context += turn.output_tokens
    return total
