"""What the radix cache asks about waiting requests: when one may run, and what it may load then.

`admission.solo.Solo` answers from this process's waiting room alone, `ranks.lockstep.Lockstep` with
what all ranks of a tensor parallel group agreed on.

Everything here runs on the scheduler's thread, and neither copies nor waits, but for the
collectives of `Lockstep`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from sglang_ext.admission.searches import Searches
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.composition import Bools, Composition
from sglang_ext.tiers.store import KeySpace, LoadTicket, TierCounts
from sglang_ext.tiers.store.types import Hashes

# Hands over pages of a load that are pinned and verified; None when they are not to be had.
Take = Callable[[Hashes], LoadTicket | None]
# Handles of the waiting requests, as the scheduler will take them.
Queue = Callable[[], Sequence[Hashable]]


class Admission(ABC):
    """Waiting requests by their handles, from when they enter the queue until they run.

    Attributes:
        decides_alone: False when several ranks must decide alike.
    """

    decides_alone: bool

    # ---- a request's way ----

    @abstractmethod
    def enter(self, handle: Hashable, prefix: ReusablePrefix, key: Any) -> TierCounts:
        """A request enters the queue.

        Args:
            handle: SGLang's name of it.
            prefix: what it could reuse.
            key: SGLang's key of the pages of the prefix.

        Returns:
            Where the pages lie that are not on the device, in this process.
        """

    @abstractmethod
    def may_admit(self, handle: Hashable) -> bool:
        """False while a request should wait for pages that are on their way. O(1)."""

    @abstractmethod
    def num_loadable(
        self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes, max_quality: int
    ) -> int:
        """How many pages behind a device prefix can be loaded now, and are worth it.

        Args:
            handle: of the request.
            space: the request's, as of now.
            first_page: index of the first page that is not on the device.
            hashes: u8 `[N, 32]`, its pages from there on.
            max_quality: the worst that it may be given.
        """

    @abstractmethod
    def num_worth(self, handle: Hashable, device_tokens: int, num_pages: int) -> int:
        """How many of some pages in DRAM are worth loading, where one process decides on that.

        Told of each match, also of one with nothing to load: what is counted of an admitted request
        is of its last.

        Args:
            handle: of the request.
            device_tokens: leading tokens that are on the device.
            num_pages: pages of the prompt behind those that could be loaded now.
        """

    @abstractmethod
    def num_stored(self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes) -> int:
        """How many pages behind a hybrid's device prefix are stored in any tier.

        Args:
            handle: of the request.
            space: the request's, as of now.
            first_page: index of the first page that is not on the device.
            hashes: u8 `[N, 32]`, its pages from there on.
        """

    @abstractmethod
    def composition(self, handle: Hashable, first_page: int, num_pages: int) -> Composition | None:
        """How so many of the counted pages of a cut prompt are made of stored ones, on all ranks.

        None where they are stored as they are, and in a process that decides alone.
        """

    @abstractmethod
    def everywhere(self, flags: Bools) -> Bools:
        """Which of some things are so on all ranks, which all of them ask for now.

        Args:
            flags: bool `[N]`, what this one knows of them.
        """

    @abstractmethod
    def taker(self, handle: Hashable, space: KeySpace, first_page: int) -> Take | None:
        """What hands over the pages that were counted; None where the load looks them up."""

    @abstractmethod
    def load_queued(self, handle: Hashable) -> None:
        """A load of a request's pages is queued and pins them itself."""

    @abstractmethod
    def admit(self, handle: Hashable, last_page: int | None) -> None:
        """A request is admitted.

        Args:
            handle: of the request.
            last_page: index of its prompt's last page when that is whole; see `take_last`.
        """

    @abstractmethod
    def take_last(
        self, handle: Hashable, space: KeySpace, page_hash: Hashes, max_quality: int
    ) -> LoadTicket | None:
        """Pins what is stored of the last page of an admitted request's prompt.

        Args:
            handle: of the request.
            space: the request's, as of now.
            page_hash: u8 `[1, 32]`.
            max_quality: the worst that it may be given.
        """

    @abstractmethod
    def release(self, handle: Hashable) -> None:
        """A request runs, or ran: what is still pinned for it is given back."""

    @abstractmethod
    def leave(self, handle: Hashable) -> None:
        """A request leaves the queue without running, or is about to enter it again."""

    @abstractmethod
    def leave_all(self) -> None:
        """Every request leaves."""

    @abstractmethod
    def agree_on(self, searches: Searches) -> None:
        """From now on what these find is agreed on in each step; nothing in one process."""

    # ---- the scheduler's steps ----

    @abstractmethod
    def step(self) -> list[Any]:
        """Once a scheduler step: plans follow the queue, finished saves are taken.

        Returns:
            Requests whose loads failed somewhere; their output must not be used.
        """

    @abstractmethod
    def end_loads(self, reqs: list[Any]) -> list[Any]:
        """Waits for the loads of the batch that just ran; returns what `step` does."""

    @abstractmethod
    def settle_loads(self, reqs: list[Any]) -> list[Any]:
        """A batch's result is about to be used; returns what `step` does."""

    @abstractmethod
    def drain_saves(self) -> None:
        """Takes the results of all saves; this process has waited for its own before."""

    @abstractmethod
    def agree_on_worst(self, quality: int) -> int:
        """The worst of what all ranks found of one thing, which all of them look at now.

        Args:
            quality: what this one found, from 0 to 255.
        """
