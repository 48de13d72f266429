"""The host arena: slots, pins, deferred frees, pre-faulting and closing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiers import host
from sglang_ext.tiers.anonymous_memory import PAGE_BYTES
from sglang_ext.tiers.errors import (
    TierClosedError,
    TierConfigError,
    TierInvariantError,
    TierUsageError,
)
from sglang_ext.tiers.host import HostArena

SLOT_BYTES = 8192


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of `[address, address + num_bytes)` that are in memory, by the kernel's own count."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(num_bytes // PAGE_BYTES * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE_BYTES


def arena_of(num_slots: int, slot_bytes: int = SLOT_BYTES) -> HostArena:
    return HostArena(num_slots, slot_bytes, hugepages=False)


def test_slots_are_one_aligned_zeroed_view_of_the_mapping() -> None:
    arena = arena_of(16)
    assert arena.slots.shape == (16, SLOT_BYTES)
    assert arena.slots.dtype == np.uint8
    assert arena.slots.ctypes.data == arena.address
    assert arena.address % 4096 == 0
    assert arena.nbytes == 16 * SLOT_BYTES
    assert not arena.slots.any()
    arena.slots[3, 5] = 9
    assert arena.slots[3, 5] == 9, "slots gave a copy"
    assert np.count_nonzero(arena.slots) == 1


def test_slot_can_be_read_into_by_direct_io(tmp_path: Path) -> None:
    arena = arena_of(4)
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * (SLOT_BYTES // 256))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system has no O_DIRECT")
    try:
        assert os.preadv(fd, [memoryview(arena.slots[2])], 0) == SLOT_BYTES
    finally:
        os.close(fd)
    assert arena.slots[2].tobytes() == path.read_bytes()
    assert not arena.slots[[0, 1, 3]].any()


def test_alloc_gives_distinct_slots_low_and_ascending_first_and_fewer_when_short() -> None:
    arena = arena_of(10)
    assert arena.alloc(4).tolist() == [0, 1, 2, 3]
    assert arena.alloc(0).tolist() == []
    assert arena.alloc(99).tolist() == [4, 5, 6, 7, 8, 9]
    assert arena.alloc(1).tolist() == []
    assert (arena.num_free, arena.num_used) == (0, 10)
    arena.check()


def test_freed_slots_come_back_first() -> None:
    arena = arena_of(10)
    arena.alloc(6)
    arena.free([1, 4])
    assert sorted(arena.alloc(2).tolist()) == [1, 4]


def test_handed_out_slots_do_not_change_when_the_arena_goes_on() -> None:
    arena = arena_of(4)
    first = arena.alloc(2)
    arena.free(first)
    arena.alloc(4)
    assert first.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("slots", "message"),
    [([5], "not in use"), ([1], "not in use"), ([0, 1], "not in use"), ([0, 0], "twice"),
     ([-1], "lie in"), ([8], "lie in"), ([2**40], "lie in"), ([0.5], "integers")],
)  # fmt: skip
def test_wrong_free_is_refused_and_changes_nothing(slots: list[int], message: str) -> None:
    arena = arena_of(8)
    arena.alloc(3)
    arena.free([1])
    generation = arena.generation.copy()
    with pytest.raises(TierUsageError, match=message):
        arena.free(slots)
    assert arena.num_used == 2
    np.testing.assert_array_equal(arena.generation, generation)
    arena.check()


def test_negative_count_is_refused() -> None:
    with pytest.raises(TierUsageError, match="-1"):
        arena_of(2).alloc(-1)


def test_generation_counts_frees() -> None:
    arena = arena_of(3)
    arena.alloc(3)
    arena.free([0, 1])
    arena.alloc(2)
    arena.pin([1])
    arena.free([1])
    assert arena.generation.tolist() == [1, 2, 0]
    arena.unpin([1])
    assert arena.generation.tolist() == [1, 2, 0], "the free is counted once"


def test_free_of_a_pinned_slot_waits_for_the_last_unpin() -> None:
    arena = arena_of(3)
    arena.alloc(3)
    arena.pin([1, 1, 2])
    arena.free([0, 1])
    assert (arena.num_free, arena.num_used, arena._num_deferred) == (1, 1, 1)
    assert arena.alloc(9).tolist() == [0], "a pinned slot was given away"
    arena.unpin([1])
    assert arena.alloc(9).tolist() == []
    arena.check()
    arena.unpin([1, 2])
    assert (arena.num_free, arena.num_used, arena._num_deferred) == (1, 2, 0)
    assert arena.alloc(9).tolist() == [1]
    arena.check()


def test_deferred_slot_can_be_neither_freed_nor_pinned_again() -> None:
    arena = arena_of(2)
    arena.alloc(1)
    arena.pin([0])
    arena.free([0])
    with pytest.raises(TierUsageError, match="nothing to free"):
        arena.free([0])
    with pytest.raises(TierUsageError, match="nothing to pin"):
        arena.pin([0])
    arena.unpin([0])
    arena.check()


def test_pinned_tells_which() -> None:
    arena = arena_of(4)
    arena.alloc(4)
    arena.pin([1, 3])
    assert arena.pinned([0, 1, 2, 3, 3]).tolist() == [False, True, False, True, True]
    arena.unpin([3])
    assert arena.pinned([3]).tolist() == [False]


def test_unpin_more_often_than_pinned_is_refused_and_changes_nothing() -> None:
    arena = arena_of(2)
    arena.alloc(2)
    arena.pin([0, 1])
    with pytest.raises(TierUsageError, match="Slot 0"):
        arena.unpin([1, 0, 0])
    assert arena.pinned([0, 1]).all()


def test_pin_of_a_free_slot_is_refused() -> None:
    with pytest.raises(TierUsageError, match="nothing to pin"):
        arena_of(2).pin([0])


@pytest.mark.parametrize(
    ("num_slots", "slot_bytes", "limit", "message"),
    [(0, 4096, None, "at least one page"), (-5, 4096, None, "at least one page"),
     (1, 0, None, "multiple of 4096"), (1, -4096, None, "multiple of 4096"),
     (1, 4095, None, "multiple of 4096"), (3, 4096, 8192, "available"),
     (1 << 40, 4096, None, "available")],
)  # fmt: skip
def test_impossible_sizes_are_refused_in_one_sentence(
    num_slots: int, slot_bytes: int, limit: int | None, message: str
) -> None:
    with pytest.raises(TierConfigError, match=message) as caught:
        HostArena(num_slots, slot_bytes, memory_limit_bytes=limit)
    sentence = str(caught.value)
    assert sentence.endswith(".")
    assert ". " not in sentence


def test_exactly_what_is_available_is_accepted() -> None:
    assert HostArena(2, 4096, memory_limit_bytes=8192).num_free == 2


@pytest.mark.parametrize("old_kernel", [False, True])
def test_prefault_commits_all_and_keeps_what_is_there(
    monkeypatch: pytest.MonkeyPatch, old_kernel: bool
) -> None:
    if old_kernel:
        monkeypatch.setattr(host, "populate", lambda address, num_bytes: False)
    arena = arena_of(20)
    arena.alloc(7)
    arena.slots[:7] = 55
    assert resident_bytes(arena.address, arena.nbytes) == 7 * SLOT_BYTES
    assert arena.prefault(threading.Event()) == arena.nbytes
    assert resident_bytes(arena.address, arena.nbytes) == arena.nbytes
    assert (arena.slots[:7] == 55).all()


def test_prefault_stops_between_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PREFAULT_PIECE_BYTES", 2 * SLOT_BYTES)
    stop = threading.Event()
    seen: list[int] = []

    def populate_then_stop(address: int, num_bytes: int) -> bool:
        seen.append(num_bytes)
        if len(seen) == 3:
            stop.set()
        return True

    monkeypatch.setattr(host, "populate", populate_then_stop)
    assert arena_of(20).prefault(stop) == 6 * SLOT_BYTES
    assert seen == [2 * SLOT_BYTES] * 3


def test_prefault_covers_a_last_piece_that_is_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PREFAULT_PIECE_BYTES", 3 * SLOT_BYTES)
    arena = arena_of(10)
    assert arena.prefault(threading.Event()) == arena.nbytes
    assert resident_bytes(arena.address, arena.nbytes) == arena.nbytes


def test_prefault_ends_when_the_arena_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_PREFAULT_PIECE_BYTES", SLOT_BYTES)
    arena = arena_of(10)

    def populate_then_close(address: int, num_bytes: int) -> bool:
        assert not arena.close(), "the memory was unmapped under the pre-faulting"
        return True

    monkeypatch.setattr(host, "populate", populate_then_close)
    assert arena.prefault(threading.Event()) == SLOT_BYTES


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        low, high = (int(part, 16) for part in line.split()[0].split("-"))
        if low <= address < high:
            return True
    return False


def test_close_unmaps_and_refuses_later_use() -> None:
    arena = arena_of(1000)
    address = arena.address
    arena.alloc(5)
    assert is_mapped(address)
    assert arena.close()
    assert not is_mapped(address)
    assert arena.close(), "a second close is allowed"
    with pytest.raises(TierClosedError):
        arena.alloc(1)
    with pytest.raises(TierClosedError):
        arena.free([0])
    with pytest.raises(TierClosedError):
        arena.pin([0])
    with pytest.raises(TierClosedError):
        _ = arena.slots
    with pytest.raises(TierClosedError):
        _ = arena.address
    assert arena.prefault(threading.Event()) == 0


def test_close_under_a_held_view_keeps_it_readable_until_dropped() -> None:
    arena = arena_of(1000)
    address = arena.address
    view: npt.NDArray[np.uint8] | None = arena.slots[4]
    assert view is not None
    view[:] = 3
    assert not arena.close()
    with pytest.raises(TierClosedError):
        arena.alloc(1)
    assert (view == 3).all()
    view = None
    assert arena.close()
    assert not is_mapped(address)


def test_unpin_after_close_lets_a_copy_in_flight_end() -> None:
    arena = arena_of(4)
    arena.pin(arena.alloc(2))
    arena.close()
    arena.unpin([0, 1])
    assert not arena.pinned([0, 1]).any()
    arena.check()


@pytest.mark.parametrize("fault", ["leak", "double", "state", "pin"])
def test_check_finds_damage(fault: str) -> None:
    arena = arena_of(6)
    arena.alloc(3)
    arena.check()
    if fault == "leak":
        arena._num_free -= 1
    elif fault == "double":
        arena._stack[0] = arena._stack[1]
    elif fault == "state":
        arena._state[0] = 2
        arena._num_deferred = 1
    else:
        arena._pins[5] = 1
    with pytest.raises(TierInvariantError):
        arena.check()


NUM_MODEL_SLOTS = 8
operations = st.lists(
    st.tuples(
        st.sampled_from(["alloc", "free", "pin", "unpin"]),
        st.lists(st.integers(0, NUM_MODEL_SLOTS - 1), max_size=5),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(operations)
def test_random_histories_follow_the_model(history: list[tuple[str, list[int]]]) -> None:
    arena = arena_of(NUM_MODEL_SLOTS, 4096)
    used: set[int] = set()
    deferred: set[int] = set()
    pins = [0] * NUM_MODEL_SLOTS
    frees = [0] * NUM_MODEL_SLOTS
    for name, slots in history:
        if name == "alloc":
            num_free = NUM_MODEL_SLOTS - len(used) - len(deferred)
            got = arena.alloc(len(slots)).tolist()
            assert len(got) == len(set(got)) == min(len(slots), num_free)
            assert not (set(got) & (used | deferred))
            used |= set(got)
            continue
        allowed = {
            "free": set(slots) <= used and len(set(slots)) == len(slots),
            "pin": set(slots) <= used,
            "unpin": all(slots.count(slot) <= pins[slot] for slot in slots),
        }[name]
        if not allowed:
            with pytest.raises(TierUsageError):
                getattr(arena, name)(slots)
            continue
        getattr(arena, name)(slots)
        for slot in slots:
            pins[slot] += {"free": 0, "pin": 1, "unpin": -1}[name]
            frees[slot] += name == "free"
        if name == "free":
            used -= set(slots)
            deferred |= {slot for slot in slots if pins[slot]}
        deferred = {slot for slot in deferred if pins[slot]}
        assert (arena.num_used, arena._num_deferred) == (len(used), len(deferred))
        assert arena.generation.tolist() == frees
        assert arena.pinned(range(NUM_MODEL_SLOTS)).tolist() == [count > 0 for count in pins]
        arena.check()


def test_threads_never_share_a_slot_and_the_books_balance_at_the_end() -> None:
    arena = arena_of(64, 4096)
    failures: list[str] = []

    def work(name: int) -> None:
        rng = np.random.default_rng(name)
        for _ in range(300):
            slots = arena.alloc(int(rng.integers(1, 12)))
            arena.slots[slots, :8] = name
            arena.pin(slots)
            arena.free(slots[::2])  # deferred: the bytes must stay ours until the unpin
            if not (arena.slots[slots, :8] == name).all():
                failures.append(f"thread {name} found another's bytes")
            arena.unpin(slots)
            arena.free(slots[1::2])

    threads = [threading.Thread(target=work, args=(name,)) for name in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert (arena.num_free, arena.num_used, arena._num_deferred) == (64, 0, 0)
    arena.check()
