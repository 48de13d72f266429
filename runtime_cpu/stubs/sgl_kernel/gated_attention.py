"""Gates and norms of the layers of Qwen3-Next and Qwen3.5, as far as SGLang's models use them."""

from __future__ import annotations

import torch
from torch.nn.functional import silu


def fused_sigmoid_mul_cpu(x: torch.Tensor, gate: torch.Tensor) -> None:
    """Multiplies by a gate.

    Args:
        x: `[T, D]`, written.
        gate: as many values, before the sigmoid.
    """
    x.mul_(gate.reshape(x.shape).sigmoid())


def fused_rmsnorm_gated_cpu(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """The norm of each row, times its gate.

    Args:
        x: `[N, V]`.
        weight: `[V]`.
        gate: `[N, V]`, before silu.
        eps: added to the mean of squares.

    Returns:
        `[N, V]`.
    """
    return (_norm(x, weight, eps) * silu(gate.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of each head.

    Args:
        q: `[T, Hq * D]`.
        k: `[T, H * D]`.
        q_weight: `[D]`, less one.
        k_weight: `[D]`, less one.
        eps: added to the mean of squares.
        head_dim: D.

    Returns:
        `[T * Hq, D]` and `[T * H, D]`.
    """
    queries = _norm(q.reshape(-1, head_dim), 1.0 + q_weight.float(), eps)
    keys = _norm(k.reshape(-1, head_dim), 1.0 + k_weight.float(), eps)
    return queries.to(q.dtype), keys.to(k.dtype)


def fused_qk_gemma_rmsnorm_with_gate_cpu(
    q_gate: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    head_dim: int,
    num_heads: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same, with a gate behind each head of the queries.

    Args:
        q_gate: `[T, Hq * 2 * D]`.
        k: `[T, H * D]`.
        q_weight: `[D]`, less one.
        k_weight: `[D]`, less one.
        eps: added to the mean of squares.
        head_dim: D.
        num_heads: Hq.

    Returns:
        `[T * Hq, D]`, `[T * H, D]` and the gates `[T * Hq, D]`.
    """
    q, gate = q_gate.reshape(-1, num_heads, 2, head_dim).unbind(2)
    norms = fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim)
    return *norms, gate.contiguous().view(-1, head_dim)


def fused_qkvzba_split_reshape_cat_contiguous_cpu(
    mixed_qkvz: torch.Tensor,
    mixed_ba: torch.Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The parts of a layer's projections.

    Args:
        mixed_qkvz: `[T, 2 * Hk * K + 2 * H * V]`.
        mixed_ba: `[T, 2 * H]`.
        num_heads_qk: Hk.
        num_heads_v: H.
        head_qk: K.
        head_v: V.

    Returns:
        What is convolved `[T, 2 * Hk * K + H * V]`, the gate `[T, H, V]`, and twice `[T, H]`.
    """
    qkv_dim = 2 * num_heads_qk * head_qk + num_heads_v * head_v
    qkv, z = mixed_qkvz.split([qkv_dim, num_heads_v * head_v], dim=-1)
    b, a = mixed_ba.split([num_heads_v, num_heads_v], dim=-1)
    z = z.reshape(-1, num_heads_v, head_v)
    return qkv.contiguous(), z, b.contiguous(), a.contiguous()


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    values = x.float()
    return values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
