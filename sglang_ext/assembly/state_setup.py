"""What is built for a model whose layers have a state a sequence."""

from __future__ import annotations

from typing import Any

from sglang_ext.device.layout import PageLayout
from sglang_ext.device.states.snapshots import Snapshots, StatePool
from sglang_ext.errors import HierKVConfigError

_LEAST_STATES = 4


def snapshots_of(ctx: Any, layout: PageLayout) -> Snapshots | None:
    """How the states of a model are stored; None of a model without.

    Args:
        ctx: SGLang's `TreeCacheBuildContext`.
        layout: of the model's pages.

    Raises:
        HierKVConfigError: SGLang keeps more of a sequence than is copied; one sentence.
    """
    if not ctx.is_hybrid_ssm:
        return None
    requests = ctx.params.req_to_token_pool
    pool = requests.mamba_pool
    for expected, found in (
        (
            "states in a MambaPool",
            type(pool).__name__ if type(pool).__name__ != "MambaPool" else "",
        ),
        ("states as they are computed", "ones in int8" if requests.mamba_ckpt_pool else ""),
        ("no replayed states", "a ring of them" if _has_ring(pool) else ""),
        (
            "no more than convolution and recurrent states",
            "others beside them" if pool._slot_siblings else "",
        ),
    ):
        if found:
            raise HierKVConfigError(
                f"--enable-hier-kv needs {expected}, got {found}; "
                "start this model without --enable-hier-kv."
            )
    cache = pool.mamba_cache
    tensors = tuple(t for t in (*cache.conv, cache.temporal) if t.numel())
    states = StatePool(tensors, tuple(requests.mamba_map))
    return Snapshots(states, layout, ctx.params.pp_size)


def _has_ring(pool: Any) -> bool:
    """Whether a sequence's state lags behind its tokens, which lie in a ring."""
    return pool.replayssm_write_pos is not None or pool.enable_linear_replayssm_spec


def check_room(snapshots: Snapshots, num_slots: int) -> None:
    """Refuses DRAM in which two states would be all that there is.

    Raises:
        HierKVConfigError: one sentence.
    """
    least = _LEAST_STATES * snapshots.num_parts
    if num_slots < least:
        raise HierKVConfigError(
            f"--hier-kv-host-size must hold at least {least} pages of "
            f"{snapshots.layout.slot_bytes} bytes, four states of this model, got {num_slots}; "
            "give a larger size."
        )


def check_state_bytes(state_bytes: int, host_bytes: int) -> None:
    """The same before there are pools, of what four states take at least.

    Args:
        state_bytes: of one, on this rank; 0 of a model without.
        host_bytes: of this rank's DRAM.

    Raises:
        HierKVConfigError: one sentence.
    """
    if host_bytes < _LEAST_STATES * state_bytes:
        raise HierKVConfigError(
            f"--hier-kv-host-size must hold at least {_LEAST_STATES * state_bytes} bytes a rank, "
            f"four states of this model, got {host_bytes}; give a larger size."
        )


def awaited_layers(
    snapshots: Snapshots, kv_pool: Any, num_drafts: int = 0
) -> list[tuple[int, ...]]:
    """The numbers by which the forward waits for the layers of pages, and for those of states.

    They are counted from the first layer of this pipeline stage.

    Args:
        snapshots: of the model's states.
        kv_pool: of its pages.
        num_drafts: layers of draft models, which are a page's last and have the last numbers.
    """
    first = int(kv_pool.start_layer)
    full, states = (
        tuple(int(layer) - first for layer in layers)
        for layers in (kv_pool.full_attention_layer_id_mapping, snapshots.pool.layers)
    )
    num_layers = 1 + max(*full, *states)
    return [(*full, *range(num_layers, num_layers + num_drafts)), states]


def follow_loads(ctx: Any, counter: Any) -> None:
    """Lets the forward wait at each layer with a state for that layer's."""
    ctx.params.req_to_token_pool.register_layer_transfer_counter(counter)
