"""Mamba2's kernels in plain torch against a token-by-token recurrence."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu, softplus

from runtime_cpu.plugins.sglang_cpu import state_space
from runtime_cpu.plugins.sglang_cpu.pools import kept_states
from tests.unit.runtime_cpu.stub_modules import load_stub

convolution = load_stub("convolution")
H, P, G, N, W = 4, 8, 2, 16, 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def recurrence(
    inputs: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], state: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs `[T, H, P]`, and the state in front of each token and behind the last."""
    states, found = [state.clone()], []
    for x, dt, keys, queries in zip(*(inputs[k] for k in ("x", "dt", "B", "C")), strict=True):
        state = states[-1].clone()
        out = torch.empty(H, P)
        for h in range(H):
            step_size = softplus(dt[h] + weights["dt_bias"][h])
            group = h // (H // G)
            state[h] = state[h] * torch.exp(step_size * weights["A"][h])
            state[h] += step_size * torch.outer(x[h], keys[group])
            out[h] = state[h] @ queries[group] + weights["D"][h] * x[h]
        states.append(state)
        found.append(out)
    return torch.stack(found), states


def made(num_tokens: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    inputs = {
        "x": torch.randn(num_tokens, H, P),
        "dt": torch.randn(num_tokens, H),
        "B": torch.randn(num_tokens, G, N),
        "C": torch.randn(num_tokens, G, N),
    }
    weights = {"A": -torch.rand(H) - 0.1, "D": torch.randn(H), "dt_bias": torch.randn(H)}
    return inputs, weights


@pytest.mark.parametrize("lengths", [[5], [16, 3, 21], [7, 40]])
@pytest.mark.parametrize("has_initial", [False, True])
def test_a_scan_is_the_recurrence_and_has_its_states(lengths: list[int], has_initial: bool) -> None:
    chunk = 8
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    num_tokens = int(bounds[-1])
    inputs, weights = made(num_tokens)
    initial = torch.randn(len(lengths), H, P, N) if has_initial else None
    tracked = [int(start) + 3 for start in bounds[:-1]]
    out = torch.empty(1, num_tokens, H, P)
    chunks, ends, wanted = state_space.mamba_chunk_scan_combined(
        inputs["x"].unsqueeze(0),
        inputs["dt"].unsqueeze(0),
        weights["A"],
        inputs["B"].unsqueeze(0),
        inputs["C"].unsqueeze(0),
        chunk,
        D=weights["D"],
        dt_bias=weights["dt_bias"],
        cu_seqlens=bounds,
        initial_states=initial,
        out=out,
        state_dtype=torch.float32,
        track_seq_idx=torch.arange(len(lengths)),
        track_end_locs=torch.tensor(tracked),
    )
    assert wanted is not None
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        begin = torch.zeros(H, P, N) if initial is None else initial[i]
        rows = {name: values[start:end] for name, values in inputs.items()}
        found, states = recurrence(rows, weights, begin)
        torch.testing.assert_close(out[0, start:end], found, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(ends[i], states[-1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(wanted[0, i], states[3], atol=1e-4, rtol=1e-4)
        for c in range(-(-start // chunk), -(-end // chunk)):
            torch.testing.assert_close(
                chunks[0, c], states[c * chunk - start], atol=1e-4, rtol=1e-4
            )


def update(
    pool: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    weights: dict[str, torch.Tensor],
    slots: torch.Tensor,
    out: torch.Tensor,
    **options: Any,
) -> None:
    """The runtime's update, with weights and steps for each value of a head, as SGLang has them."""
    state_space.selective_state_update(
        pool,
        inputs["x"],
        inputs["dt"].unsqueeze(-1).expand_as(inputs["x"]),
        weights["A"][:, None, None].expand(-1, P, N),
        inputs["B"],
        inputs["C"],
        weights["D"][:, None].expand(-1, P),
        dt_bias=weights["dt_bias"][:, None].expand(-1, P),
        state_batch_indices=slots,
        out=out,
        **options,
    )


def test_an_update_is_the_recurrence() -> None:
    inputs, weights = made(3)
    pool, slots = torch.randn(6, H, P, N), torch.tensor([4, 1, 5])
    before, out = pool.clone(), torch.empty(3, H, P)
    update(pool, inputs, weights, slots, out)
    for i, slot in enumerate(slots.tolist()):
        row = {name: values[i : i + 1] for name, values in inputs.items()}
        found, states = recurrence(row, weights, before[slot])
        torch.testing.assert_close(out[i], found[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(pool[slot], states[-1], atol=1e-4, rtol=1e-4)
    others = [0, 2, 3]
    assert torch.equal(pool[others], before[others])


def test_verified_guesses_are_the_recurrence_and_have_its_states() -> None:
    """Each state behind a guess is kept apart; that of the sequence is left as it is."""
    num_guesses, slots, rows = 3, torch.tensor([4, 1]), torch.tensor([1, 0])
    chains = [made(num_guesses)[0] for _ in slots]
    inputs = {name: torch.stack([chain[name] for chain in chains]) for name in chains[0]}
    _, weights = made(1)
    pool, out = torch.randn(6, H, P, N), torch.empty(2, num_guesses, H, P)
    before, kept = pool.clone(), torch.empty(2, num_guesses, H, P, N)
    update(
        *(pool, inputs, weights, slots, out),
        disable_state_update=True,
        intermediate_states_buffer=kept,
        intermediate_state_indices=rows,
    )
    assert torch.equal(pool, before)
    for i, slot in enumerate(slots.tolist()):
        found, states = recurrence(chains[i], weights, before[slot])
        torch.testing.assert_close(out[i], found, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(kept[rows[i]], torch.stack(states[1:]), atol=1e-4, rtol=1e-4)


def convolved(seen: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """`[D, T]` behind W - 1 inputs; silu."""
    num = seen.shape[1] - W + 1
    rows = [(seen[:, t : t + W] * weight).sum(1) + bias for t in range(num)]
    return silu(torch.stack(rows, dim=1))


def test_a_convolution_goes_on_where_the_last_one_ended() -> None:
    dim, lengths = 6, [9, 2, 5]
    x, weight, bias = torch.randn(dim, sum(lengths)), torch.randn(dim, W), torch.randn(dim)
    pool, slots = torch.randn(8, dim, W - 1), torch.tensor([2, 7, 3])
    before, has = pool.clone(), torch.tensor([True, True, False])
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    out = convolution.causal_conv1d_fn_cpu(x, weight, bias, pool, bounds, None, slots, has)
    more = torch.randn(3, dim)
    last = convolution.causal_conv1d_update_cpu(more, pool, weight, bias, "silu", slots)
    for i, (start, end) in enumerate(pairwise(bounds.tolist())):
        head = before[slots[i]] if has[i] else torch.zeros(dim, W - 1)
        seen = torch.cat([head, x[:, start:end], more[i].unsqueeze(1)], dim=1)
        found = convolved(seen, weight, bias)
        torch.testing.assert_close(out[:, start:end], found[:, :-1])
        torch.testing.assert_close(last[i], found[:, -1])
        torch.testing.assert_close(pool[slots[i]], seen[:, -(W - 1) :])


def test_states_are_kept_where_a_mask_says_so() -> None:
    conv, ssm = torch.randn(6, 3, 2), torch.randn(6, 2, 2)
    before = conv.clone(), ssm.clone()
    kept_states.track_mamba_states_if_needed(
        conv, ssm, torch.tensor([1, 2]), torch.tensor([False, True]), torch.tensor([4, 5]), 2
    )
    for found, was in zip((conv, ssm), before, strict=True):
        assert torch.equal(found[5], was[2])
        assert torch.equal(found[:5], was[:5])


def test_a_convolution_of_guesses_leaves_the_inputs_behind_each() -> None:
    num, dim, steps = 2, 3, 4
    weight, bias = torch.randn(dim, W), torch.randn(dim)
    # As SGLang has it, which takes the result to lie in memory alike.
    x, pool = torch.randn(num, steps, dim).transpose(1, 2), torch.randn(5, dim, W - 1)
    before, slots, rows = pool.clone(), torch.tensor([3, 1]), torch.tensor([1, 0])
    # As SGLang has it: windows that overlap in memory.
    inputs = torch.zeros(3, dim, steps + W - 2)
    stride = inputs.stride()
    windows = inputs.as_strided((3, steps, dim, W - 1), (stride[0], 1, stride[1], 1))
    out = convolution.causal_conv1d_update_cpu(
        x,
        pool,
        weight,
        bias,
        "silu",
        conv_state_indices=slots,
        intermediate_conv_window=windows,
        intermediate_state_indices=rows,
        retrieve_next_token=None,
    )
    assert torch.equal(pool, before)
    assert out.stride() == x.stride()
    # SGLang views them as rows of tokens, which of several sequences are those only if they lie so.
    assert torch.equal(out.transpose(1, 2).view(num * steps, dim).view(num, steps, dim).mT, out)
    for step in range(steps):  # as one token after another
        found = convolution.causal_conv1d_update_cpu(
            x[..., step], pool, weight, bias, "silu", conv_state_indices=slots
        )
        torch.testing.assert_close(out[..., step], found, atol=1e-6, rtol=1e-5)
        assert torch.equal(windows[rows, step], pool[slots])


def test_what_was_right_goes_to_its_slot_and_what_is_kept_to_another() -> None:
    layers, slots, rows, steps = 2, 8, 3, 4
    temporal, conv = torch.randn(layers, slots, 5), torch.randn(layers, slots, 3, 2)
    caches = SimpleNamespace(
        temporal=temporal.clone(),
        conv=[conv.clone()],
        intermediate_ssm=torch.randn(layers, rows, steps, 5),
        intermediate_conv_window=[torch.randn(layers, rows, steps, 3, 2)],
    )
    own, right = torch.tensor([6, 2]), torch.tensor([3, 0])
    kept, at = torch.tensor([5, 4]), torch.tensor([1, -1])
    kept_states.scatter_mamba_states_after_mtp_verify(caches, own, right, kept, at)
    for found, before, behind in (
        (caches.temporal, temporal, caches.intermediate_ssm),
        (caches.conv[0], conv, caches.intermediate_conv_window[0]),
    ):
        wanted = before.clone()
        wanted[:, 6], wanted[:, 2] = behind[:, 0, 3], behind[:, 1, 0]
        wanted[:, 5] = behind[:, 0, 1]  # and nothing of the other
        assert torch.equal(found, wanted)
    kept_states.scatter_mamba_states_after_mtp_verify(
        caches, own, right, None, None, src_indices_raw=torch.tensor([2, 1])
    )
    assert torch.equal(caches.temporal[:, 6], caches.intermediate_ssm[:, 2, 3])
