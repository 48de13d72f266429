"""The gated delta rule: gates, whole chunks, one more token.

Each function has the arguments and the results of the kernel, as far as ``GDNAttnBackend`` uses
them, and writes states in place as that does. Sums are in float32. A state is `[V, K]` a head: what
it takes a key to.
"""
# ruff: noqa: N803 - the arguments have the kernels' names.

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import sigmoid, softplus

# Tokens of a chunk; behind each of a sequence's SGLang asks for the state.
CHUNK = 64
_NORM_EPS = 1e-6


def fused_gdn_gating_cpu(
    A_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much of the state each token leaves, as a logarithm, and how much of itself it writes.

    Args:
        A_log: `[H]`.
        a: `[T, H]`.
        b: `[T, H]`.
        dt_bias: `[H]`.

    Returns:
        Twice `[1, T, H]`, float32.
    """
    decay = -A_log.float().exp() * softplus(a.float() + dt_bias.float())
    return decay.unsqueeze(0), sigmoid(b.float()).unsqueeze(0)


def chunk_gated_delta_rule_cpu(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    cu_seqlens: torch.Tensor,
    head_first: bool,
    use_qk_l2norm_in_kernel: bool,
    initial_state_indices: torch.Tensor,
) -> tuple[torch.Tensor, None, torch.Tensor]:
    """Whole prompts or chunks of them.

    Args:
        q: `[1, T, Hk, K]`, sequences one after another.
        k: `[1, T, Hk, K]`.
        v: `[1, T, H, V]`; H is a multiple of Hk.
        g: `[1, T, H]`, see `fused_gdn_gating_cpu`.
        beta: `[1, T, H]`.
        initial_state: `[S, H, V, K]`; those of the batch are read and written.
        cu_seqlens: `[N + 1]`, where sequences begin.
        head_first: False.
        use_qk_l2norm_in_kernel: True.
        initial_state_indices: `[N]`, slots of the sequences.

    Returns:
        Outputs `[1, T, H, V]`; None for the last states, which are in their slots; and the states
        in front of each chunk of each sequence, `[1, C, H, V, K]`.
    """
    assert use_qk_l2norm_in_kernel
    assert not head_first
    queries, keys = _queries_and_keys(q[0], k[0], v.shape[2])
    values, decay, writes = v[0].float(), g[0], beta[0]
    out, fronts = torch.empty_like(v), []
    slots = initial_state_indices.tolist()
    for slot, (start, end) in zip(slots, pairwise(cu_seqlens.tolist()), strict=True):
        state = initial_state[slot].to(torch.float32, copy=True)  # its slot is written below
        for first in range(start, end, CHUNK):
            rows = slice(first, min(first + CHUNK, end))
            fronts.append(state.to(k.dtype))
            found, state = _chunk(
                queries[rows], keys[rows], values[rows], decay[rows], writes[rows], state
            )
            out[0, rows] = found.to(out.dtype)
        initial_state[slot] = state.to(initial_state.dtype)
    return out, None, torch.stack(fronts).unsqueeze(0)


def _chunk(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    writes: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Some tokens of a sequence: `[T, H, V]` of outputs, and the state `[H, V, K]` behind them.

    What a token adds is the outer product of its key and its value less what the state takes its
    key to, in which is what the tokens before it added: a triangular system.
    """
    queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))  # [H, T, ...]
    writes = writes.transpose(0, 1).unsqueeze(-1)
    left = decay.cumsum(0).transpose(0, 1)  # [H, T], logarithms
    between = (left.unsqueeze(-1) - left.unsqueeze(-2)).tril().exp().tril()
    of_before = left.exp().unsqueeze(-1)
    known = writes * (values - of_before * (keys @ state.transpose(1, 2)))
    system = (writes * between * (keys @ keys.transpose(1, 2))).tril(-1)
    added = torch.linalg.solve_triangular(system, known, upper=False, unitriangular=True)
    found = of_before * (queries @ state.transpose(1, 2))
    found += (between * (queries @ keys.transpose(1, 2))) @ added
    to_end = (left[:, -1:] - left).exp().unsqueeze(-1)
    behind = left[:, -1].exp()[:, None, None] * state + (added * to_end).transpose(1, 2) @ keys
    return found.transpose(0, 1), behind


def fused_sigmoid_gating_delta_rule_update_cpu(
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
    disable_state_update: bool = False,
    intermediate_states_buffer: torch.Tensor | None = None,
    intermediate_state_indices: torch.Tensor | None = None,
    retrieve_parent_token: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """One more token of each sequence, or guesses that are verified, a chain of T a sequence.

    Args:
        A_log: `[H]`.
        dt_bias: `[H]`.
        q: `[1, B * T, Hk, K]`, the tokens of a sequence one after another.
        k: `[1, B * T, Hk, K]`.
        v: `[1, B * T, H, V]`; H is a multiple of Hk.
        a: `[B * T, H]`.
        b: `[B * T, H]`.
        initial_state_source: `[S, H, V, K]`; those of the batch are written.
        initial_state_indices: `[B]`, slots.
        disable_state_update: whether they are not written; of guesses.
        intermediate_states_buffer: `[R, T, H, V, K]`, written with the state behind each guess.
        intermediate_state_indices: `[B]` or more, rows of it.
        retrieve_parent_token: None, as guesses are chains.
        **kwargs: unused.

    Returns:
        `[1, B * T, H, V]`.
    """
    assert retrieve_parent_token is None
    decay, writes = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    queries, keys = _queries_and_keys(q[0], k[0], v.shape[2])
    slots = initial_state_indices.long()
    num = len(slots)
    steps = v.shape[1] // max(1, num)
    state = initial_state_source[slots].float()
    out = torch.empty_like(v)
    for step in range(steps):
        rows = torch.arange(num) * steps + step
        state = state * decay[0, rows].exp()[..., None, None]
        recalled = (state * keys[rows].unsqueeze(-2)).sum(-1)
        added = writes[0, rows].unsqueeze(-1) * (v[0, rows].float() - recalled)
        state = state + added.unsqueeze(-1) * keys[rows].unsqueeze(-2)
        out[0, rows] = (state * queries[rows].unsqueeze(-2)).sum(-1).to(v.dtype)
        if intermediate_states_buffer is not None:
            assert intermediate_state_indices is not None
            kept = state.to(intermediate_states_buffer.dtype)
            intermediate_states_buffer[intermediate_state_indices[:num].long(), step] = kept
    if not disable_state_update:
        initial_state_source[slots] = state.to(initial_state_source.dtype)
    return out


def _queries_and_keys(
    q: torch.Tensor, k: torch.Tensor, num_heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of unit length, for each head of the values, in float32; queries scaled."""
    queries, keys = (
        x.float() * (x.float().square().sum(-1, keepdim=True) + _NORM_EPS).rsqrt() for x in (q, k)
    )
    num_shared = num_heads // q.shape[1]
    queries = queries * q.shape[-1] ** -0.5
    return queries.repeat_interleave(num_shared, 1), keys.repeat_interleave(num_shared, 1)
