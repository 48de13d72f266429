"""How the loops of the tiers are compiled: without the GIL, and kept on disk.

Where neither the package's folder nor the user's cache can be written, as in a read-only container,
every process compiles for itself, some seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "boundscheck": False}


def compiled(function: _Function) -> _Function:
    """Compiles a loop for the types of its first call.

    `PlacementPolicy` and `Lineage` make those first calls when the first of a process is built, so
    that nothing compiles while serving.
    """
    return _compile((), function)


def compiled_for(signature: Any) -> Callable[[_Function], _Function]:
    """Compiles a loop for the types of `signature`, when its module is first imported."""
    return lambda function: _compile((signature,), function)


def _compile(signature: tuple[Any, ...], function: _Function) -> _Function:
    try:
        result: _Function = numba.njit(*signature, cache=True, **_OPTIONS)(function)
    except RuntimeError:
        result = numba.njit(*signature, **_OPTIONS)(function)
    return result
