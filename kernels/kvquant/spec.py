"""What the kernels work on: the arrays of a transform, and the order of coefficients in tiles."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[Any]
I16 = npt.NDArray[np.int16]
I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

LANES = 32  # coefficients in a tile: the lanes of the entropy coder; part of the stored format
MAX_GRID = 32767  # a value on its channel's grid, and a coefficient, fit int16 with both signs
MAX_RECON = 8 * 32768 + 3  # largest |8 q - sign(q) d| of any int16 q
_MAX_EXPONENT = 100  # x * 2^100 of a subnormal rounds to 0 with or without flushing
_EXACT = 2.0**53

# The unsigned type in which planes hold the bits of a dtype.
WORDS: dict[str, np.dtype[Any]] = {
    "bf16": np.dtype(np.uint16),
    "fp16": np.dtype(np.uint16),
    "fp32": np.dtype(np.uint32),
    "fp8_e4m3": np.dtype(np.uint8),
    "fp8_e5m2": np.dtype(np.uint8),
}


class KvQuantError(ValueError):
    """Symbols or escapes that no encoder writes: the data is damaged, treat it as a miss."""


@dataclass(frozen=True, eq=False)
class TransformArrays:
    """A transform: B blocks of `block_channels` (n) channels of the flattened S * C axis.

    Levels are counted from the coarsest, 0; the step of a level is a third of the one before.
    Checked when made, so that the kernels may rely on every bound; not changed afterwards.

    Attributes:
        num_planes: S.
        num_channels: C, channels of a plane.
        block_channels: n; divides C or is a multiple of it, and divides S * C.
        num_levels: L.
        grid_exp: i8 `[B, n]`, the grid of a channel is 2^grid_exp.
        mean: i32 `[B, n]` in grid points.
        forward: i32 `[B, n, n]`, (channel, coefficient).
        inverse: i32 `[B, n, n]`, (coefficient, channel).
        inv_step: f64 `[L, B, n]`, one over the step of a coefficient.
        recon_shift: u8 `[L, B, n]`, 0 to 3 eighths of a step towards zero.
        mean_f32: f32 `[B, n]` in units of the values.
        out_scale: f32 `[L, B, n]`, the value of one unit of the inverse transform.
        num_live: i32 `[L, B]`, coefficients kept; the first ones of a block, never fewer at a finer
            level.
        classes: u16 `[L, B, n]`, table of each coefficient's base symbols.
        refine_classes: u16 `[L, B, n]`, first of three tables of its refinements to this level.
        radius: u8 `[K]`, the largest |q| that a table has a symbol for; at most 126.
    """

    num_planes: int
    num_channels: int
    block_channels: int
    num_levels: int
    grid_exp: npt.NDArray[np.int8]
    mean: I32
    forward: I32
    inverse: I32
    inv_step: F64
    recon_shift: U8
    mean_f32: F32
    out_scale: F32
    num_live: I32
    classes: U16
    refine_classes: U16
    radius: U8

    def __post_init__(self) -> None:
        s, c, n, levels = (
            self.num_planes, self.num_channels, self.block_channels, self.num_levels
        )  # fmt: skip
        if min(s, c, n, levels) < 1 or (s * c) % n or (n % c and c % n):
            raise ValueError(
                f"blocks of {n} channels must divide planes of {c} or be whole planes of {s}, "
                f"and there must be a level, got {levels}"
            )
        b = self.num_blocks
        shapes: dict[str, tuple[type, tuple[int, ...]]] = {
            "grid_exp": (np.int8, (b, n)),
            "mean": (np.int32, (b, n)),
            "forward": (np.int32, (b, n, n)),
            "inverse": (np.int32, (b, n, n)),
            "inv_step": (np.float64, (levels, b, n)),
            "recon_shift": (np.uint8, (levels, b, n)),
            "mean_f32": (np.float32, (b, n)),
            "out_scale": (np.float32, (levels, b, n)),
            "num_live": (np.int32, (levels, b)),
            "classes": (np.uint16, (levels, b, n)),
            "refine_classes": (np.uint16, (levels, b, n)),
            "radius": (np.uint8, self.radius.shape[:1]),
        }
        for name, (kind, shape) in shapes.items():
            array = getattr(self, name)
            if array.dtype != kind or array.shape != shape or not array.flags.c_contiguous:
                raise ValueError(
                    f"{name} must be C-contiguous {np.dtype(kind)} {list(shape)}, got "
                    f"{array.dtype} {list(array.shape)}"
                )
            if not array.flags.behaved:
                object.__setattr__(self, name, array.copy())
        self._check_ranges()

    def _check_ranges(self) -> None:
        n, tables = self.block_channels, self.radius.size
        coarser, finer = self.num_live[:-1], self.num_live[1:]
        checks = {
            f"|grid_exp| <= {_MAX_EXPONENT}": (np.abs(self.grid_exp.astype(np.int16)) <= 100).all(),
            "|mean| <= 32768": (np.abs(self.mean.astype(np.int64)) <= 32768).all(),
            "inv_step finite and positive": np.isfinite(self.inv_step).all()
            and (self.inv_step > 0).all(),
            "recon_shift <= 3": (self.recon_shift <= 3).all(),
            "mean_f32 finite": np.isfinite(self.mean_f32).all(),
            "out_scale finite": np.isfinite(self.out_scale).all(),
            f"0 <= num_live <= {n}": (self.num_live >= 0).all() and (self.num_live <= n).all(),
            "num_live not less at a finer level": (coarser <= finer).all(),
            "radius of at least one table, at most 126": tables and (self.radius <= 126).all(),
            "classes of known tables": (self.classes < tables).all(),
            "refine_classes of known tables": (self.refine_classes[1:] + 2 < tables).all(),
            "sums of the transforms below 2^53": all(
                65536.0 * np.abs(self.forward[b].astype(np.float64)).sum(0).max() < _EXACT
                and MAX_RECON * np.abs(self.inverse[b].astype(np.float64)).sum(0).max() < _EXACT
                for b in range(self.num_blocks)
            ),
        }
        for wanted, holds in checks.items():
            if not holds:
                raise ValueError(f"transform arrays: expected {wanted}")

    @property
    def num_blocks(self) -> int:
        """B."""
        return self.num_planes * self.num_channels // self.block_channels

    def layout(self, level: int) -> Layout:
        """Where the coefficients of a level lie in tiles."""
        return self._layouts[self.check_level(level)]

    def check_level(self, level: int) -> int:
        """`level`, or ValueError if there is none of that number."""
        if not 0 <= level < self.num_levels:
            raise ValueError(f"level must be in [0, {self.num_levels}), got {level}")
        return level

    def moves(self, level: int) -> npt.NDArray[np.uint64] | None:
        """How coefficients of `level - 1` lie in the tiles of `level`.

        Returns:
            uint64 `[M, 3]`: runs of coefficients that cross no tile in either, as position at
            `level - 1`, position at `level` and number; None if the two layouts are the same.
        """
        self.check_level(level - 1)
        return self._moves[self.check_level(level) - 1]

    @cached_property
    def _layouts(self) -> tuple[Layout, ...]:
        return tuple(Layout.of(self, level) for level in range(self.num_levels))

    @cached_property
    def _moves(self) -> tuple[npt.NDArray[np.uint64] | None, ...]:
        found: list[npt.NDArray[np.uint64] | None] = []
        for level in range(1, self.num_levels):
            coarse, fine = self.layout(level - 1), self.layout(level)
            if np.array_equal(coarse.starts, fine.starts):
                found.append(None)
                continue
            source = np.arange(coarse.num_live)
            block = np.searchsorted(coarse.starts, source, side="right") - 1
            target = source - coarse.starts[block] + fine.starts[block]
            cut = (source % LANES == 0) | (target % LANES == 0) | (source == coarse.starts[block])
            begin = np.flatnonzero(cut)
            num = np.diff(begin, append=source.size)
            found.append(np.stack([begin, target[begin], num], axis=1).astype(np.uint64))
        return tuple(found)


@dataclass(frozen=True, eq=False)
class Layout:
    """The order of one level's live coefficients: block after block, cut into tiles of 32 lanes.

    Attributes:
        starts: i64 `[B + 1]`, position of each block's first coefficient; the last is their number.
        num_tiles: N.
        classes: u16 `[N, 32]`, table of each lane's base symbols; 0 in padding.
        refine_classes: u16 `[N, 32]`, first of three tables of each lane's refinements; 0 in
            padding.
        radius: u8 `[N, 32]`, the radius of `classes`; 0 in padding.
        shift: u8 `[N, 32]`, the recon shift; 0 in padding.
    """

    starts: I64
    num_tiles: int
    classes: U16
    refine_classes: U16
    radius: U8
    shift: U8

    @classmethod
    def of(cls, arrays: TransformArrays, level: int) -> Layout:
        """The layout of a level."""
        live = arrays.num_live[level]
        starts = np.zeros(arrays.num_blocks + 1, np.int64)
        np.cumsum(live, out=starts[1:])
        num_tiles = -(-int(starts[-1]) // LANES)
        mask = np.arange(arrays.block_channels) < live[:, None]

        def lanes(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
            flat = np.zeros(num_tiles * LANES, values.dtype)
            flat[: starts[-1]] = values[mask]
            return flat.reshape(num_tiles, LANES)

        classes = lanes(arrays.classes[level])
        return cls(
            starts,
            num_tiles,
            classes,
            lanes(arrays.refine_classes[level]),
            lanes(arrays.radius[arrays.classes[level]]),
            lanes(arrays.recon_shift[level]),
        )

    @property
    def num_live(self) -> int:
        """Live coefficients of a token."""
        return int(self.starts[-1])


@dataclass(frozen=True, eq=False)
class RawRows:
    """Rows, the channels of one block at one token, that are kept as they are.

    Attributes:
        index: u32 `[R]`, `block * T + token`, ascending; none of them at a token of `sinks`.
        bits: words `[R, n]`.
        sinks: words `[S, min(raw_tokens, T), C]`, the first tokens.
    """

    index: U32
    bits: Words
    sinks: Words


@dataclass(frozen=True, eq=False)
class Quantised:
    """Quantised planes.

    Attributes:
        tiles: i16 `[N, T, 32]`, the live coefficients; 0 in padding, in raw rows and at sinks.
        raw: the rows kept as they are.
    """

    tiles: I16
    raw: RawRows


def behaved(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """`array`, or a copy if it is read-only or unaligned, which numba would compile for."""
    return array if array.flags.behaved else array.copy()


def row_places(
    index: npt.NDArray[Any], arrays: TransformArrays, num_tokens: int
) -> tuple[I64, I64, I64]:
    """Plane `[R, n]`, token `[R, 1]` and channel `[R, n]` of rows given as in `RawRows.index`."""
    block, token = np.divmod(index.astype(np.int64), num_tokens)
    channel = block[:, None] * arrays.block_channels + np.arange(arrays.block_channels)
    return channel // arrays.num_channels, token[:, None], channel % arrays.num_channels


def check_dtype(dtype: str) -> np.dtype[Any]:
    """The type of the words of a dtype, or ValueError."""
    if dtype not in WORDS:
        raise ValueError(f"dtype must be one of {list(WORDS)}, got {dtype!r}")
    return WORDS[dtype]


def check_planes(planes: Words, dtype: str, arrays: TransformArrays) -> None:
    """Raise ValueError unless `planes` are words `[S, T, C]` of the transform's shape."""
    kind = check_dtype(dtype)
    s, c = arrays.num_planes, arrays.num_channels
    if planes.ndim != 3 or planes.shape[0] != s or planes.shape[2] != c or not planes.shape[1]:
        raise ValueError(f"planes must be [{s}, T, {c}] with T > 0, got {list(planes.shape)}")
    if planes.dtype != kind or not planes.flags.c_contiguous:
        raise ValueError(f"planes of {dtype} must be C-contiguous {kind}, got {planes.dtype}")
    check_indices(arrays, planes.shape[1])


def check_indices(arrays: TransformArrays, num_tokens: int) -> None:
    """Raise ValueError if positions of a chunk would not fit the u32 that they are stored in."""
    if (arrays.num_planes * arrays.num_channels + LANES) * num_tokens >= 1 << 32:
        raise ValueError(f"{num_tokens} tokens are too many for one chunk; split it")


def check_tiles(tiles: npt.NDArray[Any], kind: type, layout: Layout, what: str = "tiles") -> None:
    """Raise ValueError unless `tiles` are `[N, T, 32]` of a layout."""
    wanted = (layout.num_tiles, tiles.shape[1] if tiles.ndim == 3 else 0, LANES)
    if tiles.dtype != kind or tiles.shape != wanted or not tiles.flags.c_contiguous:
        raise ValueError(
            f"{what} must be C-contiguous {np.dtype(kind)} [{layout.num_tiles}, T, {LANES}], got "
            f"{tiles.dtype} {list(tiles.shape)}"
        )


def clamp_limits(arrays: TransformArrays, first_level: int, last_level: int) -> tuple[I32, I32]:
    """Bounds on |q| at `last_level` of a stream whose base is `first_level`, i32 `[B, n]` each.

    A coefficient that becomes live at a refinement has coarse value 0, so that its value there is
    -1, 0 or 1; m levels further the same is (3^(m + 1) - 1) / 2.  A value of 3 or more there, or in
    a coefficient that stays dead, makes the row raw, as does one that does not fit int16.

    Returns:
        The largest |q| that is kept, and the smallest that makes its row raw.
    """
    column = np.arange(arrays.block_channels)
    clamp = np.zeros((arrays.num_blocks, arrays.block_channels), np.int32)
    raw = np.full_like(clamp, 3)
    for level in range(last_level, first_level, -1):
        power = 3 ** min(last_level - level, 9)
        live = column < arrays.num_live[level][:, None]
        clamp[live] = min((3 * power - 1) // 2, MAX_GRID)
        raw[live] = min(3 * power - (power - 1) // 2, MAX_GRID + 1)
    live = column < arrays.num_live[first_level][:, None]
    clamp[live], raw[live] = MAX_GRID, MAX_GRID + 1
    return clamp, raw
