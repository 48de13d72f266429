"""Hit rate and time to first token of a server on which 30 % of the conversations overflow.

With the feature the client sends its whole history and the server cuts it. Without it the client
cuts by the same rule, as it must, and what it keeps stands at other positions than before: past the
head everything is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.codec.corpus import TEXT
from bench.core.case import CaseFailedError
from bench.core.stats import median, percentile
from sglang_ext.truncation.cut import CutRule
from sglang_ext.truncation.marks import marks_of_tokenizer
from testkit.requests import settle
from testkit.server import Server, ServerError
from testkit.workload import load_tokenizer

OVERFLOW_SHARE = 0.3
_CONTEXT, _PAGE = 1024, 16
_NEW_TOKENS, _MESSAGE_TOKENS = 8, (70, 130)
_SYSTEM = "<|system|>You answer from the manual.<|end|>"
_SHORT_TURNS = 4
_HOST_GB = "0.1"
_SIDES = {"with": "overflow", "without": "off"}


@dataclass
class Turn:
    """One answered request.

    Attributes:
        chat, turn: which.
        dropped: tokens that were cut out of it.
        is_new_cut: whether it is the first behind a cut.
        sent, prompt, cached: tokens of the whole history, of the prompt served, and reused.
        ttft_ms: until the first token.
    """

    chat: int
    turn: int
    dropped: int
    is_new_cut: bool
    sent: int
    prompt: int
    cached: int
    ttft_ms: float


@dataclass
class Served:
    """All turns of a side, by `with` and `without`."""

    turns: dict[str, list[Turn]] = field(default_factory=dict)

    def hit_rate(self, side: str, *, at_cuts: bool = False) -> float:
        """Share of prompt tokens that were reused, over all turns but each chat's first."""
        turns = [t for t in self.turns[side] if t.turn and (t.is_new_cut or not at_cuts)]
        return sum(t.cached for t in turns) / sum(t.prompt for t in turns)

    def ttft(self, side: str, *, at_cuts: bool = False) -> list[float]:
        """Milliseconds of each turn but each chat's first."""
        return [t.ttft_ms for t in self.turns[side] if t.turn and (t.is_new_cut or not at_cuts)]

    def figures(self) -> dict[str, Any]:
        """The keys of the report."""
        out: dict[str, Any] = {}
        for side in _SIDES:
            out[f"hit_rate_{side}"] = self.hit_rate(side)
            out[f"hit_rate_at_cuts_{side}"] = self.hit_rate(side, at_cuts=True)
            for name, at_cuts in (("ttft", False), ("ttft_at_cuts", True)):
                times = self.ttft(side, at_cuts=at_cuts)
                out[f"{name}_p50_ms_{side}"] = median(times)
                out[f"{name}_p95_ms_{side}"] = percentile(times, 95)
        return out


class _Client:
    """Conversations whose user messages are pieces of the bundled manuals."""

    def __init__(self, num_chats: int) -> None:
        self.tokenizer = load_tokenizer()
        rng = np.random.default_rng(11)
        paths = sorted(path for path in TEXT.glob("*/*") if path.name != "COPYRIGHT")
        text = "\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
        self.manual = self._ids(text)
        num_long = round(OVERFLOW_SHARE * num_chats)
        # Long enough for one cut at least and two at most.
        turns = [int(rng.integers(11, 17)) for _ in range(num_long)]
        turns += [_SHORT_TURNS] * (num_chats - num_long)
        self.num_turns = [int(count) for count in rng.permutation(turns)]
        self.messages = [[self._message(rng) for _ in range(count)] for count in self.num_turns]
        self.marks = marks_of_tokenizer(_hf_tokenizer())
        # The server keeps a few tokens of the context to itself; so does the client.
        self.rule = CutRule(_CONTEXT - 8, align=_PAGE)

    def begin(self, chat: int) -> list[int]:
        """Tokens before the first turn; each chat has its own system prompt."""
        return [0, *self._ids(_SYSTEM.replace("manual", f"manual {chat}"))]

    def _message(self, rng: np.random.Generator) -> list[int]:
        count = int(rng.integers(*_MESSAGE_TOKENS))
        start = int(rng.integers(0, len(self.manual) - count))
        words = self.manual[start : start + count]
        return [*self._ids("<|user|>"), *words, *self._ids("<|end|><|assistant|>")]

    def end(self) -> list[int]:
        """What ends an answer."""
        return self._ids("<|end|>")

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def measure_served(folder: Path, num_chats: int, tell: Callable[[str], None]) -> Served:
    """Runs the workload on a server with truncation and on one without.

    Raises:
        CaseFailedError: a prompt over the context was not cut, or was not served.
    """
    client, served = _Client(num_chats), Served()
    for side, setting in _SIDES.items():
        tell(f"serving, {side}: starting")
        # A third of what all chats need at once stays on the device; DRAM holds all.
        pool = max(2 * _CONTEXT, num_chats * _CONTEXT // 6) // _PAGE * _PAGE
        args = ["--context-length", _CONTEXT, "--page-size", _PAGE, "--max-total-tokens", pool]
        args += ["--enable-hier-kv", "--hier-kv-truncation", setting]
        args += ["--hier-kv-host-size", _HOST_GB, "--hier-kv-disk-dir", folder / side]
        args += ["--hier-kv-disk-size", "1", "--attention-backend", "cpu_extend"]
        with Server([str(arg) for arg in args], stop="kill", start_timeout_s=600) as server:
            served.turns[side] = _run(server, client, side, tell)
    _check(served)
    return served


def _run(server: Server, client: _Client, side: str, tell: Callable[[str], None]) -> list[Turn]:
    done: list[Turn] = []
    history = [client.begin(chat) for chat in range(len(client.num_turns))]
    starts: list[int | None] = [None] * len(history)
    for turn in range(max(client.num_turns)):
        tell(f"serving, {side}: turn {turn} of {max(client.num_turns)}")
        for chat, messages in enumerate(client.messages):
            if turn >= len(messages):
                continue
            text = history[chat] = history[chat] + messages[turn]
            cut = _cut(client, text)
            sent = text if side == "with" or not cut.is_cut else cut.keep(text)
            ttft_ms, meta, answer = _ask(server, sent)
            dropped = len(text) - int(meta["prompt_tokens"])
            is_new = dropped > 0 and starts[chat] != dropped
            starts[chat] = dropped
            prompt, cached = int(meta["prompt_tokens"]), int(meta["cached_tokens"])
            done.append(Turn(chat, turn, dropped, is_new, len(text), prompt, cached, ttft_ms))
            history[chat] = history[chat] + answer + client.end()
        settle(server)
    return done


def _cut(client: _Client, text: list[int]) -> Any:
    rule, messages = client.rule, client.marks.find(text)
    if len(text) + _NEW_TOKENS <= rule.context_len:
        return rule.cut(0, 1, 0)
    limit = rule.context_len - rule.room(_NEW_TOKENS)
    return rule.cut(len(text), limit, rule.head_len(messages.first), messages)


def _ask(server: Server, ids: list[int]) -> tuple[float, dict[str, Any], list[int]]:
    begin_s = time.perf_counter()
    first_s = 0.0
    event: dict[str, Any] = {}
    sampling = {"max_new_tokens": _NEW_TOKENS, "ignore_eos": True}
    try:
        for last in server.stream(input_ids=ids, sampling_params=sampling):
            first_s = first_s or time.perf_counter()
            event = last
    except ServerError as error:
        raise CaseFailedError(f"a prompt of {len(ids)} tokens was refused: {error}") from error
    reason = event["meta_info"].get("finish_reason") or {}
    if reason.get("type") == "abort" or len(event["output_ids"]) != _NEW_TOKENS:
        raise CaseFailedError(f"a prompt of {len(ids)} tokens was not answered whole: {reason}")
    return 1e3 * (first_s - begin_s), event["meta_info"], event["output_ids"]


def _check(served: Served) -> None:
    for side, turns in served.turns.items():
        chats = {turn.chat for turn in turns}
        over = {turn.chat for turn in turns if turn.dropped}
        if any(turn.prompt + _NEW_TOKENS > _CONTEXT for turn in turns):
            raise CaseFailedError(f"{side}: a prompt over the context was served uncut")
        if any(turn.dropped < 0 or turn.cached > turn.prompt for turn in turns):
            raise CaseFailedError(f"{side}: a prompt is reported longer than it was sent")
        if abs(len(over) / len(chats) - OVERFLOW_SHARE) > 0.05:
            raise CaseFailedError(f"{side}: {len(over)} of {len(chats)} conversations overflow")


def _hf_tokenizer() -> Any:
    from transformers import AutoTokenizer

    from bench.codec.bed import BUNDLED_MODEL

    return AutoTokenizer.from_pretrained(str(BUNDLED_MODEL))
