"""One rank: the waiting room of this process alone says who may run and load."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from sglang_ext.admission.admission import Admission, Queue, Take
from sglang_ext.admission.searches import Searches
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.device.composition import Bools, Composition
from sglang_ext.tiers.store import KeySpace, LoadTicket, PageStore, TierCounts
from sglang_ext.tiers.store.types import Hashes


class Solo(Admission):
    """A process that decides on what it knows.

    It has many methods because `Admission` has.

    Args:
        store: DRAM and disk.
        room: the waiting requests.
        queue: the waiting requests' handles.
        page_tokens: P.
        take_saves: takes the results of finished saves, as SGLang does once a step.
        finish_loads: waits for a batch's loads as SGLang does; returns those that failed.
    """

    decides_alone = True

    def __init__(
        self,
        store: PageStore,
        room: WaitingRoom,
        queue: Queue,
        page_tokens: int,
        take_saves: Callable[[], None],
        finish_loads: Callable[[list[Any]], list[Any]],
    ) -> None:
        self._store = store
        self._room = room
        self._queue = queue
        self._page_tokens = page_tokens
        self._take_saves = take_saves
        self._finish_loads = finish_loads

    def enter(self, handle: Hashable, prefix: ReusablePrefix, key: Any) -> TierCounts:
        """See `Admission`."""
        return self._room.enter(handle, prefix)

    def may_admit(self, handle: Hashable) -> bool:
        """See `Admission`."""
        return self._room.may_admit(handle)

    def num_loadable(
        self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes, max_quality: int
    ) -> int:
        """What is ready in DRAM, as far as it is worth loading."""
        num_ready = self._store.ready_prefix(space, hashes, max_quality)
        return self.num_worth(handle, first_page * self._page_tokens, num_ready)

    def num_worth(self, handle: Hashable, device_tokens: int, num_pages: int) -> int:
        """By its own speeds."""
        return self._room.num_worth(handle, device_tokens, num_pages)

    def num_stored(self, handle: Hashable, space: KeySpace, first_page: int, hashes: Hashes) -> int:
        """What this process knows of."""
        return self._store.locate_prefix(space, hashes).total if len(hashes) else 0

    def composition(self, handle: Hashable, first_page: int, num_pages: int) -> Composition | None:
        """None: what is ready is looked up at each match."""
        return None

    def everywhere(self, flags: Bools) -> Bools:
        """What it knows."""
        return flags

    def taker(self, handle: Hashable, space: KeySpace, first_page: int) -> Take | None:
        """None: the load pins what is ready when it is queued."""
        return None

    def load_queued(self, handle: Hashable) -> None:
        """The plan has done its work."""
        self.release(handle)

    def admit(self, handle: Hashable, last_page: int | None) -> None:
        """See `Admission`."""
        self.release(handle)

    def take_last(
        self, handle: Hashable, space: KeySpace, page_hash: Hashes, max_quality: int
    ) -> LoadTicket | None:
        """See `Admission`."""
        return self._store.pin_ready(space, page_hash, max_quality)

    def release(self, handle: Hashable) -> None:
        """See `Admission`."""
        self._room.leave(handle, admitted=True)

    def leave(self, handle: Hashable) -> None:
        """See `Admission`."""
        self._room.leave(handle)

    def leave_all(self) -> None:
        """See `Admission`."""
        self._room.leave_all()

    def agree_on(self, searches: Searches) -> None:
        """Whoever searches takes what it finds."""

    def step(self) -> list[Any]:
        """A load that failed is known when its batch ran, so none is told of here."""
        self._room.step(self._queue())
        self._take_saves()
        return []

    def end_loads(self, reqs: list[Any]) -> list[Any]:
        """See `Admission`."""
        return self._finish_loads(reqs)

    def settle_loads(self, reqs: list[Any]) -> list[Any]:
        """Nothing is open: `end_loads` has told."""
        return []

    def drain_saves(self) -> None:
        """See `Admission`."""
        self._take_saves()

    def agree_on_worst(self, quality: int) -> int:
        """Its own."""
        return quality
