"""Where a prompt of a model with states can be resumed, against what a resume needs."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.states.snapshots import Snapshots, StatePool  # noqa: E402
from sglang_ext.seam.hybrids.state_pages import StatePages  # noqa: E402
from tests.long_form import count  # noqa: E402
from tests.property.hybrids.hit_rig import LAYOUT, HitRig  # noqa: E402

CASES = count(2_000, 50_000)
MOST_OF_A_CASE = 256  # pages
LONE_SHARE = 0.1  # of cases: one whole state, however many others lack a part


class Rig(HitRig):
    """With the pages of a model with states."""

    def __init__(self) -> None:
        super().__init__(MOST_OF_A_CASE)
        self.snapshots = Snapshots(StatePool((torch.zeros(3, 6, 4, 7, 9),), (0, 2, 4)), LAYOUT)
        tree: Any = None
        self.pages = StatePages(self.snapshots, self.store, tree, tree)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig()
    assert rig.snapshots.num_parts > 2
    yield rig
    rig.store.close()


def draw(rng: random.Random, num: int, num_parts: int) -> tuple[list[bool], list[list[bool]]]:
    """Which of some pages are there, and which parts of the state behind each."""
    if rng.random() < LONE_SHARE:
        parts = [[True] * num_parts for _ in range(num)]
        whole = rng.randrange(num)
        for page in set(range(num)) - {whole}:
            parts[page][rng.randrange(1, num_parts)] = False
        return [True] * num, parts
    pages = [rng.random() < 0.9 for _ in range(num)]
    parts = [
        [rng.random() < rng.choice((0.0, 0.8, 1.0)) for _ in range(num_parts)] for _ in range(num)
    ]
    return pages, parts


def test_a_hit_is_what_a_resume_needs(rig: Rig) -> None:
    """The longest prefix of stored pages behind whose last page a whole state is."""
    rng = random.Random(5)
    seen = set()
    for _ in range(CASES):
        num, on_device = rng.randint(1, 8), rng.randint(0, 2)
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(num, 32)
        pages, parts = draw(rng, num, rig.snapshots.num_parts)
        for page in range(num):
            there = [hashes[page : page + 1]] * pages[page]
            entries = rig.snapshots.entries(hashes[page])
            there += [entries[i : i + 1] for i, has in enumerate(parts[page]) if has]
            if there:
                rig.put(np.concatenate(there))
        wanted = 0
        for end in range(1, num + 1):
            if all(pages[:end]) and all(parts[end - 1]):
                wanted = end
        assert rig.pages.num_loadable(rig.space, hashes, 255) == wanted
        limit = rng.randint(min(on_device, num), num)
        tail = hashes[on_device:limit]
        behind = 0
        for end in range(1, len(tail) + 1):
            if all(pages[on_device : on_device + end]) and all(parts[on_device + end - 1]):
                behind = end
        wish, found = rig.pages.wish(rig.space, hashes, on_device, limit)
        assert found == behind
        expected = [hashes[: on_device + behind]]
        if behind:
            expected.append(rig.snapshots.entries(tail[behind - 1]))
        if on_device + behind == limit < num:
            expected.append(hashes[limit : limit + 1])
        assert wish.tobytes() == np.concatenate(expected).tobytes()
        seen.add((wanted, behind))
        rig.make_room(num * (1 + rig.snapshots.num_parts))
    assert len(seen) > 20
