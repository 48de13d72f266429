"""Tables, symbols and buffers for the rANS tests."""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.kernels import rans
from sglang_ext.kernels.rans import Coded, Tables

U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]

GUARD = 0xA5
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def make_tables(alphabets: list[int], rng: np.random.Generator, skew: float = 1.0) -> Tables:
    """Row 0 is the padding class; row i + 1 has `alphabets[i]` symbols, each of some frequency.

    The greater the skew, the rarer most symbols; from 10 on most have frequency 1.
    """
    freqs = np.zeros((len(alphabets) + 1, 256), np.uint16)
    freqs[0, 0] = 4096
    for row, num in enumerate(alphabets, 1):
        weights = rng.random(num) ** (4 * skew)
        share = np.floor(weights / weights.sum() * (4096 - num)).astype(np.uint16)
        freqs[row, :num] = 1 + share
        freqs[row, rng.integers(num)] += 4096 - freqs[row].sum(dtype=np.int64)
    return Tables(freqs)


@dataclass(frozen=True)
class Case:
    """What `encode` takes."""

    symbols: U8
    classes: U16
    tables: Tables
    tiles_per_group: int
    context: U8 | None

    @property
    def num_tokens(self) -> int:
        return int(self.symbols.shape[1])

    def encode(self, engine: rans.Engine = "numba") -> Coded:
        return rans.encode(
            self.symbols, self.classes, self.tables, self.tiles_per_group, self.context, engine
        )

    def decode(self, coded: Coded, engine: rans.Engine = "numba") -> U8:
        out = np.full_like(self.symbols, GUARD)
        self.decode_into(out, coded, engine)
        return out

    def decode_into(self, out: U8, coded: Coded, engine: rans.Engine = "numba") -> None:
        rans.decode(
            coded, self.classes, self.tables, self.num_tokens, self.tiles_per_group,
            self.context, out, engine,
        )  # fmt: skip

    def coding(self, symbols: U8) -> Coded:
        """Other symbols, coded as these are."""
        changed = Case(symbols, self.classes, self.tables, self.tiles_per_group, self.context)
        return changed.encode()


def make_case(
    num_tiles: int,
    num_tokens: int,
    tiles_per_group: int,
    tables: Tables,
    rng: np.random.Generator,
    num_contexts: int = 0,
    uniform: bool = False,
) -> Case:
    """Symbols drawn by their tables' frequencies or, `uniform`, each of a table's as often."""
    highest = tables.num_tables - max(1, num_contexts)
    classes = rng.integers(0, highest + 1, (num_tiles, 32)).astype(np.uint16)
    shape = (num_tiles, num_tokens, 32)
    context = rng.integers(0, num_contexts, shape).astype(np.uint8) if num_contexts else None
    rows = np.broadcast_to(classes[:, None, :], shape).astype(np.int64)
    if context is not None:
        rows = rows + context
    if uniform:
        used = (tables.freqs > 0).sum(1)
        symbols = np.floor(rng.random(shape) * used[rows]).astype(np.uint8)
    else:
        slots = tables.decode_lut.reshape(-1, 4096) & 0xFF
        symbols = slots[rows, rng.integers(0, 4096, shape)].astype(np.uint8)
    return Case(symbols, classes, tables, tiles_per_group, context)


def same_coded(a: Coded, b: Coded) -> bool:
    pairs = ((a.states, b.states), (a.offsets, b.offsets), (a.words, b.words))
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in pairs)


class Guarded:
    """A copy of an array that ends where a page begins that nobody can touch.

    Bytes before it are `GUARD`; a page that nobody can touch lies before these, too.
    """

    def __init__(self, array: npt.NDArray[Any], read_only: bool = False) -> None:
        self._num_bytes = max(array.nbytes, array.itemsize)
        inner = -(-self._num_bytes // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, inner + 2 * _PAGE)
        raw = np.frombuffer(self._map, np.uint8)
        raw[_PAGE : _PAGE + inner] = GUARD
        start = _PAGE + inner - array.nbytes
        self._before = raw[_PAGE:start]
        self.array = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        self.array[...] = array
        address = raw.ctypes.data
        self._protect(address, _PAGE, 0)
        self._protect(address + _PAGE + inner, _PAGE, 0)
        if read_only:
            self._protect(address + _PAGE, inner, mmap.PROT_READ)

    @staticmethod
    def _protect(address: int, num_bytes: int, rights: int) -> None:
        args = (ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_int(rights))
        if _LIBC.mprotect(*args):
            raise OSError(ctypes.get_errno(), "mprotect")

    def check(self) -> None:
        assert (self._before == GUARD).all()


def mutated(coded: Coded, rng: np.random.Generator) -> Coded:
    """Coded data with something wrong with it that `api` leaves to the kernels to find."""
    states, offsets, words = coded.states.copy(), coded.offsets.copy(), coded.words.copy()
    kind = rng.integers(9)
    if kind == 0:  # cut short
        words = words[: rng.integers(words.size + 1)]
        offsets = np.minimum(offsets, np.uint32(words.size))
    elif kind == 1:  # more words than needed, of some group
        at, more = int(offsets[rng.integers(offsets.size)]), int(rng.integers(1, 70))
        extra = rng.integers(0, 65536, more).astype(np.uint16)
        offsets[np.flatnonzero(offsets >= at)[-1] :] += np.uint32(more)
        words = np.concatenate([words[:at], extra, words[at:]])
    elif kind == 2 and words.size:  # one bit
        words[rng.integers(words.size)] ^= np.uint16(1 << rng.integers(16))
    elif kind == 3 and words.size:  # a run of them
        start = int(rng.integers(words.size))
        end = int(rng.integers(start, words.size + 1))
        words[start:end] = rng.integers(0, 65536, end - start)
    elif kind == 4:  # a state
        states[tuple(rng.integers(states.shape))] = rng.integers(1 << 16, 1 << 32)
    elif kind == 5:
        states[:] = rng.integers(1 << 16, 1 << 32, states.shape)
    elif kind == 6:  # groups begin elsewhere
        inner = rng.integers(0, words.size + 1, offsets.size - 2)
        offsets[1:-1] = np.sort(inner)
    elif kind == 7:  # no words at all
        words, offsets = words[:0], np.zeros_like(offsets)
    else:
        words = rng.integers(0, 65536, int(rng.integers(2 * words.size + 2))).astype(np.uint16)
        offsets = np.sort(rng.integers(0, words.size + 1, offsets.size)).astype(np.uint32)
        offsets[0], offsets[-1] = 0, words.size
    return Coded(states, offsets, words)
