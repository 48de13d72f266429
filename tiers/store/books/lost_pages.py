"""Which pages left the last tier that had them, for as long as that is remembered."""

from __future__ import annotations

import enum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.anonymous_memory import lazy_zeros
from sglang_ext.tiers.store.types import Hashes

# Places for each page that the index can hold, and their bounds: 8 bytes each, 32 MiB at most.
_PLACES_A_PAGE: Final = 4
_MIN_PLACES, _MAX_PLACES = 1 << 12, 1 << 22
_WHY: Final = np.uint64(0b1111)  # the bits of a place that say why; the others name the page
_POSITION_SHIFT: Final = np.uint64(4)
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)


class Absence(enum.IntEnum):
    """Why a page cannot be had, as far as the page store knows."""

    STORED = 0  # it can be
    NEVER_STORED = 1  # or longer ago than is remembered
    EVICTED_HOST = 2  # left DRAM, and nothing below had it
    EVICTED_DISK = 3  # left the disk, and DRAM did not have it
    CLEARED = 4
    UNREADABLE = 5  # was damaged, or could not be read
    NOT_SAVED = 6  # was offered, and its save failed or found no room
    OTHER_NAMESPACE = 7  # is stored, for other weights or another adapter
    NOT_EXACT = 8  # is stored, but worse than is asked for


class LostPages:
    """A bounded memory of pages that were lost, and why; for reports only.

    A place holds one page. A later loss takes the place of an earlier one by chance, so that after
    as many losses as the index holds pages about three quarters of what was lost before are still
    known. A page that is taken for another needs 60 equal bits. Nothing is ever read, loaded or
    left out for what stands here.

    Not locked: the owner's lock is held around every call.

    Args:
        num_pages: that the index can hold.
    """

    def __init__(self, num_pages: int) -> None:
        wanted = 1 << (_PLACES_A_PAGE * num_pages - 1).bit_length()
        num_places = min(max(wanted, _MIN_PLACES), _MAX_PLACES)
        self._places: npt.NDArray[np.uint64] = lazy_zeros((num_places,), np.uint64)
        self._mask = np.uint64(num_places - 1)

    @property
    def nbytes(self) -> int:
        """Memory that it takes at most."""
        return self._places.nbytes

    def note(self, hashes: Hashes, numbers: npt.NDArray[np.uint32], why: Absence) -> None:
        """Remembers pages as lost.

        Args:
            hashes: u8 `[N, 32]`.
            numbers: u32 `[N]`, of their key spaces.
            why: how.
        """
        words = _words(hashes, numbers)
        self._places[self._at(words)] = (words & ~_WHY) | np.uint64(why)

    def why(self, hashes: Hashes, number: int) -> npt.NDArray[np.uint8]:
        """How pages were lost: u8 `[N]` of `Absence`; `NEVER_STORED` where that is not known."""
        words = _words(hashes, np.uint32(number))
        found = self._places[self._at(words)]
        known = (found ^ words) & ~_WHY == 0
        why: npt.NDArray[np.uint8] = (found & _WHY).astype(np.uint8)
        why[~known | (why == 0)] = Absence.NEVER_STORED
        return why

    def _at(self, words: npt.NDArray[np.uint64]) -> Any:
        return (words >> _POSITION_SHIFT) & self._mask


def _words(hashes: Hashes, numbers: npt.NDArray[np.uint32] | np.uint32) -> npt.NDArray[np.uint64]:
    """64 bits of each page's key; page hashes are as good as random."""
    first = np.ascontiguousarray(hashes[:, :8]).view(np.uint64).reshape(-1)
    with np.errstate(over="ignore"):
        of_space = np.asarray(numbers).astype(np.uint64) * _SPREAD
    words: npt.NDArray[np.uint64] = first ^ of_space
    return words
