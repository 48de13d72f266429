"""What is built for a server whose draft model has KV of its own (speculative decoding)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from sglang_ext.device.load_counter import LoadCounter
from sglang_ext.device.pools import HybridPools
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.windows.block_groups import BlockGroups
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.lossless import any_codec

_KEPT = "a draft model's"


def kept_ropes(num_layers: int) -> list[LayerRope]:
    """How K of a draft's layers is stored where the model's K may be without its rotation.

    As the draft has it: what it guesses does not hang on how the model's is coded.
    """
    return [LayerRope(None, movable=False, is_kept=True, reason=_KEPT) for _ in range(num_layers)]


def check_planes(pools: HybridPools, config: HierKVConfig) -> None:
    """Refuses codecs where window layers are stored as blocks, which no codec takes for planes.

    A draft with rows of another width than its model's makes blocks of window layers that have the
    full layers' shape, so the model's kind does not say it.

    Raises:
        HierKVConfigError: one sentence.
    """
    codec = any_codec(config)
    if isinstance(pools.groups, BlockGroups) and codec:
        raise HierKVConfigError(
            "--enable-hier-kv needs --hier-kv-codec none where window layers have K and V of "
            f"another shape than the full layers or a draft model, got {codec}; leave it out or "
            "choose another draft model."
        )


def live_models(target: Any, draft_runners: Sequence[Any]) -> Any:
    """All models whose weights decide the bytes of a page, as one module."""
    if not draft_runners:
        return target
    models = [target, *(runner.model for runner in draft_runners)]
    return torch.nn.ModuleList(models)


def draft_facts(
    algorithm: str | None, draft_runners: Sequence[Any], *, keys_are_pairs: bool
) -> dict[str, Any]:
    """What a namespace says of drafts: a page with draft KV is none without, and the reverse."""
    configs = [runner.model_config.hf_config.to_dict() for runner in draft_runners]
    for config in configs:  # where the files lie says nothing of the KV
        config.pop("_name_or_path", None)
        config.pop("transformers_version", None)
    return {"algorithm": algorithm, "models": configs, "pairs": keys_are_pairs}


def count_loads_of(draft_runners: Sequence[Any], counter: LoadCounter) -> None:
    """Has each forward of a draft model wait for what is loaded of it."""
    for runner in draft_runners:
        runner.token_to_kv_pool.register_layer_transfer_counter(_WholeLoads(counter))


class _WholeLoads:
    """A draft model's view of the counter: its layers are the last of a page.

    SGLang's pools and graphs read what is public here.

    Args:
        counter: of all layers.
    """

    def __init__(self, counter: LoadCounter) -> None:
        self._counter = counter

    @property
    def num_layers(self) -> int:
        """Of the target and its drafts."""
        return self._counter.num_layers

    @property
    def consumer_index(self) -> int:
        """The batch of loads that the current forward reads, -1 for none."""
        return self._counter.consumer_index

    def wait_until(self, threshold: int) -> None:
        """Waits for all layers; a draft model's own layer says nothing of the target's."""
        self._counter.wait_until(self._counter.num_layers - 1)
