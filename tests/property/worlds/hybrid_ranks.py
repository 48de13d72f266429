"""Ranks of one server of a hybrid without the server: a window or state world for each.

A row, window or state that is not a request's own fails at once.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.provenance.request_state import state_of
from sglang_ext.ranks.consensus import AgreedRequest
from sglang_ext.ranks.resume_promises import ResumeBook
from sglang_ext.tiers.remote import RemoteStore, RemoteStoreConfig
from sglang_ext.tiers.remote.breaker import BreakerConfig
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from tests.property.worlds.hostile_engine import HostileEngine
from tests.property.worlds.rank_of_many import RankOfMany, run_worlds
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


class _RemoteRank(_Rank):
    """A rank with a remote store and no disk; what its world is comes from a class beside it.

    Attributes:
        num_unanswered: questions that are not answered.

    Args:
        folder: of the world.
        patch: undone with the test.
        seed: of what is done.
        behaviour: of the store; see `HostileEngine`.
        silent: share of what it is asked that it never answers.
        options: of the world.
    """

    num_unanswered = 0

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        behaviour: dict[str, Any],
        silent: float = 0.0,
        **options: Any,
    ) -> None:
        self._engine = HostileEngine(random.Random(f"{seed} {folder.name}"), **behaviour)
        config = RemoteStoreConfig(breaker=BreakerConfig(first_wait_s=0.01, max_wait_s=0.05))
        remote = RemoteStore(config=config, engine=self._engine)
        assert remote.wait_usable(300.0)
        super().__init__(folder, patch, seed, remote=remote, disk_bytes=0, **options)
        asks = self.store.ask_remote

        def ask_remote(lookup: RemoteLookup) -> bool:
            if self.own.random() >= silent:
                return asks(lookup)
            self.num_unanswered += 1
            return True

        patch.setattr(self.store, "ask_remote", ask_remote)

    def lose(self) -> None:
        """As `RankOfMany.lose`, or the store forgets some of what this rank gave it."""
        names = list(self._engine.values)
        if not names or self.own.random() < 0.5:
            super().lose()
            return
        for name in self.own.sample(names, min(6, len(names))):
            self.num_lost += self._engine.values.pop(name, None) is not None


class RemoteWindowRank(_RemoteRank, WindowRank):
    """A rank of a model with window layers, with a remote store and no disk."""


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


class RemoteStateRank(_RemoteRank, StateRank):
    """A rank of a model with states, with a remote store and no disk."""


def run_alike(
    kind: Any,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    seed: int,
    own: list[dict[str, Any]],
    num_loads: int,
    **options: Any,
) -> list[Any]:
    """Ranks that have decided alike; see `run_worlds`."""
    ranks = run_worlds(kind, folder, patch, seed=seed, num_loads=num_loads, own=own, **options)
    for rank in ranks[1:]:
        pairs = zip(ranks[0].trace, rank.trace, strict=True)
        assert next((pair for pair in pairs if pair[0] != pair[1]), None) is None
    return ranks


# What a rank might do wrong that has its part of a state where another one has not.
def by_its_own_part(book: Any, handle: Any, promise: Any, agreed: AgreedRequest) -> None:
    """Each goes by whether its own part is there, and not by whether all ranks' are."""
    quality = min(agreed.quality, 255) if promise.is_whole else 1 << 8
    _settle_one(book, handle, promise, agreed._replace(quality=quality))


def by_its_own_place(book: Any, handle: Any, promise: Any, agreed: AgreedRequest) -> None:
    """Each goes on from the place that it has named."""
    end = promise.point.end_page
    _settle_one(book, handle, promise, agreed._replace(first_page=end, end_page=end))


def by_its_own_time(book: Any, handle: Any, promise: Any, agreed: AgreedRequest) -> None:
    """One whose store has answered does not wait for the others."""
    admit = agreed.admit or (promise.question is None and promise.is_whole)
    _settle_one(book, handle, promise, agreed._replace(admit=admit))


_settle_one = ResumeBook._settle_one
