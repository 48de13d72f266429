"""Checks of the arguments, and dispatch to an engine; all engines make the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import cpu, naive, vector, wide
from .tables import LANES, STATE_LOW, U8, U16, U32, RansError, Tables

Engine = Literal["numba", "naive", "triton"]
_U = np.uint64
_kernels = wide if vector.SUPPORTED else cpu
_NO_CONTEXT = np.zeros(1, np.uint8)
_REASONS = {
    cpu.RAN_OUT: "its words end before its symbols do",
    cpu.LEFT_OVER: "it has more words than its symbols need",
    cpu.END_STATE: "a lane does not end in the state that encoding starts with",
}


@dataclass(frozen=True, eq=False)
class Coded:
    """What `encode` makes of N tiles in G groups.

    Attributes:
        states: uint32 `[G, 32]`, the state of each lane to begin decoding with.
        offsets: uint32 `[G + 1]`, where each group's words begin in `words`, and the end.
        words: uint16 `[W]`, all groups' words.
    """

    states: U32
    offsets: U32
    words: U16

    @property
    def nbytes(self) -> int:
        """Bytes of states and words; offsets can be stored as lengths in fewer than they have."""
        return int(self.states.nbytes + self.words.nbytes)


def num_groups(num_tiles: int, tiles_per_group: int) -> int:
    """Groups that `num_tiles` tiles make."""
    return -(-num_tiles // tiles_per_group)


def tiles_per_group_for(num_tokens: int, symbols_per_lane: int = 2048) -> int:
    """Tiles of `num_tokens` to put in a group, so that the states cost little.

    A lane's state takes 16 bits more than its share of the words would.
    """
    return max(1, -(-symbols_per_lane // num_tokens))


def encode(
    symbols: U8,
    classes: U16,
    tables: Tables,
    tiles_per_group: int,
    context: U8 | None = None,
    engine: Engine = "numba",
) -> Coded:
    """Encode tiles of symbols; runs on the calling thread, without the GIL.

    Args:
        symbols: uint8 `[N, T, 32]`: tile, token, lane.
        classes: uint16 `[N, 32]`, the table of each lane of each tile.
        tables: the frequency tables.
        tiles_per_group: tiles that share 32 states and a stream of words; the last group may
            have fewer.
        context: uint8 `[N, T, 32]`, added to the class symbol by symbol, or None.
        engine: what to run it on; all make the same.

    Raises:
        ValueError: shapes, dtypes or tables do not fit, a symbol has frequency 0 in its table, or
            there are 2^32 symbols or more.
    """
    symbols, classes, context = _checked_tiles(symbols, classes, tables, tiles_per_group, context)
    if symbols.size >= 1 << 32:
        raise ValueError(f"at most 2^32 - 1 symbols at a time, got {symbols.size}")
    if engine == "naive":
        return Coded(*naive.encode(symbols, classes, tables, tiles_per_group, context))
    if engine == "triton":
        from . import gpu

        return Coded(*gpu.encode(symbols, classes, tables, tiles_per_group, context))
    num_tiles, num_tokens, _ = symbols.shape
    groups = num_groups(num_tiles, tiles_per_group)
    tiles = min(tiles_per_group, num_tiles)
    states, offsets = np.empty((groups, LANES), np.uint32), np.zeros(groups + 1, np.uint32)
    # Room for the worst case; pages of it that are not written are never made real.
    words = np.empty(symbols.size, np.uint16)
    failed = _kernels.encode(
        symbols.reshape(-1),
        tables.encode_lut,
        classes.reshape(-1),
        _NO_CONTEXT if context is None else context.reshape(-1),
        context is not None,
        _U(num_tokens),
        _U(tiles_per_group),
        np.empty(tiles * num_tokens * LANES + 1, np.uint16),
        states.reshape(-1),
        offsets,
        words,
    )
    if failed:
        first = (int(failed) - 1) * tiles_per_group
        raise ValueError(f"a symbol of tiles {first}.. has frequency 0 in its table")
    return Coded(states, offsets, words[: offsets[-1]])


def decode(
    coded: Coded,
    classes: U16,
    tables: Tables,
    num_tokens: int,
    tiles_per_group: int,
    context: U8 | None,
    out: U8,
    engine: Engine = "numba",
) -> None:
    """Decode what `encode` made; runs on the calling thread, without the GIL.

    Neither reads nor writes outside the arrays, whatever `coded` holds. If it returns, encoding
    `out` again makes `coded`, bit by bit; that does not mean that nobody has changed it.

    Args:
        coded: states, offsets and words; may be views of untrusted bytes.
        classes: uint16 `[N, 32]`, as encoded.
        tables: the frequency tables.
        num_tokens: T.
        tiles_per_group: as encoded.
        context: uint8 `[N, T, 32]`, as encoded, or None.
        out: uint8 `[N, T, 32]`, C-contiguous, to be filled. Holds anything after an error.
        engine: what to run it on.

    Raises:
        RansError: `coded` is not what `encode` makes of N such tiles.
        ValueError: shapes, dtypes or tables of the other arguments do not fit.
    """
    if out.shape != (classes.shape[0], num_tokens, LANES) or not out.flags.c_contiguous:
        raise ValueError(
            f"out must be C-contiguous [{classes.shape[0]}, {num_tokens}, {LANES}], got {out.shape}"
        )
    if not out.flags.writeable:
        raise ValueError("out must be writeable")
    _, classes, context = _checked_tiles(out, classes, tables, tiles_per_group, context)
    states, offsets, words = _checked_coded(coded, num_groups(out.shape[0], tiles_per_group))
    if engine == "naive":
        naive.decode(states, offsets, words, classes, tables, tiles_per_group, context, out)
        return
    if engine == "triton":
        from . import gpu

        gpu.decode(states, offsets, words, classes, tables, tiles_per_group, context, out)
        return
    failed = int(
        _kernels.decode(
            words,
            offsets,
            states.reshape(-1),
            tables.decode_lut,
            classes.reshape(-1),
            _NO_CONTEXT if context is None else context.reshape(-1),
            context is not None,
            _U(num_tokens),
            _U(tiles_per_group),
            out.reshape(-1),
        )
    )
    if failed:
        raise RansError(f"group {failed >> 2} is damaged: {_REASONS[failed & 3]}")


def warm_up() -> None:
    """Compile, or load from the cache, the CPU kernels; some seconds the first time on a machine.

    Every call uses the same two signatures, so nothing is compiled later.
    """
    freqs = np.zeros((1, 256), np.uint16)
    freqs[0, :2] = 2048
    tables, classes = Tables(freqs), np.zeros((1, LANES), np.uint16)
    symbols = np.zeros((1, 1, LANES), np.uint8)
    decode(encode(symbols, classes, tables, 1), classes, tables, 1, 1, None, symbols)


def _checked_tiles(
    symbols: U8, classes: U16, tables: Tables, tiles_per_group: int, context: U8 | None
) -> tuple[U8, U16, U8 | None]:
    if symbols.ndim != 3 or symbols.shape[2] != LANES or symbols.dtype != np.uint8:
        raise ValueError(f"symbols must be uint8 [N, T, 32], got {symbols.dtype} {symbols.shape}")
    if not symbols.shape[1]:
        raise ValueError(f"tiles must have at least one token, got {symbols.shape}")
    if classes.shape != (symbols.shape[0], LANES) or classes.dtype != np.uint16:
        raise ValueError(
            f"classes must be uint16 [{symbols.shape[0]}, 32], got {classes.dtype} {classes.shape}"
        )
    if tiles_per_group < 1:
        raise ValueError(f"tiles_per_group must be positive, got {tiles_per_group}")
    highest = int(classes.max(initial=0))
    if context is not None:
        if context.shape != symbols.shape or context.dtype != np.uint8:
            raise ValueError(
                f"context must be uint8 {symbols.shape}, got {context.dtype} {context.shape}"
            )
        context = _plain(context)
        highest += int(context.max(initial=0))
    if highest >= tables.num_tables:
        raise ValueError(
            f"the highest class plus the highest context must be under {tables.num_tables}, "
            f"got {highest}"
        )
    return _plain(symbols), _plain(classes), context


def _checked_coded(coded: Coded, groups: int) -> tuple[U32, U32, U16]:
    states, offsets, words = coded.states, coded.offsets, coded.words
    for name, array, shape, kind in (
        ("states", states, (groups, LANES), np.uint32),
        ("offsets", offsets, (groups + 1,), np.uint32),
        ("words", words, (words.size,), np.uint16),
    ):
        if array.shape != shape or array.dtype != kind:
            raise RansError(
                f"{name} must be {np.dtype(kind)} {shape}, got {array.dtype} {array.shape}"
            )
    if offsets[0] != 0 or offsets[-1] != words.size or (offsets[1:] < offsets[:-1]).any():
        raise RansError(f"offsets must rise from 0 to the number of words, {words.size}")
    if states.size and int(states.min()) < STATE_LOW:
        raise RansError(f"states must be at least {STATE_LOW}, got {int(states.min())}")
    return _plain(states), _plain(offsets), _plain(words)


def _plain(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array, or a copy of it, such that numba sees one type only."""
    return np.require(array, array.dtype.newbyteorder("="), ["C", "A", "W"])
