"""The causal convolution in front of layers with a state, which its last inputs are part of."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import conv1d, silu


def causal_conv1d_fn_cpu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    conv_states: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens_cpu: Any = None,
    cache_indices: torch.Tensor | None = None,
    has_initial_state: torch.Tensor | None = None,
    activation: str | None = "silu",
    **kwargs: Any,
) -> torch.Tensor:
    """The convolution of whole prompts or chunks of them.

    Args:
        x: `[D, T]`, sequences one after another.
        weight: `[D, W]`.
        bias: `[D]`.
        conv_states: `[S, D, W - 1]`, the last inputs of each slot; those of the batch are written.
        query_start_loc: `[N + 1]`, where sequences begin in `x`.
        seq_lens_cpu: unused.
        cache_indices: `[N]`, slots of the sequences.
        has_initial_state: bool `[N]`, of which sequences the slot holds what was before.
        activation: "silu", "swish" or None.
        **kwargs: unused.

    Returns:
        `[D, T]`.
    """
    assert cache_indices is not None
    num_before = weight.shape[1] - 1
    out = torch.empty_like(x)
    starts = query_start_loc.tolist()
    slots = cache_indices.tolist()
    for i, (start, end) in enumerate(pairwise(starts)):
        before = x.new_zeros((x.shape[0], num_before))
        if has_initial_state is not None and bool(has_initial_state[i]):
            before = conv_states[slots[i]].to(x.dtype)
        seen = torch.cat([before, x[:, start:end]], dim=1)
        found = conv1d(seen.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight)).squeeze(0)
        out[:, start:end] = _activated(found, activation)
        conv_states[slots[i]] = seen[:, seen.shape[1] - num_before :].to(conv_states.dtype)
    return out


def causal_conv1d_update_cpu(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
    intermediate_conv_window: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """The convolution of one more token of each sequence, or of guesses that are verified.

    Args:
        x: `[N, D]`, or `[N, D, T]` of guesses, a chain each.
        conv_state: `[S, D, W - 1]`; those of the batch are written, but not with guesses.
        weight: `[D, W]`.
        bias: `[D]`.
        activation: "silu", "swish" or None.
        conv_state_indices: `[N]`, slots.
        intermediate_conv_window: `[R, T, D, W - 1]`, written with the state behind each guess.
        intermediate_state_indices: `[N]`, rows of it.
        **kwargs: of trees of guesses, which are not computed here; None each.

    Returns:
        As `x`, in memory, too: SGLang views what comes back of guesses as rows of tokens.
    """
    assert conv_state_indices is not None
    assert all(value is None for value in kwargs.values())
    inputs = x.unsqueeze(-1) if x.dim() == 2 else x
    seen = torch.cat([conv_state[conv_state_indices].to(x.dtype), inputs], dim=-1)
    found = conv1d(seen, weight.unsqueeze(1), bias, groups=len(weight))
    if intermediate_conv_window is None:
        assert x.dim() == 2
        conv_state[conv_state_indices] = seen[..., 1:].to(conv_state.dtype)
    else:
        assert intermediate_state_indices is not None
        rows, num_before = intermediate_state_indices.long(), weight.shape[1] - 1
        for step in range(inputs.shape[-1]):  # the windows overlap in memory
            window = seen[..., step + 1 : step + 1 + num_before]
            intermediate_conv_window[:, step][rows] = window.to(intermediate_conv_window.dtype)
    return torch.empty_like(x).copy_(_activated(found, activation).reshape(x.shape))


def _activated(found: torch.Tensor, activation: str | None) -> torch.Tensor:
    return found if activation is None else silu(found)
