"""Which kernels copy pages between the pools and DRAM: Triton's or numba's, compiled at start."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from sglang_ext.device.pools import DevicePool, HybridPools
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.errors import HierKVConfigError
from sglang_ext.kernels import rope as rope_kernels
from sglang_ext.settings.config import HierKVConfig

logger = logging.getLogger(__name__)


def uses_triton(config: HierKVConfig, pool: DevicePool) -> bool:
    """Whether a pool's pages are copied by Triton's kernels, not numba's."""
    return config.kernels == "triton" or pool.device.type == "cuda"


def choose_kernels(
    config: HierKVConfig, pools: HybridPools, ropes: Sequence[list[LayerRope]], page_size: int
) -> ModuleType | Any:
    """The kernels of a pool, compiled; `ropes` are of each part of it.

    Raises:
        HierKVConfigError: the operator asked for kernels that the pool cannot have.
    """
    pool = pools.full
    if config.kernels == "numba" and pool.device.type == "cuda":
        raise HierKVConfigError(
            "--hier-kv-kernels numba needs a KV pool on the CPU, got one on "
            f"{pool.device}; use auto or triton."
        )
    if uses_triton(config, pool):
        from sglang_ext.kernels.rope import gpu

        if pool.device.type == "cuda":
            _compile(gpu, pools, ropes, page_size)
        return gpu
    known = [rope.spec for part in ropes for rope in part if rope.spec is not None]
    spec = known[0] if known else None
    rope_kernels.warm_up(pool.dtype, spec)
    for dtype in {v.dtype for v in pool.v} - {pool.dtype}:  # rows of an index
        rope_kernels.warm_up(dtype)
    return rope_kernels


def _compile(
    kernels: ModuleType, pools: HybridPools, ropes: Sequence[list[LayerRope]], page_size: int
) -> None:
    """Compiles the kernels of all layers now: the first load should not wait for a compiler."""
    start_s = time.monotonic()
    done = set()
    parts = [pools.full, *pools.window_parts()]
    layers: list[tuple[torch.Tensor, Any]] = []
    for part, of_layers in zip(parts, ropes, strict=True):
        layers += zip(part.k, (rope.spec for rope in of_layers), strict=True)
        layers += ((v, None) for v in part.v if v.shape[2])
    for tensor, spec in layers:
        kind = (tensor.dtype, tensor.shape[1:], tensor.stride(), id(spec))
        if kind not in done:
            done.add(kind)
            kernels.warm_up(tensor, spec, page_size)
    logger.info(
        "hier-kv: kernels of %d kinds of layers compiled in %.1f s",
        len(done),
        time.monotonic() - start_s,
    )
