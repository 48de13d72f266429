"""Profiles: what codec ``hier`` knows of a model, measured once, kept in a ``.hkp`` file.

Nothing in a file is trusted: `profile_file` bounds sizes before memory is taken, and
:meth:`Profile.validate` checks every invariant that encoders and decoders rely on.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.codec.base import CodecError, LearnedShape
from sglang_ext.codec.profile_file import (
    ARRAYS,
    INTS,
    MAX_LEVELS,
    MAX_TABLES,
    num_array_bytes,
    pack,
    unpack,
)
from sglang_ext.kernels.kvquant.spec import TransformArrays
from sglang_ext.tiers.access import write_private

PROB_SUM = 4096
ALPHABET = 256
MAX_RADIUS = 126
NUM_CONTEXTS = 3
MAX_RAW_TOKENS = 64
# Of coefficients that lie outside their table: more would cost as much as a refinement layer does.
_MAX_ESCAPES = 3e-4
# Arrays whose first axis, or second behind the levels, is that of the blocks.
_BY_BLOCK = ("grid_exp", "mean", "forward", "inverse", "mean_f32")
_BY_LEVEL = ("inv_step", "recon_shift", "out_scale", "num_live", "classes", "refine_classes")


@dataclass(frozen=True, eq=False)
class Profile:
    """Transform, steps and entropy tables of one model.

    B blocks of n = ``block_channels`` consecutive channels cover the ``num_planes * num_channels``
    ones; L levels go from the coarsest, 0, each with a third of the step of the one before; K
    tables. Checked when made, never changed afterwards, shared by any number of threads.

    Attributes:
        num_planes: S, layer-major, K then V.
        num_channels: C, channels of a plane.
        head_dim: D; it only describes.
        block_channels: n; divides C or is a multiple of it.
        num_levels: L.
        default_level: the level to use when none is asked for.
        grid_exp: i8 [B, n]; a channel's grid is 2^grid_exp.
        mean: i32 [B, n], in grid points.
        forward: i32 [B, n, n], (channel, coefficient).
        inverse: i32 [B, n, n], (coefficient, channel).
        inv_step: f64 [L, B, n].
        recon_shift: u8 [L, B, n], eighths of a step towards zero.
        mean_f32: f32 [B, n].
        out_scale: f32 [L, B, n].
        num_live: i32 [L, B], coefficients kept, never fewer at a finer level.
        classes: u16 [L, B, n], table of each coefficient's base symbols.
        refine_classes: u16 [L, B, n], first of 3 tables for going from level l - 1 to l.
        freqs: u16 [K, 256], each row sums to 4096. Row 0 is the padding's.
        radius: u8 [K]; base symbols are q + radius, the escape is 2 radius + 1.
        raw_tokens: first tokens of a sequence that are worth keeping as they are.
        source: where it comes from, for people.
    """

    num_planes: int
    num_channels: int
    head_dim: int
    block_channels: int
    num_levels: int
    default_level: int
    grid_exp: npt.NDArray[np.int8]
    mean: npt.NDArray[np.int32]
    forward: npt.NDArray[np.int32]
    inverse: npt.NDArray[np.int32]
    inv_step: npt.NDArray[np.float64]
    recon_shift: npt.NDArray[np.uint8]
    mean_f32: npt.NDArray[np.float32]
    out_scale: npt.NDArray[np.float32]
    num_live: npt.NDArray[np.int32]
    classes: npt.NDArray[np.uint16]
    refine_classes: npt.NDArray[np.uint16]
    freqs: npt.NDArray[np.uint16]
    radius: npt.NDArray[np.uint8]
    raw_tokens: int = 0
    source: str = ""

    def __post_init__(self) -> None:
        """Checks everything; see :meth:`validate`."""
        self.validate()

    def validate(self) -> None:
        """Check every invariant that encoders and decoders rely on.

        Raises:
            CodecError: one does not hold; says which.
        """
        if not (1 <= self.num_levels <= MAX_LEVELS and 0 <= self.default_level < self.num_levels):
            raise CodecError(f"profile: {self.num_levels} levels, default {self.default_level}")
        if not 0 <= self.raw_tokens <= MAX_RAW_TOKENS:
            raise CodecError(f"profile: expected 0 to {MAX_RAW_TOKENS} raw tokens")
        _check_tables(self.freqs, self.radius)
        try:
            arrays = self.transform
        except (ValueError, TypeError, AttributeError) as error:
            raise CodecError(f"profile: {error}") from error
        live = np.arange(self.block_channels) < self.num_live[..., None]
        base = self.classes[live]
        if not self._is_base[base].all():
            raise CodecError("profile: a coefficient's table lacks a symbol of its radius")
        refined = self.refine_classes[1:][live[1:]].astype(np.int64)
        for context in range(NUM_CONTEXTS):
            rows = self.freqs[np.unique(refined + context)]
            if (rows[:, :3] == 0).any():
                raise CodecError("profile: a refinement's table lacks one of its three symbols")
        if arrays.num_blocks * self.block_channels != self.num_planes * self.num_channels:
            raise CodecError("profile: blocks do not cover the channels")

    @cached_property
    def transform(self) -> TransformArrays:
        """The arrays that the kernels take."""
        return TransformArrays(
            num_planes=self.num_planes,
            num_channels=self.num_channels,
            block_channels=self.block_channels,
            num_levels=self.num_levels,
            **{name: getattr(self, name) for name in ARRAYS if name != "freqs"},
        )

    @cached_property
    def max_base_level(self) -> int:
        """The finest level worth coding in one layer.

        Finer ones have coefficients beyond every table's radius, which as escapes cost 60 bits
        each; coded as a base of this level with refinements they cost 1.6 bits a level.
        """
        escape = self.freqs[np.arange(len(self.radius)), 2 * self.radius.astype(np.int64) + 1]
        wide = (self.radius == MAX_RADIUS) * (escape / PROB_SUM)
        live = np.arange(self.block_channels) < self.num_live[..., None]
        share = (wide[self.classes] * live).sum((1, 2)) / np.maximum(live.sum((1, 2)), 1)
        bad = np.flatnonzero(share > _MAX_ESCAPES)
        return max(int(bad[0]) - 1, 0) if bad.size else self.num_levels - 1

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name this profile in streams: of all numbers, not of ``source``."""
        digest = hashlib.blake2b(digest_size=32)
        digest.update(struct.pack(f"<{len(INTS)}q", *(self._ints()[name] for name in INTS)))
        for name, kind in ARRAYS.items():
            digest.update(np.ascontiguousarray(getattr(self, name), kind).data)
        return digest.digest()

    def of_rank(self, num_channels: int, rank: int, num_ranks: int) -> Profile:
        """What it says of the heads of one of several tensor parallel ranks.

        They have equal runs of the heads, in their order; with fewer heads than ranks some have the
        same. Blocks are coded one by one, so a rank's are coded as they would be with all others.

        Args:
            num_channels: of a plane on this rank.
            rank: its number.
            num_ranks: how many there are.

        Raises:
            CodecError: its blocks are not of one rank's heads each, or it is of another model.
        """
        if num_channels == self.num_channels:
            return self
        num_parts, rest = divmod(self.num_channels, num_channels)
        size = self.block_channels
        if rest or num_ranks % num_parts:
            raise CodecError(
                f"it is for planes of {self.num_channels} channels, which do not lie on "
                f"{num_ranks} ranks with {num_channels} on each"
            )
        if num_channels % size:
            raise CodecError(
                f"its blocks of {size} channels reach over the heads of several ranks, of which "
                f"each has {num_channels}; `hier-kv calibrate --max-block {num_channels}` makes "
                "one whose blocks do not"
            )
        own, in_plane = num_channels // size, self.num_channels // size
        first = rank * num_parts // num_ranks * own
        planes = np.arange(self.num_planes)[:, None]
        blocks = (in_plane * planes + np.arange(first, first + own)).reshape(-1)
        arrays = {name: getattr(self, name)[blocks] for name in _BY_BLOCK}
        for name in _BY_LEVEL:
            arrays[name] = np.ascontiguousarray(getattr(self, name)[:, blocks])
        return replace(self, num_channels=num_channels, **arrays)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return num_array_bytes(self._ints())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads, for this user; it appears whole or not at all."""
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            write_private(part, self.to_bytes())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def to_bytes(self) -> bytes:
        """The content of a file; the same on every machine for the same zstandard release."""
        return pack({name: getattr(self, name) for name in ARRAYS}, self._ints(), self.source)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Profile:
        """Read what :meth:`save` wrote.

        Raises:
            CodecError: it is no such file, or a damaged one.
            OSError: it cannot be read.
        """
        try:
            return cls.from_bytes(Path(path).read_bytes())
        except CodecError as error:
            raise CodecError(f"{path}: {error}") from error

    @classmethod
    def from_bytes(cls, data: bytes, shape: LearnedShape | None = None) -> Profile:
        """The profile in a file's content.

        Args:
            data: the content.
            shape: of the model that it must be of, where somebody else may have made the file.

        Raises:
            CodecError: it is none, damaged, or of another model.
        """
        arrays, ints, source = unpack(data, shape)
        fields: dict[str, Any] = arrays | ints
        fields.pop("num_tables")
        return cls(**fields, source=source)

    def _ints(self) -> dict[str, int]:
        values = {name: getattr(self, name) for name in INTS if name != "num_tables"}
        return values | {"num_tables": len(self.freqs)}

    @cached_property
    def _is_base(self) -> npt.NDArray[np.bool_]:
        """Which tables have every symbol of their radius, and the escape."""
        used = np.arange(ALPHABET) <= 2 * self.radius.astype(np.int64)[:, None] + 1
        return np.asarray(((self.freqs > 0) == used).all(1))


def _check_tables(freqs: npt.NDArray[Any], radius: npt.NDArray[Any]) -> None:
    if freqs.dtype != np.uint16 or freqs.ndim != 2 or freqs.shape[1] != ALPHABET:
        raise CodecError(f"profile: freqs must be u16 [K, 256], got {freqs.dtype} {freqs.shape}")
    if not 1 <= len(freqs) <= MAX_TABLES or radius.shape != (len(freqs),):
        raise CodecError(f"profile: expected 1 to {MAX_TABLES} tables, each with a radius")
    if (freqs.sum(1, dtype=np.int64) != PROB_SUM).any() or freqs[0, 0] != PROB_SUM:
        raise CodecError("profile: tables must sum to 4096, and the first be the padding's")
