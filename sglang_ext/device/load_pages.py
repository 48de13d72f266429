"""Pages on their way to the device: what is done with each, at which positions, to which rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.device.ports.base import DevicePort
from sglang_ext.kernels.rope import Corrections

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]

# What a load does with a page's K.
EMBED = 0  # position-free: embed it at its position
COPY = 1  # as the engine had it, and at that position again
MOVE = 2  # as the engine had it: rotate it by the difference


@dataclass(frozen=True)
class LoadPages:
    """One request's pages, prepared for loading layer by layer.

    Attributes:
        page_slots: i64 `[n]`, the pages' slots.
        token_slots: i64 `[n * P]`, rows of the device pool to write; where the port keeps indices.
        positions: i64 `[n * P]`, positions to embed K at.
        how: u8 `[n]`, what is done with each page's K: `EMBED`, `COPY` or `MOVE`.
        saved_positions: i64 `[n * P]`, positions that K is stored at.
        corrections: those that apply, by layer; None for a layer without.
        first_row: row of the first page with which the tokens begin; then there may be fewer than
            `n * P` of them, and `how` is the same for all pages.
    """

    page_slots: I64
    token_slots: Any
    positions: Any
    how: U8
    saved_positions: Any
    corrections: list[Corrections | None]
    first_row: int = 0

    def part(self, begin: int, stop: int, page_size: int) -> LoadPages:
        """Pages [begin, stop) of these."""
        first = self.first_row
        end = min(first + len(self.positions), stop * page_size)
        rows = slice(max(first, begin * page_size), end)
        tokens = slice(rows.start - first, rows.stop - first)
        return LoadPages(
            self.page_slots[begin:stop],
            self.token_slots[tokens],
            self.positions[tokens],
            self.how[begin:stop],
            self.saved_positions[tokens],
            [_of_pages(found, begin, stop) for found in self.corrections],
            first_row=rows.start - begin * page_size,
        )

    def of_one_kind(self, page_size: int, most: int | None = None) -> Iterator[LoadPages]:
        """These in order, in parts of pages that are treated alike, `most` pages at a time."""
        borders = [0, *(np.flatnonzero(np.diff(self.how)) + 1).tolist(), len(self.how)]
        for begin, end in itertools.pairwise(borders):
            step = most or end - begin
            for first in range(begin, end, step):
                yield self.part(first, min(first + step, end), page_size)

    def chosen(self, which: I64, page_size: int) -> LoadPages:
        """Some pages of these, which must be whole."""
        tokens = (which[:, None] * page_size + np.arange(page_size)).reshape(-1)
        corrections: list[Corrections | None] = []
        for found in self.corrections:
            if found is not None:  # only position-free pages have any
                place = np.searchsorted(which, found.page).astype(np.int32)
                found = Corrections(place, found.element, found.bits)
            corrections.append(found)
        return LoadPages(
            self.page_slots[which],
            self.token_slots[tokens],
            self.positions[tokens],
            self.how[which],
            self.saved_positions[tokens],
            corrections,
        )


@dataclass(frozen=True)
class PageRun:
    """Tokens that follow one another in stored pages and in the request that loads them.

    Attributes:
        page_slots: i64 `[n]`, the pages' slots, in order.
        first_row: row of the first page with which the run begins, below P.
        num_tokens: length of the run; it ends in the last page.
    """

    page_slots: I64
    first_row: int
    num_tokens: int


@dataclass(frozen=True)
class PageSource:
    """Where kernels find pages: the arena itself, or what was brought to the device of it.

    Attributes:
        pages: u8 `[m, bytes]`, on the host or on the device.
        index: i64 `[n]`, row of `pages` that holds each page asked for.
        first_byte: offset inside the slot of the first byte of a row.
    """

    pages: Any
    index: Any
    first_byte: int = 0


def uploaded(parts: list[LoadPages], port: DevicePort) -> list[LoadPages]:
    """The same with all that kernels read beside the pages on the device: one copy in all."""
    pieces: list[npt.NDArray[Any]] = []
    for part in parts:
        pieces += [part.positions, part.saved_positions]
        for found in part.corrections:
            if found is not None:
                pieces += [found.page, found.element, found.bits]
    if not pieces:
        return parts
    flat = port.upload(np.concatenate([piece.astype(np.int64) for piece in pieces]))
    borders = itertools.pairwise(itertools.accumulate(map(len, pieces), initial=0))

    def take() -> Any:
        begin, end = next(borders)
        return flat[begin:end]

    placed = []
    for part in parts:
        positions, saved = take(), take()
        corrections = [
            None if found is None else Corrections(take(), take(), take())
            for found in part.corrections
        ]
        placed.append(
            replace(part, positions=positions, saved_positions=saved, corrections=corrections)
        )
    return placed


def _of_pages(found: Corrections | None, begin: int, stop: int) -> Corrections | None:
    """Those of pages [begin, stop), which count from there."""
    if found is None:
        return None
    which = slice(*np.searchsorted(found.page, (begin, stop)).tolist())
    if which.start == which.stop:
        return None
    return Corrections(found.page[which] - np.int32(begin), found.element[which], found.bits[which])
