"""The gate of an expert that all tokens take (Qwen's), in plain torch."""

from __future__ import annotations

import sys

import torch

_MODEL = "sglang.srt.models.qwen2_moe"


def bind_shared_expert() -> None:
    """Puts the function below in the place of SGLang's kernel, if such a model is loaded."""
    model = sys.modules.get(_MODEL)
    if model is not None:
        setattr(model, "fused_gate_sigmoid_mul_add", fused_gate_sigmoid_mul_add)  # noqa: B010


def fused_gate_sigmoid_mul_add(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    shared_output: torch.Tensor,
    final_hidden_states: torch.Tensor,
) -> None:
    """Adds the shared expert's output, times its gate, to that of the others.

    Args:
        hidden_states: `[T, D]`, what the experts took.
        gate_weight: `[D]`.
        shared_output: `[T, D]`.
        final_hidden_states: `[T, D]`, written.
    """
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid().unsqueeze(-1)
    final_hidden_states += (gate * shared_output.float()).to(final_hidden_states.dtype)
