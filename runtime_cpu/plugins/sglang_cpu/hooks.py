"""Applies SGLang's hooks without a search that every process of every server would pay for.

For each hook SGLang looks at every name of every loaded module for places where the hooked function
was imported from its module. That takes 30 ms of a core and, in a forked process, a copy of all the
memory that it touches: 4 of the 6 s of a start. A method is imported by nobody: its class is.
"""

from __future__ import annotations


def load() -> None:
    """Leaves the search out for methods."""
    from sglang.srt.plugins import hook_registry

    search = hook_registry._propagate_patch

    def search_for_functions(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else int(search(original, wrapped, source))

    hook_registry._propagate_patch = search_for_functions
