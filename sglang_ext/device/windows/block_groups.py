"""Groups of a hybrid model whose window layers have K and V of other shapes than the full layers.

Such layers do not fill the page of another one for one, so what is put into groups are their blocks
of K and V, one by one, in the order of the layers: as many a group as fit into what a page of the
full layers takes. A layer's K may be in one group and its V in the next. Each group has a layout of
its own in the frame of the full layers' page, and lies in the same slots, segments and index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Block:
    """K or V of a window layer.

    Attributes:
        index: of the layer in the window layers' pool.
        is_v: whether it is V.
    """

    index: int
    is_v: bool


@dataclass(frozen=True)
class BlockGroups:
    """Which blocks the parts of a model's pages hold.

    Attributes:
        full: the model's layers with full attention whose KV is stored, and draft models' behind
            them (`LayerGroups`); what a page holds.
        window: those with a window.
        groups: blocks of window layers; `Block.index` is an index into `window`.
    """

    full: tuple[int, ...]
    window: tuple[int, ...]
    groups: tuple[tuple[Block, ...], ...]

    @property
    def model_layers(self) -> list[tuple[int, ...]]:
        """The model's layers of each part: of the full one, then of the groups, block by block."""
        return [
            self.full,
            *(tuple(self.window[block.index] for block in group) for group in self.groups),
        ]

    def describe(self) -> list[Any]:
        """What each part holds, in order; for the namespace."""
        groups = [
            [[self.window[block.index], "v" if block.is_v else "k"] for block in group]
            for group in self.groups
        ]
        return [list(self.full), *groups]


def group_blocks(
    blocks: Sequence[tuple[Block, int]], capacity: int
) -> tuple[tuple[Block, ...], ...]:
    """Puts blocks into groups, each as full as the order of the blocks allows.

    Args:
        blocks: in the order of the layers, with the bytes that each takes in a page.
        capacity: bytes of a group.

    Raises:
        ValueError: a block is larger than a group.
    """
    groups: list[list[Block]] = [[]]
    free = capacity
    for block, num_bytes in blocks:
        if num_bytes > capacity:
            raise ValueError(f"a block of {num_bytes} bytes in groups of {capacity}")
        if num_bytes > free:
            groups.append([])
            free = capacity
        groups[-1].append(block)
        free -= num_bytes
    return tuple(map(tuple, groups))
