"""Layers whose K stays as the engine has it in pages whose other layers' K is position-free."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang_ext.assembly.draft_setup import kept_ropes
from sglang_ext.device.copier import CopyError
from sglang_ext.device.layout import ROPE_BOUND, ROPE_DELTA, ROPE_PRE
from sglang_ext.device.load_pages import PageRun
from sglang_ext.device.rope_discovery import LayerRope, rope_digest
from tests.unit.device.test_copier import DIM, LAYERS, OTHER, PAGE, ROWS, Rig, same

KEPT = LAYERS - 1
SLOTS = np.array([5, 2, 9])


def rig_of(mode: str = "pre") -> Rig:
    rig = Rig(mode=mode)
    rig.ropes[KEPT:] = kept_ropes(1)
    rig.fill(ROWS, 64)
    return rig


@pytest.mark.parametrize(("mode", "state"), [("pre", ROPE_PRE), ("delta", ROPE_DELTA)])
def test_they_bind_no_page_and_come_back_bit_for_bit(mode: str, state: int) -> None:
    rig = rig_of(mode)
    assert {page.rope_state for page in rig.copier.save(ROWS, 64, SLOTS)} == {state}
    before = rig.read(ROWS)
    stored = [stored_k(rig, layer) for layer in range(LAYERS)]
    assert torch.equal(stored[KEPT], before[KEPT].view(torch.int16))
    assert torch.equal(stored[0], before[0].view(torch.int16)) == (mode == "delta")
    rig.load(SLOTS.tolist(), OTHER, 64)
    assert same(rig.read(OTHER), before)


def stored_k(rig: Rig, layer: int) -> torch.Tensor:
    """Of the three pages, as bit patterns [T, H, D]."""
    at = rig.layout.k_offsets[layer]
    size = rig.layout.k_row_bytes[layer] * PAGE
    found = [rig.slots[slot, at : at + size].view(np.int16) for slot in SLOTS]
    return torch.from_numpy(np.concatenate(found).reshape(len(ROWS), -1, DIM))


@pytest.mark.parametrize("mode", ["pre", "delta"])
def test_they_keep_a_page_at_its_position(mode: str) -> None:
    rig = rig_of(mode)
    rig.copier.save(ROWS, 64, SLOTS)
    assert not rig.copier.movable
    with pytest.raises(CopyError, match="bound to position 64 cannot be loaded elsewhere"):
        rig.copier.prepare_load(SLOTS, OTHER, 1000)
    with pytest.raises(CopyError, match="bound to position 64 cannot be loaded elsewhere"):
        rig.copier.prepare_runs([PageRun(SLOTS, 0, len(OTHER))], OTHER, 1000)


def test_another_layer_that_is_bound_binds_the_page() -> None:
    rig = rig_of()
    rig.copier.bind(0, "a test")
    assert {page.rope_state for page in rig.copier.save(ROWS, 64, SLOTS)} == {ROPE_BOUND}
    before = rig.read(ROWS)
    rig.load(SLOTS.tolist(), OTHER, 64)
    assert same(rig.read(OTHER), before)


def test_namespaces_tell_such_pages_from_those_that_are_bound_as_a_whole() -> None:
    own = Rig().ropes[:KEPT]
    bound = [LayerRope(None, movable=False) for _ in range(LAYERS)]
    digests = {rope_digest([*own, *kept_ropes(1)], "pre"), rope_digest(bound, "pre")}
    assert len({*digests, rope_digest(Rig().ropes, "pre")}) == 3
