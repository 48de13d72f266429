"""What models with window layers and models with states share: hits that end where both are.

A hit is the longest prefix of which the full layers' pages are all stored, and behind whose last
page is what the other layers need to go on. Scheduler's thread only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from sglang_ext.device.transfers import Hashes
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import READY

STORED = 0xFF  # any bit of a page's state


class ResumablePages(ABC):
    """Where prompts can be resumed.

    Args:
        store: DRAM and disk.
        tree: SGLang's.
        offers_stored: what is stored is offered to be saved, too: of several ranks, each has to
            offer the same, whatever it has.
    """

    def __init__(self, store: PageStore, tree: RadixTree, *, offers_stored: bool = False) -> None:
        self._store = store
        self._tree = tree
        self._offers_stored = offers_stored

    @property
    @abstractmethod
    def most_pages(self) -> int:
        """Pages that a plan has room for, with what is needed beside them."""

    @abstractmethod
    def _resume(self, space: KeySpace, tail: Hashes, states: int, max_quality: int = ANY) -> int:
        """Pages of a tail whose full layers are all there behind which one can go on."""

    @abstractmethod
    def _beside(self, tail: Hashes, end: int) -> Hashes:
        """Keys of what the other layers need to go on behind `end` pages of a tail."""

    def parts(self, hashes: Hashes) -> Hashes:
        """Keys of all that is stored page by page of some pages."""
        return hashes

    def num_loadable(self, space: KeySpace, tail: Hashes, max_quality: int) -> int:
        """Pages behind a device prefix that can be loaded, and be gone on behind, now.

        Args:
            space: where they belong.
            tail: u8 `[N, 32]`, the pages from the prefix on. SGLang's tree has what the prefix
                needs to be gone on behind, or it would be no prefix.
            max_quality: the worst that may be loaded.
        """
        num = self._store.ready_prefix(space, tail, max_quality)
        return self._resume(space, tail[:num], READY, max_quality)

    def wish(
        self, space: KeySpace, hashes: Hashes, num_on_device: int, limit: int
    ) -> tuple[Hashes, int]:
        """What a request that waits could reuse, in the order in which it is of use.

        Args:
            space: where its pages belong.
            hashes: u8 `[N, 32]`, its pages from the root on.
            num_on_device: leading ones that are on the device.
            limit: pages that can be loaded at most; the next one is asked for all the same, when
                all those before can be, as a prompt's last page is (`_restore_last_page`).

        Returns:
            The pages up to where it can be resumed, and what is needed beside them there; and how
            many pages behind the device prefix the former are.
        """
        tail = hashes[num_on_device:limit]
        num = self._store.locate_prefix(space, tail).total
        end = self._resume(space, tail[: min(num, self.most_pages)], STORED)
        wanted = [hashes[: num_on_device + end]]
        if end:
            wanted.append(self._beside(tail, end))
        if num_on_device + end == limit < len(hashes):
            wanted.append(self.parts(hashes[limit : limit + 1]))
        return np.concatenate(wanted), end
