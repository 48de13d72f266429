"""A conversation that is sent again and again as it grows, and cut by the product's own rule."""

from __future__ import annotations

from typing import Literal

import numpy as np
import torch

from bench.truncation.kv import Cached, PooledLm
from sglang_ext.codec.calibration.hf_capture import I64
from sglang_ext.truncation.cut import NO_MESSAGES, Cut, CutRule, Messages

Mode = Literal["recompute", "reuse", "naive"]
MODES: tuple[Mode, ...] = ("recompute", "reuse", "naive")
CONTEXT = 512


class Conversation:
    """B conversations of equal lengths under one way of keeping KV over cuts.

    `recompute` computes all that a new cut keeps; `reuse` moves what it has; `naive` leaves it
    where it was.

    Attributes:
        cached: the KV of what is kept.
        cut: the last one.
    """

    def __init__(
        self, model: PooledLm, mode: Mode, head: int, *, batch: int = 1, limit: int = CONTEXT
    ) -> None:
        self.model, self.mode, self.head, self.batch = model, mode, head, batch
        self.limit, self.rule = limit, CutRule(CONTEXT)
        self.cached = Cached(model, batch, CONTEXT, head)
        self.cut = Cut(0, head)

    def feed(
        self, text: I64, messages: Messages = NO_MESSAGES, num_scored: int = 1
    ) -> torch.Tensor:
        """Sends the whole text so far [B, n].

        Returns:
            Logits [B, num_scored, vocabulary] after its last tokens.
        """
        cut = self.rule.cut(text.shape[1], self.limit, self.head, messages)
        if cut.tail_start != self.cut.tail_start:
            self.cached = self._kept(cut)
        self.cut = cut
        prompt = np.concatenate([text[:, : self.head], text[:, cut.tail_start :]], axis=1)
        return self.cached.append(prompt[:, self.cached.length :], num_scored)

    def fork(self, mode: Mode) -> Conversation:
        """Another that goes on from here in another way, at no cost.

        KV is replaced at a cut and added to before it: of several that share it, none may be fed
        without being cut.
        """
        other = Conversation(self.model, mode, self.head, batch=self.batch, limit=self.limit)
        other.cached, other.cut = self.cached, self.cut
        return other

    def _kept(self, cut: Cut) -> Cached:
        if self.mode == "recompute":
            return Cached(self.model, self.batch, CONTEXT, cut.tail_start)
        return self.cached.truncated(cut, self.mode)
