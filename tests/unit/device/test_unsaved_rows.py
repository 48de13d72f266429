"""Rows of the device that cannot leave until they are saved, and SGLang needs their room before."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.seam.hooks.scheduler import _before_retraction  # noqa: E402
from tests.property.worlds.taint_world import PAGE, World  # noqa: E402

TOKENS = [1 + at % 90 for at in range(6 * PAGE)]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_retraction_frees_what_is_being_saved(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang takes requests off the device until a decode step has room, and aborts the last one.

    By its own question whether it has, which it asks again behind each of them.
    """
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
        step: Any = {"num_tokens": world.allocator.size, "tree_cache": world.cache}
        assert not world.allocator.check_decode_capacity(**step)
        _before_retraction(SimpleNamespace(tree_cache=world.cache))
        assert world.allocator.check_decode_capacity(**step)
        _before_retraction(SimpleNamespace(tree_cache=world.cache))
        waits = world.store.stats()["waits_for_saved_pages"]
        assert waits == 1, "there was nothing more to wait for"
    finally:
        may_save.set()
        world.close()
