"""Mamba2 in plain torch: convolution, chunked scan and state update, as SGLang's kernels have them.

Each function has the name, the arguments and the results of the kernel that it stands for, as far
as ``MambaMixer2`` uses them, and writes states in place as that does. Sums are in float32.
"""
# ruff: noqa: N803 - the arguments have the kernels' names.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import conv1d, silu, softplus


def causal_conv1d_fn(
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


def causal_conv1d_update(
    x: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    conv_state_indices: torch.Tensor | None = None,
) -> torch.Tensor:
    """The convolution of one more token of each sequence.

    Args:
        x: `[N, D]`.
        conv_state: `[S, D, W - 1]`; those of the batch are written.
        weight: `[D, W]`.
        bias: `[D]`.
        activation: "silu", "swish" or None.
        conv_state_indices: `[N]`, slots.

    Returns:
        `[N, D]`.
    """
    assert conv_state_indices is not None
    seen = torch.cat([conv_state[conv_state_indices].to(x.dtype), x.unsqueeze(-1)], dim=-1)
    found = conv1d(seen, weight.unsqueeze(1), bias, groups=len(weight)).squeeze(-1)
    conv_state[conv_state_indices] = seen[..., 1:].to(conv_state.dtype)
    return _activated(found, activation)


def mamba_chunk_scan_combined(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    cu_seqlens: torch.Tensor,
    initial_states: torch.Tensor | None,
    out: torch.Tensor,
    state_dtype: torch.dtype,
    track_seq_idx: torch.Tensor | None = None,
    track_end_locs: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The scan of whole prompts or chunks of them.

    Args:
        x: `[1, T, H, P]`, sequences one after another.
        dt: `[1, T, H]`, before bias and softplus.
        A: `[H]`, negative.
        B: `[1, T, G, N]`.
        C: `[1, T, G, N]`.
        chunk_size: tokens of a chunk of the batch.
        D: `[H]`.
        dt_bias: `[H]`.
        cu_seqlens: `[S + 1]`, where sequences begin.
        initial_states: `[S, H, P, N]`; None: all are zero.
        out: `[1, T, H, P]`, written.
        state_dtype: of the states that are returned.
        track_seq_idx: `[K]`, sequences of which a state within is wanted.
        track_end_locs: `[K]`, where in the batch.
        **kwargs: unused.

    Returns:
        The states at the start of each chunk of the batch, `[1, T / chunk_size, H, P, N]`; those at
        the end of each sequence, `[S, H, P, N]`; and those asked for, `[1, K, H, P, N]`.
    """
    num_tokens, num_heads, head_dim = x.shape[1:]
    bounds = cu_seqlens.tolist()
    num_chunks = -(-num_tokens // chunk_size)
    tracked = [] if track_end_locs is None else track_end_locs.tolist()
    size = (num_heads, head_dim, B.shape[-1])
    chunks = x.new_zeros((1, num_chunks, *size), dtype=state_dtype)
    ends = x.new_zeros((len(bounds) - 1, *size), dtype=state_dtype)
    wanted = x.new_zeros((1, len(tracked), *size), dtype=state_dtype)
    steps = softplus(dt[0].float() + dt_bias.float())
    for i, (start, end) in enumerate(pairwise(bounds)):
        state = x.new_zeros(size, dtype=torch.float32)
        if initial_states is not None:
            state = initial_states[i].float()
        cuts = {loc for loc in tracked if start < loc < end}
        cuts |= {loc for loc in range(0, end, chunk_size) if loc > start}
        for first, stop in pairwise(sorted({start, end} | cuts)):
            if first % chunk_size == 0:
                chunks[0, first // chunk_size] = state.to(state_dtype)
            rows = slice(first, stop)
            found, state = _scan(x[0, rows], steps[rows], A, B[0, rows], C[0, rows], state)
            out[0, rows] = (found + D.float()[:, None] * x[0, rows].float()).to(out.dtype)
            for k, loc in enumerate(tracked):
                if loc == stop:
                    wanted[0, k] = state.to(state_dtype)
        ends[i] = state.to(state_dtype)
    return chunks, ends, wanted if tracked else None


def _scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence: `[T, H, P]` of outputs, and the state `[H, P, N]` behind them."""
    num_heads = x.shape[1]
    keys = B.float().repeat_interleave(num_heads // B.shape[1], dim=1).transpose(0, 1)  # [H, T, N]
    queries = C.float().repeat_interleave(num_heads // C.shape[1], dim=1).transpose(0, 1)
    values = (x.float() * steps.unsqueeze(-1)).transpose(0, 1)  # [H, T, P]
    decay = (steps * A.float()).cumsum(0).transpose(0, 1)  # [H, T], logarithms
    between = (decay.unsqueeze(-1) - decay.unsqueeze(-2)).tril().exp().tril()
    found = (queries @ keys.transpose(1, 2) * between) @ values
    found += decay.exp().unsqueeze(-1) * (queries @ state.transpose(1, 2))
    left = (decay[:, -1:] - decay).exp().unsqueeze(-1)
    behind = decay[:, -1].exp()[:, None, None] * state + (values * left).transpose(1, 2) @ keys
    return found.transpose(0, 1), behind


def selective_state_update(
    state: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    *,
    dt_bias: torch.Tensor,
    state_batch_indices: torch.Tensor,
    out: torch.Tensor,
    **kwargs: Any,
) -> None:
    """One more token of each sequence.

    Args:
        state: `[S, H, P, N]`; those of the batch are written.
        x: `[B, H, P]`.
        dt: `[B, H, P]`, before bias and softplus.
        A: `[H, P, N]`, negative.
        B: `[B, G, N]`.
        C: `[B, G, N]`.
        D: `[H, P]`.
        dt_bias: `[H, P]`.
        state_batch_indices: `[B]`, slots.
        out: `[B, H, P]`, written.
        **kwargs: unused.
    """
    num_shared = x.shape[1] // B.shape[1]
    keys = B.float().repeat_interleave(num_shared, dim=1).unsqueeze(2)  # [B, H, 1, N]
    queries = C.float().repeat_interleave(num_shared, dim=1).unsqueeze(2)
    step = softplus(dt.float() + dt_bias.float()).unsqueeze(-1)  # [B, H, P, 1]
    before = state[state_batch_indices].float()
    after = before * (step * A).exp() + step * x.float().unsqueeze(-1) * keys
    state[state_batch_indices] = after.to(state.dtype)
    out.copy_((after * queries).sum(-1) + D.float() * x.float())


def track_mamba_states_if_needed(
    conv_states: torch.Tensor,
    ssm_states: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """Copies the states of some sequences to the slots in which they are kept.

    Args:
        conv_states: `[S, ...]` of a layer.
        ssm_states: `[S, ...]` of a layer.
        cache_indices: `[N]`, slots of the sequences.
        mamba_track_mask: bool `[N]`, which are kept.
        mamba_track_indices: `[N]`, slots to keep them in.
        batch_size: N.
        check_freed_slots: unused.
    """
    rows = mamba_track_mask[:batch_size].nonzero(as_tuple=True)[0]
    source, target = cache_indices[rows].long(), mamba_track_indices[rows].long()
    for states in (conv_states, ssm_states):
        states[target] = states[source]


def _activated(found: torch.Tensor, activation: str | None) -> torch.Tensor:
    return found if activation is None else silu(found)
