"""How the loops of this package are compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compiles a loop for the types of its first call, without the GIL, kept on disk.

    `PlacementPolicy` makes those first calls when the first policy of a process is built, so that
    nothing compiles while serving.
    """
    options: dict[str, Any] = {"nogil": True, "boundscheck": False}
    try:
        result: _Function = numba.njit(cache=True, **options)(function)
    except RuntimeError:
        # Neither the package's folder nor the user's cache can be written: compile in memory.
        result = numba.njit(**options)(function)
    return result
