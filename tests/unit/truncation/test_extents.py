"""Extents against a token-by-token search."""

from __future__ import annotations

import hashlib
import random

import numpy as np
import pytest

from sglang_ext.device.composition import Bools, Composition, Hashes
from sglang_ext.truncation.extents import Source, agree_on, compose

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

    def source_on(self, lost: set[bytes]) -> Source:
        """The same chain on a rank that has lost some pages."""

        def usable_of(hashes: Hashes) -> Bools:
            has = dict(zip((row.tobytes() for row in self.hashes), self.usable, strict=True))
            keys = [row.tobytes() for row in hashes]
            return np.array([has[each] and each not in lost for each in keys], np.bool_)

        one = self.source
        return Source(one.shift, one.begin, one.end, one.hashes, usable_of)

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
        check_parts(found, wanted, rng)


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


def check_parts(found: Composition, wanted: list[tuple[bytes, int]], rng: random.Random) -> None:
    """Some of the pages are made as they were among all of them."""
    first = rng.randrange(found.num_pages)
    num = rng.randint(1, found.num_pages - first)
    part, span = found.part(first, num), slice(first * PAGE, (first + num) * PAGE)
    assert tokens_of(part) == wanted[span]
    assert part.start == found.start + first * PAGE
    assert (part.stored == found.stored[first : first + num]).all()
    first_uses = list(dict.fromkeys(digest for digest, _ in wanted[span]))
    assert [row.tobytes() for row in part.hashes] == first_uses
    order = [row.tobytes() for row in found.hashes]
    for num_hashes in range(len(order) + 1):
        known = set(order[:num_hashes])
        lead = next((at for at, (page, _) in enumerate(wanted) if page not in known), len(wanted))
        assert found.num_covered(num_hashes) == lead // PAGE
    assert (part.digest() == found.digest()) == (num == found.num_pages)


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_agreed_make_a_prompt_of_pages_that_all_have(seed: int) -> None:
    rng = random.Random(seed)
    start, end = PAGE * rng.randrange(3), PAGE * rng.randint(4, 14)
    own = Chain("own", [rng.random() < 0.4 for _ in range(end // PAGE)], 0, 0, end)
    near = Chain("near", [True] * 24, rng.randint(0, 21), 6, end)
    far = Chain("far", [True] * 30, rng.randint(22, 40), 6, end)
    chains = [own, near, far, Chain("head", [True] * 2, 0, 0, 6)]
    keys = [row.tobytes() for chain in chains for row in chain.hashes]
    losses: list[set[bytes]] = [set(rng.sample(keys, 6)) for _ in range(3)]
    ranks = [[chain.source_on(lost) for chain in chains] for lost in losses]
    told: list[Bools] = []

    def tell(flags: Bools) -> Bools:
        told.append(flags)
        return flags

    for sources in ranks:
        agree_on(sources, start, end, PAGE, tell)
    everywhere = np.logical_and.reduce(told)
    for sources in ranks:
        agree_on(sources, start, end, PAGE, lambda flags: everywhere)
    made = [compose(start, end, PAGE, sources[0], sources[1:]) for sources in ranks]
    least = [chain.source_on(set.union(*losses)) for chain in chains]
    wanted = compose(start, end, PAGE, least[0], least[1:])
    digests = {None if each is None else each.digest() for each in [*made, wanted]}
    assert len(digests) == 1
