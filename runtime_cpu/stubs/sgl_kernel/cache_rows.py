"""Where tokens of speculative decoding lie in the KV pool. Every tensor is on the CPU.

`req_to_token` is i32 `[R, C]`, the rows of each request's tokens; `req_pool_indices` i64 `[B]`
names a batch's requests in it. Arguments stand in the order of SGLang's compiled kernels.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch


def assign_req_to_token_pool_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """Writes new rows, one request's behind the other's, in `[start, end)` of each request."""
    done = 0
    for request, start, end in _spans(req_pool_indices, start_offset, end_offset):
        rows = out_cache_loc[done : done + end - start]
        req_to_token[request, start:end] = rows.to(req_to_token.dtype)
        done += end - start


def assign_extend_cache_locs_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
) -> None:
    """The way back: the rows of `[start, end)` of each request, one behind the other."""
    done = 0
    for request, start, end in _spans(req_pool_indices, start_offset, end_offset):
        rows = req_to_token[request, start:end]
        out_cache_loc[done : done + end - start] = rows.to(out_cache_loc.dtype)
        done += end - start


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    num_steps: int,
) -> None:
    """As `assign_extend_cache_locs_cpu`, of the `topk * num_steps` tokens behind each sequence."""
    ends = seq_lens + topk * num_steps
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, ends, out_cache_loc, pool_len
    )


def fill_bonus_tokens_cpu(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
) -> None:
    """Each request's last accepted token, of `accept_stride` places a request."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.reshape(-1)[last])


def fill_accept_out_cache_loc_cpu(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor
) -> None:
    """Rows of the accepted tokens, closed up; -1 in `accept_index` is none."""
    accepted = accept_index.reshape(-1)
    accepted = accepted[accepted > -1]
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def rotate_input_ids_cpu(
    input_ids: torch.Tensor,
    extend_start_loc: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    topk_index: torch.Tensor,
    select_index: torch.Tensor | None,
) -> None:
    """Shifts each request's tokens left by one and puts a new one last, or at `select_index`."""
    for at, (start, num) in enumerate(
        zip(extend_start_loc.tolist(), extend_seq_lens.tolist(), strict=True)
    ):
        if num == 0:
            continue
        input_ids[start : start + num - 1] = input_ids[start + 1 : start + num].clone()
        last = start + num - 1 if select_index is None else int(select_index[at])
        input_ids[last] = topk_index.reshape(-1)[at]


def copy_all_layer_kv_cache_cpu(
    data_ptrs: torch.Tensor, strides: torch.Tensor, tgt_loc: torch.Tensor, src_loc: torch.Tensor
) -> None:
    """Copies rows over others in each of some buffers, given by address and bytes a row."""
    target, source = tgt_loc.long().numpy(), src_loc.long().numpy()
    if not len(target):
        return
    num_rows = int(max(target.max(), source.max())) + 1
    for address, num_bytes in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        memory = (ctypes.c_uint8 * (num_rows * num_bytes)).from_address(address)
        rows = np.frombuffer(memory, np.uint8).reshape(num_rows, num_bytes)
        rows[target] = rows[source]


def _spans(
    requests: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
) -> list[tuple[int, int, int]]:
    return list(zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True))
