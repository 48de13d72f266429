"""Where a prompt of a model with window layers can be resumed, against what its tokens read."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.windows.window_layers import WindowLayers  # noqa: E402
from sglang_ext.provenance.tree_quality import DeviceProvenance  # noqa: E402
from sglang_ext.seam.hybrids.window_pages import WindowPages  # noqa: E402
from sglang_ext.seam.radix_tree import TreeNode  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from tests.long_form import count  # noqa: E402
from tests.property.hybrids.hit_rig import PAGE, HitRig  # noqa: E402

CASES = count(2_000, 50_000)
GROUPS = 2
MOST_OF_A_CASE = 64  # pages
Pages = list[bool]


class Rig(HitRig):
    """With the pages of models with window layers."""

    def pages(
        self, num_before: int, tree: Any = None, saver: Any = None, *, of_pairs: bool = False
    ) -> WindowPages:
        """Of a model whose tokens read so many tokens before their own in a window layer."""
        copiers: Any = (None,) * GROUPS
        layers = WindowLayers(-(-num_before // PAGE), PAGE, copiers, [])
        return WindowPages(
            layers, self.store, tree, saver, pages=DeviceProvenance(1), may_move=lambda: False,
            of_pairs=of_pairs,
        )  # fmt: skip


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    rig = Rig(MOST_OF_A_CASE)
    yield rig
    rig.store.close()


def furthest(full: Pages, windows: list[Pages], before: int, first: int, limit: int) -> int:
    """Pages behind the first ones, which the device has, up to where every later token reads.

    Args:
        full: whether the full layers' part of each page is there.
        windows: of each group, whether its part of each page is.
        before: tokens before its own that a token reads in a window layer.
        first: leading pages that are on the device, with the window behind them.
        limit: it may end there at most.
    """
    found = 0
    for end in range(first + 1, limit + 1):
        read = {token // PAGE for token in range(max(0, end * PAGE - before), end * PAGE)}
        new = range(first, end)
        if all(full[page] for page in new) and all(
            group[page] for group in windows for page in read if page in new
        ):
            found = end - first
    return found


def test_a_hit_is_what_a_resume_needs(rig: Rig) -> None:
    """The longest prefix behind which every token finds all that it reads in any layer."""
    rng = random.Random(5)
    seen = set()
    for _ in range(CASES):
        before, num = rng.randint(1, 14), rng.randint(1, 8)
        pages = rig.pages(before)
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(num, 32)
        share = rng.choice((0.5, 0.8, 1.0))
        full = [rng.random() < 0.9 for _ in range(num)]
        windows = [[rng.random() < max(share, 0.8) for _ in range(num)] for _ in range(GROUPS)]
        keys = pages.parts(hashes)  # of the full layers, then group by group
        there = np.array([*full, *windows[0], *windows[1]])
        if there.any():
            rig.put(keys[there])
        wanted = furthest(full, windows, before, 0, num)
        assert pages.num_loadable(rig.space, hashes, 255) == wanted
        on_device = rng.randint(0, min(2, num))
        limit = rng.randint(on_device, num)
        behind = furthest(full, windows, before, on_device, limit)
        wish, found = pages.wish(rig.space, hashes, on_device, limit)
        assert found == behind, (full, windows, before, on_device, limit)
        end = on_device + behind
        expected = [hashes[:end]]
        if behind:  # what lies on the device needs no window of its own
            begin = max(on_device, end - -(-before // PAGE))
            expected += [keys[num * (1 + at) :][begin:end] for at in range(GROUPS)]
        if end == limit < num:
            expected += [keys[num * at :][limit : limit + 1] for at in range(1 + GROUPS)]
        assert wish.tobytes() == np.concatenate(expected).tobytes()
        seen.add((wanted, behind))
        rig.make_room(num * (1 + GROUPS))
    assert len(seen) > 20


def test_the_window_where_the_tree_ends_stays() -> None:
    """The tree has six pages of a turn of eight, of which four were its prompt."""
    rig = Rig(MOST_OF_A_CASE, PolicyConfig())
    hashes = np.frombuffer(random.Random(1).randbytes(32 * 8), np.uint8).reshape(8, 32)
    node = TreeNode("node", 0, 6, [page.tobytes().hex() for page in hashes[:6]], None, False)
    tree = SimpleNamespace(page_size=PAGE, window_path=lambda key: (6, [node]))
    pages = rig.pages(PAGE, tree)
    for part in pages.parts(hashes):
        rig.put(part[None])  # none leads to another
    assert rig.store.lookahead is not None
    rig.store.lookahead.used(rig.space, hashes, None)
    req = SimpleNamespace(
        origin_input_ids=[7] * (4 * PAGE), full_untruncated_fill_ids=[7] * (8 * PAGE),
        extra_key=None, cache_salt=None, finished=lambda: True,
    )  # fmt: skip
    note = pages.save(req, rig.space, 8 * PAGE, lambda place, num: place)
    assert note is not None
    note()
    table = rig.store._books.table
    leaving = rig.store.counters.snapshot()["superseded_pages"]
    keys = table.index.keys(table.order.next_to_leave(leaving, 0.0))[0]
    found = {key.tobytes() for key in keys}
    windows = pages.parts(hashes)[8:].reshape(GROUPS, 8, 32)
    for group in windows:  # behind page 3 the prompt is asked again, behind 4 it ended
        assert {at for at, key in enumerate(group) if key.tobytes() in found} == {0, 1, 4}
    rig.store.close()


@pytest.mark.parametrize(
    ("of_pairs", "more", "ends"),
    [(False, 0, {3, 4}), (False, 1, {4}), (True, 0, {3}), (True, 1, {3, 4}), (True, 2, {4})],
)
def test_a_window_is_saved_where_the_same_prompt_goes_on_and_where_it_ends(
    rig: Rig, of_pairs: bool, more: int, ends: set[int]
) -> None:
    """With keys of pairs four pages take a token more, and so does going on behind them."""
    num_prompt, saved, keyed = 4 * PAGE + more, [], []
    hashes = np.frombuffer(random.Random(2).randbytes(32 * 4), np.uint8).reshape(4, 32)

    def window_path(key: Any) -> tuple[int, list[TreeNode]]:
        keyed.append(key)
        end = len(key) // PAGE
        pages = [page.tobytes().hex() for page in hashes[:end]]
        return end, [TreeNode("node", 0, end, pages, torch.arange(end * PAGE), False)]

    def save_window(node: Any, place: Any, pages: Any, rows: torch.Tensor) -> bool:
        saved.append(int(rows[-1] + 1) // PAGE)
        assert pages.tobytes() == hashes[saved[-1] - 1 : saved[-1]].tobytes()
        return True

    tree = SimpleNamespace(page_size=PAGE, window_path=window_path)
    pages = rig.pages(PAGE, tree, SimpleNamespace(save_window=save_window), of_pairs=of_pairs)
    req = SimpleNamespace(
        origin_input_ids=[7] * num_prompt, full_untruncated_fill_ids=array("q", [7] * num_prompt),
        extra_key=None, cache_salt=None, finished=lambda: False,
    )  # fmt: skip
    pages.save(req, rig.space, num_prompt, lambda place, num: place)
    assert set(saved) == ends
    assert all(key.is_bigram == of_pairs for key in keyed)
