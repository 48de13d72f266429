"""Copies of states that SGLang's tree keeps, in plain torch.

Each function has the name and the arguments of the kernel that it stands for.
"""

from __future__ import annotations

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
