"""Lets SGLang's LoRA path run where no accelerator is: torch refuses to pin memory there.

A plugin of SGLang's for the servers of the tests that need it. Pinning changes where a tensor's
memory lies, never its values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MAKERS = ("tensor", "empty", "zeros", "ones", "full", "arange", "empty_like", "zeros_like")


def load() -> None:
    """Entry point: whoever asks for pinned memory is given other."""
    for name in _MAKERS:
        setattr(torch, name, _unpinned(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda self, *args: self)  # noqa: B010


def _unpinned(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def without(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **kwargs)

    return without
