"""Loads at token granularity: every offset gives what a page-aligned load gives, to rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.device.copier import CopyError
from sglang_ext.device.layout import ROPE_BOUND
from sglang_ext.device.load_pages import PageRun
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels.rope import naive
from tests.unit.device.test_copier import LAYERS, PAGE, RIG_SPECS, ROWS, Rig, same

SLOTS = np.array([5, 2, 9])
WIDE = np.arange(20 * PAGE, 26 * PAGE)[::-1].copy()
POSITION = 64  # that the pages were saved at


def load(rig: Rig, runs: list[PageRun], rows: np.ndarray, position: int) -> None:
    parts = rig.copier.prepare_runs(runs, rows, position)
    for layer in range(LAYERS):
        for part in parts:
            rig.copier.load_layer(part, layer)


def test_a_run_at_its_own_position_gives_the_same_bits_at_every_offset() -> None:
    rig = Rig()
    rig.fill(ROWS, POSITION)
    rig.disturb(ROWS[:1])  # so that corrections are used, and cut where the run begins or ends
    saved = rig.copier.save(ROWS, POSITION, SLOTS)
    assert sum(page.num_corrections for page in saved) > 0
    before = rig.read(ROWS)
    for first in range(PAGE):
        for num in (PAGE, 2 * PAGE - first, 3 * PAGE - first):
            pages = SLOTS[: -(-(first + num) // PAGE)]
            load(rig, [PageRun(pages, first, num)], WIDE[:num], POSITION + first)
            wanted = [tensor[first : first + num] for tensor in before]
            assert same(rig.read(WIDE[:num]), wanted), (first, num)


@pytest.mark.parametrize("mode", ["pre", "delta"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_offset_moves_as_whole_pages_do(mode: str, dtype: torch.dtype) -> None:
    rig = Rig(mode=mode, dtype=dtype)
    plain = rig.fill(ROWS, POSITION)
    rig.copier.save(ROWS, POSITION, SLOTS)
    tolerance = 0.04 if dtype == torch.bfloat16 else 1e-4
    for first in range(PAGE):
        for target in (3, 16, POSITION - 1, 1000):
            num = 3 * PAGE - first
            rows = WIDE[:num]
            load(rig, [PageRun(SLOTS, first, num)], rows, target)
            # The same tokens at the same positions, from whole pages: bit for bit.
            if target >= first:
                aligned = WIDE[3 * PAGE :]
                load(rig, [PageRun(SLOTS, 0, 3 * PAGE)], aligned, target - first)
                wanted = [tensor[first:] for tensor in rig.read(aligned)]
                assert same(rig.read(rows), wanted), (first, target)
            for layer, used in enumerate(RIG_SPECS):
                found = rig.k[layer][torch.from_numpy(rows)]
                x = plain[layer][first:]
                if used is not None:
                    x = naive.rotate(x, target + np.arange(num), used)
                assert torch.allclose(found.float(), x.float(), rtol=tolerance, atol=tolerance)


def test_runs_are_joined_across_pages_and_states() -> None:
    """A bound page among position-free ones is rotated by the difference."""
    rig = Rig()
    rig.fill(ROWS, POSITION)
    rig.disturb(ROWS[PAGE : 2 * PAGE])
    saved = rig.copier.save(ROWS, POSITION, SLOTS)
    assert saved[1].rope_state == ROPE_BOUND
    source = rig.read(ROWS)
    runs = [PageRun(SLOTS[:1], 1, 3), PageRun(SLOTS, 4, 3 * PAGE - 4)]
    num = 3 + 3 * PAGE - 4
    load(rig, runs, WIDE[:num], 200)
    tokens = np.concatenate([np.arange(1, 4), np.arange(4, 3 * PAGE)])
    found = rig.read(WIDE[:num])
    assert torch.equal(found[2], source[2][tokens])  # no rotary embedding in that layer
    for layer in range(LAYERS, 2 * LAYERS):
        assert torch.equal(found[layer], source[layer][tokens])
    used = RIG_SPECS[0]
    assert used is not None
    x = naive.unrotate(source[0][tokens], POSITION + tokens, used)
    wanted = naive.rotate(x, 200 + np.arange(num), used)
    assert torch.allclose(found[0].float(), wanted.float(), rtol=0.04, atol=0.04)


def test_what_cannot_move_is_refused() -> None:
    rig = Rig()
    rig.ropes[1] = LayerRope(None, movable=False)
    rig.fill(ROWS, POSITION)
    rig.copier.save(ROWS, POSITION, SLOTS)
    assert not rig.copier.movable
    load(rig, [PageRun(SLOTS[:1], 2, 4)], WIDE[:4], POSITION + 2)
    with pytest.raises(CopyError, match="cannot be loaded elsewhere"):
        rig.copier.prepare_runs([PageRun(SLOTS[:1], 2, 4)], WIDE[:4], POSITION)
    with pytest.raises(ValueError, match="for 5 rows"):
        rig.copier.prepare_runs([PageRun(SLOTS[:1], 2, 4)], WIDE[:5], POSITION + 2)
    rig.slots[2] = 0
    assert rig.copier.damaged(SLOTS).tolist() == [1]
