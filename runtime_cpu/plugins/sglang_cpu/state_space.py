"""Mamba2 in plain torch: chunked scan and state update, as SGLang's kernels have them.

Each function has the name, the arguments and the results of the kernel that it stands for, as far
as ``MambaMixer2`` uses them, and writes states in place as that does. Sums are in float32.
"""
# ruff: noqa: N803 - the arguments have the kernels' names.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import softplus


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
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **kwargs: Any,
) -> None:
    """One more token of each sequence, or guesses that are verified: `T` of each, a chain.

    Args:
        state: `[S, H, P, N]`; those of the batch are written, but not with guesses.
        x: `[B, H, P]`, of guesses `[B, T, H, P]`.
        dt: as `x`, before bias and softplus.
        A: `[H, P, N]`, negative.
        B: `[B, G, N]`, of guesses `[B, T, G, N]`.
        C: as `B`.
        D: `[H, P]`.
        dt_bias: `[H, P]`.
        state_batch_indices: `[B]`, slots.
        out: as `x`, written.
        intermediate_states_buffer: `[R, T, H, P, N]`, written with the state behind each guess.
        intermediate_state_indices: `[B]`, rows of it.
        retrieve_parent_token: of trees of guesses, which are not computed here; None.
        **kwargs: unused.
    """
    assert retrieve_parent_token is None
    behind = state[state_batch_indices].float()
    if intermediate_states_buffer is None:
        behind = _next_token(behind, x, dt, A, B, C, D, dt_bias, out)
        state[state_batch_indices] = behind.to(state.dtype)
        return
    assert intermediate_state_indices is not None
    rows = intermediate_state_indices.long()
    for step in range(x.shape[1]):
        tokens, steps, keys, queries, said = (each[:, step] for each in (x, dt, B, C, out))
        behind = _next_token(behind, tokens, steps, A, keys, queries, D, dt_bias, said)
        intermediate_states_buffer[rows, step] = behind.to(intermediate_states_buffer.dtype)


def _next_token(
    before: torch.Tensor,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """The states `[B, H, P, N]` behind a token of each sequence; writes what comes of it."""
    num_shared = x.shape[1] // B.shape[1]
    keys = B.float().repeat_interleave(num_shared, dim=1).unsqueeze(2)  # [B, H, 1, N]
    queries = C.float().repeat_interleave(num_shared, dim=1).unsqueeze(2)
    step = softplus(dt.float() + dt_bias.float()).unsqueeze(-1)  # [B, H, P, 1]
    after = before * (step * A).exp() + step * x.float().unsqueeze(-1) * keys
    out.copy_((after * queries).sum(-1) + D.float() * x.float())
    return after
