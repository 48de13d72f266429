"""How the loops of the tiers are compiled: without the GIL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from sglang_ext.compiling import jit

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False}


def compiled(function: _Function) -> _Function:
    """Compiles a loop for the types of its first call.

    `PlacementPolicy` and `PageParents` make those first calls when the first of a process is built,
    so that nothing compiles while serving.
    """
    return jit(**_OPTIONS)(function)


def compiled_for(signature: Any) -> Callable[[_Function], _Function]:
    """Compiles a loop for the types of `signature`, when its module is first imported."""
    return jit(signature, **_OPTIONS)
