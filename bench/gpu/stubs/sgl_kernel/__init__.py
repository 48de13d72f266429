"""Stand-in for SGLang's compiled CUDA kernels, whose wheel is too large for the kit.

What a dense model's forward calls is here in plain torch, in place as the kernels do it; the other
names need only exist, as SGLang imports them whatever the model is. A name that is not here stays
absent on purpose: SGLang tests for such ones with ``try: from sgl_kernel import ...``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0"


def absent(name: str) -> Callable[..., Any]:
    """A kernel that is imported and not called."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name} is not in the kit")

    kernel.__name__ = name
    return kernel


def rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """``[N, D]`` over its last axis, times a weight ``[D]``; computed in float32."""
    normed = _normed(x.float(), eps) * weight.float()
    out = torch.empty_like(x) if out is None else out
    return out.copy_(normed)


def gemma_rmsnorm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """As `rmsnorm`, of a weight that is stored less one."""
    return rmsnorm(x, weight.float() + 1, eps, out)


def fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """Adds x to the residual, and leaves in x the norm of the sum."""
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normed(total, eps) * weight.float())


def gemma_fused_add_rmsnorm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """As `fused_add_rmsnorm`, of a weight that is stored less one."""
    fused_add_rmsnorm(x, residual, weight.float() + 1, eps)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The first half of the last axis through SiLU, times the second."""
    return _gated(torch.nn.functional.silu, x, out)


def gelu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same with GELU."""
    return _gated(torch.nn.functional.gelu, x, out)


def gelu_tanh_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The same with GELU by its approximation."""
    return _gated(lambda half: torch.nn.functional.gelu(half, approximate="tanh"), x, out)


def weak_ref_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself: a graph then keeps its memory."""
    return tensor


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _gated(
    of: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor | None
) -> torch.Tensor:
    first, second = x.float().chunk(2, -1)
    out = x.new_empty(first.shape) if out is None else out
    return out.copy_(of(first) * second)


int8_scaled_mm = absent("int8_scaled_mm")
moe_sum = absent("moe_sum")
moe_sum_reduce = absent("moe_sum_reduce")
top_k_renorm_prob = absent("top_k_renorm_prob")
top_p_renorm_prob = absent("top_p_renorm_prob")
