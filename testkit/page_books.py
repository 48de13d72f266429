"""An owner of a tier that knows each of its pages and gives up any of them, in random order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.base import Location, RecoveredPages, Tier


class PageBooks:
    """Where pages lie. Attributes: `pages`, by location: hash and blocks."""

    def __init__(self, seed: int, on_gone: Callable[[Location], None] | None = None) -> None:
        self.pages: dict[Location, tuple[bytes, int]] = {}
        self._thinned: set[int] = set()
        self._rng = np.random.default_rng(seed)
        self._on_gone = on_gone or (lambda location: None)
        self.keep: Callable[[bytes], bool] = lambda page_hash: False

    def connect(self, tier: Tier) -> None:
        tier.keeper = self  # type: ignore[attr-defined]
        tier.on_drop = self.on_drop  # type: ignore[attr-defined]

    def add(
        self, hashes: Sequence[bytes], places: Sequence[Location | None], num: Sequence[int]
    ) -> None:
        for page_hash, place, num_blocks in zip(hashes, places, num, strict=True):
            if place is not None:
                assert place not in self.pages, "a place was given out that a page has"
                self.pages[place] = (page_hash, num_blocks)

    def add_recovered(self, pages: RecoveredPages) -> None:
        known: set[bytes] = set()
        for row in range(len(pages)):
            page_hash = pages.hashes[row].tobytes()
            if page_hash not in known:
                known.add(page_hash)
                place = Location(int(pages.segment[row]), int(pages.block[row]))
                self.pages[place] = (page_hash, int(pages.num_blocks[row]))
        self._thinned.update(pages.segment.tolist())

    def on_drop(self, digest: bytes, segment: int) -> None:
        self._forget([place for place in self.pages if place.segment == segment])

    def give_up(self, num_blocks: int) -> int:
        may_go = [place for place, page in self.pages.items() if not self.keep(page[0])]
        self._rng.shuffle(may_go)
        gone: list[Location] = []
        total = 0
        for row in may_go:
            if total >= num_blocks:
                break
            place = Location(int(row[0]), int(row[1]))
            gone.append(place)
            total += self.pages[place][1]
        self._forget(gone)
        return total

    def live_records(
        self, segment: int
    ) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint16]] | None:
        mine = sorted((p.block, page[1]) for p, page in self.pages.items() if p.segment == segment)
        return (
            np.array([block for block, _ in mine], np.uint32),
            np.array([num for _, num in mine], np.uint16),
        )

    def num_live_blocks(self, segment: int) -> int:
        return sum(page[1] for place, page in self.pages.items() if place.segment == segment)

    def take_thinned(self) -> dict[int, int]:
        thinned, self._thinned = self._thinned, set()
        return {segment: self.num_live_blocks(segment) for segment in thinned}

    def _forget(self, places: Sequence[Location]) -> None:
        for place in places:
            self._on_gone(place)
            del self.pages[place]
            self._thinned.add(place.segment)
