"""A zygote's index finds the names that SGLang's own search finds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from runtime_cpu import inprocess
from runtime_cpu.imported_names import index_imported_names

WORLD = ("source", "importer", "renamer", "other")


# Made for a test, or they would be names of this module, too.
MAKERS: dict[str, Callable[[], Any]] = {
    "function": lambda: lambda: "hooked",
    "class": lambda: type("Hooked", (), {}),
    "object": object,
}


def world(patch: pytest.MonkeyPatch, value: Any) -> dict[str, ModuleType]:
    """Modules of which two have imported a value from the first."""
    modules = {name: ModuleType(f"names_{name}") for name in WORLD}
    for name, module in modules.items():
        patch.setitem(sys.modules, f"names_{name}", module)
        module.other = len  # type: ignore[attr-defined]
    for name, attribute in (("source", "it"), ("importer", "it"), ("renamer", "its_other_name")):
        setattr(modules[name], attribute, value)
    return modules


def replaced(patch: pytest.MonkeyPatch, value: Any, prepare: Callable[[Any], None]) -> Any:
    """What is where after a hook's replacement, of modules some of which are changed before it."""
    from sglang.srt.plugins import hook_registry

    modules = world(patch, value)
    prepare(hook_registry)
    late = ModuleType("names_late")  # imported later
    patch.setitem(sys.modules, "names_late", late)
    late.it = value  # type: ignore[attr-defined]
    modules["other"].it = value  # type: ignore[attr-defined]
    modules["importer"].it = None  # type: ignore[attr-defined]
    num = hook_registry._propagate_patch(value, "wrapped", modules["source"])
    kept = {name: dict(vars(module)) for name, module in {**modules, "late": late}.items()}
    names = ("it", "its_other_name")
    return num, {name: [found.get(each) for each in names] for name, found in kept.items()}


@pytest.mark.parametrize("kind", MAKERS)
def test_the_index_replaces_what_the_search_replaces(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = MAKERS[kind]()
    inprocess.prepare()
    from sglang.srt.plugins import hook_registry

    monkeypatch.setattr(hook_registry, "_propagate_patch", hook_registry._propagate_patch)
    searched = replaced(monkeypatch, value, lambda registry: None)
    indexed = replaced(monkeypatch, value, lambda registry: index_imported_names())
    assert indexed == searched
    num, found = indexed
    assert num == 3
    assert found["source"] == [value, None]
    assert found["importer"] == [None, None]
    assert found["renamer"] == [None, "wrapped"]
    assert found["other"] == found["late"] == ["wrapped", None]
