"""Rotary embedding in place, for models that take nothing else (Llama 4).

SGLang's kernels rotate q and k where they lie. What stands for them on a CPU without AMX returns
new tensors, and such a model would go on with those that are not rotated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATTENTION = "Llama4Attention"


def rotate_in_place(model: torch.nn.Module) -> None:
    """Has the rotary modules of a model that needs it write q and k, once each."""
    rotaries: dict[int, Any] = {
        id(module.rotary_emb): module.rotary_emb
        for module in model.modules()
        if type(module).__name__ == _ATTENTION and module.rotary_emb is not None
    }
    for rotary in rotaries.values():
        rotary.forward = _in_place(rotary.forward)


def _in_place(rotate: Callable[..., Any]) -> Callable[..., Any]:
    def rotate_both(
        positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        rotated = rotate(positions, query, key, *args, **kwargs)
        for target, source in zip((query, key), rotated, strict=True):
            target.copy_(source)
        return query, key

    return rotate_both
