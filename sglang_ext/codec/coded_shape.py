"""Pages as codecs see them: planes of equal width, those of a draft model apart from the model's.

A draft's layers are the last of a page. They are few, and of another kind than the model's: how
many guesses are right hangs on them, their heads may be others, and what was learned about the
model says nothing of them. So they are planes of their own, which are coded without loss whatever
codes the model's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sglang_ext.codec.base import CodecError, PlaneArray, kv_dtype
from sglang_ext.device.layout import U8, PageLayout

_Blocks = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Planes:
    """Planes of some neighbouring layers in a slot: K and V of each layer in turn.

    Attributes:
        num_planes: S.
        num_tokens: P.
        num_channels: C.
        dtype: name of the KV dtype, as codecs call it.
        blocks: where each lies in a slot, and how long it is.
    """

    num_planes: int
    num_tokens: int
    num_channels: int
    dtype: str
    blocks: _Blocks

    @classmethod
    def of(cls, layout: PageLayout, dtype: str, layers: range, whose: str) -> Planes:
        """Checks that every plane has the same width.

        Args:
            layout: of the pages.
            dtype: name of the KV dtype, as codecs call it.
            layers: which ones of the page.
            whose: they are, in words.

        Raises:
            CodecError: K and V, or layers, differ in width.
        """
        rows = [
            (layout.k_row_bytes[layer], 0 if layout.has_index else layout.v_row_bytes[layer])
            for layer in layers
        ]
        widths = {width for row in rows for width in row if width}
        if len(widths) != 1 or len({bool(v_bytes) for _, v_bytes in rows}) != 1:
            raise CodecError(f"codecs need planes of one width, {whose} has {sorted(widths)}")
        per_layer = 2 if rows[0][1] else 1
        num_channels = widths.pop() // kv_dtype(dtype).value_bytes
        blocks = tuple(_blocks(layout, layers))
        return cls(per_layer * len(layers), layout.page_size, num_channels, dtype, blocks)

    @property
    def axes(self) -> tuple[int, int, int]:
        """(S, P, C)."""
        return self.num_planes, self.num_tokens, self.num_channels

    def take(self, slot: U8) -> PlaneArray:
        """The planes [S, P, C] of a slot: a view where they lie side by side, else a copy."""
        first, size = self.blocks[0]
        end = first + size * len(self.blocks)
        if end == sum(self.blocks[-1]):  # all are of one size, so nothing lies between them
            flat = slot[first:end]
        else:
            flat = np.concatenate([slot[at : at + size] for at, size in self.blocks])
        return flat.view(kv_dtype(self.dtype).storage).reshape(self.axes)

    def put(self, planes: PlaneArray, slot: U8) -> None:
        """Writes the planes back where `take` took them from."""
        if not np.shares_memory(planes, slot):
            _put(planes.reshape(-1).view(np.uint8), slot, self.blocks)


@dataclass(frozen=True)
class CodedShape:
    """A page as codecs see it.

    Rows of an index are none of the planes: they are kept as they are.

    Attributes:
        layout: where the planes lie in a slot.
        dtype: name of the KV dtype, as codecs call it.
        head_dim: D of the model.
        own: the model's planes.
        draft: those of its draft model; None without one that has KV of its own.
    """

    layout: PageLayout
    dtype: str
    head_dim: int
    own: Planes
    draft: Planes | None = None

    @classmethod
    def of(
        cls, layout: PageLayout, dtype: str, head_dim: int, num_draft_layers: int = 0
    ) -> CodedShape:
        """Of pages whose last layers are a draft model's.

        Raises:
            CodecError: K and V, or layers of one model, differ in width.
        """
        num_own, num_all = layout.num_layers - num_draft_layers, layout.num_layers
        own = Planes.of(layout, dtype, range(num_own), "this model")
        draft = None
        if num_draft_layers:
            draft = Planes.of(layout, dtype, range(num_own, num_all), "its draft model")
        return cls(layout, dtype, head_dim, own, draft)

    @property
    def index_bytes(self) -> int:
        """Bytes of a page's rows of an index."""
        return sum(size for _, size in self._index_blocks())

    def index_of(self, slot: U8) -> bytes:
        """Rows of an index, as they lie in a slot, layer by layer."""
        return b"".join(slot[at : at + size].tobytes() for at, size in self._index_blocks())

    def put_index(self, rows: U8, slot: U8) -> None:
        """Writes them back where `index_of` took them from."""
        _put(rows, slot, self._index_blocks())

    def _index_blocks(self) -> _Blocks:
        layout = self.layout
        if not layout.has_index:
            return ()
        blocks = zip(layout.v_offsets, layout.v_row_bytes, strict=True)
        return tuple((at, row_bytes * layout.page_size) for at, row_bytes in blocks if row_bytes)


def _blocks(layout: PageLayout, layers: range) -> Iterator[tuple[int, int]]:
    """Where planes lie, and how long they are."""
    for layer in layers:
        yield layout.k_offsets[layer], layout.k_row_bytes[layer] * layout.page_size
        if layout.v_row_bytes[layer] and not layout.has_index:
            yield layout.v_offsets[layer], layout.v_row_bytes[layer] * layout.page_size


def _put(flat: U8, slot: U8, blocks: _Blocks) -> None:
    taken = 0
    for at, size in blocks:
        slot[at : at + size] = flat[taken : taken + size]
        taken += size
