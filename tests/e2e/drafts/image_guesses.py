"""Prompts with images on a server that guesses, and what shows that their pages have its rows."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tiers.records.record import parse_header
from testkit.images.vision_model import picture
from testkit.server import Server
from tests.e2e.drafts.restored import check_same
from tests.e2e.drafts.test_speculation import records, share
from tests.e2e.hier_server import by_tier, settled
from tests.e2e.images.image_prompts import Prompt, ask, check_right, prompts
from tests.e2e.models.hybrid_answers import cached, values

PAGE = 64
# Images begin and end inside of pages, a chunk of a prompt ends in one, and one has two of them.
_, SMALL, LARGE, EARLY, _, TWO, _, _ = prompts()
PICTURED = (LARGE, TWO, EARLY, SMALL)
# Of one shape with the last one, so their tokens are alike.
OTHER = Prompt(SMALL.text, (picture(99, width=5, height=13),))


def _answers(server: Server, num: int, **fields: Any) -> list[dict[str, Any]]:
    return [ask(server, prompt, num, **fields) for prompt in PICTURED]


@dataclass
class Pictured:
    """Answers to `PICTURED` behind what the device has.

    Attributes:
        num: tokens of an answer.
        hits: the answers.
        names: of the stored pages and states that the last one alone has.
    """

    num: int
    hits: list[dict[str, Any]]
    names: set[bytes]

    def check(self, server: Server, tier: str, lost: int = 0, *, is_narrow: bool = False) -> None:
        """They come back from a tier as they do from the device.

        With other guesses right, other tokens are verified together, which rounds otherwise. Of K
        and V in fp8 that can be the next value, and later tokens may be others.

        Args:
            server: which has them there, and not on its device.
            tier: where.
            lost: so many last ones come back without the draft's rows.
            is_narrow: K and V are in fp8.
        """
        found = _answers(server, self.num)
        assert cached(found) == cached(self.hits)
        assert [by_tier(answer).get(tier, 0) for answer in found] == cached(self.hits)
        kept = len(found) - lost
        check_same(found[:kept], self.hits[:kept])
        without, had = found[kept:], self.hits[kept:]
        num = 1 if is_narrow else self.num
        for lacking, whole in zip(without, had, strict=True):
            assert lacking["output_ids"][:num] == whole["output_ids"][:num]
        if lost:
            print(f"images: {share(had):.3f} of guesses right, {share(without):.3f} without KV")
            assert share(without) < share(had) - 0.1

    def check_plain(self, server: Server) -> None:
        """A server of SGLang's alone, whose device has none of it, has the same hits."""
        _answers(server, self.num)
        check_same(_answers(server, self.num), self.hits)


def device_hits(server: Server, disk: Path, num: int) -> Pictured:
    """Asks until the device has all; what is computed then is what is computed apart from all.

    Args:
        server: on whose device is nothing with images.
        disk: its folder.
        num: tokens of an answer.
    """
    apart = _answers(server, num, cache_salt="apart")
    computed, before = [], set[bytes]()
    for prompt in PICTURED:
        settled(server)
        before = names_in(disk)
        computed.append(ask(server, prompt, num))
    settled(server)
    names = names_in(disk) - before
    check_right(computed, apart)
    hits = _answers(server, num)
    check_right(hits, computed)
    assert min(cached(hits)) >= PAGE
    return Pictured(num, hits, names)


def check_another_image(server: Server, num: int) -> None:
    """An image of the same shape shares the text before it with one that is there, and no more."""
    apart, first = (ask(server, each, num, cache_salt="apart") for each in (OTHER, SMALL))
    assert values([apart]) != values([first])
    settled(server)
    found = ask(server, OTHER, num)
    check_right([found], [apart])
    assert cached([found])[0] < 2 * PAGE


def names_in(folder: Path) -> set[bytes]:
    """What the records of a disk are named by: pages and states."""
    return {parse_header(record)[0].page_hash for _, _, record in records(folder)}
