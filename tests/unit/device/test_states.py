"""Snapshots of states: their bytes and their keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sglang_ext.device.layout import PageLayout
from sglang_ext.device.states.snapshots import (
    Snapshots,
    StatePool,
    furthest_resume,
    part_hashes,
)

SLOTS = 6
LAYOUT = PageLayout(4, (64, 64), (64, 64), 2)


def pool(*kinds: tuple[torch.dtype, tuple[int, ...]]) -> StatePool:
    torch.manual_seed(0)
    tensors = [(100 * torch.randn(3, SLOTS, *shape)).to(dtype) for dtype, shape in kinds]
    return StatePool(tuple(tensors), (0, 2, 4))


@pytest.mark.parametrize(
    "kinds",
    [
        [(torch.bfloat16, (5, 3)), (torch.float32, (2, 7, 9))],
        [(torch.bfloat16, (1, 1)), (torch.bfloat16, (3, 3)), (torch.float32, (1, 1, 1))],
        [(torch.float32, (8, 16, 8))],
        [(torch.float16, (40, 3))],
    ],
)
def test_a_state_comes_back_bit_for_bit_into_another_slot(kinds: list[Any]) -> None:
    states = pool(*kinds)
    snapshots = Snapshots(states, LAYOUT)
    num_bytes = sum(t[:, 0].numel() * t.element_size() for t in states.tensors)
    assert snapshots.num_bytes >= num_bytes > snapshots.num_bytes - snapshots.part_bytes - 192
    before = [t.clone() for t in states.tensors]
    parts = torch.full((snapshots.num_parts, snapshots.part_bytes), 7, dtype=torch.uint8)
    snapshots.gather(torch.tensor([4]), parts)
    snapshots.scatter(parts.clone(), torch.tensor([1]))
    for tensor, was in zip(states.tensors, before, strict=True):
        assert torch.equal(tensor[:, 1], was[:, 4])
        others = [0, 2, 3, 4, 5]
        assert torch.equal(tensor[:, others], was[:, others])


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch is asked for that is work on a device, and the memory that it takes for that."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []
        self.taken_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        self.names.append(str(func))
        known = {each.untyped_storage().data_ptr() for each in _tensors((args, kwargs))}
        for each in _tensors(result):
            if each.untyped_storage().data_ptr() not in known:
                self.taken_bytes += each.nbytes
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def test_a_copy_is_a_launch_a_tensor_and_takes_no_memory_of_the_device() -> None:
    states = pool((torch.bfloat16, (5, 3)), (torch.float32, (2, 7, 9)))
    snapshots = Snapshots(states, LAYOUT)
    parts = torch.empty((snapshots.num_parts, snapshots.part_bytes), dtype=torch.uint8)
    with _Operations() as saved:
        snapshots.gather(torch.tensor([4]), parts)
    with _Operations() as loaded:
        snapshots.scatter(parts, torch.tensor([1]))
    assert saved.names == ["aten.zero_.default", *["aten.index_select.out"] * 2]
    assert loaded.names == ["aten.index_copy_.default"] * 2
    assert saved.taken_bytes == loaded.taken_bytes == 0


def test_no_value_lies_in_two_parts() -> None:
    """Parts of one key may come from two computations of the same tokens."""
    states = pool((torch.bfloat16, (5, 3)), (torch.float32, (2, 7, 9)))
    snapshots = Snapshots(states, LAYOUT)
    parts = torch.empty((snapshots.num_parts, snapshots.part_bytes), dtype=torch.uint8)
    other = torch.empty_like(parts)
    snapshots.gather(torch.tensor([4]), parts)
    snapshots.gather(torch.tensor([2]), other)
    for part in range(snapshots.num_parts):
        mixed = parts.clone()
        mixed[part] = other[part]
        snapshots.scatter(mixed, torch.tensor([1]))
        for tensor in states.tensors:
            assert ((tensor[:, 1] == tensor[:, 4]) | (tensor[:, 1] == tensor[:, 2])).all()


def test_keys_of_parts_are_of_one_page_and_one_part() -> None:
    hashes = np.arange(3 * 32, dtype=np.uint8).reshape(3, 32)
    keys = [row.tobytes() for part in range(4) for row in part_hashes(hashes, part)]
    assert len({*keys, *(row.tobytes() for row in hashes)}) == 4 * 3 + 3


def test_places_to_resume_at_are_named_from_the_furthest_on() -> None:
    assert furthest_resume([True, False, True, True, False], 8) == [4, 3, 1]
    assert furthest_resume([True, False, True, True, False], 2) == [4, 3]
    assert furthest_resume([], 2) == []


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("full", "heads", "dim", "stateful", "conv", "matrix"),
    [
        (12, 2, 256, 36, (8192, 3), (32, 128, 128)),
        (4, 8, 128, 24, (10240, 3), (128, 64, 128)),
        (4, 8, 128, 36, (3328, 3), (48, 64, 128)),
    ],
    ids=["qwen3-next-80b", "nemotron-h-8b", "granite-4-h-tiny"],
)
def test_a_prompt_takes_the_bytes_that_its_layers_and_states_need(
    full: int,
    heads: int,
    dim: int,
    stateful: int,
    conv: tuple[int, int],
    matrix: tuple[int, int, int],
    num_ranks: int,
) -> None:
    """A prompt of 4,096 tokens in bfloat16 with a state at its end, with headers and all."""
    page, num_tokens = 64, 4096
    row = max(1, heads // num_ranks) * dim * 2
    layout = PageLayout(page, (row,) * full, (row,) * full, 2)
    shapes = (
        (torch.bfloat16, (conv[0] // num_ranks, conv[1])),
        (torch.float32, (matrix[0] // num_ranks, *matrix[1:])),
    )
    tensors = tuple(
        torch.empty(stateful, 2, *shape, dtype=dtype, device="meta") for dtype, shape in shapes
    )
    snapshots = Snapshots(StatePool(tensors, tuple(range(stateful))), layout)
    state_bytes = sum(tensor[:, 0].numel() * tensor.element_size() for tensor in tensors)
    needed = 2 * row * full * num_tokens + state_bytes
    taken = (num_tokens // page + snapshots.num_parts) * layout.slot_bytes
    assert taken <= 1.05 * needed
