"""The door between the device and the tiers: what passes, and what becomes of what does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import KeySpace, LivePages, LoadTicket, PageStore, PageStoreConfig
from tests.tiers.tier_pages import NAMESPACE, OTHER_NAMESPACE, SLOT_BYTES, key, make_slot

NONE = np.empty((0, 32), np.uint8)
HASHES = np.frombuffer(b"".join(map(key, range(3))), np.uint8).reshape(-1, 32)


@pytest.fixture
def store(tmp_path: Path) -> PageStore:
    return PageStore(HostArena(8, SLOT_BYTES), PageIndex(64), None, PageStoreConfig())


def save(store: PageStore, space: KeySpace) -> int:
    """Saves three pages; returns how many are in DRAM then."""
    ticket = store.begin_save(space, HASHES, NONE)
    for page, slot in zip(ticket.pages.tolist(), ticket.slots.tolist(), strict=True):
        store.arena.slots[slot] = make_slot(page, space.digest)
    store.finish_save(ticket, ok=True)
    return store.ready_prefix(space, HASHES)


def pinned(store: PageStore, space: KeySpace) -> LoadTicket:
    ticket = store.pin_ready(space, HASHES)
    assert ticket is not None
    return ticket


def test_a_ticket_of_now_passes_and_keeps_its_pins(store: PageStore) -> None:
    space = store.space(NAMESPACE)
    assert save(store, space) == 3
    ticket = pinned(store, space)
    pages = store.gate.load(ticket, space)
    assert pages is not None
    assert pages.ticket is ticket
    assert store.gate.is_live(pages)
    assert store.arena._pins.sum() == 3
    store.release(ticket.slots)


def test_a_ticket_of_former_weights_is_a_miss_and_a_count(store: PageStore) -> None:
    """Even where the same weights came back: what lay between is not known."""
    space = store.space(NAMESPACE)
    save(store, space)
    before, kept = pinned(store, space), store.gate.load(pinned(store, space), space)
    assert kept is not None
    store.end_epoch()
    again = store.space(NAMESPACE)
    assert again.number == space.number
    assert store.gate.load(before, space) is None
    assert store.gate.load(pinned(store, space), again) is None
    assert not store.gate.is_live(kept)
    store.release(kept.ticket.slots)
    assert not store.arena._pins.any()
    assert store.stats()["stale_load_pages"] == 9
    # The pages themselves are as good as before.
    passed = store.gate.load(pinned(store, again), again)
    assert passed is not None
    store.release(passed.ticket.slots)


def test_a_ticket_of_another_key_space_does_not_pass(store: PageStore) -> None:
    space, other = store.space(NAMESPACE), store.space(OTHER_NAMESPACE)
    save(store, space)
    assert store.gate.load(pinned(store, space), other) is None
    assert store.gate.load(pinned(store, space), store.space(NAMESPACE, b"a" * 32)) is None
    assert not store.arena._pins.any()


def test_pages_that_may_be_loaded_are_not_made_by_hand(store: PageStore) -> None:
    space = store.space(NAMESPACE)
    save(store, space)
    ticket = pinned(store, space)
    with pytest.raises(TypeError, match="made by Gate"):
        LivePages(ticket, object())
    store.release(ticket.slots)


@pytest.mark.parametrize("when", ["before it began", "while it copied"])
def test_a_save_that_weights_overtook_stores_nothing(store: PageStore, when: str) -> None:
    space = store.space(NAMESPACE)
    if when == "before it began":
        store.end_epoch()
        ticket = store.begin_save(space, HASHES, NONE)
        assert (len(ticket.rows), ticket.dropped) == (0, 3)
    else:
        ticket = store.begin_save(space, HASHES, NONE)
        store.end_epoch()
    store.finish_save(ticket, ok=True)
    now = store.space(NAMESPACE)
    assert store.ready_prefix(now, HASHES) == 0
    assert store.stats()["stale_save_pages"] == 3
    assert store.wait_idle(300.0)
    assert save(store, now) == 3
    store.check()
