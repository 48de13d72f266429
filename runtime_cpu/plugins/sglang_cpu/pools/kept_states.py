"""Copies of states that SGLang's tree keeps, in plain torch.

Each function has the name and the arguments of the kernel that it stands for.
"""

from __future__ import annotations

from typing import Any

import torch


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
    track_mamba_states_all_layers(
        conv_states.unsqueeze(0),
        ssm_states.unsqueeze(0),
        cache_indices,
        mamba_track_mask,
        mamba_track_indices,
        batch_size,
    )


def track_mamba_states_all_layers(
    conv_states_pool: torch.Tensor,
    ssm_states_pool: torch.Tensor,
    cache_indices: torch.Tensor,
    mamba_track_mask: torch.Tensor,
    mamba_track_indices: torch.Tensor,
    batch_size: int,
    check_freed_slots: bool = False,
) -> None:
    """The same of all layers at once.

    Args:
        conv_states_pool: `[L, S, ...]`.
        ssm_states_pool: `[L, S, ...]`.
        cache_indices: `[N]`, slots of the sequences.
        mamba_track_mask: bool `[N]`, which are kept.
        mamba_track_indices: `[N]`, slots to keep them in.
        batch_size: N.
        check_freed_slots: unused.
    """
    rows = mamba_track_mask[:batch_size].nonzero(as_tuple=True)[0]
    source, target = cache_indices[rows].long(), mamba_track_indices[rows].long()
    for states in (conv_states_pool, ssm_states_pool):
        states[:, target] = states[:, source]


def scatter_mamba_states_after_mtp_verify(
    mamba_caches: Any,
    state_indices_tensor: torch.Tensor,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    src_indices_raw: torch.Tensor | None = None,
) -> None:
    """Copies the states behind the last guesses that were right to the sequences' slots.

    Args:
        mamba_caches: SGLang's ``MambaPool.SpeculativeState``: states `[L, S, ...]`, and behind
            each guess `[L, R, T, ...]`.
        state_indices_tensor: `[N]`, slots of the sequences.
        last_correct_step_indices: `[N]`, the last guess of each that was right.
        mamba_track_indices: `[N]`, slots to keep states in, less than 0 of what has ended; None:
            none is kept.
        mamba_steps_to_track: `[N]`, the guess of each whose state is kept; less than 0: none.
        src_indices_raw: `[N]`, rows of the states behind guesses; None: the sequences' numbers.
    """
    caches = mamba_caches
    pairs = [(caches.temporal, caches.intermediate_ssm)]
    pairs += list(zip(caches.conv, caches.intermediate_conv_window, strict=True))
    for slots, steps in (
        (state_indices_tensor, last_correct_step_indices),
        (mamba_track_indices, mamba_steps_to_track),
    ):
        if slots is None:
            continue
        assert steps is not None
        rows = ((steps >= 0) & (slots >= 0)).nonzero(as_tuple=True)[0]
        sources = rows if src_indices_raw is None else src_indices_raw[rows].long()
        for states, behind_guesses in pairs:
            found = behind_guesses[:, sources, steps[rows].long()]
            states[:, slots[rows].long()] = found.to(states.dtype)
