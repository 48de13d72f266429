"""After the tiers were cleared: what the device holds counts as not stored, and is saved again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore  # noqa: E402

from sglang_ext.seam.radix_tree import RadixTree  # noqa: E402
from sglang_ext.seam.wrapper import HierKVLinkerWrapper  # noqa: E402


class Core:
    """As much of SGLang's tree as ends a save."""

    finish_external_linker_offload = UnifiedTreeCore.finish_external_linker_offload
    needs_save = staticmethod(UnifiedTreeCore._needs_external_linker_offload)

    def __init__(self, stored: list[bool], saving: list[int]) -> None:
        self._node_arena = {
            number: SimpleNamespace(
                external_cache_stored=is_stored,
                write_through_pending_id=number if number in saving else None,
            )
            for number, is_stored in enumerate(stored)
        }

    def node_by_id(self, number: int) -> Any:
        return self._node_arena[number]

    def unsaved(self) -> list[int]:
        return [number for number, node in self._node_arena.items() if self.needs_save(node)]


def make(stored: list[bool], saving: list[int]) -> tuple[Core, HierKVLinkerWrapper]:
    core = Core(stored, saving)
    wrapper = object.__new__(HierKVLinkerWrapper)
    cache: Any = SimpleNamespace(tree_core=core, page_size=1, dec_lock_ref=lambda *_: None)
    wrapper.cache, wrapper._tree = cache, RadixTree(cache, "python")
    wrapper.pending_offloads = [
        SimpleNamespace(publish_node_ids=[number], lock_node_id=number, lock_params=None)
        for number in saving
    ]
    return core, wrapper


def test_what_was_saved_before_a_clear_is_saved_again() -> None:
    core, wrapper = make([True, True, False], [])
    assert core.unsaved() == [2]
    wrapper.forget_saves()
    assert core.unsaved() == [0, 1, 2]


def test_a_save_that_ended_before_a_clear_and_is_taken_after_it_stored_nothing() -> None:
    core, wrapper = make([False] * 3, [0, 1])
    wrapper.forget_saves()
    wrapper.pending_offloads.append(
        SimpleNamespace(publish_node_ids=[2], lock_node_id=2, lock_params=None)
    )
    core.node_by_id(2).write_through_pending_id = 2
    wrapper.commit_completed_offloads([True])
    wrapper.commit_completed_offloads([True, True])
    assert core.unsaved() == [0, 1]  # the third began after the clear
