"""Where on its path a page is said to lie when it is saved, with either of SGLang's tree cores."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.transfers import hashes_from_hex  # noqa: E402
from sglang_ext.tiers.records.record import parse_header  # noqa: E402
from tests.property.worlds.taint_world import PAGE, World  # noqa: E402

TOKENS = [1 + at % 90 for at in range(6 * PAGE)]


def positions(world: World, tokens: list[int]) -> list[int]:
    """What the headers in DRAM say of the pages of some tokens."""
    index = world.store._books.table.index
    rows = index.lookup(hashes_from_hex(world.keys(tokens)), world.space.number)
    assert (rows >= 0).all()
    return [parse_header(world.arena.slots[slot])[0].position for slot in index.host_slot[rows]]


@pytest.mark.parametrize("core", ["python", "rust"])
def test_pages_of_a_node_behind_another_have_their_own_position(
    core: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch, 1, core=core, lossy=False, with_disk=False)
    try:
        world.run([*TOKENS[: 3 * PAGE], 7])
        world.run([*TOKENS, 7])
        assert positions(world, TOKENS) == list(range(0, 6 * PAGE, PAGE))
    finally:
        world.close()
