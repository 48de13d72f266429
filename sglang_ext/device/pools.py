"""View of SGLang's device KV pool: its tensors per layer, and what the plugin cannot copy.

Imports no SGLang: the pool's kind is told by its class name and attributes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sglang_ext.device.layout import LayerGroups, PageLayout
from sglang_ext.errors import HierKVConfigError

# Values of these dtypes lie on a free grid that un-rotation can round to.
ROTATABLE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What a pool's quant_method may be: none, as of MLA pools, or one that does nothing.
_PLAIN_VALUES = ("NoneType", "UnquantizedKVCacheMethod")


@dataclass(frozen=True)
class DevicePool:
    """The device tier of one model.

    Attributes:
        kind: ``mha`` (K and V of every head) or ``mla`` (one compressed row a token).
        dtype: dtype of the values; fp8 pools are seen as uint8 bytes.
        k: K of each layer, ``[S, H, D]``; row strides may exceed H*D.
        v: V of each layer, ``[S, H, Dv]``; empty for MLA.
        latent_dim: columns of an MLA row that carry no rotary part; 0 for MHA.
        num_slots: S, token slots including the padding page.
    """

    kind: str
    dtype: torch.dtype
    k: tuple[torch.Tensor, ...]
    v: tuple[torch.Tensor, ...]
    latent_dim: int
    num_slots: int

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

    def layout(self, page_size: int) -> PageLayout:
        """The layout of this pool's pages in a slot."""
        item = self.k[0].element_size()
        return PageLayout(
            page_size=page_size,
            k_row_bytes=tuple(t.shape[1] * t.shape[2] * item for t in self.k),
            v_row_bytes=(
                tuple(t.shape[1] * t.shape[2] * item for t in self.v) or (0,) * self.num_layers
            ),
            item_bytes=item,
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
    else:
        raise HierKVConfigError(
            "--enable-hier-kv needs a plain MHA, GQA, MQA or MLA KV pool, got "
            f"{name}; leave the flag out for this model."
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
        kind="mla" if latent_dim else "mha",
        dtype=dtype,
        k=tuple(_three_axes(t) for t in k),
        v=tuple(_three_axes(t) for t in v),
        latent_dim=latent_dim,
        num_slots=int(k[0].shape[0]),
    )


@dataclass(frozen=True)
class HybridPools:
    """The device tier of a model whose window layers may have a pool of their own.

    Attributes:
        full: of the layers with full attention, or of all.
        window: of the window layers; None where there is no such pool.
        groups: which layers these are; None without `window`.
    """

    full: DevicePool
    window: DevicePool | None = None
    groups: LayerGroups | None = None


def describe_pools(kv_pool: Any) -> HybridPools:
    """As `describe_pool`, of a pool that may be one of two, or of a hybrid with states."""
    if type(kv_pool).__name__ == "HybridLinearKVPool":
        return HybridPools(describe_pool(kv_pool.full_kv_pool))
    if type(kv_pool).__name__ != "SWAKVPool":
        return HybridPools(describe_pool(kv_pool))
    full, window = describe_pool(kv_pool.full_kv_pool), describe_pool(kv_pool.swa_kv_pool)
    shapes = {t.shape[1:] for pool in (full, window) for t in pool.k}
    values = {t.shape[1:] for pool in (full, window) for t in pool.v}
    if (full.kind, window.kind) != ("mha", "mha") or len(shapes) > 1 or len(values) > 1:
        raise HierKVConfigError(
            "--enable-hier-kv needs window layers with K and V of the shape that full layers have, "
            "got others; add --disable-hybrid-swa-memory or leave the flag out for this model."
        )
    layers: dict[bool, dict[int, int]] = {False: {}, True: {}}
    for layer, (index, is_window) in kv_pool.layers_mapping.items():
        layers[bool(is_window)][index] = layer
    ids = [tuple(by_index[i] for i in range(len(by_index))) for by_index in layers.values()]
    return HybridPools(full, window, LayerGroups(full=ids[0], window=ids[1]))


def with_layers_of(pool: DevicePool, other: DevicePool) -> DevicePool:
    """The same rows, with the layers of another pool behind those of this one.

    Raises:
        HierKVConfigError: the other pool's rows are not those of the same tokens, or of a kind or
            dtype of their own.
    """
    for expected, found in (
        (pool.kind, other.kind),
        (str(pool.dtype), str(other.dtype)),
        (f"{pool.num_slots} rows", f"{other.num_slots} rows"),
        (str(pool.device), str(other.device)),
    ):
        if expected != found:
            raise HierKVConfigError(
                "--enable-hier-kv needs a draft model with a KV pool as the target model's "
                f"({expected}), got {found}; leave --speculative-algorithm out or choose another "
                "draft model."
            )
    return replace(pool, k=pool.k + other.k, v=pool.v + other.v)


def pool_of(pool: DevicePool, layers: Sequence[int]) -> DevicePool:
    """The same rows, of some layers."""
    return replace(pool, k=tuple(pool.k[i] for i in layers), v=tuple(pool.v[i] for i in layers))


def _three_axes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 3 else tensor.reshape(tensor.shape[0], 1, -1)
