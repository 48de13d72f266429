"""Draft tokens that a target model verifies, as its attention sees them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch


def verified_batch(forward_batch: Any) -> Any:
    """A batch of drafts that are verified, as one that extends its sequences by them."""
    num = forward_batch.spec_info.draft_token_num
    before = forward_batch.seq_lens
    return SimpleNamespace(
        out_cache_loc=forward_batch.out_cache_loc,
        req_pool_indices=forward_batch.req_pool_indices,
        seq_lens=before + num,
        extend_prefix_lens=before,
        extend_seq_lens=torch.full_like(before, num),
        encoder_lens=None,
    )


def masks_of(forward_batch: Any) -> torch.Tensor | None:
    """What each draft token attends to of its request's, bool `[B, N, N]`.

    None where the drafts are chains, in which a token attends to all before it.
    """
    spec_info = forward_batch.spec_info
    num = spec_info.draft_token_num
    masks: torch.Tensor | None = spec_info.custom_mask
    if spec_info.tree_topk == 1 or masks is None or not masks.numel():
        return None
    masks = masks[: forward_batch.batch_size * num * num].view(-1, num, num)
    chain = torch.ones(num, num, dtype=torch.bool).tril()
    return None if bool((masks == chain).all()) else masks
