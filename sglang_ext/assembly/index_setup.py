"""What a namespace says of a model whose pages hold rows of an index.

The rows themselves are found and described in `device/pools.py`, and copied in V's place.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from sglang_ext.device.pools import DevicePool

_INDEXER = "Indexer"
# What of SGLang's indexer decides the bytes of a row, besides weights and configuration: where its
# kernels differ, rows of one are nothing to the other.
_WAYS = (
    "use_dsa_indexer_fusion",
    "use_aiter_fused_fp8_writer",
    "use_gfx950_fused_indexer",
    "is_neox_style",
    "block_size",
    "scale_fmt",
    "rope_head_dim",
)
# Prompts of so many tokens attend to all tokens on a GPU, whatever the index chooses; SGLang sets
# it to the number that the index chooses where the operator did not.
_DENSE_UP_TO = "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD"


def index_facts(model: torch.nn.Module, kv_pool: Any, pool: DevicePool) -> dict[str, Any] | None:
    """What is stored of an index, and how it is written; None without an index.

    A page with rows of an index is none without, and the reverse, and rows of other layers, of
    other shapes, or written in another way are those of another model.

    Args:
        model: SGLang's.
        kv_pool: its pool.
        pool: the same, as it is copied.
    """
    if not pool.has_index:
        return None
    ways = {
        tuple((name, str(getattr(module, name, None))) for name in _WAYS)
        for module in model.modules()
        if type(module).__name__ == _INDEXER
    }
    return {
        "layers": [layer for layer, rows in enumerate(pool.v) if rows.shape[2]],
        "row": [int(kv_pool.index_head_dim), int(kv_pool.quant_block_size)],
        "page": int(kv_pool.index_page_size),
        "ways": sorted(map(list, ways)),
        "dense_up_to": os.environ.get(_DENSE_UP_TO, ""),
        "device": "hip" if torch.version.hip else pool.device.type,
    }
