"""Payload of a page: where each layer's K and V lie, and the tail with corrections.

    [layer 0: K block][layer 0: V block][layer 1: K block] ... [tail]

A block is ``[P, H, D]`` in the KV dtype, rows of one token next to each other, 64-byte aligned.
MLA pools have one block a layer and no V; where rows of an index lie beside the latent ones, those
of a layer are its second block, as SGLang keeps them: a page's values, then its scales. The tail
(little endian, layout version 1, stored on disk, never renumber)::

    u32 layout version | u32 rope state | u64 saved position | u32 number of corrections | u32 zero
    u32[L] corrections of each layer | { u32 element, u32 bits }[number of corrections]

``element`` counts values inside the layer's K block. Corrections are sorted by layer.

Where K is always bound to its position, nothing is ever listed, and a slot has no room for it. A
page of other blocks may lie in the frame of such a page: it has that one's slot, payload and tail,
whatever its blocks are. What they leave free is zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

HEADER_BYTES = 512
SLOT_ALIGN_BYTES = 4096
BLOCK_ALIGN_BYTES = 64
LAYOUT_VERSION = 1

# How K is stored in a page. Stored on disk; never renumber.
ROPE_PRE = 0  # before rotary embedding, with corrections for the saved position
ROPE_BOUND = 1  # as the engine had it; valid at the saved position only
ROPE_DELTA = 2  # as the engine had it; may be rotated by a difference of positions
ROPE_NAMES = {ROPE_PRE: "pre", ROPE_BOUND: "bound", ROPE_DELTA: "delta"}

_TAIL_FIXED_BYTES = 24
NUM_WORD = 4  # of a tail, counts corrections
_CORRECTION_BYTES = 8
# Room for corrections: 1 in 256 K values. Measured shares are far below (docs/benchmarks.md);
# a page that needs more is kept position-bound.
_CORRECTION_ROOM = 256

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PageLayout:
    """Byte offsets inside a slot, for pages of one model.

    Attributes:
        page_size: tokens in a page, P.
        k_row_bytes: bytes of one token's K in each layer, ``[L]``.
        v_row_bytes: bytes of one token's V in each layer, ``[L]``; 0 for MLA.
        item_bytes: bytes of one value.
        frame: layout of the pages whose slot, payload and tail these have; None: their own.
        is_bound: whether K is always as the engine has it, so that there is nothing to list.
        has_index: whether a layer's second block is not V but rows of an index.

    Raises:
        ValueError: the blocks do not fit into the frame, or one of the two is not bound.
    """

    page_size: int
    k_row_bytes: tuple[int, ...]
    v_row_bytes: tuple[int, ...]
    item_bytes: int
    frame: PageLayout | None = None
    is_bound: bool = False
    has_index: bool = False
    # Derived from the fields above.
    k_offsets: tuple[int, ...] = field(init=False)
    v_offsets: tuple[int, ...] = field(init=False)
    tail_offset: int = field(init=False)
    slot_bytes: int = field(init=False)
    max_corrections: int = field(init=False)
    gaps: tuple[slice, ...] = field(init=False)

    def __post_init__(self) -> None:
        end = self._place_blocks()
        tail_offset = end if self.frame is None else self.frame.tail_offset
        if end > tail_offset:
            raise ValueError(f"blocks up to byte {end} in pages whose tail is at {tail_offset}")
        if self.frame is not None and not (self.is_bound and self.frame.is_bound):
            raise ValueError("pages in the frame of others have nothing to list, and neither these")
        object.__setattr__(self, "tail_offset", tail_offset)
        object.__setattr__(self, "gaps", tuple(self._find_gaps()))
        num_values = sum(self.k_row_bytes) * self.page_size // self.item_bytes
        cap = 0 if self.is_bound else max(16, num_values // _CORRECTION_ROOM)
        end = tail_offset + self.tail_bytes(cap)
        slot_bytes = _align(end, SLOT_ALIGN_BYTES) if self.frame is None else self.frame.slot_bytes
        object.__setattr__(self, "slot_bytes", slot_bytes)
        # What alignment leaves over is room for corrections too.
        spare = 0 if self.is_bound else (slot_bytes - end) // _CORRECTION_BYTES
        object.__setattr__(self, "max_corrections", cap + spare)

    def _place_blocks(self) -> int:
        """Where each block begins; returns where the last one ends."""
        offset = HEADER_BYTES
        k_offsets: list[int] = []
        v_offsets: list[int] = []
        for k_bytes, v_bytes in zip(self.k_row_bytes, self.v_row_bytes, strict=True):
            k_offsets.append(offset)
            offset += block_bytes(k_bytes, self.page_size)
            v_offsets.append(offset)
            offset += block_bytes(v_bytes, self.page_size)
        object.__setattr__(self, "k_offsets", tuple(k_offsets))
        object.__setattr__(self, "v_offsets", tuple(v_offsets))
        return offset

    def _find_gaps(self) -> Iterator[slice]:
        """Bytes of the payload, in front of the tail, that are no block's."""
        rows = sorted(
            [
                *zip(self.k_offsets, self.k_row_bytes, strict=True),
                *zip(self.v_offsets, self.v_row_bytes, strict=True),
            ]
        )
        end = HEADER_BYTES
        for offset, row_bytes in (*rows, (self.tail_offset, 0)):
            if offset > end:
                yield slice(end, offset)
            end = max(end, offset + row_bytes * self.page_size)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.k_row_bytes)

    @property
    def num_listed_layers(self) -> int:
        """Layers whose corrections the tail counts."""
        return self.num_layers if self.frame is None else self.frame.num_layers

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V in a page, without header, alignment and tail."""
        return (sum(self.k_row_bytes) + sum(self.v_row_bytes)) * self.page_size

    def tail_bytes(self, num_corrections: int) -> int:
        """Bytes of the tail of a page with this many corrections."""
        return _TAIL_FIXED_BYTES + 4 * self.num_listed_layers + _CORRECTION_BYTES * num_corrections

    def payload_bytes(self, num_corrections: int) -> int:
        """Bytes from the end of the header to the end of the tail."""
        return self.tail_offset - HEADER_BYTES + self.tail_bytes(num_corrections)


@dataclass(frozen=True)
class LayerGroups:
    """Which layers of a model the parts of its pages hold.

    Attributes:
        full: the model's layers with full attention, by number, and behind them those of draft
            models, numbered on from the model's last; what a page holds.
        window: those with a window.
    """

    full: tuple[int, ...]
    window: tuple[int, ...]

    @property
    def groups(self) -> list[tuple[int, ...]]:
        """Indices into `window`, as many a group as there are full layers.

        The last group ends with the last layer. Where layers do not suffice it holds some twice,
        with the same content, so that no byte of a page is left as it was.
        """
        size, num = len(self.full), len(self.window)
        firsts = [*range(0, num - size, size), num - size]
        return [tuple(layer % num for layer in range(first, first + size)) for first in firsts]

    @property
    def model_layers(self) -> list[tuple[int, ...]]:
        """The model's layers of each part: of the full one, then of the groups."""
        return [self.full, *(tuple(self.window[i] for i in group) for group in self.groups)]

    def describe(self) -> list[list[int]]:
        """What each part holds, in order; for the namespace."""
        return [list(layers) for layers in self.model_layers]


@dataclass(frozen=True)
class PageTails:
    """The decoded tails of some pages.

    Attributes:
        rope_state: u32 `[n]`, `ROPE_PRE`, `ROPE_BOUND` or `ROPE_DELTA`.
        position: i64 `[n]`, saved position of each page's first token.
        page: i32 `[m]`, page of each correction, an index into the pages asked for, ascending.
        layer: i64 `[m]`, layer of each correction, ascending within a page.
        element: u32 `[m]`, value index inside the layer's K block.
        bits: u32 `[m]`, the engine's bits of that value.
    """

    rope_state: U32
    position: I64
    page: npt.NDArray[np.int32]
    layer: I64
    element: U32
    bits: U32


def tail_head(rope_state: int, position: int) -> I64:
    """The tail's fixed fields of a page without corrections, as i64 `[3]`.

    Args:
        rope_state: how K is stored.
        position: position of the first token.
    """
    return np.array([LAYOUT_VERSION | rope_state << 32, position, 0], np.uint64).view(np.int64)


def write_tail(
    slot: U8,
    layout: PageLayout,
    *,
    rope_state: int,
    position: int,
    counts: Sequence[int] | U32 | None = None,
    entries: U32 | None = None,
) -> int:
    """Writes the tail of a page.

    Args:
        slot: u8 ``[slot_bytes]``, the page's slot.
        layout: the page's layout.
        rope_state: how K is stored.
        position: position of the first token.
        counts: corrections of each layer, ``[L]``; None for none.
        entries: u32 ``[n, 2]`` of (element, bits), sorted by layer; None for none.

    Returns:
        The page's payload length in bytes, for the record's header.
    """
    num = 0 if entries is None else len(entries)
    tail = slot[layout.tail_offset : layout.tail_offset + layout.tail_bytes(num)].view(np.uint32)
    tail[: _TAIL_FIXED_BYTES // 4] = tail_head(rope_state, position).view(np.uint32)
    tail[NUM_WORD] = num
    first_entry = _TAIL_FIXED_BYTES // 4 + layout.num_listed_layers
    tail[_TAIL_FIXED_BYTES // 4 : first_entry] = 0 if counts is None else counts
    if entries is not None:
        tail[first_entry:] = entries.reshape(-1)
    return layout.payload_bytes(num)


def read_tails(slots: U8, page_slots: I64, layout: PageLayout) -> PageTails | None:
    """Decodes the tails of some pages; None when one of them is not of this layout.

    Nothing in a tail is trusted: a length or count that does not fit is answered with None.

    Args:
        slots: u8 `[num_slots, slot_bytes]`, C-contiguous.
        page_slots: i64 `[n]`, the pages' slots.
        layout: the pages' layout.
    """
    words = slots.reshape(-1).view(np.uint32)
    num_fixed, num_layers = _TAIL_FIXED_BYTES // 4, layout.num_listed_layers
    first = page_slots * (layout.slot_bytes // 4) + layout.tail_offset // 4
    head = words[first[:, None] + np.arange(num_fixed + num_layers)]
    state, num, counts = head[:, 1], head[:, 4], head[:, num_fixed:]
    fits = (head[:, 0] == LAYOUT_VERSION) & (head[:, 5] == 0) & (state <= max(ROPE_NAMES))
    fits &= (num <= layout.max_corrections) & (counts.sum(axis=1, dtype=np.uint64) == num)
    if not fits.all():
        return None
    page = np.repeat(np.arange(len(page_slots), dtype=np.int32), num)
    layer = np.repeat(np.tile(np.arange(num_layers), len(page_slots)), counts.reshape(-1))
    # The i-th correction of a page lies 2 * i words behind the page's first.
    place = np.arange(len(page)) - np.repeat((np.cumsum(num) - num).astype(np.int64), num)
    at = (first + num_fixed + num_layers)[page] + 2 * place
    element, bits = words[at], words[at + 1]
    limits = np.asarray(layout.k_row_bytes)[layer] * layout.page_size // layout.item_bytes
    if bool((element >= limits).any()):
        return None
    position = head[:, 2].astype(np.int64) | head[:, 3].astype(np.int64) << 32
    return PageTails(state, position, page, layer, element, bits)


def block_bytes(row_bytes: int, page_size: int) -> int:
    """Bytes that a block takes in a page, up to where the next one begins."""
    return _align(row_bytes * page_size, BLOCK_ALIGN_BYTES)


def _align(value: int, to: int) -> int:
    return -(-value // to) * to
