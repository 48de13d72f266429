"""Spares forked servers SGLang's search for names that a hook has to replace.

For every hook SGLang walks all attributes of all modules for those that some module has imported
from where the hooked function is: half a second of a core in each scheduler. Here the zygote looks
once; a server looks at modules that it has imported, or that have got names, since.
"""

from __future__ import annotations

import importlib
import sys
from operator import is_not
from types import FunctionType, ModuleType
from typing import Any

_REGISTRY = "sglang.srt.plugins.hook_registry"
_SEARCH = "_propagate_patch"
_INDEXED = (FunctionType, type)


def index_imported_names() -> None:
    """Puts an index of what is imported now in place of SGLang's search, in this process."""
    registry = importlib.import_module(_REGISTRY)
    search = getattr(registry, _SEARCH, None)
    if search is not None:  # as releases are that were looked at
        setattr(registry, _SEARCH, _Index(search).replace)


class _Index:
    """Where functions and classes are attributes of modules.

    Args:
        search: SGLang's, for hooks on anything else.
    """

    def __init__(self, search: Any) -> None:
        self._search = search
        self._places: dict[int, list[tuple[ModuleType, str]]] = {}  # by identity of the value
        # Each module that was looked at, its names, and how many there were of them.
        self._indexed = [(module, vars(module), len(vars(module))) for module in _modules()]
        self._indexed_ids = {id(module) for module, _, _ in self._indexed}
        # Those of later, and the entries of `sys.modules` among which they were found.
        self._new: list[ModuleType] = []
        self._entries: list[Any] = list(sys.modules.values())
        for module, names, _ in self._indexed:
            for name, value in list(names.items()):
                if issubclass(type(value), _INDEXED):  # some objects warn who asks for a class
                    self._places.setdefault(id(value), []).append((module, name))

    def replace(self, original: Any, wrapped: Any, source_module: Any) -> int:
        """As SGLang's `_propagate_patch`: returns how many attributes it replaced."""
        if not issubclass(type(original), _INDEXED):
            return int(self._search(original, wrapped, source_module))
        places = {(id(module), name): module for module, name in self._places.get(id(original), ())}
        for module in self._changed():
            for name, value in list(vars(module).items()):
                if value is original:
                    places[id(module), name] = module
        num_replaced = 0
        for (_, name), module in places.items():
            if module is not source_module and vars(module).get(name) is original:
                try:
                    setattr(module, name, wrapped)
                except (AttributeError, TypeError):
                    continue
                num_replaced += 1
        return num_replaced

    def _changed(self) -> list[ModuleType]:
        """Modules that were imported, or have got names, since the index was made."""
        entries = list(sys.modules.values())
        if len(entries) != len(self._entries) or any(map(is_not, entries, self._entries)):
            self._entries = entries
            self._new = [module for module in _modules() if id(module) not in self._indexed_ids]
        return [module for module, names, num in self._indexed if len(names) != num] + self._new


def _modules() -> list[ModuleType]:
    entries: list[Any] = list(sys.modules.values())  # some are no modules
    return [module for module in entries if isinstance(module, ModuleType)]
