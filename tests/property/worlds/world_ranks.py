"""Ranks of one server, each of them a world that looks into every row: see `rank_of_many`."""

from __future__ import annotations

from typing import Any, ClassVar

from tests.property.worlds.rank_of_many import RankOfMany
from tests.property.worlds.taint_world import World


class WorldRank(World, RankOfMany):
    """One rank; worlds with more in them come behind it among a class's bases.

    Attributes:
        num_steps: of a round.
    """

    num_steps: ClassVar[int]

    def one_round(self) -> None:
        """See `RankOfMany`."""
        for _ in range(self.num_steps):
            self.step()
        self.drain()

    def give_up_one(self) -> None:
        """A waiting request is given up."""
        req = self.waiting.pop(self.rng.randrange(len(self.waiting)))
        self.cache.release_aborted_request(req.cache_request_handle)

    def of_sglang(self) -> tuple[Any, ...]:
        """What SGLang's tree and pool came to, which has to be alike."""
        return (
            len(self.cache.linker.pending_offloads),
            sorted(self.cache.linker.hit_markers),
            int(self.allocator.available_size()),
            int(self.cache.full_protected_size()),
        )

    def _do_flush(self) -> bool | None:
        if self.running or self.waiting:
            return False
        self.cache.quiesce()
        return super()._do_flush()

    def settle(self) -> None:
        """As the world's, with what all ranks have saved."""
        self.cache.quiesce()
        super().settle()
