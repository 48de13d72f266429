"""Triton's interpreter without what it does again at each call of a function by a kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Has the interpreter put its functions in place of the language's once a launch.

    Of itself it walks the whole language for that at each call of a function, too, though only what
    it did at the launch is taken back.
    """
    if not isinstance(interpreter._patch_lang, _Patch):
        interpreter._patch_lang = _Patch(interpreter._patch_lang)


class _Patch:
    """Triton's `_patch_lang`, which leaves out what is in place already."""

    def __init__(self, patch: Callable[[Any], Any]) -> None:
        self._patch = patch
        self._patched: set[str] = set()  # names of languages, since the launch began

    def __call__(self, function: Any) -> Any:
        languages = {
            value.__name__
            for value in function.__globals__.values()
            if inspect.ismodule(value) and value in (tl, tl.core)
        }
        if languages <= self._patched:
            return None  # of a call; a launch is the first
        scope = self._patch(function)
        self._patched |= languages
        restore = scope.restore

        def end() -> None:
            self._patched.clear()
            restore()

        scope.restore = end
        return scope
