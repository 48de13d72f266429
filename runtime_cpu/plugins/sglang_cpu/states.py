"""Models whose layers have states on a CPU, where SGLang binds no kernels for them."""

from __future__ import annotations

import sys
from typing import Any

import torch

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
_DELTA_ATTENTION = ("KimiDeltaAttention", "KimiK3DeltaAttention")


def allow_snapshots() -> None:
    """Lets SGLang keep states of prompts (``extra_buffer``) here as on a GPU.

    It asks what the platform's kernels can do; those of this runtime can.
    """
    from sglang.srt.arg_groups import mamba_hook

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def bind_kernels(model: torch.nn.Module) -> None:
    """Puts plain torch in the place of SGLang's kernels, if a model with states is loaded.

    Args:
        model: that was loaded.
    """
    if any(type(module).__name__ in _DELTA_ATTENTION for module in model.modules()):
        _bind_delta_attention()
    mixer = sys.modules.get(_MIXER)
    if mixer is None:
        return
    from sgl_kernel import mamba as convolution
    from sglang.kernels.ops.attention.fla import fused_norm_gate, layernorm_gated
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    from . import state_space
    from .pools import kept_states

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        for bound in (name, f"{name}_triton"):  # which one is called, a model decides
            setattr(mixer, bound, getattr(convolution, f"{name}_cpu"))
    for name in ("mamba_chunk_scan_combined", "selective_state_update"):
        setattr(mixer, name, getattr(state_space, name))
    for name in (
        "track_mamba_states_if_needed",
        "track_mamba_states_all_layers",
        "scatter_mamba_states_after_mtp_verify",
    ):
        setattr(backend, name, getattr(kept_states, name))
    for norms in (fused_norm_gate, layernorm_gated):  # else in Triton, unless a CPU has AMX
        setattr(norms, "_use_cpu", True)  # noqa: B010
    # Between decode steps SGLang page-locks a mask, which torch refuses without a GPU.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010


def _bind_delta_attention() -> None:
    """The same, of Kimi Delta Attention and its norm, whose modules SGLang imports behind this."""
    from sgl_kernel import mamba as convolution
    from sglang.kernels.ops.attention.fla.fused_norm_gate import FusedRMSNormGated
    from sglang.srt.layers.attention.linear import kda_backend as backend
    from sglang.srt.layers.attention.linear.kernels import kda_triton

    from . import delta_attention

    setattr(backend, "causal_conv1d_fn", convolution.causal_conv1d_fn_cpu)  # noqa: B010
    for name in ("chunk_kda", "fused_sigmoid_gating_delta_rule_update"):
        setattr(kda_triton, name, getattr(delta_attention, name))
    of_other_gates = FusedRMSNormGated.forward

    def forward(norm: Any, x: torch.Tensor, g: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if norm.activation != "sigmoid":
            return of_other_gates(norm, x, g, *args, **kwargs)
        return delta_attention.norm_gated_by_sigmoid(x, norm.weight, g, norm.eps)

    setattr(FusedRMSNormGated, "forward", forward)  # noqa: B010
