"""The window layers of a hybrid model: pages of their own beside those of the full layers.

A layer with a sliding window needs the pages of its window alone to go on behind a prefix, so they
are stored where a prompt may be resumed, and the full layers' everywhere. The window layers fall
into groups of as many layers as are full, so a page of a group has the layout of any other page;
its key is the key of the full layers' page, changed in a way that belongs to the group.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.device.composition import Composition
from sglang_ext.device.copier import PageCopier

Hashes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class WindowLayers:
    """How the window layers of a model are stored.

    Attributes:
        num_pages: pages that the window in front of a token may reach into.
        page_size: tokens of a page.
        copiers: one a group.
        model_layers: see `LayerGroups`.
    """

    num_pages: int
    page_size: int
    copiers: tuple[PageCopier, ...]
    model_layers: list[tuple[int, ...]]

    @property
    def num_groups(self) -> int:
        """Entries of a page's window layers in the store."""
        return len(self.copiers)

    def entries(self, hashes: Hashes) -> Hashes:
        """Keys of the window layers of some pages, u8 `[G * N, 32]`: of one group after another."""
        return np.concatenate([group_hashes(hashes, group) for group in range(self.num_groups)])

    def page_keys(self, hashes: Hashes) -> Hashes:
        """Keys of all parts of some pages: of the full layers, then group by group."""
        return np.concatenate([hashes, self.entries(hashes)])

    def window_of(self, end: int) -> slice:
        """The pages that going on behind the first `end` pages needs."""
        return slice(max(0, end - self.num_pages), end)

    def moved_window_of(self, end: int) -> slice:
        """The pages that going on behind them needs elsewhere, where they may begin inside a page.

        A window that ends anywhere in the last of these pages lies in them.
        """
        return slice(max(0, end - self.num_pages - 1), end)

    def window_in(self, composition: Composition) -> Composition:
        """How the window behind the last page of a composition is made."""
        window = self.window_of(composition.num_pages)
        return composition.part(window.start, window.stop - window.start)

    def keys_of(self, composition: Composition) -> Hashes:
        """Keys of all that a composition is made of, as a load has them: see `page_keys`."""
        window = self.window_in(composition)
        return np.concatenate([composition.hashes, self.entries(window.hashes)])


def group_hashes(hashes: Hashes, group: int) -> Hashes:
    """Keys of a group's part of some pages, u8 `[N, 32]`.

    A page's hash is a SHA-256 value, and so is what it is changed by: to find a page whose key is
    another's part is to find a preimage.
    """
    tag = hashlib.sha256(b"hier-kv window layers, group %d" % group).digest()
    return hashes ^ np.frombuffer(tag, np.uint8)


def resume_length(full: Bools, window: Bools, num_pages: int) -> int:
    """The longest prefix behind which a model with windows can go on, in pages.

    Args:
        full: bool `[N]`, whether the full layers' part of each page is there.
        window: bool `[N]`, whether all groups of its window layers are there.
        num_pages: pages of a window. What lies before the first page is there.
    """
    missing = np.flatnonzero(~full)
    num = int(missing[0]) if len(missing) else len(full)
    page = np.arange(num)
    last_missing = np.maximum.accumulate(np.where(window[:num], -1, page))
    is_whole = page - last_missing >= np.minimum(page + 1, num_pages)
    ends = np.flatnonzero(is_whole)
    return int(ends[-1]) + 1 if len(ends) else 0
