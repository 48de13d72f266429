"""Ranks of one server of a hybrid without the server: a window or state world for each.

A row, window or state that is not a request's own fails at once.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.provenance.request_state import state_of
from tests.property.worlds.rank_of_many import RankOfMany
from tests.property.worlds.state_world import StateWorld
from tests.property.worlds.window_world import Request, WindowWorld


class _Rank(WindowWorld, RankOfMany):
    """What a world of either kind does otherwise as one of several."""

    def do(self, kind: str) -> None:
        super().do(kind)
        self.note(kind)
        self.may_lose()

    def note(self, kind: str) -> None:
        """What has to be alike: what was decided, and what SGLang's tree and pools came to."""
        self.trace.append((
            kind,
            [req.rid for req in self.waiting],
            [(req.rid, req.prefix_len, req.num_loaded) for req in self.running],
            len(self.cache.linker.pending_offloads),
            sorted(self.cache.linker.hit_markers),
            self.rows_left(),
            self.rows_in_use(),
            self.branches(),
        ))  # fmt: skip

    def rows_left(self) -> list[int]:
        """What is free on the device, of each pool."""
        raise NotImplementedError

    def rows_in_use(self) -> list[int]:
        """What the tree has and may not give up, of each pool."""
        raise NotImplementedError

    def branches(self) -> list[Any]:
        """Where SGLang was asked to keep a state, or where windows will be saved."""
        raise NotImplementedError

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        admitted = super().admit(req, chunk)
        self.trace.append(("admitted" if admitted else "held", req.rid, req.num_loaded))
        self.counts["loaded"] += bool(admitted and req.num_loaded)
        return admitted

    def _do_steer(self) -> bool:
        return False

    def settle(self) -> None:
        self.cache.quiesce()
        super().settle()


class WindowRank(_Rank):
    """A rank of a model with window layers."""

    def rows_left(self) -> list[int]:
        """See `_Rank`."""
        parts = self.allocator.full_attn_allocator, self.allocator.swa_attn_allocator
        return [int(each.available_size()) for each in parts]

    def rows_in_use(self) -> list[int]:
        """See `_Rank`."""
        return [int(self.cache.full_protected_size()), int(self.cache.swa_protected_size())]

    def branches(self) -> list[Any]:
        """See `_Rank`."""
        return [sorted(state_of(req).resume_pages) for req in (*self.waiting, *self.running)]


class StateRank(_Rank, StateWorld):
    """A rank of a model with states."""

    def rows_left(self) -> list[int]:
        """See `_Rank`."""
        parts = self.allocator, self.req_pool.mamba_allocator
        return [int(each.available_size()) for each in parts]

    def rows_in_use(self) -> list[int]:
        """See `_Rank`."""
        return [int(self.cache.full_protected_size()), int(self.cache.mamba_protected_size())]

    def branches(self) -> list[Any]:
        """See `_Rank`."""
        return sorted(self._branches.items())
