"""Looks at a model that SGLang has built and whose weights it has not read yet.

Its layers, its configuration and this rank's place are known then, and nobody has waited for the
weights. All of it is looked at again when pools and stores are there: what is expected here may be
less than what comes, and of several pipeline stages nothing is.
"""

from __future__ import annotations

from typing import Any

import torch

from sglang_ext.assembly.codec_setup import DTYPE_NAMES, try_profile
from sglang_ext.assembly.state_setup import check_state_bytes
from sglang_ext.assembly.window_setup import read_layers
from sglang_ext.device.layout import PageLayout
from sglang_ext.device.pools import check_block_sizes
from sglang_ext.errors import HierKVConfigError
from sglang_ext.ranks.rank import RankPlace
from sglang_ext.seam.expected_pages import (
    expected_layout,
    page_tokens,
    pool_dtype,
    state_bytes,
    window_rows,
)
from sglang_ext.seam.start.ranks import place_of_ranks
from sglang_ext.settings.config import HierKVConfig

_LEAST_SLOTS = 2


def check_before_weights(runner: Any, model: Any) -> None:
    """Refuses what would be refused behind the weights.

    Args:
        runner: SGLang's model runner of the target.
        model: its model, without weights.

    Raises:
        HierKVConfigError: one sentence.
    """
    model_config, server_args = runner.model_config, runner.server_args
    if model_config.is_hybrid_swa:
        read_layers(model_config.hf_text_config, model)
    place = place_of_ranks()
    if place.pp_size > 1:
        return
    dtype = pool_dtype(server_args, model_config)
    config = place.config_of(HierKVConfig.from_dict(server_args._hier_kv))
    # Of a quantized checkpoint the weights' configuration may make values a byte each.
    item_bytes = 1 if dtype is None else dtype.itemsize
    page_size = page_tokens(server_args)
    layout = expected_layout(model_config, page_size, place.head_ranks, item_bytes)
    # With latent rows, and where all ranks have all heads, one rank may keep the pages of all.
    is_shared = not any(layout.v_row_bytes) or place.head_ranks == 1
    num_bytes = config.host_bytes * (place.tp_size if is_shared else 1)
    check_slots(num_bytes // layout.slot_bytes, layout.slot_bytes, config.host_size)
    check_state_bytes(state_bytes(model_config), num_bytes)
    if model_config.is_hybrid_swa:
        rows = window_rows(model_config, place.tp_size, item_bytes)
        check_block_sizes(rows, layout)
    elif dtype is not None:  # what is learned is of the model's layers alone
        _check_profile(config, layout, dtype, model_config, place)


def check_slots(num_slots: int, slot_bytes: int, host_size: float) -> None:
    """Refuses DRAM in which hardly a page has room.

    Raises:
        HierKVConfigError: one sentence.
    """
    if num_slots < _LEAST_SLOTS:
        raise HierKVConfigError(
            f"--hier-kv-host-size must hold at least {_LEAST_SLOTS} pages of {slot_bytes} bytes a "
            f"rank, got {host_size:g} GiB; give a larger size."
        )


def _check_profile(
    config: HierKVConfig,
    layout: PageLayout,
    dtype: torch.dtype,
    model_config: Any,
    place: RankPlace,
) -> None:
    name = DTYPE_NAMES.get(dtype)
    if name is not None:
        head_dim = int(model_config.head_dim)
        try_profile(config, layout, name, head_dim, str(model_config.model_path), place)
