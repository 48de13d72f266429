"""Ranks whose conversations overflow: a truncation world for each, in which K is rotated.

Half of each K row is what its fingerprint says, rotated to the row's position. So a row that was
moved has to be what the model would have written at its new place, to rounding, and a row that was
left where it was, or moved elsewhere, fails at once.

Where one rank keeps the pages of all, a rank's copies end at once here, but its readings do so some
steps later, by its own chance, as on a device that is behind: until then no slot of theirs may
change.

Text of a conversation that ended is now and then not kept on one rank alone, so that ranks find
other text, or none.
"""

from __future__ import annotations

import hashlib
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels.rope import RopeSpec, naive
from sglang_ext.provenance.request_state import state_of
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.ranks.shared_promises import SharedBook
from sglang_ext.tiers.records.record import HEADER_BYTES
from sglang_ext.tiers.store import KeySpace, LoadTicket
from sglang_ext.truncation.agreed_quotes import AgreedQuotes
from sglang_ext.truncation.lineage import QuoteLineage, lineage_of
from tests.property.worlds.taint_world import HEADS, LAYERS, Request, Wrong
from tests.property.worlds.truncation_world import CONTEXT, TruncationWorld
from tests.property.worlds.world_ranks import WorldRank

_FIRST, _ROTATED = 8, 16  # elements of a head that are rotated
_TOLERANCE = 0.05  # of values up to 2, rounded to bfloat16 three times
MOST_LATE_STEPS = 30  # of a reading, behind the copy
STEPS_A_CLEAR = 170
TEXT_LOSS = 0.1  # of a conversation, on one rank alone


def rope() -> LayerRope:
    """A rotary embedding of a part of each head."""
    angles = np.arange(2 * CONTEXT)[:, None] * 100.0 ** (-np.arange(_ROTATED // 2) / 8)[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return LayerRope(RopeSpec(cos, sin, _ROTATED, _FIRST, False, "eager"), movable=True)


class TruncationRank(WorldRank, TruncationWorld):
    """One rank."""

    num_steps = 250

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        ropes = [rope() for _ in range(LAYERS)]
        super().__init__(folder, patch, seed, ropes=ropes, **options)
        assert ropes[0].spec is not None
        self._spec = ropes[0].spec
        quotes = self.cache.quotes
        assert isinstance(quotes, AgreedQuotes)
        self._note_text = quotes.note
        patch.setattr(quotes, "note", self._may_note)

    def _may_note(self, req: Request, space: KeySpace, num_tokens: int) -> None:
        if self.own.random() >= TEXT_LOSS:
            self._note_text(req, space, num_tokens)

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

    def step(self) -> None:
        """As the world's; now and then promises are void, and a request is given up."""
        kind = self.rng.random()
        if kind < 0.01:
            self.cache.weights_change()
        elif kind < 0.02 and self.waiting:
            self.give_up_one()
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
            *self.of_sglang(),
        ))  # fmt: skip

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        admitted = super().admit(req, chunk)
        lineage = lineage_of(req)
        moved, made_of = 0, None
        if admitted and lineage is not None and lineage.loaded is not None:
            moved, made_of = lineage.num_moved, lineage.loaded.digest()
        name = None if lineage is None else lineage.key
        self.trace.append((admitted, req.rid, name, moved, made_of, state_of(req).reused))
        self.counts["loaded"] += bool(moved)
        self.counts["quoted"] += bool(moved) and isinstance(lineage, QuoteLineage)
        return admitted

    def retract(self, req: Request) -> None:
        """As the world's; SGLang puts it in the queue anew."""
        super().retract(req)
        self.enqueue(req)


class OneCopyRank(TruncationRank):
    """One of several ranks of which one keeps the pages of all.

    Attributes:
        num_late: readings that ended behind the copy.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        super().__init__(folder, patch, seed, **options)
        self.num_late = self._now = self._num_steps = 0
        self._late: deque[tuple[int, LoadTicket, str]] = deque()
        self._end_load = self.store.end_load
        patch.setattr(self.store, "end_load", self._end_later)

    @property
    def num_readings(self) -> int:
        """Readings that are not over on all ranks; the same number on each."""
        admission = self.cache.admission
        assert isinstance(admission, Lockstep)
        assert isinstance(admission.promises, SharedBook)
        return len(admission.promises.readings)

    def _end_later(self, ticket: LoadTicket) -> None:
        """From the load's thread, or the scheduler's."""
        if ticket.reading is None:
            self._end_load(ticket)
            return
        steps = self.own.randrange(MOST_LATE_STEPS)
        self._late.append((self._now + steps, ticket, self._content(ticket)))

    def _content(self, ticket: LoadTicket) -> str:
        """Without the headers, in which the keeper may put a checksum."""
        return hashlib.sha256(self.arena.slots[ticket.slots, HEADER_BYTES:].tobytes()).hexdigest()

    def _end_late(self, *, all_of_them: bool = False) -> None:
        self._now += 1
        for _ in range(len(self._late)):
            due, ticket, content = self._late.popleft()
            if not all_of_them and due > self._now:
                self._late.append((due, ticket, content))
                continue
            assert self._content(ticket) == content, "a page changed while it was read"
            self._end_load(ticket)
            self.num_late += 1

    def step(self) -> None:
        """As the world's; at some steps the tiers are cleared."""
        self._end_late()
        self._num_steps += 1
        if self._num_steps % STEPS_A_CLEAR == 0:
            self.cache.clear_storage_backend()
            self.counts["cleared"] = self.counts.get("cleared", 0) + 1
        super().step()

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        """Counts the cut prompts that loaded."""
        admitted = super().admit(req, chunk)
        if admitted and lineage_of(req) is not None:
            self.counts["loaded"] += bool(state_of(req).num_loaded_tokens)
        return admitted

    def lose(self) -> None:
        """What is lost is lost to all."""
        if self.store.keeps_pages:
            super().lose()

    def settle(self) -> None:
        """As the world's, when all have read."""
        self.cache.quiesce()
        while self.num_readings:
            self._end_late(all_of_them=True)
            self.cache.check_hicache_events()
        if self.store.keeps_pages:
            super().settle()
            return
        self.cache.quiesce()
        self.cache.check_hicache_events()
        self.check_tree()
        self.arena.check()
        assert not np.any(self.arena._pins)
