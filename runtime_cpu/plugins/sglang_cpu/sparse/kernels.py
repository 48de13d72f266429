"""What SGLang has kernels of a GPU for in a model with an index: its bytes, scores and choice."""

from __future__ import annotations

from typing import Any

import torch

# As SGLang's kernels do it.
_LARGEST = 448.0
_LEAST_SCALED = 1e-4
_SCALE_BYTES = 4


def rotate_activation(x: torch.Tensor) -> torch.Tensor:
    """Hadamard's transform of the last axis, whose size is a power of two, as SGLang scales it."""
    size = x.shape[-1]
    out = x.float()
    step = 1
    while step < size:
        pairs = out.reshape(*x.shape[:-1], size // (2 * step), 2, step)
        left, right = pairs.unbind(-2)
        out = torch.stack((left + right, left - right), -2).reshape(x.shape)
        step *= 2
    scaled: torch.Tensor = out * size**-0.5
    return scaled.to(x.dtype)


def act_quant(
    x: torch.Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in fp8 and a scale for each block of them; a power of two where `scale_fmt` is set.

    Args:
        x: `[..., N]`.
        block_size: values with one scale.
        scale_fmt: how scales are rounded.

    Returns:
        `[..., N]` in fp8, and `[..., N / block_size]` in float32.
    """
    blocks = x.float().reshape(*x.shape[:-1], -1, block_size)
    scale = blocks.abs().amax(-1).clamp(min=_LEAST_SCALED) / _LARGEST
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (blocks / scale.unsqueeze(-1)).clamp(-_LARGEST, _LARGEST)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale


def store(
    *,
    pool: Any,
    buf: torch.Tensor,
    loc: torch.Tensor,
    index_k: torch.Tensor,
    index_k_scale: torch.Tensor,
) -> None:
    """Writes rows of the index: in each page all tokens' K, and behind them all their scales.

    Args:
        pool: SGLang's.
        buf: u8 `[pages, bytes of a page]`.
        loc: i64 `[T]`, slots.
        index_k: fp8 `[T, D]`.
        index_k_scale: float32 `[T]` or `[T, 1]`.
    """
    size, dim = pool.index_page_size, pool.index_head_dim
    page, row = loc // size, loc % size
    keys = buf[:, : size * dim].view(-1, size, dim)
    scales = buf[:, size * dim :].view(-1, size, _SCALE_BYTES)
    keys[page, row] = index_k.view(torch.uint8)
    scales[page, row] = index_k_scale.reshape(-1, 1).contiguous().view(torch.uint8)


def gather(
    pool: Any,
    buf: torch.Tensor,
    page_indices: torch.Tensor,
    seq_len_tensor: torch.Tensor,
    seq_len_sum: int,
    max_seq_len: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the index of one sequence.

    Args:
        pool: SGLang's.
        buf: as in `store`.
        page_indices: `[pages]`, of the sequence.
        seq_len_tensor: `[1]`.
        seq_len_sum: tokens.
        max_seq_len: the same.

    Returns:
        u8 `[T, D]` and u8 `[T, 4]`: K and scales.
    """
    size, dim = pool.index_page_size, pool.index_head_dim
    pages = buf[page_indices.long()]
    keys = pages[:, : size * dim].reshape(-1, dim)
    scales = pages[:, size * dim :].reshape(-1, _SCALE_BYTES)
    return keys[:seq_len_sum], scales[:seq_len_sum]


def choose(
    query: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    scales: torch.Tensor,
    num: int,
) -> torch.Tensor:
    """The tokens that each of a sequence's last tokens attends to.

    Args:
        query: fp8 `[N, H, D]`, of the last N tokens.
        weights: float32 `[N, H, 1]`, of the heads, with the scales of the queries.
        keys: u8 `[T, D]`, fp8 values.
        scales: u8 `[T, 4]`, float32 values.
        num: most tokens that one attends to.

    Returns:
        i32 `[N, num]`, in the order of the sequence, -1 behind the last one.
    """
    total, rows = len(keys), len(query)
    key = keys.view(torch.float8_e4m3fn).float()
    products = torch.einsum("nhd,td->nht", query.float(), key).relu()
    scores = (products * weights).sum(1) * scales.contiguous().view(torch.float32).T
    position = torch.arange(total - rows, total).unsqueeze(1)
    scores.masked_fill_(torch.arange(total) > position, -torch.inf)
    best = scores.topk(min(num, total), sorted=False)
    found = best.indices.masked_fill(best.values == -torch.inf, total).sort(-1).values
    out = torch.full((rows, num), -1, dtype=torch.int32)
    out[:, : found.shape[1]] = found.masked_fill(found == total, -1)
    return out
