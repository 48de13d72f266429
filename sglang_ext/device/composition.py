"""Pages of a prompt that are made of parts of stored pages, as a load is told of them.

Pure: numpy only. `truncation/extents.py` works them out.
"""

from __future__ import annotations

from dataclasses import dataclass

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
        shift: as in `Source`; 0 where they keep their positions.
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
        end = begin + num * self.page_size
        used: list[I64] = []
        position = 0
        for run in self.runs:
            low, high = (
                max(begin, position) - position,
                min(end, position + run.num_tokens) - position,
            )
            if low < high:
                rows = slice(
                    (run.first_row + low) // self.page_size,
                    -(-(run.first_row + high) // self.page_size),
                )
                used.append(run.pages[rows])
            position += run.num_tokens
        return self.hashes[np.unique(np.concatenate(used))] if used else self.hashes[:0]
