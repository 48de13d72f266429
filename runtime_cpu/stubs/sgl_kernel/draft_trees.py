"""Trees of draft tokens: how they are built, and which path of one the target model accepts.

A tree of a request has N tokens, the first of them its root, the last token that is known. Links
are i64 `[B, N]`, -1 for none: `retrive_next_token` is a token's first child, `retrive_next_sibling`
the next child of its parent, `retrive_index` its place among the batch's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_FULL_MASK, _SQUARE_MASK = 0, 1


def build_tree_kernel_efficient_cpu(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    verified_seq_len: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Links the selected draft tokens, and says which of them each may attend to.

    Args:
        parent_list: i64 `[B, ...]`, for each group of `topk` candidates the candidate before it.
        selected_index: i64 `[B, N - 1]`, the candidates in the tree, ascending.
        verified_seq_len: i64 `[B]`, tokens before the tree.
        tree_mask: bool, written: `[B, N, N]`, or with the prefix's columns before.
        positions: i64 `[B * N]`, written.
        retrive_index: see above, written, as are the other links, which are -1 before.
        retrive_next_token: see above.
        retrive_next_sibling: see above.
        topk: candidates a group.
        depth: the longest path without the root.
        num_tokens: N.
        tree_mask_mode: 0 with the prefix's columns, 1 without.
    """
    if tree_mask_mode not in (_FULL_MASK, _SQUARE_MASK):
        raise NotImplementedError("expected a tree mask of booleans, got packed bits")
    done = 0
    for at, seq_len in enumerate(verified_seq_len.tolist()):
        parents = _parents(parent_list[at].tolist(), selected_index[at].tolist(), topk)
        mask = _ancestors(parents)
        before = seq_len if tree_mask_mode == _FULL_MASK else 0
        size = num_tokens * (before + num_tokens)
        tree_mask[done : done + size].view(num_tokens, before + num_tokens)[:, before:] = mask
        done += size
        first = at * num_tokens
        positions[first : first + num_tokens] = seq_len + mask.sum(1) - 1
        retrive_index[at] = torch.arange(first, first + num_tokens)
        _link(parents, retrive_next_token[at], retrive_next_sibling[at])


def reconstruct_indices_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    batch_size: int,
    num_tokens: int,
) -> None:
    """The links of trees that are given by their masks, bool `[B * N * N]`."""
    masks = tree_mask.view(batch_size, num_tokens, num_tokens)
    for at, seq_len in enumerate(verified_seq_len.tolist()):
        before = masks[at].tril(-1)
        parents = [max(row.nonzero().flatten().tolist(), default=-1) for row in before]
        first = at * num_tokens
        positions[first : first + num_tokens] = seq_len + before.sum(1)
        retrive_index[at] = torch.arange(first, first + num_tokens)
        retrive_next_token[at], retrive_next_sibling[at] = -1, -1
        _link(parents, retrive_next_token[at], retrive_next_sibling[at])


def verify_tree_greedy_cpu(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
) -> None:
    """Follows each tree as long as the target model's choice is among the children.

    Args:
        predicts: i32 `[B * N]`, written: the target's choice behind each accepted token.
        accept_index: i32 `[B, most]`, written: places of the accepted tokens, the root first.
        accept_token_num: i32 `[B]`, written: how many, without the root.
        candidates: `[B, N]`, the tokens.
        retrive_index: see above.
        retrive_next_token: see above.
        retrive_next_sibling: see above.
        target_predict: `[B, N]`, the token that the target model chooses behind each.
    """
    for at in range(len(candidates)):
        tokens, wanted = candidates[at].tolist(), target_predict[at].tolist()
        places = retrive_index[at].tolist()
        child, sibling = retrive_next_token[at].tolist(), retrive_next_sibling[at].tolist()
        here, num = 0, 0
        accept_index[at, 0] = places[0]
        predicts[places[0]] = wanted[0]
        while num + 1 < accept_index.shape[1]:
            follower = child[here]
            while follower != -1 and tokens[follower] != wanted[here]:
                follower = sibling[follower]
            if follower == -1:
                break
            here, num = follower, num + 1
            accept_index[at, num] = places[here]
            predicts[places[here]] = wanted[here]
        accept_token_num[at] = num


def _parents(groups: Sequence[int], selected: Sequence[int], topk: int) -> list[int]:
    """Each token's parent as an index into the tree; -1 of the root.

    And of a token whose parent was not selected, as happens where their scores are equal: nothing
    leads to it, so it is not accepted.
    """
    place = {candidate: at for at, candidate in enumerate(selected, 1)}
    parents = [-1]
    for candidate in selected:
        group = candidate // topk
        parents.append(0 if group == 0 else place.get(groups[group], -1))
    return parents


def _ancestors(parents: Sequence[int]) -> torch.Tensor:
    """Bool `[N, N]`: what each token attends to, itself among it."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent >= 0:
            mask[token] |= mask[parent]
    return mask


def _link(parents: Sequence[int], child: torch.Tensor, sibling: torch.Tensor) -> None:
    """Writes the links of one tree, children in ascending order."""
    for token in range(len(parents) - 1, 0, -1):
        parent = parents[token]
        if parent >= 0:
            sibling[token] = child[parent].clone()
            child[parent] = token
