"""Where the tokens of a truncated prompt lie: in pages that are stored under other prompts.

What is kept of a conversation was stored, page by page, under the prompts it was computed for: the
whole conversation, and each of its earlier truncations. In the prompt after a cut the same tokens
stand elsewhere, in general not at a page's begin. So a page of the truncated prompt is made of
extents: (stored page, token offset, number of tokens). An extent names a page by its hash, never by
where it lies; it is worked out from the prompt each time, so nothing has to be kept of it and
nothing can be stale.

Pure: numpy only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.device.composition import Bools, Composition, Hashes, TokenSpan

Qualities = npt.NDArray[np.uint8]


@dataclass
class Source:
    """A chain of pages that may hold tokens of the prompt.

    Attributes:
        shift: the token at position t of the prompt is token t + shift of the chain.
        begin: first position that it may give.
        end: end of the positions that it may give.
        hashes: u8 `[N, 32]`, the chain's page hashes.
        usable_of: asks which of the pages can be had; called at most once, when it matters.
    """

    shift: int
    begin: int
    end: int
    hashes: Hashes
    usable_of: Callable[[Hashes], Bools]
    _usable: Bools | None = field(default=None, init=False)

    @property
    def usable(self) -> Bools:
        """Which pages can be had, bool `[N]`."""
        if self._usable is None:
            self._usable = self.usable_of(self.hashes)
        return self._usable

    def agree(self, start: int, stop: int, page_size: int, agreed: Bools) -> None:
        """Takes what all ranks have of the pages of `asked`, instead of asking here."""
        self._usable = np.zeros(len(self.hashes), np.bool_)
        self._usable[self.asked(start, stop, page_size)] = agreed

    def asked(self, start: int, stop: int, page_size: int) -> slice:
        """Pages that may hold tokens at positions [start, stop) of the prompt."""
        begin, end = max(start, self.begin), min(stop, self.end)
        if begin >= end:
            return slice(0, 0)
        pages = (begin + self.shift) // page_size, -(-(end + self.shift) // page_size)
        return slice(min(pages[0], len(self.hashes)), min(pages[1], len(self.hashes)))

    def stop_from(self, position: int, page_size: int) -> int:
        """End of the tokens that it gives from a position on without a gap."""
        if not self.begin <= position < self.end:
            return position
        page = (position + self.shift) // page_size
        rest = self.usable[page:]
        if not rest.size or not rest[0]:
            return position
        num = rest.size if rest.all() else int(np.argmin(rest))
        return min(self.end, (page + num) * page_size - self.shift)

    def next_from(self, position: int, page_size: int) -> int:
        """The first position from this one on that it gives; its end if there is none."""
        position = max(position, self.begin)
        if position >= self.end:
            return self.end
        page = (position + self.shift) // page_size
        rest = self.usable[page:]
        if not rest.size or not rest.any():
            return self.end
        at = (page + int(np.argmax(rest))) * page_size - self.shift
        return min(self.end, max(position, at))


def compose(
    start: int, end: int, page_size: int, own: Source, others: Sequence[Source]
) -> Composition | None:
    """Makes the pages of [start, end) of stored ones, as far as that goes without a gap.

    Args:
        start: a multiple of the page size.
        end: of the prompt; a page that it cuts short is not made.
        page_size: tokens in a page, P.
        own: the prompt's own chain; its hashes are those of the pages from position 0 on.
        others: other chains, the best first. A page stored under its own hash is always preferred.

    Returns:
        None when not one page can be made.
    """
    sources = (own, *others)
    pieces: list[tuple[Source, int, int]] = []
    position = start
    while position < end:
        for at, source in enumerate(sources):
            stop = source.stop_from(position, page_size)
            if stop > position:
                better = (one.next_from(position, page_size) for one in sources[:at])
                stop = min([stop, end, *(place for place in better if place > position)])
                pieces.append((source, position, stop))
                position = stop
                break
        else:
            break
    num_pages = (position - start) // page_size
    if num_pages == 0:
        return None
    return _gather(start, num_pages, page_size, own, pieces)


def agree_on(
    sources: Sequence[Source],
    start: int,
    stop: int,
    page_size: int,
    everywhere: Callable[[Bools], Bools],
) -> None:
    """Sees to it that a prompt is made of the same stored pages on all ranks.

    Args:
        sources: the same on all ranks, but for which pages can be had.
        start: first position that is wanted.
        stop: end of these.
        page_size: P.
        everywhere: which of some things are so on all ranks.
    """
    parts = [source.asked(start, stop, page_size) for source in sources]
    own = [
        source.usable_of(source.hashes[part]) for source, part in zip(sources, parts, strict=True)
    ]
    agreed = everywhere(np.concatenate(own))
    for source, part in zip(sources, parts, strict=True):
        num = part.stop - part.start
        source.agree(start, stop, page_size, agreed[:num])
        agreed = agreed[num:]


def _gather(
    start: int,
    num_pages: int,
    page_size: int,
    own: Source,
    pieces: Sequence[tuple[Source, int, int]],
) -> Composition:
    end = start + num_pages * page_size
    rows: list[bytes] = []
    known: dict[bytes, int] = {}
    runs: list[TokenSpan] = []
    stored = np.zeros(num_pages, np.bool_)
    for source, begin, stop in pieces:
        stop = min(stop, end)
        if begin >= stop:
            continue
        first = (begin + source.shift) // page_size
        last = -(-(stop + source.shift) // page_size)
        pages = np.empty(last - first, np.int64)
        for at, digest in enumerate(source.hashes[first:last]):
            key = digest.tobytes()
            if key not in known:
                known[key] = len(rows)
                rows.append(key)
            pages[at] = known[key]
        runs.append(
            TokenSpan(pages, (begin + source.shift) % page_size, stop - begin, source.shift)
        )
        if source is own:
            whole = slice(-(-(begin - start) // page_size), (stop - start) // page_size)
            stored[whole] = True
    hashes = np.frombuffer(b"".join(rows), np.uint8).reshape(-1, 32)
    return Composition(start, page_size, hashes, tuple(runs), stored)
