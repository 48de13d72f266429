"""Attention of prefill context parallel ranks, each of which computes some tokens of a batch.

SGLang's zigzag strategy says which tokens are this rank's, gathers K and V of all of them and
writes them into the pool of each rank; its attention kernels want a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Reads keys and values of a request's first tokens and attends: (queries, request, tokens).
Attend = Callable[[torch.Tensor, int, int], torch.Tensor]


def is_sharded(forward_batch: Any) -> bool:
    """Whether this rank has some of a batch's tokens only."""
    from sglang.srt.layers.cp.utils import is_cp_active

    return bool(is_cp_active(forward_batch))


def allow_sharded_prefills() -> None:
    """SGLang asks for a GPU's stream before it gathers what the ranks have computed."""
    if not torch.cuda.is_available():
        setattr(torch.cuda, "current_stream", lambda device=None: None)  # noqa: B010


def write_all(
    k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any, window_rows: Any
) -> None:
    """Writes K and V of all ranks' tokens into this rank's pool.

    Args:
        k: `[N, H, D]`, of this rank's tokens.
        v: `[N, H, Dv]`.
        layer: SGLang's.
        forward_batch: likewise.
        window_rows: of the pool of window layers, for all tokens; None without such a pool.
    """
    from sglang.srt.layers.cp.base import get_cp_strategy

    get_cp_strategy().materialize_full_kv(forward_batch, layer, k, v, swa_loc=window_rows)


def attend_sharded(query: torch.Tensor, forward_batch: Any, attend: Attend) -> torch.Tensor:
    """Attention of this rank's tokens: an early and a late part of each request's new ones.

    Args:
        query: `[N, Hq, D]`, of this rank's tokens, and of rows that only fill up.
        forward_batch: SGLang's.
        attend: of one part of one request.

    Returns:
        `[N, Hq, Dv]`.
    """
    from sglang.srt.layers.cp.base import get_cp_strategy

    requests = forward_batch.req_pool_indices.tolist()

    def attend_parts(
        queries: torch.Tensor, ends: torch.Tensor, num_seen: torch.Tensor, longest: int
    ) -> torch.Tensor:
        bounds = ends.tolist()
        parts = [
            attend(queries[start:end], request, seen)
            for request, start, end, seen in zip(
                requests, bounds[:-1], bounds[1:], num_seen.tolist(), strict=True
            )
        ]
        return torch.cat(parts)

    found: torch.Tensor = get_cp_strategy().run_attention(
        query, forward_batch, query.device, attend_parts
    )
    return found
