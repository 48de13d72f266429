"""Extents against a token-by-token search."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from sglang_ext.device.composition import Bools, Composition, Hashes
from sglang_ext.truncation.extents import Source, compose

PAGE = 4


def hashes_of(name: str, num: int) -> Hashes:
    digests = [hashlib.sha256(f"{name}{page}".encode()).digest() for page in range(num)]
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 32)


class Chain:
    """A chain, some of whose pages can be had."""

    def __init__(self, name: str, usable: list[bool], shift: int, begin: int, end: int) -> None:
        self.hashes = hashes_of(name, len(usable))
        self.usable = usable
        self.source = Source(shift, begin, end, self.hashes, self._usable_of)
        self.asked = 0

    def _usable_of(self, hashes: Hashes) -> Bools:
        assert hashes is self.hashes
        self.asked += 1
        return np.array(self.usable, np.bool_)

    def gives(self, position: int) -> tuple[bytes, int] | None:
        """(page, row) of a token, if it can be had."""
        row = position + self.source.shift
        page = row // PAGE
        inside = self.source.begin <= position < self.source.end
        if not inside or page >= len(self.usable) or not self.usable[page]:
            return None
        return self.hashes[page].tobytes(), row % PAGE


def tokens_of(found: Composition) -> list[tuple[bytes, int]]:
    return [
        (found.hashes[run.pages[row // PAGE]].tobytes(), row % PAGE)
        for run in found.runs
        for row in range(run.first_row, run.first_row + run.num_tokens)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_it_finds_what_a_search_token_by_token_finds(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(50):
        start, num = PAGE * rng.randrange(3), rng.randint(1, 12)
        end = start + PAGE * num + rng.randrange(PAGE)
        head = rng.randint(0, 10)
        share = rng.choice((0.6, 0.9, 1.0))

        def draw(length: int, share: float = share) -> list[bool]:
            return [rng.random() < share for _ in range(length)]

        own = Chain("own", draw(end // PAGE, 0.3), 0, 0, end)
        others = [Chain(name, draw(20), rng.randint(0, 21), head, end) for name in ("near", "far")]
        others.append(Chain("head", draw(5), 0, 0, head))
        chains = [own, *others]
        wanted: list[tuple[bytes, int]] = []
        for position in range(start, end):
            places = [place for chain in chains if (place := chain.gives(position))]
            if not places:
                break
            wanted.append(places[0])
        wanted = wanted[: len(wanted) // PAGE * PAGE]
        found = compose(start, end, PAGE, own.source, [chain.source for chain in others])
        assert max(chain.asked for chain in chains) <= 1
        if found is None:
            assert not wanted
            continue
        assert tokens_of(found) == wanted
        assert len(np.unique(found.hashes, axis=0)) == len(found.hashes)
        check_pages(found, wanted, own)


def check_pages(found: Composition, wanted: list[tuple[bytes, int]], own: Chain) -> None:
    """What is said of each page follows from its tokens."""
    order = [row.tobytes() for row in found.hashes]
    values = np.arange(len(order), dtype=np.uint8)
    worst = found.worst_of(values, 99)
    moved = [bool(run.shift) for run in found.runs for _ in range(run.num_tokens)]
    assert found.num_moved == sum(moved)
    first = found.start // PAGE
    for page in range(found.num_pages):
        span = slice(page * PAGE, (page + 1) * PAGE)
        used = [order.index(digest) for digest, _ in wanted[span]]
        assert worst[page] == max(99 if any(moved[span]) else 0, *used)
        sources = {row.tobytes() for row in found.sources_of(first + page, 1)}
        assert sources == {digest for digest, _ in wanted[span]}
        alone = {digest for digest, _ in wanted[span]} == {own.hashes[first + page].tobytes()}
        assert found.stored[page] == alone
