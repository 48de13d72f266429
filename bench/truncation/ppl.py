"""Perplexity behind one, two and three cuts: recomputed, reused, and left at old positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from bench.codec.corpus import TEXT
from bench.truncation.chat import CONTEXT, MODES, Conversation, Mode
from bench.truncation.kv import PooledLm, check_transform
from sglang_ext.codec.calibration.hf_capture import I64
from sglang_ext.truncation.cut import CutRule

NUM_CUTS = 3
_HEAD = 4
_STRIDE = 1024  # of windows: what one is scored on, no other is
_BATCH = 8

F64 = NDArray[np.float64]


@dataclass
class Losses:
    """Mean negative log-likelihood in nats of each window, by mode: lists of [windows] by cut."""

    by_mode: dict[Mode, list[list[float]]] = field(
        default_factory=lambda: {mode: [[] for _ in range(NUM_CUTS)] for mode in MODES}
    )

    def perplexity(self, mode: Mode) -> list[float]:
        """Over all windows, after each number of cuts."""
        return [float(np.exp(np.mean(values))) for values in self.by_mode[mode]]

    def ratio(self, mode: Mode) -> list[float]:
        """Perplexity over that of recomputation."""
        both = zip(self.perplexity(mode), self.perplexity("recompute"), strict=True)
        return [value / exact for value, exact in both]

    def interval(self, mode: Mode) -> list[tuple[float, float]]:
        """95 % bootstrap interval of the ratio, over windows."""
        out = []
        for cut in range(NUM_CUTS):
            mine = np.asarray(self.by_mode[mode][cut])
            extra = mine - np.asarray(self.by_mode["recompute"][cut])
            picks = np.random.default_rng(7).integers(0, extra.size, (2000, extra.size))
            low, high = np.percentile(np.exp(extra[picks].mean(axis=1)), [2.5, 97.5])
            out.append((float(low), float(high)))
        return out


def held_out_windows(model: PooledLm) -> list[I64]:
    """Windows of text that the model never saw, long enough to be cut three times."""
    rule = CutRule(CONTEXT)
    step = rule.cut(CONTEXT + 1, CONTEXT, _HEAD).num_dropped
    length = CONTEXT + NUM_CUTS * step
    paths = sorted(path for path in TEXT.glob("*/*") if path.name != "COPYRIGHT")
    text = "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in paths)
    tokens, lead = model.lm.tokenize(text), model.lm.leading_tokens()
    starts = range(0, len(tokens) - length + len(lead) + 1, _STRIDE)
    return [np.concatenate([lead, tokens[at : at + length - len(lead)]]) for at in starts]


def measure_perplexity(model: PooledLm, num_windows: int, tell: Callable[[str], None]) -> Losses:
    """Runs windows, evenly spread over the text.

    Raises:
        CaseFailedError: K is not moved to where it should be.
    """
    windows = held_out_windows(model)
    if num_windows < len(windows):
        picks = np.linspace(0, len(windows) - 1, num_windows).round().astype(int)
        windows = [windows[at] for at in picks]
    check_transform(
        model,
        np.stack(windows[:2])[:, :CONTEXT],
        CutRule(CONTEXT).cut(CONTEXT + 1, CONTEXT, _HEAD),
    )
    losses = Losses()
    for begin in range(0, len(windows), _BATCH):
        tell(f"perplexity, window {begin} of {len(windows)}")
        _run_batch(model, np.stack(windows[begin : begin + _BATCH]), losses)
    return losses


def _run_batch(model: PooledLm, text: I64, losses: Losses) -> None:
    first = Conversation(model, "reuse", _HEAD, batch=len(text))
    first.feed(text[:, :CONTEXT])
    chats = {mode: first.fork(mode) for mode in MODES}
    end = CONTEXT
    for number in range(NUM_CUTS):
        new = CONTEXT - first.rule.cut(end + 1, CONTEXT, _HEAD).num_kept + 1
        end += new
        for mode, chat in chats.items():
            logits = chat.feed(text[:, :end], num_scored=new)
            losses.by_mode[mode][number] += _nll(logits, text[:, end - new : end]).tolist()


def _nll(logits: torch.Tensor, tokens: I64) -> F64:
    """Mean over tokens but the first, by sequence."""
    said = torch.log_softmax(logits[:, :-1], -1)
    following = torch.from_numpy(tokens[:, 1:])[..., None]
    return np.asarray(-said.gather(-1, following)[..., 0].mean(-1, dtype=torch.float64).numpy())
