"""Models with Mamba2 layers on a CPU, where SGLang binds no kernels for them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import NoReturn

import torch

_MIXER = "sglang.srt.layers.attention.mamba.mamba"
# Names of compiled kernels that SGLang imports beside Mamba2's; of other kinds of layers.
_ABSENT = ("causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu")
_ABSENT_OPS = ("fused_gdn_gating_cpu", "fused_sigmoid_gating_delta_rule_update_cpu")


def allow_snapshots() -> None:
    """Lets SGLang keep states of prompts (``extra_buffer``) here as on a GPU.

    It asks what the platform's kernels can do; those of `state_space` can.
    """
    from sglang.srt.arg_groups import mamba_hook

    mamba_hook._platform_supports_mamba_cache_extra_buffer = lambda: True


def bind_kernels() -> None:
    """Puts `state_space` in the place of SGLang's kernels, if a model with states is loaded."""
    mixer = sys.modules.get(_MIXER)
    if mixer is None:
        return
    _name_absent_kernels()
    from sglang.srt.layers.attention import hybrid_linear_attn_backend as backend

    from . import state_space as kernels

    for name in ("causal_conv1d_fn", "causal_conv1d_update"):
        setattr(mixer, f"{name}_triton", getattr(kernels, name))
    for name in ("mamba_chunk_scan_combined", "selective_state_update"):
        setattr(mixer, name, getattr(kernels, name))
    backend.track_mamba_states_if_needed = kernels.track_mamba_states_if_needed
    # Between decode steps SGLang page-locks a mask, which torch refuses without a GPU.
    setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor)  # noqa: B010


def _name_absent_kernels() -> None:
    """Lets SGLang import kernels of linear attention, which nobody may call here."""
    module = ModuleType("sgl_kernel.mamba")
    for name in _ABSENT:
        setattr(module, name, _refusing(name))
    sys.modules.setdefault("sgl_kernel.mamba", module)
    for name in _ABSENT_OPS:
        setattr(torch.ops.sgl_kernel, name, _refusing(name))


def _refusing(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel's {name} was called, but this CPU runtime has Mamba2's kernels only: "
            "use a model without other linear attention, or a GPU machine"
        )

    return kernel
