"""Hints in the page store: over DRAM and disk, and with pages that are elsewhere by now."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.policy.hints.lives import _CONVERSATIONS_A_CALL
from tests.unit.store.store_rig import Make, Rig, check_content, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _serve(
    rig: Rig, chat: np.ndarray, returns_in_s: float | None = None, *, ends: bool = False
) -> None:
    lookahead = rig.store.lookahead
    assert lookahead is not None
    rig.save(chat)
    lookahead.used(rig.space, chat, None)
    if ends or returns_in_s is not None:
        lookahead.hint(rig.space, chat, owner=0, returns_in_s=returns_in_s)


def test_in_dram_what_comes_back_stays_and_what_is_over_goes(make: Make) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    soon, silent, over = (pages(name, 10) for name in ("soon", "silent", "over"))
    _serve(rig, soon, 3600.0)
    _serve(rig, silent)
    _serve(rig, over, ends=True)
    assert rig.count("hinted_return_pages") == rig.count("hinted_ends_pages") == 10
    rig.save(pages("new", 10))
    assert [rig.ready(chat) for chat in (soon, silent, over)] == [10, 10, 0]
    rig.save(pages("newer", 6))
    assert [rig.ready(chat) for chat in (soon, silent)] == [10, 4]
    check_content(rig, soon)
    rig.settle()


def test_whose_time_is_over_goes_first_and_is_counted(make: Make) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    lookahead, now_s = rig.store.lookahead, [100.0]
    assert lookahead is not None
    rig.books.table.now_s = lambda: now_s[0]
    old, silent, short = (pages(name, 10) for name in ("old", "silent", "short"))
    _serve(rig, old)
    lookahead.limit_life(rig.space, old, owner=0, ttl_s=3600.0)
    _serve(rig, silent)
    _serve(rig, short)
    lookahead.limit_life(rig.space, short, owner=0, ttl_s=30.0)
    assert rig.count("ttl_pages") == 20
    assert lookahead.take_changed(8) == []
    assert rig.count("ttl_ended_pages") == 0
    now_s[0] = 140.0
    assert lookahead.take_changed(8) == []
    assert rig.count("ttl_ended_pages") == 10
    rig.save(pages("new", 10))
    assert [rig.ready(chat) for chat in (old, silent, short)] == [10, 10, 0]
    lookahead.limit_life(rig.space, short, owner=0, ttl_s=30.0)
    assert rig.count("hints_not_followed") == 1
    rig.settle()


def test_a_step_of_many_looks_ends_few_of_the_conversations_that_are_due_at_once(
    make: Make,
) -> None:
    num = 4 * _CONVERSATIONS_A_CALL
    rig = make(slots=num, disk=False, lookahead=True, index=4 * num)
    lookahead, now_s = rig.store.lookahead, [100.0]
    assert lookahead is not None
    rig.books.table.now_s = lambda: now_s[0]
    for number in range(num):
        chat = pages(f"chat {number}", 1)
        _serve(rig, chat)
        lookahead.limit_life(rig.space, chat, owner=0, ttl_s=30.0)
        now_s[0] += 1e-4  # each is a conversation of its own
    now_s[0] = 140.0
    for _ in range(64):
        assert lookahead.take_changed(1) == []
    assert rig.count("ttl_ended_pages") == _CONVERSATIONS_A_CALL
    for _ in range(64):
        now_s[0] += 0.02
        lookahead.take_changed(1)
    assert rig.count("ttl_ended_pages") == num
    rig.settle()


def test_what_is_pinned_stays_in_its_share_of_dram(make: Make) -> None:
    rig = make(slots=40, disk=False, lookahead=True, pin_share=0.25, index=64)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    mine, other = pages("mine", 10), pages("other", 10)
    for chat in (mine, other):
        _serve(rig, chat)
        lookahead.pin(rig.space, chat, owner=int(chat is other), seconds=600.0)
    # Of both tiers a quarter, and of that half for one owner: 5 pages, and 3 of what is left.
    assert (rig.count("pinned_pages"), rig.count("pins_refused_pages")) == (8, 12)
    assert rig.store.stats()["pinned_now_pages"] == 8
    for number in range(6):
        _serve(rig, pages(f"many-{number}", 10))
    assert [rig.ready(chat) for chat in (mine, other)] == [5, 3]
    rig.settle()


def test_a_pin_that_is_over_is_no_pin(make: Make) -> None:
    rig = make(slots=40, disk=False, lookahead=True, pin_share=0.5, index=64)
    lookahead, now_s = rig.store.lookahead, [100.0]
    assert lookahead is not None
    rig.books.table.now_s = lambda: now_s[0]
    chat = pages("mine", 10)
    _serve(rig, chat)
    lookahead.pin(rig.space, chat, owner=0, seconds=30.0)
    now_s[0] = 131.0
    lookahead.take_changed(8)
    assert rig.store.stats()["pinned_now_pages"] == 0
    for number in range(6):
        _serve(rig, pages(f"many-{number}", 10))
    assert rig.ready(chat) == 0
    rig.settle()


def test_on_disk_what_is_pinned_stays_too(make: Make) -> None:
    rig = make(slots=32, lookahead=True, max_bytes=80 * 8192, segment_bytes=16 * 8192,
               pin_share=0.5)  # fmt: skip
    lookahead = rig.store.lookahead
    assert lookahead is not None
    first = pages("first", 16)
    _serve(rig, first)
    lookahead.pin(rig.space, first, owner=0, seconds=600.0)
    for number in range(12):
        _serve(rig, pages(f"chat-{number}", 16))
        rig.settle()
    assert rig.on_disk(first) == 16


def test_the_share_is_of_the_room_in_dram_and_on_disk_and_not_of_the_rows_of_the_index(
    make: Make,
) -> None:
    rig = make(slots=20, lookahead=True, max_bytes=80 * 8192, segment_bytes=16 * 8192,
               pin_share=0.1, index=125)  # fmt: skip
    lookahead = rig.store.lookahead
    assert lookahead is not None
    for number in range(5):
        chat = pages(f"chat-{number}", 10)
        _serve(rig, chat)
        rig.settle()
        lookahead.pin(rig.space, chat, owner=number, seconds=600.0)
    assert rig.store.stats()["pinned_now_pages"] == (20 + 80) // 10


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_what_is_demoted_is_written_and_leaves_dram_first_and_not_the_disk(
    make: Make, policy: str
) -> None:
    rig = make(slots=41, lookahead=True, policy=policy)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    old, mine = pages("old", 10), pages("mine", 10)
    for chat in (old, mine):
        _serve(rig, chat)
    assert lookahead.demote(rig.space, mine) == 10
    assert lookahead.demote(rig.space, mine) == 0
    rig.settle()
    assert rig.on_disk(mine) == 10
    for number in range(3):
        _serve(rig, pages(f"many-{number}", 10))
        rig.settle()
    assert (rig.ready(mine), rig.on_disk(mine), rig.ready(old)) == (0, 10, 10)
    rig.until(lambda: _is_brought(rig, mine))
    check_content(rig, mine)
    rig.settle()


def test_what_is_not_demoted_is_not_written_either(make: Make) -> None:
    rig = make(slots=41, lookahead=True, policy="write_back")
    lookahead = rig.store.lookahead
    assert lookahead is not None
    head, tails = pages("head", 5), [pages("one", 5), pages("other", 5)]
    for tail in tails:
        _serve(rig, np.concatenate([head, tail]))
    assert lookahead.demote(rig.space, np.concatenate([head, tails[0]])) == 5
    rig.settle()
    assert (rig.on_disk(head), rig.on_disk(tails[0]), rig.on_disk(tails[1])) == (0, 5, 0)


def test_what_the_disk_did_not_take_before_is_written_when_it_is_demoted(make: Make) -> None:
    rig = make(slots=41, lookahead=True, policy="write_through")
    lookahead = rig.store.lookahead
    assert lookahead is not None
    mine = pages("mine", 10)
    rig.io.fail_writes = True
    _serve(rig, mine)
    rig.settle()
    assert (rig.ready(mine), rig.on_disk(mine)) == (10, 0)
    rig.io.fail_writes = False
    assert lookahead.demote(rig.space, mine) == 10
    rig.settle()
    assert rig.on_disk(mine) == 10


def _is_brought(rig: Rig, path: np.ndarray) -> bool:
    """Plans a path; a plan has the room that is free, which what is not written yet is not."""
    plan = rig.store.plan(rig.space, path)
    if plan is None:
        return False
    rig.wait(plan)
    num_ready = rig.ready(path)
    rig.store.cancel_plan(plan)
    return num_ready == len(path)


def test_without_a_disk_nothing_is_demoted(make: Make) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    chat = pages("chat", 10)
    _serve(rig, chat)
    assert lookahead.demote(rig.space, chat) == 0
    rig.settle()


def test_on_disk_too(make: Make) -> None:
    """Of ten chats the disk and DRAM hold half: those that come back are among them."""
    rig = make(slots=32, lookahead=True, max_bytes=80 * 8192, segment_bytes=16 * 8192)
    chats = [pages(f"chat-{number}", 16) for number in range(10)]
    for number, chat in enumerate(chats):
        _serve(rig, chat, 3600.0 if number < 2 else None, ends=number >= 2)
        rig.settle()
    assert [rig.on_disk(chat) for chat in chats[:2]] == [16, 16]
    assert sum(rig.on_disk(chat) for chat in chats[2:]) > 0
    for chat in chats[:2]:
        plan = rig.store.plan(rig.space, chat)
        assert plan is not None
        rig.wait(plan)
        check_content(rig, chat)
        rig.store.cancel_plan(plan)
    rig.settle()


def test_a_hint_of_what_is_not_stored_is_counted_and_does_nothing(make: Make) -> None:
    rig = make(slots=16, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    lookahead.hint(rig.space, pages("nothing", 4), owner=0, returns_in_s=None)
    assert rig.count("hints_not_followed") == 1
    assert rig.count("hinted_ends_pages") == 0
    rig.settle()


def test_a_hint_names_no_page_of_another_key_space(make: Make) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    other = rig.store.space(bytes(32))
    chat = pages("chat", 10)
    _serve(rig, chat)
    lookahead.hint(other, chat, owner=0, returns_in_s=None)
    assert rig.count("hints_not_followed") == 1


def test_what_was_looked_for_and_not_used_takes_hints_when_it_rests(make: Make) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    lookahead, now_s = rig.store.lookahead, [100.0]
    assert lookahead is not None
    rig.books.table.now_s = lambda: now_s[0]
    chat, other = pages("chat", 10), pages("other", 10)
    _serve(rig, chat)
    lookahead.expect("prefetch", rig.space, chat, 0)
    lookahead.leave("prefetch")
    lookahead.hint(rig.space, chat, owner=0, returns_in_s=None)
    assert rig.count("hinted_ends_pages") == 0  # a request may be about to use it
    lookahead.rested(rig.space, chat)
    lookahead.limit_life(rig.space, chat, owner=0, ttl_s=30.0)
    now_s[0] = 140.0
    lookahead.take_changed(8)
    assert rig.count("ttl_ended_pages") == 10
    _serve(rig, other)
    rig.save(pages("new", 20))
    assert (rig.ready(chat), rig.ready(other)) == (0, 10)
    rig.settle()
