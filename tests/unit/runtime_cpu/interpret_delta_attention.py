"""KDA in plain torch against SGLang's own recurrence in Triton, under the interpreter.

A process of its own, run by test_cpu_delta_attention.py: `TRITON_INTERPRET` counts when the
kernels are imported. SGLang's kernels of whole chunks need block pointers, which the Triton that
is here no longer has; its recurrence computes the same, token by token.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

from itertools import pairwise
from typing import Any

import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.kernels.ops.attention.linear import fused_sigmoid_gating_recurrent as one  # noqa: E402

from runtime_cpu.plugins.sglang_cpu import delta_attention  # noqa: E402

H, K, SLOTS = 2, 32, 6
LENGTHS, IN_USE = [70, 5, 130], [4, 1, 3]


def made(num_tokens: int) -> dict[str, Any]:
    """Tokens of some sequences, and a layer's weights; some of its gates close at once."""
    return {
        "q": torch.randn(1, num_tokens, H, K),
        "k": torch.randn(1, num_tokens, H, K),
        "v": torch.randn(1, num_tokens, H, K),
        "a": torch.randn(num_tokens, H * K),
        "b": torch.randn(1, num_tokens, H),
        "A_log": torch.tensor([-5.0, 2.0]).view(1, 1, H, 1),
        "dt_bias": torch.randn(H * K),
    }


def by_recurrence(
    given: dict[str, Any],
    bounds: list[int],
    slots: list[int],
    states: torch.Tensor,
    lower_bound: float | None,
) -> torch.Tensor:
    """Outputs of SGLang's kernel; the states in their slots are written."""
    found: torch.Tensor = one.fused_sigmoid_gating_delta_rule_update(
        **given,
        initial_state_source=states,
        initial_state_indices=torch.tensor(slots, dtype=torch.int32),
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        softplus_beta=1.0,
        softplus_threshold=20.0,
        is_kda=True,
        lower_bound=lower_bound,
    )
    return found


def rows_of(given: dict[str, Any], start: int, end: int) -> dict[str, Any]:
    """Some tokens of a sequence."""
    rows = {name: given[name][:, start:end] for name in ("q", "k", "v", "b")}
    return {**given, **rows, "a": given["a"][start:end]}


def check_chunks(lower_bound: float | None) -> None:
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).tolist()
    given, pool = made(bounds[-1]), torch.randn(SLOTS, H, K, K)
    states, tracked = pool.clone(), torch.zeros(len(LENGTHS), H, K, K)
    out, fronts = delta_attention.chunk_kda(
        **{name: given[name] for name in ("q", "k", "v", "A_log", "dt_bias")},
        g=given["a"].view(1, -1, H, K),
        beta=given["b"],
        initial_state=states,
        initial_state_indices=torch.tensor(IN_USE, dtype=torch.int32),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=torch.tensor(bounds),
        beta_is_raw=True,
        output_intermediate_states=True,
        track_state=tracked,
        track_chunk_idx=torch.tensor([1, -1, 2], dtype=torch.int32),
        lower_bound=lower_bound,
    )
    wanted = pool.clone()
    close(out, by_recurrence(given, bounds, IN_USE, wanted, lower_bound))
    close(states, wanted)
    at = 0
    for i, (slot, (start, end)) in enumerate(zip(IN_USE, pairwise(bounds), strict=True)):
        for chunk, first in enumerate(range(start, end, delta_attention.CHUNK)):
            front = pool.clone()
            if first > start:
                rows = rows_of(given, start, first)
                by_recurrence(rows, [0, first - start], [slot], front, lower_bound)
            close(fronts[0, at], front[slot])
            if (i, chunk) in ((0, 1), (2, 2)):
                close(tracked[i], front[slot])
            at += 1
    assert at == fronts.shape[1]
    assert not tracked[1].any()


def check_steps(lower_bound: float | None) -> None:
    given, pool = made(len(IN_USE)), torch.randn(SLOTS, H, K, K)
    ours, wanted = pool.clone(), pool.clone()
    found = delta_attention.fused_sigmoid_gating_delta_rule_update(
        **given,
        initial_state_source=ours,
        initial_state_indices=torch.tensor(IN_USE, dtype=torch.int32),
        is_kda=True,
        lower_bound=lower_bound,
    )
    close(found, by_recurrence(given, [0, 1, 2, 3], IN_USE, wanted, lower_bound))
    close(ours, wanted)


def close(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-4)


if __name__ == "__main__":
    torch.manual_seed(0)
    for bound in (None, -5.0):
        check_steps(bound)
        check_chunks(bound)
    print("all checks passed")
