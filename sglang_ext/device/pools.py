"""View of SGLang's device KV pool: its tensors per layer, and what the plugin cannot copy.

Rows of a sparse attention's index are handled here (`_index_rows`): they take V's place in a page.

Imports no SGLang: the pool's kind is told by its class name and attributes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_ext.device.layout import HEADER_BYTES, LayerGroups, PageLayout, block_bytes
from sglang_ext.device.windows.block_groups import Block, BlockGroups, group_blocks
from sglang_ext.errors import HierKVConfigError

# Values of these dtypes lie on a free grid that un-rotation can round to.
ROTATABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
INDEXED = "indexed"
_BYTES = torch.uint8  # of an fp8 pool
# What a pool's quant_method may be: none, as of MLA pools, or one that does nothing.
_PLAIN_VALUES = ("NoneType", "UnquantizedKVCacheMethod")


@dataclass(frozen=True)
class DevicePool:
    """The device tier of one model.

    Attributes:
        kind: ``mha`` (K and V of every head), ``mla`` (one compressed row a token), or ``indexed``
            (such a row, and beside it one of an index that chooses what is attended to).
        dtype: dtype of the values; fp8 pools are seen as uint8 bytes.
        k: K of each layer, ``[S, H, D]``; row strides may exceed H*D.
        v: V of each layer, ``[S, H, Dv]``; empty for MLA, and where K and V are blocks alike. With
            an index, its rows of each layer, ``[S, 1, words]``, of no words in a layer without.
            SGLang keeps those of a page together, all values and then all scales, so only those
            of whole pages mean anything: a row here is as much of a page as a token takes.
        latent_dim: columns of an MLA row that carry no rotary part; 0 for MHA.
        num_slots: S, token slots including the padding page.
        values: of an fp8 pool which fp8 the bytes are; None where `dtype` says what they are.
    """

    kind: str
    dtype: torch.dtype
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    latent_dim: int
    num_slots: int
    values: torch.dtype | None = None

    @property
    def format(self) -> str:
        """What the bits of a value mean: pools of bytes may be of several kinds of fp8."""
        return str(self.values or self.dtype)

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.k)

    @property
    def device(self) -> torch.device:
        """Where the pool lives."""
        return self.k[0].device

    @property
    def rotatable(self) -> bool:
        """Whether K can be stored before rotary embedding at all."""
        return self.dtype in ROTATABLE_DTYPES

    @property
    def has_index(self) -> bool:
        """Whether rows of an index are among a page's."""
        return self.kind == INDEXED

    def layout(
        self, page_size: int, frame: PageLayout | None = None, *, is_bound: bool = False
    ) -> PageLayout:
        """The layout of this pool's pages in a slot; see `PageLayout`."""
        item = self.k[0].element_size()
        return PageLayout(
            page_size=page_size,
            k_row_bytes=tuple(map(_row_bytes, self.k)),
            v_row_bytes=tuple(map(_row_bytes, self.v)) or (0,) * self.num_layers,
            item_bytes=item,
            frame=frame,
            is_bound=is_bound or self.has_index,
            has_index=self.has_index,
        )


def describe_pool(kv_pool: Any) -> DevicePool:
    """Finds the tensors of SGLang's KV pool.

    Args:
        kv_pool: ``token_to_kv_pool_allocator.get_kvcache()``.

    Raises:
        HierKVConfigError: the pool's kind or memory layout is not one that the plugin copies.
    """
    name = type(kv_pool).__name__
    if getattr(kv_pool, "use_hnd", False) or getattr(kv_pool, "kv_cache_layout", "nhd") != "nhd":
        raise HierKVConfigError(
            "--enable-hier-kv needs the token-major (NHD) KV layout, got "
            f"{getattr(kv_pool, 'kv_cache_layout', 'hnd')}; unset SGLANG_USE_HND_KVCACHE."
        )
    if name == "MHATokenToKVPool":
        k, v, latent_dim = list(kv_pool.k_buffer), list(kv_pool.v_buffer), 0
    elif name == "MLATokenToKVPool" and not kv_pool.use_dsa:
        k, v, latent_dim = list(kv_pool.kv_buffer), [], int(kv_pool.kv_lora_rank)
    elif name == "DSATokenToKVPool":
        k, v, latent_dim = list(kv_pool.kv_buffer), _index_rows(kv_pool), int(kv_pool.kv_lora_rank)
    else:
        raise HierKVConfigError(
            "--enable-hier-kv needs a plain MHA, GQA, MQA or MLA KV pool, or one with an index of "
            f"latent rows, got {name}; leave the flag out for this model."
        )
    quantizer = type(getattr(kv_pool, "quant_method", None)).__name__
    if quantizer not in _PLAIN_VALUES:
        raise HierKVConfigError(
            "--enable-hier-kv needs a KV pool without scales of its own, got one of "
            f"{quantizer}; choose --kv-cache-dtype auto."
        )
    dtype = kv_pool.dtype
    if k[0].dtype != dtype:  # fp8 is stored as uint8
        dtype = k[0].dtype
    return DevicePool(
        kind=INDEXED if name == "DSATokenToKVPool" else "mla" if latent_dim else "mha",
        dtype=dtype,
        k=tuple(map(_three_axes, k)),
        v=tuple(map(_three_axes, v)),
        latent_dim=latent_dim,
        num_slots=int(k[0].shape[0]),
        values=None if kv_pool.dtype == dtype else kv_pool.dtype,
    )


def _index_rows(kv_pool: Any) -> list[torch.Tensor]:
    """The rows of a pool's index, of each layer: as `DevicePool.v` says.

    Which layers have any is told by the memory that SGLang took, not by the model's configuration.

    Raises:
        HierKVConfigError: rows of an index are not those of the pages' tokens.
    """
    size, num_rows = int(kv_pool.page_size), int(kv_pool.kv_buffer[0].shape[0])
    words_of_page = 0
    rows: list[torch.Tensor] = []
    for buffer in kv_pool.index_k_with_scale_buffer:
        if not buffer.shape[0]:
            rows.append(torch.empty(num_rows, 1, 0, dtype=torch.int32, device=buffer.device))
            continue
        bytes_of_page = int(buffer.shape[1])
        are_alike = words_of_page in (0, bytes_of_page // 4)
        words_of_page = bytes_of_page // 4
        is_whole = buffer.is_contiguous() and buffer.dtype == torch.uint8
        if not are_alike or not is_whole or bytes_of_page % (4 * size):
            break
        rows.append(buffer.view(torch.int32).view(-1, 1, words_of_page // size))
    if (
        len(rows) != len(kv_pool.kv_buffer)
        or any(int(layer.shape[0]) != num_rows for layer in rows)
        or (int(kv_pool.index_kpool), int(kv_pool.index_page_size)) != (1, size)
        or not words_of_page
    ):
        shapes = sorted({tuple(buffer.shape) for buffer in kv_pool.index_k_with_scale_buffer})
        raise HierKVConfigError(
            "--enable-hier-kv needs an index with a row for each token of "
            f"{num_rows // size} pages of {size}, got {shapes} of {kv_pool.index_kpool} tokens a "
            "row; leave the flag out for this model."
        )
    return rows


@dataclass(frozen=True)
class HybridPools:
    """The device tier of a model whose window layers may have a pool of their own.

    Attributes:
        full: of the layers with full attention, or of all; those of draft models behind them.
        window: of the window layers; None where there is no such pool.
        groups: which layers these are; None without `window`.
        num_draft_layers: how many of `full`'s, the last ones, are of draft models.
    """

    full: DevicePool
    window: DevicePool | None = None
    groups: LayerGroups | BlockGroups | None = None
    num_draft_layers: int = 0

    def layout(self, page_size: int) -> PageLayout:
        """The layout of the full layers' pages; those of groups of blocks lie in its frame."""
        return self.full.layout(page_size, is_bound=isinstance(self.groups, BlockGroups))

    def window_parts(self) -> list[DevicePool]:
        """The window layers' pool in parts, one a group."""
        if self.window is None or self.groups is None:
            return []
        if isinstance(self.groups, LayerGroups):
            return [pool_of(self.window, layers) for layers in self.groups.groups]
        return [_of_blocks(self.window, group) for group in self.groups.groups]


def describe_pools(
    kv_pool: Any, read_layers: Collection[int] | None = None, drafts: Sequence[Any] = ()
) -> HybridPools:
    """As `describe_pool`, of a pool that may be one of two, or of a hybrid with states.

    Args:
        kv_pool: as `describe_pool` says.
        read_layers: of a model with window layers in a pool of their own, the layers whose KV some
            layer reads, by number; None: all. The others' rows, which nobody writes, are left out.
        drafts: pools of draft models, whose layers follow the full ones in the same rows. Behind
            windows they are numbered on from the model's last layer.

    Raises:
        HierKVConfigError: a pool is none that the plugin copies, or a draft's has other rows.
    """
    if type(kv_pool).__name__ != "SWAKVPool":
        own = describe_pool(_full_layers_of(kv_pool))
        full = _with_drafts(own, drafts)
        return HybridPools(full, num_draft_layers=full.num_layers - own.num_layers)
    full, window = describe_pool(kv_pool.full_kv_pool), describe_pool(kv_pool.swa_kv_pool)
    if (full.kind, window.kind, window.format) != ("mha", "mha", full.format):
        raise HierKVConfigError(
            "--enable-hier-kv needs window layers with K and V of every head in the dtype that "
            f"full layers have, got pools of {full.kind} in {full.format} and {window.kind} in "
            f"{window.format}; leave the flag out for this model."
        )
    layers: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (index, is_window) in kv_pool.layers_mapping.items():
        if read_layers is None or layer in read_layers:
            layers[bool(is_window)][index] = layer
    if not all(layers.values()):
        raise HierKVConfigError(
            "--enable-hier-kv needs window layers and full layers with KV of their own, got a "
            "model without one of the two; leave the flag out for this model."
        )
    of_full, of_window = (tuple(found[i] for i in sorted(found)) for found in layers.values())
    full = _with_drafts(pool_of(full, sorted(layers[False])), drafts)
    behind, num_draft_layers = 1 + max(kv_pool.layers_mapping), full.num_layers - len(of_full)
    of_full += tuple(range(behind, behind + num_draft_layers))
    window = pool_of(window, sorted(layers[True]))
    groups = _groups_of(full, window, (of_full, of_window), int(kv_pool.page_size))
    return HybridPools(full, window, groups, num_draft_layers)


def _full_layers_of(kv_pool: Any) -> Any:
    """The pool of layers with full attention; beside a state it is within another."""
    return kv_pool.full_kv_pool if type(kv_pool).__name__ == "HybridLinearKVPool" else kv_pool


def _with_drafts(pool: DevicePool, drafts: Sequence[Any]) -> DevicePool:
    """The target's layers and behind them those of the draft models, in the same rows."""
    for draft in drafts:
        pool = with_layers_of(pool, describe_pool(_full_layers_of(draft)))
    return pool


def _groups_of(
    full: DevicePool, window: DevicePool, ids: tuple[tuple[int, ...], ...], page_size: int
) -> LayerGroups | BlockGroups:
    """How window layers are put into pages: by layers of one shape, or by blocks of several."""
    pairs = zip((*full.k, *window.k), (*full.v, *window.v), strict=True)
    if len({(k.shape[1:], v.shape[1:]) for k, v in pairs}) == 1:
        return LayerGroups(full=ids[0], window=ids[1])
    layout = full.layout(page_size)
    blocks = [
        (Block(index, is_v), block_bytes(_row_bytes(tensors[index]), page_size))
        for index in range(window.num_layers)
        for is_v, tensors in ((False, window.k), (True, window.v))
    ]
    return BlockGroups(full=ids[0], window=ids[1], groups=_group(blocks, layout))


def check_block_sizes(window_rows: tuple[int, int], layout: PageLayout) -> None:
    """Refuses window layers of which K or V does not fit into a page, as their pools will be.

    Args:
        window_rows: bytes of a token's K and V in one of them.
        layout: of the full layers' pages.

    Raises:
        HierKVConfigError: one sentence.
    """
    sizes = [block_bytes(row_bytes, layout.page_size) for row_bytes in window_rows]
    _group([(Block(0, bool(is_v)), size) for is_v, size in enumerate(sizes)], layout)


def _group(blocks: list[tuple[Block, int]], layout: PageLayout) -> tuple[tuple[Block, ...], ...]:
    try:
        return group_blocks(blocks, layout.tail_offset - HEADER_BYTES)
    except ValueError as error:
        raise HierKVConfigError(
            "--enable-hier-kv needs full layers whose page is as large as K or V of one window "
            f"layer, got {error}; leave the flag out for this model."
        ) from error


def with_layers_of(pool: DevicePool, other: DevicePool) -> DevicePool:
    """The same rows, with the layers of another pool behind those of this one.

    Raises:
        HierKVConfigError: the other pool's rows are not those of the same tokens, or of a kind or
            dtype of their own.
    """
    for expected, found in (
        (pool.kind, other.kind),
        (pool.format, other.format),
        (f"{pool.num_slots} rows", f"{other.num_slots} rows"),
        (str(pool.device), str(other.device)),
    ):
        if expected != found:
            advice = "leave --speculative-algorithm out or choose another draft model"
            is_narrow = _BYTES in (pool.dtype, other.dtype)
            if is_narrow and expected == pool.format:  # by what a checkpoint says of its KV cache
                advice = f"give --kv-cache-dtype, which both models then have, or {advice}"
            raise HierKVConfigError(
                "--enable-hier-kv needs a draft model with a KV pool as the target model's "
                f"({expected}), got {found}; {advice}."
            )
    return replace(pool, k=pool.k + other.k, v=pool.v + other.v)


def pool_of(pool: DevicePool, layers: Sequence[int]) -> DevicePool:
    """The same rows, of some layers."""
    return replace(pool, k=tuple(pool.k[i] for i in layers), v=tuple(pool.v[i] for i in layers))


def _of_blocks(pool: DevicePool, blocks: Sequence[Block]) -> DevicePool:
    """The same rows, of some layers' K or V, each of which is copied as K is."""
    tensors = tuple((pool.v if block.is_v else pool.k)[block.index] for block in blocks)
    return replace(pool, k=tensors, v=())


def _row_bytes(tensor: torch.Tensor) -> int:
    return int(tensor.shape[1] * tensor.shape[2] * tensor.element_size())


def _three_axes(tensor: torch.Tensor) -> torch.Tensor:
    # Never a copy of it, which nobody but the plugin would read and write.
    return tensor if tensor.dim() == 3 else tensor.view(tensor.shape[0], 1, -1)
