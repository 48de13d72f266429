"""Kimi Delta Attention (KDA) in plain torch: the gated delta rule with a gate a channel of a key.

Each function has the name, the arguments and the results of the kernel that it stands for, as far
as ``TritonKDAKernel`` uses them, and writes states in place as that does. Sums are in float32. A
state is `[V, K]` a head: what it takes a key to.
"""
# ruff: noqa: N803 - the arguments have the kernels' names.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import sigmoid, softplus

# Tokens of a chunk; behind each of a sequence's SGLang may ask for the state.
CHUNK = 64
_NORM_EPS = 1e-6


def chunk_kda(
    *,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    initial_state_indices: torch.Tensor,
    use_qk_l2norm_in_kernel: bool,
    cu_seqlens: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    beta_is_raw: bool,
    output_intermediate_states: bool,
    lower_bound: float | None = None,
    track_state: torch.Tensor | None = None,
    track_chunk_idx: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Whole prompts or chunks of them.

    Args:
        q: `[1, T, H, K]`, sequences one after another.
        k: `[1, T, H, K]`.
        v: `[1, T, H, V]`.
        g: `[1, T, H, K]`, gates before bias and softplus.
        beta: `[1, T, H]`, how much a token writes, before the sigmoid.
        initial_state: `[S, H, V, K]`; those of the batch are read and written.
        initial_state_indices: `[N]`, slots of the sequences; less than 0: none, nothing is kept.
        use_qk_l2norm_in_kernel: True.
        cu_seqlens: `[N + 1]`, where sequences begin.
        A_log: `[1, 1, H, 1]`, or any shape of H values.
        dt_bias: `[H * K]`.
        beta_is_raw: True.
        output_intermediate_states: whether the states in front of chunks are returned.
        lower_bound: of what a token leaves of a state, as a logarithm; None for no bound.
        track_state: float32 `[N, H, V, K]`, written with the states that are asked for.
        track_chunk_idx: `[N]`, the chunk of each sequence in front of which its state is asked for;
            less than 0 for none.
        **kwargs: unused.

    Returns:
        Outputs `[1, T, H, V]`; and, if they are asked for, the states in front of each chunk of
        each sequence, `[1, C, H, V, K]`.
    """
    assert use_qk_l2norm_in_kernel
    assert beta_is_raw
    queries, keys = _queries_and_keys(q[0], k[0])
    decay = _decay(g[0], A_log, dt_bias, lower_bound)
    values, writes = v[0].float(), sigmoid(beta[0].float())
    out, fronts = torch.empty_like(v), []
    wanted = [-1] * len(initial_state_indices)
    if track_chunk_idx is not None:
        wanted = track_chunk_idx.tolist()
    sequences = zip(initial_state_indices.tolist(), pairwise(cu_seqlens.tolist()), strict=True)
    for i, (slot, (start, end)) in enumerate(sequences):
        state = torch.zeros(initial_state.shape[1:])
        if slot >= 0:
            state = initial_state[slot].to(torch.float32, copy=True)  # its slot is written below
        for chunk, first in enumerate(range(start, end, CHUNK)):
            rows = slice(first, min(first + CHUNK, end))
            fronts.append(state.to(k.dtype))
            if track_state is not None and chunk == wanted[i]:
                track_state[i] = state
            found, state = _chunk(
                queries[rows], keys[rows], values[rows], decay[rows], writes[rows], state
            )
            out[0, rows] = found.to(out.dtype)
        if slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    return (out, torch.stack(fronts).unsqueeze(0)) if output_intermediate_states else out


def fused_sigmoid_gating_delta_rule_update(
    *,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    initial_state_source: torch.Tensor,
    initial_state_indices: torch.Tensor,
    is_kda: bool,
    lower_bound: float | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One more token of each sequence.

    Args:
        A_log: `[1, 1, H, 1]`, or any shape of H values.
        dt_bias: `[H * K]`.
        q: `[1, B, H, K]`.
        k: `[1, B, H, K]`.
        v: `[1, B, H, V]`.
        a: `[B, H * K]`, gates before bias and softplus.
        b: `[1, B, H]`, how much a token writes, before the sigmoid.
        initial_state_source: `[S, H, V, K]`; those of the batch are written.
        initial_state_indices: `[B]`, slots; less than 0: none, nothing is kept.
        is_kda: True.
        lower_bound: of what a token leaves of a state, as a logarithm; None for no bound.
        **kwargs: unused.

    Returns:
        `[1, B, H, V]`.
    """
    assert is_kda
    queries, keys = _queries_and_keys(q[0], k[0])
    decay = _decay(a.reshape(keys.shape), A_log, dt_bias, lower_bound)
    writes = sigmoid(b.reshape(keys.shape[:2]).float())
    has_slot, slots = initial_state_indices >= 0, initial_state_indices.long()
    state = initial_state_source[slots.clamp(min=0)].float() * has_slot[:, None, None, None]
    state *= decay.exp().unsqueeze(-2)
    recalled = (state * keys.unsqueeze(-2)).sum(-1)
    added = writes.unsqueeze(-1) * (v[0].float() - recalled)
    state += added.unsqueeze(-1) * keys.unsqueeze(-2)
    initial_state_source[slots[has_slot]] = state[has_slot].to(initial_state_source.dtype)
    return (state * queries.unsqueeze(-2)).sum(-1).to(v.dtype).unsqueeze(0)


def norm_gated_by_sigmoid(
    x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor, eps: float
) -> torch.Tensor:
    """The norm of each row, times the sigmoid of its gate.

    Args:
        x: `[..., V]`.
        weight: `[V]`.
        gate: as many values, before the sigmoid.
        eps: added to the mean of squares.

    Returns:
        As `x`.
    """
    values = x.float()
    normed = values * (values.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float()
    return (normed * sigmoid(gate.reshape(x.shape).float())).to(x.dtype)


def _chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    writes: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence: `[T, H, V]` of outputs, and the state `[H, V, K]` behind them.

    As in the gated delta rule of the stand-in for ``sgl_kernel``, but that what is left of a token
    is one factor a channel of its key: products of keys are sums over what is left of each.
    """
    queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))  # [H, T, ...]
    writes = writes.transpose(0, 1).unsqueeze(-1)
    left = decay.cumsum(0).transpose(0, 1)  # [H, T, K], logarithms
    of_before = left.exp()
    # Of differences, as a factor of its own may be too large or too small for a float.
    between = (left.unsqueeze(2) - left.unsqueeze(1)).clamp(max=0.0).exp()  # [H, T, T, K]
    known = writes * (values - (keys * of_before) @ state.transpose(1, 2))
    products = torch.einsum("htk,hsk,htsk->hts", keys, keys, between)
    system = (writes * products).tril(-1)
    added = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    seen = torch.einsum("htk,hsk,htsk->hts", queries, keys, between).tril()
    found = (queries * of_before) @ state.transpose(1, 2) + seen @ added
    to_end = (left[:, -1:] - left).exp()
    behind = left[:, -1].exp().unsqueeze(1) * state + added.transpose(1, 2) @ (keys * to_end)
    return found.transpose(0, 1), behind


def _decay(
    gates: torch.Tensor, A_log: torch.Tensor, dt_bias: torch.Tensor, lower_bound: float | None
) -> torch.Tensor:
    """How much of each channel of a state a token leaves, `[T, H, K]`, as a logarithm."""
    opened = gates.float() + dt_bias.float().view(gates.shape[1:])
    scale = A_log.float().exp().view(-1, 1)
    if lower_bound is not None:
        return lower_bound * sigmoid(scale * opened)
    return -scale * softplus(opened)


def _queries_and_keys(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of unit length, in float32; queries scaled."""
    queries, keys = (
        x.float() * (x.float().square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt() for x in (q, k)
    )
    return queries * q.shape[-1] ** -0.5, keys
