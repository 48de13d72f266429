"""A sequence's state in all layers of a hybrid model, as bytes, cut into parts of a page's size.

A state is a snapshot at a position: a request can go on behind it, and nowhere else. Its parts lie
in slots of their own, with the layout of any other page: the payload is bytes of the snapshot, the
tail says that it is bound to its position. A part's key is the hash of the page that the snapshot
is behind, changed in a way that belongs to the part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.layout import HEADER_BYTES, PageLayout

Hashes = npt.NDArray[np.uint8]
# No value of a state lies in two parts, which may be of two computations of the same tokens.
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class StatePool:
    """The states on the device.

    Attributes:
        tensors: `[L, S, ...]` each, of all layers with a state and all slots. Slot 0 is padding.
        layers: the model's layers that these are, by number.
    """

    tensors: tuple[torch.Tensor, ...]
    layers: tuple[int, ...]

    def describe(self) -> list[Any]:
        """What the bytes of a snapshot are: layers, and dtype and shape of each tensor."""
        kinds = [[str(t.dtype), t.shape[0], *t.shape[2:]] for t in self.tensors]
        return [list(self.layers), kinds]


class Snapshots:
    """Cuts the states of one model into parts, and puts them together.

    Args:
        pool: the states on the device.
        layout: of the pages in whose slots the parts lie.
        num_stages: pipeline stages of the model.

    Attributes:
        span: bytes of a slot that a part takes.
        num_parts: parts of a snapshot.
        least_pages: pages that a state has to spare to be worth its bytes, the same on all ranks.
            Stages have other layers and other sizes each, so of several all states are.
    """

    def __init__(self, pool: StatePool, layout: PageLayout, num_stages: int = 1) -> None:
        self.pool = pool
        self.layout = layout
        self.span = slice(HEADER_BYTES, layout.tail_offset)
        self.part_bytes = layout.tail_offset - HEADER_BYTES
        self._starts: list[int] = []
        end = 0
        for tensor in pool.tensors:
            self._starts.append(end)
            end += -(-_slot_bytes(tensor) // _ALIGN_BYTES) * _ALIGN_BYTES
        assert self.part_bytes % _ALIGN_BYTES == 0
        self.num_parts = -(-end // self.part_bytes)
        self.least_pages = self.num_parts if num_stages == 1 else 1

    @property
    def num_bytes(self) -> int:
        """Bytes of a snapshot's parts."""
        return self.num_parts * self.part_bytes

    def entries(self, page_hash: Hashes) -> Hashes:
        """Keys of the parts of the snapshot behind a page, u8 `[parts, 32]`.

        Args:
            page_hash: u8 `[1, 32]` or `[32]`.
        """
        return np.concatenate(
            [part_hashes(page_hash.reshape(1, 32), part) for part in range(self.num_parts)]
        )

    def gather(self, slot: torch.Tensor, out: Any) -> None:
        """Writes a snapshot.

        Args:
            slot: `[1]`, on the pool's device.
            out: u8 `[parts, part_bytes]`, contiguous, on the pool's device. On a device no other
                memory is taken, and nobody waits.
        """
        memory, index = torch.as_tensor(out), slot.to(torch.int64)
        memory.zero_()
        for tensor, values in zip(self.pool.tensors, self._blocks(memory), strict=True):
            torch.index_select(tensor, 1, index, out=values)

    def scatter(self, parts: Any, slot: torch.Tensor) -> None:
        """Reads a snapshot; the way back of `gather`."""
        memory, index = torch.as_tensor(parts), slot.to(torch.int64)
        for tensor, values in zip(self.pool.tensors, self._blocks(memory), strict=True):
            tensor.index_copy_(1, index, values)

    def _blocks(self, parts: torch.Tensor) -> list[torch.Tensor]:
        """Where each tensor lies in a snapshot, `[L, 1, ...]`."""
        flat, blocks = parts.view(-1), []
        for tensor, start in zip(self.pool.tensors, self._starts, strict=True):
            raw = flat[start : start + _slot_bytes(tensor)].view(tensor.dtype)
            blocks.append(raw.view(tensor.shape[0], 1, *tensor.shape[2:]))
        return blocks


def part_hashes(hashes: Hashes, part: int) -> Hashes:
    """Keys of a part of the snapshots behind some pages, u8 `[N, 32]`.

    A page's hash is a SHA-256 value, and so is what it is changed by: to find a page whose key is
    another's part is to find a preimage.
    """
    tag = hashlib.sha256(b"hier-kv states, part %d" % part).digest()
    return hashes ^ np.frombuffer(tag, np.uint8)


def furthest_resume(has_first: Sequence[bool] | npt.NDArray[np.bool_], most: int) -> list[int]:
    """Where a prompt may be resumed, in pages, the furthest first.

    Args:
        has_first: bool `[N]`, whether a part of the snapshot behind each page is there.
        most: so many of them are named.
    """
    ends = np.flatnonzero(np.asarray(has_first, np.bool_)) + 1
    named: list[int] = ends[::-1][:most].tolist()
    return named


def _slot_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a slot in all layers."""
    return tensor.shape[0] * tensor[0, 0].numel() * tensor.element_size()
