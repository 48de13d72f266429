"""Rows of the device that cannot leave until they are saved, and SGLang needs their room before."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import ScheduleBatch  # noqa: E402

from sglang_ext.seam.hooks.scheduler import _around_room_for_decode  # noqa: E402
from tests.property.worlds.taint_world import PAGE, World  # noqa: E402

TOKENS = [1 + at % 90 for at in range(6 * PAGE)]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_decode_step_has_the_room_of_what_is_being_saved(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else SGLang takes requests off the device until it has, and aborts the last one."""
    world = World(tmp_path, monkeypatch, 1, core=core, device_pages=8, lossy=False, with_disk=False)
    may_save = threading.Event()
    begin_save, quiesce = world.store.begin_save, world.cache.hier_linker.quiesce

    def begin_save_late(*args: Any) -> Any:
        may_save.wait()
        return begin_save(*args)

    def wait_for_saves() -> bool:
        may_save.set()
        return quiesce()

    monkeypatch.setattr(world.store, "begin_save", begin_save_late)
    monkeypatch.setattr(world.cache.hier_linker, "quiesce", wait_for_saves)
    try:
        req = world.arrive([*TOKENS, 7], exact=False, num_new=0)
        assert world.admit(req)
        while req in world.running:
            world.go_on(req)
        assert world.cache.linker.pending_offloads
        batch: Any = SimpleNamespace(
            tree_cache=world.cache,
            token_to_kv_pool_allocator=world.allocator,
            new_tokens_required_next_decode=lambda indices: world.allocator.size,
            reqs=[],
            spec_algorithm=None,
        )
        assert not ScheduleBatch.check_decode_mem(batch)
        assert _around_room_for_decode(ScheduleBatch.check_decode_mem, batch)
        batch.new_tokens_required_next_decode = lambda indices: world.allocator.size + 1
        assert not _around_room_for_decode(ScheduleBatch.check_decode_mem, batch)
        waits = world.store.stats()["waits_for_saved_pages"]
        assert waits == 1, "there was nothing more to wait for"
    finally:
        may_save.set()
        world.close()
