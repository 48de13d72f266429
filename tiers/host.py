"""The host tier's memory: one mapping cut into slots of a fixed size.

The mapping is this process's alone, or one that several have (`shared_memory.py`): then one of them
gives the slots out, and the others read those that it names to them.

A slot's image is a record, byte for byte as it lies in a segment file, so moving between DRAM and
disk copies bytes only. The mapping is page aligned (fit for `O_DIRECT` and `cudaHostRegister`).

Life of a slot: free -> `alloc` -> used -> `free` -> free. A copy in flight holds a pin; a slot that
is freed while pinned is *deferred*: it keeps its bytes until the last `unpin`, and only then may
another page have it. So at any time: free + used + deferred == num_slots.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.anonymous_memory import PAGE_BYTES, available_bytes, map_anonymous, populate
from sglang_ext.tiers.errors import (
    TierClosedError,
    TierConfigError,
    TierInvariantError,
    TierUsageError,
)

SLOT_ALIGN_BYTES: Final = 4096
_PREFAULT_PIECE_BYTES: Final = 16 << 20
_GIB: Final = 1 << 30
_FREE, _USED, _DEFERRED = 0, 1, 2

Slots = npt.NDArray[np.int32]


class HostArena:
    """Slots of `slot_bytes` in one anonymous mapping, with pins and deferred frees.

    Thread-safe: `_lock` guards the free stack, the states, the pins, `generation` and the closed
    flag. The bytes of a slot are guarded by owning it (from `alloc` to `free`) or by a pin.
    It has many methods because memory, slots and pins change together, under that lock.

    Attributes:
        num_slots: Slots in all.
        slot_bytes: Size of one slot, a multiple of 4096.
        nbytes: Size of the mapping, in bytes.
        generation: u32 per slot, one more at every `free` (deferred ones too), so that a reference
            to an earlier page in the slot can be told from the present one. Read only.
    """

    def __init__(
        self,
        num_slots: int,
        slot_bytes: int,
        *,
        hugepages: bool = True,
        memory_limit_bytes: int | None = None,
        memory: mmap.mmap | None = None,
        is_borrowed: bool = False,
    ) -> None:
        """Map the memory; nothing is committed before `prefault` or the first write.

        Args:
            num_slots: Slots, at least 1.
            slot_bytes: Size of a slot, a multiple of 4096.
            hugepages: Ask for transparent huge pages (best effort).
            memory_limit_bytes: Most that may be asked for; what the machine and its cgroup have
                available when None.
            memory: Use this mapping, of exactly the slots' size; closed with the arena.
            is_borrowed: The slots are another process's: all count as used, and none is given out.

        Raises:
            TierConfigError: A size is out of range, or more than there is.
        """
        limit = available_bytes() if memory_limit_bytes is None else memory_limit_bytes
        _check_sizes(num_slots, slot_bytes, limit)
        self.num_slots = num_slots
        self.slot_bytes = slot_bytes
        self.nbytes = num_slots * slot_bytes
        self._lock = threading.Lock()
        self._slots: npt.NDArray[np.uint8] | None
        self.is_borrowed = is_borrowed
        self._memory = memory
        self._mapping, self._slots = self._map(hugepages=hugepages)
        self._address = int(self._slots.ctypes.data)
        self.generation: npt.NDArray[np.uint32] = np.zeros(num_slots, np.uint32)
        self._state = np.zeros(num_slots, np.uint8)
        self._pins = np.zeros(num_slots, np.int32)
        self._scratch = np.zeros(num_slots, np.int32)
        # Top of the stack is its end; the first slots handed out are the lowest.
        self._stack: Slots = np.arange(num_slots - 1, -1, -1, dtype=np.int32)
        self._num_free = num_slots
        self._num_deferred = 0
        self._before_unmap: list[Callable[[], None]] = []
        if is_borrowed:
            self._num_free, self._state[:] = 0, _USED

    # ---- memory ----------------------------------------------------------------------------

    def _map(self, *, hugepages: bool) -> tuple[mmap.mmap, npt.NDArray[np.uint8]]:
        """Maps the memory, if it is not; returns it and u8[num_slots, slot_bytes] over it."""
        mapping = self._memory
        if mapping is None:
            mapping = map_anonymous(self.nbytes, hugepages=hugepages)
        if len(mapping) != self.nbytes:
            raise TierConfigError(
                f"The host tier's slots take {self.nbytes:,} bytes and {len(mapping):,} are mapped."
            )
        flat = np.frombuffer(mapping, dtype=np.uint8)
        return mapping, flat.reshape(self.num_slots, self.slot_bytes)

    @property
    def slots(self) -> npt.NDArray[np.uint8]:
        """u8[num_slots, slot_bytes], a view of the mapping itself; no copy.

        Raises:
            TierClosedError: The arena is closed.
        """
        slots = self._slots
        if slots is None:
            raise TierClosedError("The host arena is closed; its slots are gone.")
        return slots

    @property
    def address(self) -> int:
        """Address of the first slot, for `cudaHostRegister(address, nbytes)`.

        Raises:
            TierClosedError: The arena is closed.
        """
        self._require_open()
        return self._address

    def prefault(self, stop: threading.Event, *, pause_s: float = 0.0) -> int:
        """Commit the memory piece by piece, lowest slots first, so that saves need not wait for it.

        Run it in a thread of the caller's: it works beside every other call, mostly without the
        GIL, and leaves the contents of the slots as they are.

        Args:
            stop: Ends it after the present piece (16 MiB).
            pause_s: Sleep between pieces, in seconds, to leave the memory bus to others.

        Borrowed memory is left to its owner.

        Returns:
            Bytes gone through; `nbytes` when it came to the end.
        """
        if self.is_borrowed:
            return 0
        # The view keeps the memory mapped should close() come in between.
        view = self._slots
        pieces = range(0, self.nbytes, _PREFAULT_PIECE_BYTES)
        done = 0
        for start in pieces if view is not None else ():
            if stop.is_set() or self._slots is None:
                break
            end = min(start + _PREFAULT_PIECE_BYTES, self.nbytes)
            if not populate(self._address + start, end - start):
                self._touch_free(start, end)
            done = end
            if pause_s > 0:
                time.sleep(pause_s)
        return done

    def _touch_free(self, start: int, end: int) -> None:
        """Commit free slots within bytes `[start, end)` by writing, for kernels before 5.14.

        Used slots are left to their owners' writes. The lock keeps the free ones free meanwhile.
        """
        first, last = -(-start // self.slot_bytes), -(-end // self.slot_bytes)
        with self._lock:
            if self._slots is None:
                return
            for slot in (np.flatnonzero(self._state[first:last] == _FREE) + first).tolist():
                self._slots[slot, ::PAGE_BYTES] = 0

    def before_unmap(self, call: Callable[[], None]) -> None:
        """Has something called while the memory is still mapped, when it is closed."""
        self._before_unmap.append(call)

    def close(self) -> bool:
        """Unmap the memory; later calls raise `TierClosedError`, save those that only end things.

        `close`, `unpin`, `pinned` and `prefault` stay allowed. What `before_unmap` was given is
        called first.

        Returns:
            True when the memory went back at once; False when views of it are still held
            elsewhere, which keep it mapped (and safe to read) until the last of them is dropped.
        """
        while self._before_unmap:
            self._before_unmap.pop()()
        with self._lock:
            self._slots = None
            try:
                self._mapping.close()
            except BufferError:
                return False
            return True

    # ---- slots -----------------------------------------------------------------------------

    @property
    def num_free(self) -> int:
        """Slots that `alloc` can give now."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Slots that are allocated and not freed; deferred ones do not count."""
        with self._lock:
            return self._count_used()

    def _count_used(self) -> int:
        """As `num_used`. Caller holds the lock."""
        return self.num_slots - self._num_free - self._num_deferred

    def alloc(self, count: int) -> Slots:
        """Take up to `count` slots; what they hold is unspecified.

        Returns:
            i32[M] with M <= count: fewer where not enough are free. Recently freed ones first,
            as their memory is committed and warm.

        Raises:
            TierUsageError: `count` is negative.
            TierClosedError: The arena is closed.
        """
        if count < 0:
            raise TierUsageError(f"A number of slots from 0 up was expected, not {count}.")
        with self._lock:
            self._require_open()
            end = self._num_free
            start = max(end - count, 0)
            taken = self._stack[start:end][::-1].copy()
            self._num_free = start
            self._state[taken] = _USED
            return taken

    def free(self, slots: npt.ArrayLike) -> None:
        """Give slots back; pinned ones follow at their last unpin. All or none.

        Raises:
            TierUsageError: A slot is not in use (freed already, or never allocated), is named
                twice, or is no slot at all.
            TierClosedError: The arena is closed.
        """
        wanted = self._as_slots(slots)
        with self._lock:
            self._require_open()
            self._require_used(wanted, "free")
            # `_scratch` keeps one entry a slot, so a difference means that a slot was named twice.
            order = np.arange(len(wanted), dtype=np.int32)
            self._scratch[wanted] = order
            if (self._scratch[wanted] != order).any():
                raise TierUsageError("A slot was named twice in one call to free().")
            self.generation[wanted] += np.uint32(1)
            pinned = self._pins[wanted] > 0
            self._state[wanted[pinned]] = _DEFERRED
            self._num_deferred += int(np.count_nonzero(pinned))
            self._push(wanted[~pinned])

    def pin(self, slots: npt.ArrayLike) -> None:
        """Add a reference to each slot, as often as it is named, for a copy in flight.

        Raises:
            TierUsageError: A slot is not in use; nothing was pinned.
            TierClosedError: The arena is closed.
        """
        wanted = self._as_slots(slots)
        with self._lock:
            self._require_open()
            self._require_used(wanted, "pin")
            np.add.at(self._pins, wanted, 1)

    def unpin(self, slots: npt.ArrayLike) -> None:
        """Drop a reference from each slot, as often as it is named.

        Allowed after `close`, so that a copy that was in flight can end in order.

        Raises:
            TierUsageError: A slot has fewer references than are dropped; nothing was changed.
        """
        wanted = self._as_slots(slots)
        counts: Any = 1
        if len(wanted) > 1:  # else there is nothing to sort
            wanted, counts = np.unique(wanted, return_counts=True)
        with self._lock:
            left = self._pins[wanted] - counts
            if (left < 0).any():
                raise TierUsageError(
                    f"Slot {wanted[left < 0][0]} was unpinned more often than it was pinned."
                )
            self._pins[wanted] = left
            released = wanted[(left == 0) & (self._state[wanted] == _DEFERRED)]
            self._num_deferred -= len(released)
            self._push(released)

    def pinned(self, slots: npt.ArrayLike) -> npt.NDArray[np.bool_]:
        """bool[N]: true where a slot has at least one reference."""
        wanted = self._as_slots(slots)
        with self._lock:
            mask: npt.NDArray[np.bool_] = self._pins[wanted] > 0
            return mask

    def _push(self, slots: Slots) -> None:
        """Put slots on the free stack. Caller holds the lock."""
        self._state[slots] = _FREE
        self._stack[self._num_free : self._num_free + len(slots)] = slots
        self._num_free += len(slots)

    # ---- checks ----------------------------------------------------------------------------

    def check(self) -> None:
        """Verify that the books balance (linear; for tests and idle time).

        Raises:
            TierInvariantError: They do not; the message says where.
        """
        with self._lock:
            counts = np.bincount(self._state, minlength=3).tolist()
            stack = self._stack[: self._num_free]
            deferred = self._state == _DEFERRED
            wanted = [self._num_free, self._count_used(), self._num_deferred]
            faults = {
                f"{counts} slots are free, used, deferred; counted {wanted}": counts != wanted,
                "a slot is on the free stack twice": len(np.unique(stack)) != len(stack),
                "a slot on the free stack is not free": (self._state[stack] != _FREE).any(),
                "a slot has a negative pin count": (self._pins < 0).any(),
                "a free slot is pinned": (self._pins[stack] != 0).any(),
                "a deferred slot is not pinned": (self._pins[deferred] == 0).any(),
            }
        for fault, found in faults.items():
            if found:
                raise TierInvariantError(f"Host arena: {fault}.")

    def _require_open(self) -> None:
        if self._slots is None:
            raise TierClosedError("The host arena is closed.")

    def _require_used(self, slots: Slots, action: str) -> None:
        bad = slots[self._state[slots] != _USED]
        if len(bad):
            raise TierUsageError(
                f"Slot {bad[0]} is not in use, so there is nothing to {action} "
                f"({len(bad)} of {len(slots)} slots in this call)."
            )

    def _as_slots(self, slots: npt.ArrayLike) -> Slots:
        array = np.asarray(slots)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise TierUsageError(f"Slots are integers [N], not {array.dtype}{list(array.shape)}.")
        # A negative number would index from the end: refused, not understood. Without its sign it
        # is larger than any slot.
        if array.size and int(array.astype(np.int64).view(np.uint64).max()) >= self.num_slots:
            raise TierUsageError(f"Slots lie in [0, {self.num_slots}), a slot in this call not.")
        return array.astype(np.int32, copy=False)


def _check_sizes(num_slots: int, slot_bytes: int, limit_bytes: int) -> None:
    if slot_bytes <= 0 or slot_bytes % SLOT_ALIGN_BYTES:
        raise TierConfigError(
            f"A slot is a positive multiple of {SLOT_ALIGN_BYTES} bytes, not {slot_bytes:,}."
        )
    if num_slots < 1:
        raise TierConfigError(
            f"The host tier's size must hold at least one page of {slot_bytes:,} bytes and "
            f"holds {num_slots}; raise --hier-kv-host-size."
        )
    needed = num_slots * slot_bytes
    if num_slots >= 1 << 31 or needed > limit_bytes:
        raise TierConfigError(
            f"The host tier needs {needed / _GIB:.2f} GiB of memory and "
            f"{limit_bytes / _GIB:.2f} GiB are available (machine and cgroup); lower "
            "--hier-kv-host-size."
        )
