"""Draft tokens as attention sees them: those of a tree's branches, and those that are verified."""

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


def branch_rows(
    req_to_token: torch.Tensor,
    requests: torch.Tensor,
    num_known: torch.Tensor,
    num_drafted: int,
    num_branches: int,
    num_steps: int,
    page_size: int,
) -> torch.Tensor:
    """Rows that each branch of each request attends to: the known tokens' and its own.

    SGLang gives a branch whole pages behind the known tokens, and begins each with a copy of the
    last page of these if that is not full.

    Args:
        req_to_token: i32 `[R, C]`, the rows of each request's tokens.
        requests: i64 `[B]`, of the batch.
        num_known: i64 `[B]`, tokens before the drafts.
        num_drafted: tokens of a branch, that which is decoded among them.
        num_branches: of a request.
        num_steps: tokens for which a branch has rows.
        page_size: tokens a page.

    Returns:
        `[B * num_branches, T]` for the longest request; behind a shorter one's rows any others.
    """
    longest = int(num_known.max()) + num_drafted if len(num_known) else 0
    found = req_to_token[requests].repeat_interleave(num_branches, 0)[:, :longest]
    for at, (request, known) in enumerate(zip(requests.tolist(), num_known.tolist(), strict=True)):
        in_page = known % page_size
        room = -(-(in_page + num_steps) // page_size) * page_size
        for branch in range(num_branches):
            start = known + branch * room
            drafted = req_to_token[request, start : start + num_drafted]
            found[at * num_branches + branch, known : known + num_drafted] = drafted
    return found
