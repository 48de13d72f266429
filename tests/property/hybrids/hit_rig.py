"""A page store in which any pages and parts of hybrids can be, without a device."""

from __future__ import annotations

from typing import Any

from sglang_ext.device.layout import PageLayout
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig

PAGE = 4
LAYOUT = PageLayout(PAGE, (64, 64), (64, 64), 2)
_SLOTS = 4096


class HitRig:
    """The store.

    Args:
        most_of_a_case: pages that a case puts, at most.
        placement: for a store that looks ahead.
    """

    def __init__(self, most_of_a_case: int, placement: PolicyConfig | None = None) -> None:
        self._most_of_a_case = most_of_a_case
        self._num_put = 0
        config = PageStoreConfig("write_through", placement=placement)
        arena = HostArena(_SLOTS, LAYOUT.slot_bytes)
        self.store = PageStore(arena, PageIndex(2 * _SLOTS), None, config)
        self.store.open_namespace(bytes(32), {})
        self.space: KeySpace = self.store.space(bytes(32))

    def put(self, hashes: Any) -> None:
        ticket = self.store.begin_save(self.space, hashes, hashes[:0])
        self.store.finish_save(ticket, ok=True)

    def make_room(self, num_pages: int) -> None:
        """Clears the store, which takes a while, before so many pages would have no room.

        No key of a case is one of another's.
        """
        self._num_put += num_pages
        if self._num_put > _SLOTS - self._most_of_a_case:
            self.store.clear()
            assert self.store.wait_idle(60)
            self._num_put = 0
