"""Numpy arrays that end where memory does, so that one step aside ends the process.

While a `GuardedPool` is on, `np.empty`, `np.zeros` and the copies that kernels make of their
arguments come from its regions: mapped pages between two that nobody can touch. An array ends at
its region's end; bytes before it are `GUARD` and are checked when the region is taken back.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

GUARD = 0xA5
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)
_CHECKED_BYTES = 64  # of the bytes before an array


class GuardedPool:
    """Regions of one size, given out until `take_back`. One thread at a time."""

    def __init__(self, num_regions: int = 96, region_bytes: int = 1 << 17):
        self.region_bytes = region_bytes
        self.given = 0  # arrays of the present case
        self.total = 0
        self.beside = 0  # arrays too large, or too many, for the pool
        self._regions = [self._map_region() for _ in range(num_regions)]
        self._lengths: list[int] = []
        self._empty = np.empty
        self._copiers: list[tuple[Any, str]] | None = None

    def _map_region(self) -> Any:
        memory = mmap.mmap(-1, self.region_bytes + 2 * _PAGE)
        raw = np.frombuffer(memory, np.uint8)
        for start in (0, _PAGE + self.region_bytes):
            address = ctypes.c_void_p(raw.ctypes.data + start)
            if _LIBC.mprotect(address, ctypes.c_size_t(_PAGE), ctypes.c_int(0)):
                raise OSError(ctypes.get_errno(), "mprotect")
        return raw[_PAGE : _PAGE + self.region_bytes]

    def empty(self, shape: Any, dtype: Any = float, order: str = "C") -> Any:
        """As `np.empty`; the array holds arbitrary bytes."""
        kind = np.dtype(dtype)
        axes = (int(shape),) if np.ndim(shape) == 0 else tuple(int(n) for n in shape)
        length = math.prod(axes) * kind.itemsize
        if kind.hasobject or self.given == len(self._regions) or length > self.region_bytes:
            self.beside += 1
            return self._empty(shape, dtype)
        region = self._regions[self.given]
        self.given += 1
        self.total += 1
        self._lengths.append(length)
        start = self.region_bytes - length
        region[max(0, start - _CHECKED_BYTES) : start] = GUARD
        return region[start:].view(kind).reshape(axes)

    def zeros(self, shape: Any, dtype: Any = float, order: str = "C") -> Any:
        """As `np.zeros`."""
        array = self.empty(shape, dtype)
        array[...] = 0
        return array

    def copy(self, array: Any) -> Any:
        """A copy, whatever the array is."""
        copied = self.empty(array.shape, array.dtype.newbyteorder("="))
        copied[...] = array
        return copied

    def take_back(self) -> None:
        """Checks the bytes before every array, and makes all regions free again."""
        for region, length in zip(self._regions, self._lengths, strict=False):
            start = self.region_bytes - length
            before = region[max(0, start - _CHECKED_BYTES) : start]
            assert (before == GUARD).all(), "bytes before an array were written"
        self.given = 0
        self._lengths.clear()

    @contextmanager
    def on(self) -> Iterator[None]:
        """Numpy and the kernels take their arrays from here."""
        if self._copiers is None:  # all modules that decoding needs are there by now
            self._copiers = _find_copiers()
        changed = [(np, "empty", np.empty), (np, "zeros", np.zeros)]
        changed += [(module, name, getattr(module, name)) for module, name in self._copiers]
        try:
            for module, name, _ in changed:
                replacement: Callable[..., Any] = {"empty": self.empty, "zeros": self.zeros}.get(
                    name, self.copy
                )
                setattr(module, name, replacement)
            yield
        finally:
            for module, name, original in changed:
                setattr(module, name, original)
        self.take_back()


def _find_copiers() -> list[tuple[Any, str]]:
    """Where kernels' modules have their functions that copy what numba would not take."""
    return [
        (module, name)
        for key, module in list(sys.modules.items())
        if key.startswith("sglang_ext.kernels.")
        for name in ("behaved", "_plain", "_behaved")
        if callable(getattr(module, name, None))
    ]
