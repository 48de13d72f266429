"""Pages on their way to the device: what is done with each, at which positions, to which rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ring import take_memory
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

    def of_layers(self, layers: range) -> LoadPages:
        """The same without what belongs to other layers."""
        found = [each if at in layers else None for at, each in enumerate(self.corrections)]
        return replace(self, corrections=found)

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


class IndexMemory:
    """Memory of the device for what kernels read beside pages, so that no load can lack it.

    One stream copies to it and runs the kernels that read it, so each copy is behind those that
    read what was there before. Guarded by who queues loads.

    Args:
        port: the device.
        num_values: how many it has room for.

    Raises:
        HierKVConfigError: the device has no room for it.
    """

    def __init__(self, port: DevicePort, num_values: int) -> None:
        self._port = port
        self.num_values = num_values
        (self._memory,) = take_memory(port, (8 * num_values,))

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return 8 * self.num_values

    def has_room(self, parts: Sequence[LoadPages]) -> bool:
        """Whether there is room for what belongs to all of these at a time."""
        return sum(len(piece) for part in parts for piece in _pieces(part)) <= self.num_values

    def split(self, part: LoadPages, page_size: int) -> Iterator[LoadPages]:
        """Parts of these pages, each of which there is room for."""
        if len(part.page_slots) == 1 or self.has_room([part]):
            yield part
            return
        middle = len(part.page_slots) // 2
        yield from self.split(part.part(0, middle, page_size), page_size)
        yield from self.split(part.part(middle, len(part.page_slots), page_size), page_size)

    def place(self, parts: Sequence[LoadPages]) -> list[LoadPages]:
        """The same with what kernels read of them on the device: one copy, on the current stream.

        What was placed before is overwritten.
        """
        pieces = [piece for part in parts for piece in _pieces(part)]
        if not pieces:
            return list(parts)
        values = np.concatenate([piece.astype(np.int64) for piece in pieces])
        flat = self._port.upload(values, self._memory)
        borders = itertools.pairwise(itertools.accumulate(map(len, pieces), initial=0))
        placed = (flat[begin:end] for begin, end in borders)
        return [_placed(part, placed) for part in parts]


def _pieces(part: LoadPages) -> Iterator[npt.NDArray[Any]]:
    """What kernels read of pages of one kind, beside them and their rows."""
    kind = int(part.how[0])
    if kind != COPY:
        yield part.positions
    if kind == MOVE:
        yield part.saved_positions
    for found in part.corrections:
        if found is not None:
            yield from (found.page, found.element, found.bits)


def _placed(part: LoadPages, pieces: Iterator[Any]) -> LoadPages:
    """The same with its `_pieces` on the device; what no kernel reads is left out."""
    kind = int(part.how[0])
    positions = next(pieces) if kind != COPY else None
    saved = next(pieces) if kind == MOVE else None
    corrections = [
        None if found is None else Corrections(next(pieces), next(pieces), next(pieces))
        for found in part.corrections
    ]
    return replace(part, positions=positions, saved_positions=saved, corrections=corrections)


def _of_pages(found: Corrections | None, begin: int, stop: int) -> Corrections | None:
    """Those of pages [begin, stop), which count from there."""
    if found is None:
        return None
    which = slice(*np.searchsorted(found.page, (begin, stop)).tolist())
    if which.start == which.stop:
        return None
    return Corrections(found.page[which] - np.int32(begin), found.element[which], found.bits[which])
