"""Keeps the ranks of a tensor parallel group in step: connects the consensus with SGLang's cache.

Ranks of several pipeline stages are kept in step by `ranks.stages`.

Once a scheduler step, in SGLang's own step hook, each rank tells what it knows and all take what
was agreed. Between two such points nothing is decided on what one rank alone knows. The hook runs
behind the requests that came in and before any of them is admitted, so a request that arrives in a
step may be admitted in the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import distributed

from sglang_ext.admission.admission import Admission, Queue, Take
from sglang_ext.admission.searches import Searches, SearchReport
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.composition import Bools, Composition
from sglang_ext.ranks.composed_promises import CompositionBook
from sglang_ext.ranks.consensus import (
    MAX_SAVES,
    MAX_SEARCHES,
    Agreed,
    Consensus,
    MinReduce,
    Report,
    Vector,
)
from sglang_ext.ranks.promises import FindDamaged, PromiseBook
from sglang_ext.ranks.rank import Exchange
from sglang_ext.ranks.resume_promises import ResumeBook
from sglang_ext.ranks.shared_promises import SharedBook
from sglang_ext.tiers.store import KeySpace, LoadTicket, PageStore, TierCounts
from sglang_ext.tiers.store.types import Hashes

# How often a waiting request is agreed on again because the device lost pages of its prefix.
_MAX_MOVES = 3


# A request that waited for so many steps is agreed on once more: pages may have become known.
_OLD_STEPS = 8


@dataclass
class AgreedPrompt:
    """What is kept of a waiting request so that the ranks can agree on it again.

    Attributes:
        key: SGLang's key of the pages of its prefix.
        num_moves: how often they agreed again because the device lost pages of the prefix.
        entered: number of the round before which the request entered first.
        renewed: whether they agreed again because the request waited for long.
    """

    key: Any
    num_moves: int = 0
    entered: int = -1
    renewed: bool = False


class Transfers(Protocol):
    """This rank's saves and loads, as SGLang's linker wrapper keeps them."""

    def num_pending_saves(self) -> int:
        """Saves whose results were not taken yet."""

    def ended_saves(self, most: int) -> list[bool]:
        """Results of the oldest saves that ended here and were not taken yet."""

    def take_completed_offloads(self, count: int) -> Any:
        """Takes the results of so many saves."""

    def commit_completed_offloads(self, successes: list[bool]) -> None:
        """Releases the nodes of the oldest saves, by what became of them on all ranks."""

    def end_loads(self) -> tuple[list[str], bool]:
        """Waits for a batch's loads; ids of the requests that loaded, and whether all landed."""


class Lockstep(Admission):
    """What several ranks agree on, for one cache. Scheduler thread only.

    It has many methods because `Admission` has.

    Args:
        store: this rank's DRAM and disk.
        room: its waiting requests.
        queue: the waiting requests' handles.
        transfers: its saves and loads.
        page_size: P.
        find_damaged: see `PromiseBook`.
        num_on_device: how many pages of a prompt's key are on the device.
        min_reduce: of the tensor parallel group, see `Consensus`.
        gather: of the same group, for rare events: each call is a collective of its own.
        resumes: of a hybrid, whose prompts go on at some places only; every prefix has `points`.
        shares_pages: one of these ranks keeps the pages of all; it is the one whose store does.

    Attributes:
        promises: of the waiting requests.
        gather: sends bytes to all ranks; returns what each sent, by rank.
    """

    decides_alone = False

    def __init__(
        self,
        store: PageStore,
        room: WaitingRoom,
        queue: Queue,
        transfers: Transfers,
        *,
        page_size: int,
        find_damaged: FindDamaged,
        num_on_device: Callable[[Any], int],
        min_reduce: MinReduce,
        gather: Exchange,
        resumes: bool = False,
        shares_pages: bool = False,
    ) -> None:
        self._store = store
        self._room = room
        self._queue = queue
        self._transfers = transfers
        self._page_size = page_size
        self._num_on_device = num_on_device
        self.gather = gather
        self._min_reduce = min_reduce
        self._consensus = Consensus(min_reduce)
        kind = SharedBook if shares_pages else ResumeBook if resumes else CompositionBook
        self.promises: PromiseBook = kind(
            store,
            room,
            page_size=page_size,
            find_damaged=find_damaged,
            note=self._consensus.note,
        )
        # Requests whose loads ended on this rank, and whether these landed; until it is agreed.
        self._loads: tuple[list[Any], bool] | None = None
        self._searches: Searches | None = None

    @property
    def num_rounds(self) -> int:
        """Reductions so far: one a scheduler step, and those in which saves end between steps."""
        return self._consensus.num_rounds

    # ---- a request's way ----

    def enter(self, handle: Hashable, prefix: ReusablePrefix, key: Any) -> TierCounts:
        """It is held until all ranks told of it."""
        return self.promises.enter(handle, prefix, AgreedPrompt(key))

    def may_admit(self, handle: Hashable) -> bool:
        """False while a request is held, on all ranks alike.

        In a long queue things change: the device loses pages, so that what was promised does not
        meet the device prefix any more, and pages become known. Then it is agreed on again.
        """
        promises = self.promises
        if not promises.may_admit(handle):
            self._room.hold(handle)
            return False
        prompt = promises.prompt(handle)
        if prompt is None or not self._is_outdated(handle, prompt):
            return True
        promises.enter_again(handle, self._num_on_device(prompt.key))
        return False

    def _is_outdated(self, handle: Hashable, prompt: AgreedPrompt) -> bool:
        first_page, num_missing = self.promises.gap(handle)
        if prompt.entered < 0:
            prompt.entered = self.num_rounds
        if num_missing and not prompt.renewed and self.num_rounds >= prompt.entered + _OLD_STEPS:
            prompt.renewed = True
            return True
        if not first_page or prompt.num_moves >= _MAX_MOVES:
            return False
        moved = self._num_on_device(prompt.key) < first_page
        prompt.num_moves += moved
        return moved

    def num_loadable(
        self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes, max_quality: int
    ) -> int:
        """What is promised, on every rank of the group."""
        num = self.promises.num_usable(handle, space, first_page, len(hashes))
        return self.num_worth(handle, first_page * self._page_size, num)

    def num_worth(self, handle: Hashable, device_tokens: int, num_pages: int) -> int:
        """All of them: a rank promises no more than is worth it to that rank."""
        self._room.note_match(handle, device_tokens, num_pages)
        return num_pages

    def num_stored(self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes) -> int:
        """As of when it was agreed on; none before."""
        return max(0, min(self.promises.num_stored(handle) - first_page, len(hashes)))

    def composition(self, handle: Hashable, first_page: int, num_pages: int) -> Composition | None:
        """See `Admission`."""
        return self.promises.composition(handle, first_page, num_pages)

    def everywhere(self, flags: Bools) -> Bools:
        """See `Admission`; a reduction of its own, or several for many things."""
        return self._consensus.everywhere(flags)

    def taker(self, handle: Hashable, space: KeySpace, first_page: int) -> Take | None:
        """See `Admission`."""
        return lambda hashes: self.promises.take(handle, space, first_page, hashes)

    def load_queued(self, handle: Hashable) -> None:
        """Does nothing: the remaining pins are kept, as `take_last` may want the last page's."""

    def admit(self, handle: Hashable, last_page: int | None) -> None:
        """See `Admission`."""
        self.promises.admit(handle, last_page)

    def take_last(
        self, handle: Hashable, space: KeySpace, page_hash: Hashes, max_quality: int
    ) -> LoadTicket | None:
        """See `Admission`."""
        ticket = self.promises.take_last(handle, page_hash.tobytes())
        if ticket is None or int(ticket.quality.max()) <= max_quality:
            return ticket
        self._store.end_load(ticket)
        return None

    def release(self, handle: Hashable) -> None:
        """See `Admission`."""
        self.promises.leave(handle)

    def leave(self, handle: Hashable) -> None:
        """See `Admission`."""
        self.promises.leave(handle)

    def leave_all(self) -> None:
        """See `Admission`."""
        self.promises.leave_all()
        self._room.leave_all()

    def agree_on(self, searches: Searches) -> None:
        """See `Admission`."""
        self._searches = searches

    # ---- the scheduler's steps ----

    def step(self) -> list[Any]:
        """Tells and takes; every rank calls it at the same point of its step.

        Returns:
            Requests whose loads did not land on every rank; their output must not be used.
        """
        self._room.step(self._queue())
        if self._searches is None:
            self._agree()
        else:  # a result changes what requests ask for, so only a step's round tells of searches
            told = self._searches.report(MAX_SEARCHES)
            self._searches.settle(self._agree(told).searches)
        return self._take_failed()

    def drain_saves(self) -> None:
        """Takes the results of all saves; each rank has waited for its own before."""
        while len(self._agree().saves) == MAX_SAVES:
            pass

    def agree_on_worst(self, quality: int) -> int:
        """See `Admission`; a reduction of its own, of 4 bytes."""
        least = np.array([-quality], np.int32)
        self._min_reduce(least)
        return -int(least[0])

    def end_loads(self, reqs: list[Any]) -> list[Any]:
        """Waits for this rank's loads; what landed on all of them is known at the next step."""
        rids, landed = self._transfers.end_loads()
        if rids:
            self.loads_ended([req for req in reqs if req.rid in rids], landed=landed)
        return []

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
        self._agree()
        return self._take_failed()

    def _agree(self, searches: Sequence[SearchReport] = ()) -> Agreed:
        transfers = self._transfers
        loads_landed = self._loads is None or self._loads[1]
        report = Report(
            transfers.ended_saves(MAX_SAVES),
            self.promises.report(self._queue()),
            loads_landed,
            self.promises.num_ended_readings,
            searches,
        )
        agreed = self._consensus.agree(report)
        transfers.take_completed_offloads(len(agreed.saves))
        transfers.commit_completed_offloads(agreed.saves)
        self.promises.settle(agreed.requests)
        self.promises.settle_readings(agreed.num_ended_readings, self._min_reduce)
        if self._loads is not None:
            self._loads = (self._loads[0], agreed.loads_landed)
        return agreed

    def _take_failed(self) -> list[Any]:
        reqs, landed = self._loads or ([], True)
        self._loads = None
        return [] if landed else reqs


def group_of(cache: Any) -> Any | None:
    """The gloo group of the ranks that must decide alike; None when this one is alone.

    Of several pipeline stages all ranks come here first at the same point.
    """
    return group_of_all_stages() if cache.pp_size > 1 else group_of_stage(cache)


def group_of_stage(cache: Any) -> Any | None:
    """The gloo group of the ranks of this pipeline stage; None when this one is alone in it."""
    # The second one is larger with context parallel ranks, which have the same heads.
    largest, num_ranks = None, 1
    for group in (cache.attn_tp_group, cache.tp_group):
        size = 1 if group is None else distributed.get_world_size(group=group)
        if size > num_ranks:
            largest, num_ranks = group, size
    return largest


@lru_cache(maxsize=1)
def group_of_all_stages() -> Any:
    """A gloo group of all ranks of all pipeline stages, of our own; made by all of them at once.

    SGLang's own carry messages between two stages while these are in different steps.
    """
    return distributed.new_group(backend="gloo")


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
