"""Pages of a prompt that are made of parts of stored pages, as a load is told of them.

Pure: numpy only. `truncation/extents.py` works them out.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenSpan:
    """Tokens that follow one another in the prompt and in a chain.

    Attributes:
        pages: i64 `[n]`, their pages, as indices into `Composition.hashes`.
        first_row: row of the first page with which they begin.
        num_tokens: how many they are.
        shift: the token at position t of the prompt is token t + shift of the stored chain; 0 where
            they keep their positions.
    """

    pages: I64
    first_row: int
    num_tokens: int
    shift: int


@dataclass(frozen=True)
class Composition:
    """Whole pages of a prompt, made of stored ones.

    Attributes:
        start: position of the first token.
        page_size: tokens in a page.
        hashes: u8 `[m, 32]`, the stored pages, each once, in the order of their first use.
        runs: in the order of the prompt; together `num_pages * page_size` tokens.
        stored: bool `[num_pages]`, pages that are stored as they are, under their own hash.
    """

    start: int
    page_size: int
    hashes: Hashes
    runs: tuple[TokenSpan, ...]
    stored: Bools

    @property
    def num_pages(self) -> int:
        """Pages of the prompt."""
        return len(self.stored)

    @property
    def num_moved(self) -> int:
        """Tokens that stand elsewhere than where they were computed."""
        return sum(run.num_tokens for run in self.runs if run.shift)

    def worst_of(self, values: npt.NDArray[np.uint8], moved: int = 0) -> npt.NDArray[np.uint8]:
        """For each page of the prompt, the greatest value of the stored pages that it is made of.

        Args:
            values: u8 `[m]`, of the stored pages.
            moved: what a page with moved tokens is worth at least.
        """
        out = np.zeros(self.num_pages, np.uint8)
        position = 0
        for run in self.runs:
            rows = run.first_row + np.arange(run.num_tokens)
            of_token = np.maximum(
                values[run.pages[rows // self.page_size]], moved * bool(run.shift)
            )
            pages = (position + np.arange(run.num_tokens)) // self.page_size
            np.maximum.at(out, pages, of_token.astype(np.uint8))
            position += run.num_tokens
        return out

    def sources_of(self, first: int, num: int) -> Hashes:
        """Hashes of the stored pages that pages [first, first + num) of the prompt are made of.

        Args:
            first: counted from the beginning of the prompt.
            num: number of pages.
        """
        begin = first * self.page_size - self.start
        used = [run.pages for run in self._runs_of(begin, begin + num * self.page_size)]
        return self.hashes[np.unique(np.concatenate(used))] if used else self.hashes[:0]

    def num_covered(self, num: int) -> int:
        """Leading pages of the prompt that are made of the first `num` of `hashes` alone."""
        position = 0
        for run in self.runs:
            missing = np.flatnonzero(run.pages >= num)
            if missing.size:
                num_tokens = max(0, int(missing[0]) * self.page_size - run.first_row)
                return (position + num_tokens) // self.page_size
            position += run.num_tokens
        return self.num_pages

    def part(self, first: int, num: int) -> Composition:
        """How pages [first, first + num) of these are made; `num` is at least 1.

        Args:
            first: counted from the first page of this composition.
            num: number of pages.
        """
        begin = first * self.page_size
        runs = self._runs_of(begin, begin + num * self.page_size)
        used = np.concatenate([run.pages for run in runs])
        _, first_uses = np.unique(used, return_index=True)
        order = used[np.sort(first_uses)]
        place = np.empty(len(self.hashes), np.int64)
        place[order] = np.arange(len(order))
        return Composition(
            self.start + begin,
            self.page_size,
            self.hashes[order],
            tuple(replace(run, pages=place[run.pages]) for run in runs),
            self.stored[first : first + num],
        )

    def digest(self) -> int:
        """32 bits that differ, but by chance, where compositions do."""
        digest = zlib.crc32(self.hashes.tobytes(), zlib.crc32(repr(self.start).encode()))
        for run in self.runs:
            numbers = [*run.pages.tolist(), run.first_row, run.num_tokens, run.shift]
            digest = zlib.crc32(repr(numbers).encode(), digest)
        return zlib.crc32(self.stored.tobytes(), digest)

    def _runs_of(self, begin: int, end: int) -> list[TokenSpan]:
        """The runs of tokens [begin, end), counted from `start`."""
        runs, position, size = [], 0, self.page_size
        for run in self.runs:
            low = max(begin, position) - position
            high = min(end, position + run.num_tokens) - position
            position += run.num_tokens
            if low < high:
                rows = run.first_row + low, run.first_row + high
                pages = run.pages[rows[0] // size : -(-rows[1] // size)]
                runs.append(TokenSpan(pages, rows[0] % size, high - low, run.shift))
        return runs
