"""Profiles: what codec ``hier`` knows of a model, measured once, kept in a ``.hkp`` file.

The file: ``HKVP``, version u16, length of the header u32, the header (msgpack), the arrays (one
zstandard frame; each little-endian in the narrowest integers that hold it, bytes of equal weight
together), and xxh3-64 of all that. Nothing in it is trusted: sizes are bounded before memory is
taken, and :meth:`Profile.validate` checks every invariant that encoders and decoders rely on.
"""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from sglang_ext.codec.base import MAX_CHANNELS, MAX_PLANES, CodecError
from sglang_ext.kernels.kvquant.spec import TransformArrays

# Stored on disk; never renumber.
_MAGIC, _VERSION = b"HKVP", 1
_HEAD = struct.Struct("<4sHI")
_MAX_HEADER_BYTES = 1 << 16
_MAX_CONTENT_BYTES = 1 << 32

PROB_SUM = 4096
ALPHABET = 256
MAX_RADIUS = 126
NUM_CONTEXTS = 3
MAX_LEVELS = 16
MAX_TABLES = 4096
MAX_RAW_TOKENS = 64
# Of coefficients that lie outside their table: more would cost as much as a refinement layer does.
_MAX_ESCAPES = 3e-4

_INTS = (
    "num_planes", "num_channels", "head_dim", "block_channels", "num_levels", "default_level",
    "raw_tokens", "num_tables",
)  # fmt: skip
# In the order of the file, and of the digest.
_ARRAYS: dict[str, str] = {
    "grid_exp": "|i1",
    "mean": "<i4",
    "forward": "<i4",
    "inverse": "<i4",
    "inv_step": "<f8",
    "recon_shift": "|u1",
    "mean_f32": "<f4",
    "out_scale": "<f4",
    "num_live": "<i4",
    "classes": "<u2",
    "refine_classes": "<u2",
    "freqs": "<u2",
    "radius": "|u1",
}


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
            **{name: getattr(self, name) for name in _ARRAYS if name != "freqs"},
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
        digest.update(struct.pack(f"<{len(_INTS)}q", *(self._ints()[name] for name in _INTS)))
        for name, kind in _ARRAYS.items():
            digest.update(np.ascontiguousarray(getattr(self, name), kind).data)
        return digest.digest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that :meth:`load` reads; it appears whole or not at all."""
        target = Path(path)
        part = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(self.to_bytes())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)

    def to_bytes(self) -> bytes:
        """The content of a file; the same on every machine for the same zstandard release."""
        stored = {name: _narrow(getattr(self, name), kind) for name, kind in _ARRAYS.items()}
        header: dict[str, Any] = dict(self._ints())
        header["widths"] = {name: array.itemsize for name, array in stored.items()}
        header["source"] = self.source[:4096]
        packed = msgpack.packb(header)
        content = b"".join(_shuffled(array) for array in stored.values())
        frame = zstandard.ZstdCompressor(level=19).compress(content)
        body = _HEAD.pack(_MAGIC, _VERSION, len(packed)) + packed + frame
        return bytes(body + xxhash.xxh3_64_digest(body))

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
    def from_bytes(cls, data: bytes) -> Profile:
        """The profile in a file's content.

        Raises:
            CodecError: it is none, or damaged.
        """
        if len(data) < _HEAD.size + 8 or data[:4] != _MAGIC:
            raise CodecError("expected a profile (magic HKVP)")
        if xxhash.xxh3_64_digest(data[:-8]) != data[-8:]:
            raise CodecError("the profile is damaged: wrong checksum; calibrate again")
        _, version, num_header = _HEAD.unpack_from(data)
        if version != _VERSION:
            raise CodecError(f"expected profile version {_VERSION}, got {version}")
        if num_header > min(_MAX_HEADER_BYTES, len(data) - _HEAD.size - 8):
            raise CodecError(f"profile header of {num_header} bytes is too long")
        ints, widths, source = _parse_header(data[_HEAD.size : _HEAD.size + num_header])
        frame = data[_HEAD.size + num_header : -8]
        fields: dict[str, Any] = _parse_arrays(frame, ints, widths) | _fields(ints)
        return cls(**fields, source=source)

    def _ints(self) -> dict[str, int]:
        values = {name: getattr(self, name) for name in _INTS if name != "num_tables"}
        return values | {"num_tables": len(self.freqs)}

    @cached_property
    def _is_base(self) -> npt.NDArray[np.bool_]:
        """Which tables have every symbol of their radius, and the escape."""
        used = np.arange(ALPHABET) <= 2 * self.radius.astype(np.int64)[:, None] + 1
        return np.asarray(((self.freqs > 0) == used).all(1))


def _fields(ints: dict[str, int]) -> dict[str, Any]:
    return {name: value for name, value in ints.items() if name != "num_tables"}


def _check_tables(freqs: npt.NDArray[Any], radius: npt.NDArray[Any]) -> None:
    if freqs.dtype != np.uint16 or freqs.ndim != 2 or freqs.shape[1] != ALPHABET:
        raise CodecError(f"profile: freqs must be u16 [K, 256], got {freqs.dtype} {freqs.shape}")
    if not 1 <= len(freqs) <= MAX_TABLES or radius.shape != (len(freqs),):
        raise CodecError(f"profile: expected 1 to {MAX_TABLES} tables, each with a radius")
    if (freqs.sum(1, dtype=np.int64) != PROB_SUM).any() or freqs[0, 0] != PROB_SUM:
        raise CodecError("profile: tables must sum to 4096, and the first be the padding's")


def _parse_header(data: bytes) -> tuple[dict[str, int], dict[str, int], str]:
    """Integers, widths of the stored arrays, and source; all of known types and bounded."""
    try:
        header = msgpack.unpackb(data, strict_map_key=True, max_map_len=64)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise CodecError(f"profile header: {error}") from error
    widths = header.get("widths") if isinstance(header, dict) else None
    source = header.get("source") if isinstance(header, dict) else None
    if not isinstance(widths, dict) or not isinstance(source, str):
        raise CodecError("profile header lacks fields")
    ints = {name: header.get(name) for name in _INTS}
    limits = {"num_planes": MAX_PLANES, "num_channels": MAX_CHANNELS, "num_levels": MAX_LEVELS}
    for name, value in ints.items():
        if type(value) is not int or not 0 <= value <= limits.get(name, 1 << 20):
            raise CodecError(f"profile header: {name} is {value!r}")
    for name, kind in _ARRAYS.items():
        size = np.dtype(kind).itemsize
        allowed = (1, 2, 4) if np.dtype(kind).kind == "i" else (size,)
        if widths.get(name) not in allowed or widths[name] > size:
            raise CodecError(f"profile header: {name} has a width of {widths.get(name)!r} bytes")
    return ints, widths, source


def _parse_arrays(frame: bytes, ints: dict[str, int], widths: dict[str, int]) -> dict[str, Any]:
    n, levels, tables = ints["block_channels"], ints["num_levels"], ints["num_tables"]
    total = ints["num_planes"] * ints["num_channels"]
    if not n or not total or total % n:
        raise CodecError(f"profile: blocks of {n} channels do not cover {total}")
    b = total // n
    shapes = dict.fromkeys(_ARRAYS, (levels, b, n)) | {
        "grid_exp": (b, n),
        "mean": (b, n),
        "mean_f32": (b, n),
        "forward": (b, n, n),
        "inverse": (b, n, n),
        "num_live": (levels, b),
        "freqs": (tables, ALPHABET),
        "radius": (tables,),
    }
    sizes = {name: int(np.prod(shape, dtype=object)) for name, shape in shapes.items()}
    expected = sum(sizes[name] * widths[name] for name in _ARRAYS)
    if expected > _MAX_CONTENT_BYTES:
        raise CodecError(f"profile of {expected} bytes is too large")
    content = _decompress(frame, expected)
    arrays, start = {}, 0
    for name, kind in _ARRAYS.items():
        end = start + sizes[name] * widths[name]
        arrays[name] = _unshuffled(content[start:end], kind, widths[name]).reshape(shapes[name])
        start = end
    return arrays


def _decompress(frame: bytes, expected: int) -> memoryview:
    try:
        if zstandard.frame_content_size(frame) != expected:
            raise CodecError("profile: the arrays have another size than the header says")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=expected)
    except zstandard.ZstdError as error:
        raise CodecError(f"profile: {error}") from error
    if len(content) != expected:
        raise CodecError(f"profile: expected {expected} bytes, got {len(content)}")
    return memoryview(content)


def _narrow(array: npt.NDArray[Any], kind: str) -> npt.NDArray[Any]:
    """The array in the narrowest signed integers that hold it; others as they are."""
    if np.dtype(kind).kind == "i" and array.size:
        low, high = int(array.min()), int(array.max())
        for width in (1, 2):
            limit = 1 << (8 * width - 1)
            if width < np.dtype(kind).itemsize and -limit <= low and high < limit:
                return np.ascontiguousarray(array, f"<i{width}")
    return np.ascontiguousarray(array, kind)


def _shuffled(array: npt.NDArray[Any]) -> bytes:
    """Bytes of equal weight together, which compresses better."""
    return array.reshape(-1).view(np.uint8).reshape(-1, array.itemsize).T.tobytes()


def _unshuffled(data: memoryview, kind: str, width: int) -> npt.NDArray[Any]:
    code = np.dtype(kind)
    stored = np.dtype(f"<{code.kind}{width}")
    grouped = np.frombuffer(data, np.uint8).reshape(width, -1)
    return np.ascontiguousarray(grouped.T).reshape(-1).view(stored).astype(code.newbyteorder("="))
