"""Lets SGLang's LoRA path run where no accelerator is: torch refuses to pin memory there.

Put before the CPU runtime's stand-ins on PYTHONPATH by the one test that needs it. Pinning changes
where a tensor's memory lies, never its values.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch

gc.set_threshold(200_000, 50, 50)


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return without


for _name in ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like"):
    setattr(torch, _name, _unpinned(getattr(torch, _name)))
setattr(torch.Tensor, "pin_memory", lambda self, *args: self)  # noqa: B010
