"""Finds the models that draft, whose KV belongs to the pages.

SGLang builds its radix cache from the target model's worker alone. Its draft worker is asked for a
plan of HiCache's just before, when its pools are there, so that is where it is met.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.seam.hooks.hooking import hook

_ATTRIBUTE = "_hier_kv_draft_runners"


def register_draft_hook() -> None:
    """Notes each draft worker's model runners at the target's."""
    hook(
        "sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_hicache_draft_plan",
        _after_plan,
    )


def _after_plan(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    setattr(self.target_worker.model_runner, _ATTRIBUTE, tuple(self._draft_model_runners()))


def draft_runners(target_runner: Any) -> tuple[Any, ...]:
    """SGLang's model runners of what drafts for a target; none without a draft model."""
    found: tuple[Any, ...] = getattr(target_runner, _ATTRIBUTE, ())
    return found


def algorithm_of(target_runner: Any) -> str | None:
    """The algorithm of speculative decoding that runs; None without.

    SGLang's arguments may have another name of it.
    """
    algorithm = target_runner.spec_algorithm
    return None if algorithm.is_none() else str(algorithm.name)
