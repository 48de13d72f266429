"""KV of sequences in an engine's form: bf16 pools by layer, and position-free pages beside them.

The model runs in float32, but K before rotation, V, and K in the pool are rounded to bf16, as a
bf16 engine has them. K is saved and moved by the functions that the server's copies use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from bench.codec.bed import BUNDLED_MODEL
from bench.core.case import CaseFailedError
from sglang_ext.codec.calibration.hf_capture import I64, CausalLm
from sglang_ext.kernels.rope.api import load_k, save_k
from sglang_ext.kernels.rope.spec import Corrections, PagedView, RopeSpec
from sglang_ext.truncation.cut import Cut

Mode = Literal["reuse", "naive"]

PAGE = 16
_MOST_ERROR = 0.03  # of moved K, over its length: some grid points of bf16; a place off is 0.8


class PooledLm:
    """The bundled model, with K and V rounded as a bf16 engine rounds them.

    Attributes:
        lm: the model and its tokenizer.
        spec: its rotary embedding, for the copy functions.
    """

    def __init__(self) -> None:
        self.lm = CausalLm(str(BUNDLED_MODEL))
        decoder = self.lm.model.get_decoder()
        for layer in decoder.layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                projection.register_forward_hook(lambda _m, _i, out: out.bfloat16().float())
        num_positions = int(self.lm.model.config.max_position_embeddings)
        positions = torch.arange(num_positions)[None]
        cos, sin = decoder.rotary_emb(torch.zeros(1), positions)
        half = cos.shape[-1] // 2
        self.spec = RopeSpec(
            np.ascontiguousarray(cos[0, :, :half].numpy(), np.float32),
            np.ascontiguousarray(sin[0, :, :half].numpy(), np.float32),
            2 * half,
            0,
            False,
            "fp32",
        )

    def ids(self, text: str) -> list[int]:
        """Tokens of a text."""
        return [int(token) for token in self.lm.tokenize(text)]


@dataclass
class _Layer:
    """K as cached and V [B * capacity, heads, D], both bf16."""

    keys: torch.Tensor
    values: torch.Tensor


class Cached:
    """KV of B sequences of one length.

    Attributes:
        length: tokens that each has.
        tail_start: where the text behind the head begins in the whole conversation.
    """

    def __init__(self, model: PooledLm, batch: int, capacity: int, tail_start: int = 0) -> None:
        lm = model.lm
        self.model, self.batch, self.capacity = model, batch, -(-capacity // PAGE) * PAGE
        self.length, self.tail_start = 0, tail_start
        shape = (batch * self.capacity, lm.num_kv_heads, lm.head_dim)
        self.layers = [
            _Layer(torch.zeros(shape, dtype=torch.bfloat16), torch.zeros_like(empty))
            for empty in [torch.zeros(shape, dtype=torch.bfloat16)] * lm.num_layers
        ]

    def append(self, ids: I64, num_scored: int = 1) -> torch.Tensor:
        """Runs the model on `ids` [B, T] behind what is cached, and adds its KV, rounded to bf16.

        Returns:
            Logits [B, num_scored, vocabulary] after the last tokens.
        """
        logits, states = self._run(ids, num_scored)
        rows = self.rows(np.arange(self.length, self.length + ids.shape[1]))
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.keys[rows] = keys[:, :, self.length :].transpose(1, 2).flatten(0, 1).bfloat16()
            layer.values[rows] = (
                values[:, :, self.length :].transpose(1, 2).flatten(0, 1).bfloat16()
            )
        self.length += ids.shape[1]
        return logits

    def peek(self, ids: I64) -> torch.Tensor:
        """Logits [N, T, vocabulary] of N different texts behind the one sequence; adds nothing."""
        return self._run(ids, ids.shape[1])[0]

    def truncated(self, cut: Cut, mode: Mode) -> Cached:
        """What is kept of these sequences after a cut, without computing anything.

        Only whole pages are stored, so up to a page less a token at the end is missing: the caller
        appends it with the new text.

        Args:
            cut: of the whole conversation, whose head this one shares.
            mode: `reuse` moves K to its new position, `naive` leaves it where it was.
        """
        whole = self.length // PAGE * PAGE
        first = cut.head + cut.tail_start - self.tail_start  # the tail's first row here
        kept = Cached(self.model, self.batch, self.capacity, cut.tail_start)
        kept.length = cut.head + max(0, whole - first)
        old = np.concatenate([np.arange(cut.head), np.arange(first, max(first, whole))])
        source, target = self.rows(old), kept.rows(np.arange(kept.length))
        for mine, new in zip(self.layers, kept.layers, strict=True):
            new.keys[target] = mine.keys[source]
            new.values[target] = mine.values[source]
            if mode == "reuse" and whole > first:
                self._move(mine.keys, new.keys, kept, cut.head, first, whole)
        return kept

    def saved(self, keys: torch.Tensor, num_tokens: int) -> tuple[PagedView, Corrections]:
        """Position-free pages of the first tokens (whole pages) of each sequence."""
        num_pages = self.batch * num_tokens // PAGE
        page_bytes = PAGE * keys.shape[1] * keys.shape[2] * keys.element_size()
        arena = np.zeros((num_pages, page_bytes), np.uint8)
        view = PagedView(arena, np.arange(num_pages, dtype=np.int64), 0, PAGE)
        positions = np.arange(num_tokens, dtype=np.int64)
        rows = self.rows(positions).numpy()
        fixes = save_k(keys, rows, np.tile(positions, self.batch), self.model.spec, view)
        return view, fixes

    def rows(self, places: I64) -> torch.Tensor:
        """Rows of the pool where each sequence has these places, [B * len(places)]."""
        starts = np.arange(self.batch, dtype=np.int64)[:, None] * self.capacity
        return torch.from_numpy((starts + places[None]).reshape(-1))

    def _move(
        self,
        keys: torch.Tensor,
        new: torch.Tensor,
        kept: Cached,
        head: int,
        first: int,
        whole: int,
    ) -> None:
        view, _ = self.saved(keys, whole)
        pages_each = whole // PAGE
        positions = np.arange(head, head + whole - first, dtype=np.int64)
        for one in range(self.batch):
            slots = view.page_slots[one * pages_each + first // PAGE : (one + 1) * pages_each]
            own = PagedView(view.arena, np.ascontiguousarray(slots), 0, PAGE)
            rows = positions + one * kept.capacity
            load_k(own, positions, self.model.spec, new, rows, None, first % PAGE)

    def _run(
        self, ids: I64, num_scored: int
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        from transformers import DynamicCache

        lm = self.model.lm
        tokens = torch.from_numpy(np.ascontiguousarray(ids, np.int64))
        cache = DynamicCache()
        if self.length:
            rows = self.rows(np.arange(self.length))
            for index, layer in enumerate(self.layers):
                state = [self._heads(part[rows], len(ids)) for part in (layer.keys, layer.values)]
                cache.update(*state, index)
        positions = torch.arange(self.length, self.length + ids.shape[1])[None]
        with torch.no_grad():
            out: Any = lm.model.get_decoder()(
                input_ids=tokens, past_key_values=cache, position_ids=positions, use_cache=True
            )
            last = out.last_hidden_state[:, ids.shape[1] - num_scored :]
            logits: torch.Tensor = lm.model.get_output_embeddings()(last)
        return logits, [(layer.keys, layer.values) for layer in cache.layers]

    def _heads(self, rows: torch.Tensor, batch: int) -> torch.Tensor:
        each = rows.view(self.batch, self.length, *rows.shape[1:]).transpose(1, 2).float()
        return each.expand(batch, -1, -1, -1) if self.batch == 1 else each


def check_transform(model: PooledLm, text: I64, cut: Cut) -> None:
    """That K is moved to the positions that it should be at, and comes back as it was at its own.

    The first layer's K before rotation follows from its token alone, so that moved K must be what
    the model computes at the new place, but for rounding.

    Args:
        model: the model.
        text: [B, n], whole pages of it.
        cut: of that text or a longer one; its tail begins within it.

    Raises:
        CaseFailedError: it is not.
    """
    cached = Cached(model, len(text), text.shape[1], cut.head)
    cached.append(text)
    recomputed = Cached(model, len(text), text.shape[1], cut.tail_start)
    recomputed.append(np.concatenate([text[:, : cut.head], text[:, cut.tail_start :]], axis=1))
    _check_same_place(cached)
    _check_moved(cached.truncated(cut, "reuse"), recomputed, cut.head)


def _check_same_place(cached: Cached) -> None:
    keys = cached.layers[-1].keys
    view, fixes = cached.saved(keys, cached.length)
    again = torch.zeros_like(keys)
    positions = np.arange(cached.length, dtype=np.int64)
    rows = cached.rows(positions)
    load_k(view, np.tile(positions, cached.batch), cached.model.spec, again, rows.numpy(), fixes)
    if not torch.equal(again[rows], keys[rows]):
        raise CaseFailedError("K loaded at its saved position is not what was saved, bit by bit")


def _check_moved(kept: Cached, recomputed: Cached, head: int) -> None:
    places = np.arange(head, kept.length)
    moved = kept.layers[0].keys[kept.rows(places)].float()
    exact = recomputed.layers[0].keys[recomputed.rows(places)].float()
    # Measured against each pair's length, as a small component carries the large one's rounding.
    half = moved.shape[-1] // 2
    length = exact[..., :half].hypot(exact[..., half:])
    worst = float(((moved - exact).abs() / torch.cat([length, length], -1).clamp_min(1e-9)).max())
    if not worst <= _MOST_ERROR:
        raise CaseFailedError(
            f"K of the first layer moved to its new position differs by {worst:.4f} of its length "
            "from K computed there, more than rounding explains"
        )
