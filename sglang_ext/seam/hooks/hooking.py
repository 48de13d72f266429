"""Registers hooks with SGLang and sees to it that they are in place.

SGLang logs a hook that cannot be applied and goes on; a cache of which half of the hooks are
missing serves wrong answers or dies at the first request. So whoever registers hooks asks
`check_hooks` afterwards, before anything is served.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Literal

from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.symbols import SYMBOLS

_NAMES = {str(symbol) for symbol in SYMBOLS}
_ABSENT = object()
# What stood at each target before it was hooked.
_before: dict[str, Any] = {}


def hook(
    target: str,
    function: Callable[..., Any],
    kind: Literal["before", "after", "around", "replace"] = "after",
) -> None:
    """Registers a hook, which SGLang applies after it has loaded all plugins, or at `apply_hooks`.

    Args:
        target: a name of SGLang's contract, in full.
        function: see SGLang's `HookRegistry.register`; a class with `replace`.
        kind: when it runs.

    Raises:
        KeyError: the contract does not have the name.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if target not in _NAMES:
        raise KeyError(f"{target} is hooked, and is not in seam/contract/symbols.py")
    _before.setdefault(target, _present(target))
    HookRegistry.register(target, function, HookType(kind))


def apply_hooks() -> None:
    """Has SGLang apply what was registered since it loaded its plugins.

    Raises:
        HierKVConfigError: a hook is not in place.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    HookRegistry.apply_hooks()
    check_hooks()


def check_hooks() -> None:
    """Sees that all hooks registered in this process are in place.

    Raises:
        HierKVConfigError: naming those that are not.
    """
    failed = [
        target
        for target, before in _before.items()
        if before is _ABSENT or _present(target) is before
    ]
    if failed:
        raise HierKVConfigError(
            f"--enable-hier-kv needs its hooks on SGLang, but {', '.join(failed)} could not be "
            "hooked; the log above says why; install the SGLang release that this was tested with."
        )


def _present(target: str) -> Any:
    holder, _, name = target.rpartition(".")
    try:
        return inspect.getattr_static(pkgutil.resolve_name(holder), name)
    except (ImportError, AttributeError, ValueError):
        return _ABSENT
