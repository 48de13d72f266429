"""Keeps the ranks of a tensor parallel group in step: connects the consensus with SGLang's cache.

Once a scheduler step, in SGLang's own step hook, each rank tells what it knows and all take what
was agreed. Between two such points nothing is decided on what one rank alone knows. The hook runs
behind the requests that came in and before any of them is admitted, so a request that arrives in a
step may be admitted in the same one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from sglang_ext.ranks.consensus import MAX_SAVES, Agreed, Consensus, MinReduce, Report, Vector
from sglang_ext.ranks.promises import PromiseBook
from sglang_ext.ranks.rank import Exchange

if TYPE_CHECKING:
    from sglang_ext.seam.cache import HierKVRadixCache

# How often a waiting request is agreed on again because the device lost pages of its prefix.
_MAX_MOVES = 3


# A request that waited for so many steps is agreed on once more: pages may have become known.
_OLD_STEPS = 8


@dataclass
class AgreedPrompt:
    """What a waiting request is agreed on again with.

    Attributes:
        key: SGLang's key of the pages of its wish.
        num_moves: how often that was done because the device lost pages of it.
        entered: number of the round before which it entered first.
        renewed: it was agreed on once more after a long wait.
    """

    key: Any
    num_moves: int = 0
    entered: int = -1
    renewed: bool = False


class Lockstep:
    """What several ranks agree on, for one cache. Scheduler thread only.

    Attributes:
        promises: of the waiting requests.
        gather: sends bytes to all ranks; returns what each sent, by rank.
    """

    def __init__(self, cache: HierKVRadixCache, min_reduce: MinReduce, gather: Exchange) -> None:
        """Starts with nothing agreed.

        Args:
            cache: this rank's, with its linker and waiting room.
            min_reduce: of the tensor parallel group, see `Consensus`.
            gather: of the same group, for rare events: each call is a collective of its own.
        """
        self._cache = cache
        self.gather = gather
        self._consensus = Consensus(min_reduce)
        self.promises = PromiseBook(
            cache.store,
            cache.waiting_room,
            page_size=cache.page_size,
            find_damaged=cache.hier_linker.find_damaged,
            note=self._consensus.note,
        )
        # Requests whose loads ended on this rank, and whether these landed; until it is agreed.
        self._loads: tuple[list[Any], bool] | None = None

    @property
    def num_rounds(self) -> int:
        """Reductions so far: one a scheduler step, and one at each flush or weight update."""
        return self._consensus.num_rounds

    def may_admit(self, handle: Any) -> bool:
        """False while a request is held, on all ranks alike.

        In a long queue things change: the device loses pages, so that what was promised does not
        meet the device prefix any more, and pages become known. Then it is agreed on again.
        """
        promises = self.promises
        if not promises.may_admit(handle):
            self._cache.waiting_room.hold(handle)
            return False
        prompt = promises.prompt(handle)
        if prompt is None or not self._is_outdated(handle, prompt):
            return True
        matched, _, _ = self._cache.tree_core.match_full_device_prefix(prompt.key)
        promises.enter_again(handle, matched // self._cache.page_size)
        return False

    def _is_outdated(self, handle: Any, prompt: AgreedPrompt) -> bool:
        first_page, num_missing = self.promises.gap(handle)
        if prompt.entered < 0:
            prompt.entered = self.num_rounds
        if num_missing and not prompt.renewed and self.num_rounds >= prompt.entered + _OLD_STEPS:
            prompt.renewed = True
            return True
        if not first_page or prompt.num_moves >= _MAX_MOVES:
            return False
        matched, _, _ = self._cache.tree_core.match_full_device_prefix(prompt.key)
        moved = matched // self._cache.page_size < first_page
        prompt.num_moves += moved
        return bool(moved)

    def step(self) -> list[Any]:
        """Tells and takes; every rank calls it at the same point of its step.

        Returns:
            Requests whose loads did not land on every rank; their output must not be used.
        """
        self._agree()
        return self._end_loads()

    def drain_saves(self) -> None:
        """Takes the results of all saves; each rank has waited for its own before."""
        while len(self._agree().saves) == MAX_SAVES:
            pass

    def loads_ended(self, reqs: list[Any], *, landed: bool) -> None:
        """The loads of a batch ended on this rank; agreed on in the next step, or before it."""
        before, landed_before = self._loads or ([], True)
        self._loads = ([*before, *reqs], landed and landed_before)

    def settle_loads(self, reqs: list[Any]) -> list[Any]:
        """Agrees on the loads of these requests at once: their batch's result is about to be used.

        With SGLang's overlapped scheduling a step lies between a batch and its result, and this
        finds nothing to do. Returns what `step` does.
        """
        if self._loads is None or not any(req in self._loads[0] for req in reqs):
            return []
        return self.step()

    def _agree(self) -> Agreed:
        linker = self._cache.linker
        loads_landed = self._loads is None or self._loads[1]
        report = Report(
            linker.ended_saves(MAX_SAVES),
            self.promises.report(req.cache_request_handle for req in self._cache.waiting_queue()),
            loads_landed,
        )
        agreed = self._consensus.agree(report)
        linker.take_completed_offloads(len(agreed.saves))
        linker.commit_completed_offloads(agreed.saves)
        self.promises.settle(agreed.requests)
        if self._loads is not None:
            self._loads = (self._loads[0], agreed.loads_landed)
        return agreed

    def _end_loads(self) -> list[Any]:
        reqs, landed = self._loads or ([], True)
        self._loads = None
        return [] if landed else reqs


def group_of(cache: Any) -> Any | None:
    """The gloo group of the ranks that must decide alike; None when this one is alone."""
    for group in (cache.attn_tp_group, cache.tp_group):
        if group is not None and distributed.get_world_size(group=group) > 1:
            return group
    return None


def min_reduce(group: Any, vector: Vector) -> None:
    """Replaces a vector by the element-wise minimum over a group. A blocking collective."""
    tensor = torch.from_numpy(vector)
    distributed.all_reduce(tensor, op=distributed.ReduceOp.MIN, group=group)


def exchange(group: Any | None, content: bytes) -> list[bytes]:
    """Sends bytes to all ranks of a group; returns what each sent. A blocking collective."""
    if group is None:
        return [content]
    found: list[Any] = [None] * distributed.get_world_size(group=group)
    distributed.all_gather_object(found, content, group=group)
    return found
