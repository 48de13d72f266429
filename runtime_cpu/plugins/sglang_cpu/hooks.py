"""Applies SGLang's hooks without a search that every process of every server would pay for.

For each hook SGLang looks at every name of every loaded module for places where the hooked function
was imported from its module. That takes 30 ms of a core and, in a forked process, a copy of all the
memory that it touches: 4 of the 6 s of a start. A method is imported by nobody: its class is.
"""

from __future__ import annotations

import sys


def load() -> None:
    """Leaves the search out for methods."""
    from sglang.srt.plugins import hook_registry

    _read_again()

    search = hook_registry._propagate_patch

    def search_for_functions(original: object, wrapped: object, source: object) -> int:
        return 0 if isinstance(source, type) else int(search(original, wrapped, source))

    hook_registry._propagate_patch = search_for_functions


def _read_again() -> None:
    """What SGLang's scheduler reads at its import, which a forked server has from its zygote."""
    scheduler = sys.modules.get("sglang.srt.managers.scheduler")
    if scheduler is None:
        return
    from sglang.srt.environ import envs

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()  # type: ignore[attr-defined]
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()  # type: ignore[attr-defined]
