"""What a rotary embedding is, for a kernel that copies K between the device pool and pages.

The values here are the ones the *live* model applies: its own table, in its own precision, and
its own order of rounding.  Nothing is recomputed from `rope_theta`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import torch

    RotateFn = Callable[[torch.Tensor, npt.NDArray[np.int64]], torch.Tensor]

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]

# Rounding rules, in the order `detect_rule` prefers them.  The names and numbers are part of the
# table digest in records stored on disk; never renumber, never rename.
#   eager  o1 = r(r(x1 c) - r(x2 s)), o2 = r(r(x2 c) + r(x1 s)), r = round to the KV dtype
#   fp32   o1 = r(x1 c - x2 s),       o2 = r(x2 c + x1 s),       products and sum in fp32
#   fma_a  o1 = r(fma(x1, c, -(x2 s))), o2 = r(fma(x2, c, x1 s))
#   fma_b  o1 = r(fma(-x2, s, x1 c)),   o2 = r(fma(x1, s, x2 c))
RULES: dict[str, int] = {"eager": 0, "fp32": 1, "fma_a": 2, "fma_b": 3}


@dataclass(frozen=True, eq=False)
class RopeSpec:
    """One layer's rotary embedding as the model applies it.

    Attributes:
        cos: fp32 `[max_pos, rotary_dim // 2]`, C-contiguous; the live table's values, which are
            exact in fp32 whatever dtype the model keeps them in (round them to the KV dtype first
            where the model does).  Scales such as YaRN's are part of the values.
        sin: the same for the sine.
        rotary_dim: number of rotated columns in a head, even.
        first: first rotated column inside a head (MLA: `kv_lora_rank`, else 0).
        interleaved: True pairs columns (2j, 2j + 1) (gpt-j), False (j, j + rotary_dim/2) (neox).
        rule: a name in `RULES`.

    Raises:
        ValueError: tables, dimension or rule do not fit together.
    """

    cos: F32
    sin: F32
    rotary_dim: int
    first: int
    interleaved: bool
    rule: str

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"rounding rule must be one of {list(RULES)}, got {self.rule!r}")
        if self.rotary_dim <= 0 or self.rotary_dim % 2 or self.first < 0:
            raise ValueError(
                f"rotary_dim must be even and positive and first >= 0, "
                f"got rotary_dim={self.rotary_dim}, first={self.first}"
            )
        for name, table in (("cos", self.cos), ("sin", self.sin)):
            if (
                table.dtype != np.float32
                or table.ndim != 2
                or table.shape[1] != self.rotary_dim // 2
                or not table.flags.c_contiguous
            ):
                raise ValueError(
                    f"{name} must be C-contiguous float32 [max_pos, {self.rotary_dim // 2}], "
                    f"got {table.dtype} {table.shape}"
                )
        if self.cos.shape != self.sin.shape:
            raise ValueError(f"cos {self.cos.shape} and sin {self.sin.shape} must agree in shape")

    @property
    def max_pos(self) -> int:
        """Number of positions the table covers."""
        return int(self.cos.shape[0])


@dataclass(frozen=True, eq=False)
class PagedView:
    """Where one K or V block of a run of pages lies inside a host arena.

    Token t of an operation lies in page `t // page_size`, row `t % page_size`; rows of `H * D`
    values follow each other from `byte_offset` inside the page's slot.

    Attributes:
        arena: uint8 `[num_slots, slot_bytes]`, C-contiguous (a view of the host arena).
        page_slots: int64 `[n_pages]`, the slot of each page.
        byte_offset: offset of the block inside a slot, a multiple of the value's size.
        page_size: tokens per page.
    """

    arena: U8
    page_slots: I64
    byte_offset: int
    page_size: int


@dataclass(frozen=True, eq=False)
class Corrections:
    """Values whose bits the stored position-free K does not give back at the saved position.

    They hold at the saved position, under the same table and rounding rule, and nowhere else.

    Attributes:
        page: int32 `[n]`, index into `PagedView.page_slots`, ascending.
        element: uint32 `[n]`, `row_in_page * H * D + column`, in no particular but a fixed order.
        bits: uint32 `[n]`, the pool's bits, zero-extended.
    """

    page: I32
    element: U32
    bits: U32

    def __len__(self) -> int:
        return int(self.page.shape[0])

    @staticmethod
    def none() -> Corrections:
        """The empty list."""
        return Corrections(np.empty(0, np.int32), np.empty(0, np.uint32), np.empty(0, np.uint32))


# u32 words of a tail before the counts of its layers; the fifth counts all entries.
HEAD_WORDS = 6
COUNT_WORD = 4


@dataclass(frozen=True, eq=False)
class Listing:
    """Tails of the pages of one operation, and what a device needs besides.

    Attributes:
        tails: u8 `[n, bytes]`: a head of 24 bytes, u32 `[L]` counts, and (value, bits) as u32
            pairs, a layer's behind those of the layers before it.
        num_layers: L.
        capacity: entries that a tail has room for; what is more is counted, not listed.
        wrong: u8, `H * D` a token at least, on the device; not read before it is written.
        misses: u8, 4 a token, likewise.
    """

    tails: Any
    num_layers: int
    capacity: int
    wrong: Any = None
    misses: Any = None
