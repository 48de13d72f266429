"""Ranks whose conversations overflow: a truncation world for each, in which K is rotated.

Half of each K row is what its fingerprint says, rotated to the row's position. So a row that was
moved has to be what the model would have written at its new place, to rounding, and a row that was
left where it was, or moved elsewhere, fails at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels.rope import RopeSpec, naive
from sglang_ext.provenance.request_state import state_of
from sglang_ext.truncation.lineage import lineage_of
from tests.property.worlds.rank_of_many import RankOfMany
from tests.property.worlds.taint_world import HEADS, LAYERS, Request, Wrong
from tests.property.worlds.truncation_world import CONTEXT, TruncationWorld

_FIRST, _ROTATED = 8, 16  # elements of a head that are rotated
_TOLERANCE = 0.05  # of values up to 2, rounded to bfloat16 three times
STEPS = 250


def rope() -> LayerRope:
    """A rotary embedding of a part of each head."""
    angles = np.arange(2 * CONTEXT)[:, None] * 100.0 ** (-np.arange(_ROTATED // 2) / 8)[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return LayerRope(RopeSpec(cos, sin, _ROTATED, _FIRST, False, "eager"), movable=True)


class TruncationRank(TruncationWorld, RankOfMany):
    """One rank."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        ropes = [rope() for _ in range(LAYERS)]
        super().__init__(folder, patch, seed, ropes=ropes, **options)
        assert ropes[0].spec is not None
        self._spec = ropes[0].spec

    # ---- K ----

    def forward(self, req: Request, start: int, end: int) -> None:
        super().forward(req, start, end)
        rows = self.rows_of(req, start, end)
        values = self.read_prints(rows, self.kv_pool.v_buffer[0])
        wanted = self._rotated(values, start)
        for buffer in self.kv_pool.k_buffer:
            buffer[rows, :, _FIRST : _FIRST + _ROTATED] = wanted

    def check_attended(self, req: Request, end: int) -> None:
        super().check_attended(req, end)
        if not end:
            return
        rows = self.rows_of(req, 0, end)
        values = self.read_prints(rows, self.kv_pool.v_buffer[0])
        wanted = self._rotated(values, 0).float()
        for buffer in self.kv_pool.k_buffer:
            found = buffer[rows][:, :, _FIRST : _FIRST + _ROTATED].float()
            if float((found - wanted).abs().max()) > _TOLERANCE:
                raise Wrong(f"K of {req.rid} is not that of its positions")

    def _rotated(self, values: list[int], position: int) -> torch.Tensor:
        """What K is, from a position on, of rows with these fingerprints."""
        factors = 2 * np.arange(_ROTATED) + 3
        x = (np.array(values, np.int64)[:, None] * factors % 251 - 125) / 64
        whole = torch.zeros(len(values), HEADS, _FIRST + _ROTATED, dtype=torch.bfloat16)
        whole[..., _FIRST:] = torch.from_numpy(x).to(torch.bfloat16)[:, None]
        positions = position + np.arange(len(values))
        return naive.rotate(whole, positions, self._spec)[..., _FIRST:]

    # ---- what is done ----

    def one_round(self) -> None:
        """See `RankOfMany`."""
        for _ in range(STEPS):
            self.step()
        self.drain()

    def step(self) -> None:
        """As the world's; now and then promises are void, and a request is given up."""
        kind = self.rng.random()
        if kind < 0.01:
            self.cache.weights_change()
        elif kind < 0.02 and self.waiting:
            req = self.waiting.pop(self.rng.randrange(len(self.waiting)))
            self.cache.release_aborted_request(req.cache_request_handle)
        else:
            super().step()
        self.note()
        self.may_lose()

    def note(self) -> None:
        """What has to be alike: what was decided, and what SGLang's tree and pool came to."""
        self.trace.append((
            dict(self.counts),
            [req.rid for req in self.waiting],
            [(req.rid, req.prefix_len, state_of(req).taint) for req in self.running],
            len(self.cache.linker.pending_offloads),
            sorted(self.cache.linker.hit_markers),
            int(self.allocator.available_size()),
            int(self.cache.full_protected_size()),
        ))  # fmt: skip

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        admitted = super().admit(req, chunk)
        lineage = lineage_of(req)
        moved, made_of = 0, None
        if admitted and lineage is not None and lineage.loaded is not None:
            moved, made_of = lineage.num_moved, lineage.loaded.digest()
        self.trace.append((admitted, req.rid, moved, made_of, state_of(req).reused))
        self.counts["loaded"] += bool(moved)
        return admitted

    def retract(self, req: Request) -> None:
        """As the world's; SGLang puts it in the queue anew."""
        super().retract(req)
        self.enqueue(req)

    def _do_flush(self) -> bool | None:
        if self.running or self.waiting:
            return False
        self.cache.quiesce()
        return super()._do_flush()

    def settle(self) -> None:
        """As the world's, with what all ranks have saved."""
        self.cache.quiesce()
        super().settle()
