"""The file of a profile: integers, arrays and a note, parsed without trust.

``HKVP``, version u16, length of the header u32, the header (msgpack), the arrays (one zstandard
frame; each little-endian in the narrowest integers that hold it, bytes of equal weight together),
and xxh3-64 of all that. Sizes are bounded before memory is taken: by what any model could need, and
for a file of another server by the local model's planes and by the file's own length.
"""

from __future__ import annotations

import struct
from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

from sglang_ext.codec.base import MAX_CHANNELS, MAX_PLANES, CodecError, LearnedShape

# Stored on disk; never renumber.
_MAGIC, _VERSION = b"HKVP", 1
_HEAD = struct.Struct("<4sHI")
_MAX_HEADER_BYTES = 1 << 16
_MAX_ARRAY_BYTES = 1 << 32
# What `hier-kv calibrate` makes is a fourth as long in a file as in memory.
_MAX_GROWTH, _FREE_BYTES = 64, 8 << 20
MAX_BLOCK_CHANNELS = 512

ALPHABET = 256
MAX_LEVELS = 16
MAX_TABLES = 4096
_MAX_SOURCE_CHARACTERS = 4096

INTS = (
    "num_planes", "num_channels", "head_dim", "block_channels", "num_levels", "default_level",
    "raw_tokens", "num_tables",
)  # fmt: skip
# In the order of the file, and of the digest.
ARRAYS: dict[str, str] = {
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


def pack(arrays: dict[str, npt.NDArray[Any]], ints: dict[str, int], source: str) -> bytes:
    """A file of these arrays, one for each of `ARRAYS`, and integers, one for each of `INTS`."""
    stored = {name: _narrow(arrays[name], kind) for name, kind in ARRAYS.items()}
    header: dict[str, Any] = dict(ints)
    header["widths"] = {name: array.itemsize for name, array in stored.items()}
    header["source"] = source[:_MAX_SOURCE_CHARACTERS]
    packed = msgpack.packb(header)
    content = b"".join(_shuffled(array) for array in stored.values())
    frame = zstandard.ZstdCompressor(level=19).compress(content)
    body = _HEAD.pack(_MAGIC, _VERSION, len(packed)) + packed + frame
    return bytes(body + xxhash.xxh3_64_digest(body))


def unpack(
    data: bytes, shape: LearnedShape | None = None
) -> tuple[dict[str, Any], dict[str, int], str]:
    """Arrays, integers and the note in a file. Shapes fit the integers; values may be anything.

    Args:
        data: the file's content.
        shape: of the model that it must be of, where somebody else may have made the file.

    Raises:
        CodecError: it is none, damaged, of another model, or larger than one can be.
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
    if shape is not None:
        _check_shape(ints, shape, len(frame))
    return _parse_arrays(frame, ints, widths), ints, source


def max_file_bytes(shape: LearnedShape) -> int:
    """No file of a model is longer."""
    n = min(MAX_BLOCK_CHANNELS, shape.num_planes * shape.num_channels)
    largest = dict.fromkeys(INTS, 0) | {
        "num_planes": shape.num_planes,
        "num_channels": -(-shape.num_channels // n) * n,
        "block_channels": n,
        "num_levels": MAX_LEVELS,
        "num_tables": MAX_TABLES,
    }
    return 2 * _MAX_HEADER_BYTES + num_array_bytes(largest) * 65 // 64


def num_array_bytes(ints: dict[str, int]) -> int:
    """Bytes that a profile of these integers takes in memory."""
    return sum(
        int(np.prod(axes, dtype=object)) * np.dtype(ARRAYS[name]).itemsize
        for name, axes in _shapes(ints).items()
    )


def _check_shape(ints: dict[str, int], shape: LearnedShape, frame_bytes: int) -> None:
    found = LearnedShape(ints["num_planes"], ints["num_channels"])
    if found != shape:
        raise CodecError(f"the profile is of a model of {found}, this one is of {shape}")
    if not 0 < ints["block_channels"] <= MAX_BLOCK_CHANNELS or ints["num_tables"] > MAX_TABLES:
        raise CodecError(
            f"a profile has blocks of at most {MAX_BLOCK_CHANNELS} channels and {MAX_TABLES}"
            f" tables, got {ints['block_channels']} and {ints['num_tables']}"
        )
    if num_array_bytes(ints) > _FREE_BYTES + _MAX_GROWTH * frame_bytes:
        raise CodecError(f"{frame_bytes} bytes would grow to {num_array_bytes(ints)}")


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
    ints = {name: header.get(name) for name in INTS}
    limits = {"num_planes": MAX_PLANES, "num_channels": MAX_CHANNELS, "num_levels": MAX_LEVELS}
    for name, value in ints.items():
        if type(value) is not int or not 0 <= value <= limits.get(name, 1 << 20):
            raise CodecError(f"profile header: {name} is {value!r}")
    for name, kind in ARRAYS.items():
        size = np.dtype(kind).itemsize
        allowed = (1, 2, 4) if np.dtype(kind).kind == "i" else (size,)
        if widths.get(name) not in allowed or widths[name] > size:
            raise CodecError(f"profile header: {name} has a width of {widths.get(name)!r} bytes")
    return ints, widths, source


def _parse_arrays(frame: bytes, ints: dict[str, int], widths: dict[str, int]) -> dict[str, Any]:
    n, total = ints["block_channels"], ints["num_planes"] * ints["num_channels"]
    if not n or not total or total % n:
        raise CodecError(f"profile: blocks of {n} channels do not cover {total}")
    if num_array_bytes(ints) > _MAX_ARRAY_BYTES:
        raise CodecError(f"profile of {num_array_bytes(ints)} bytes is too large")
    shapes = _shapes(ints)
    sizes = {name: int(np.prod(shape, dtype=object)) for name, shape in shapes.items()}
    expected = sum(sizes[name] * widths[name] for name in ARRAYS)
    content = _decompress(frame, expected)
    arrays, start = {}, 0
    for name, kind in ARRAYS.items():
        end = start + sizes[name] * widths[name]
        arrays[name] = _unshuffled(content[start:end], kind, widths[name]).reshape(shapes[name])
        start = end
    return arrays


def _shapes(ints: dict[str, int]) -> dict[str, tuple[int, ...]]:
    n, levels, tables = ints["block_channels"], ints["num_levels"], ints["num_tables"]
    b = ints["num_planes"] * ints["num_channels"] // n
    return dict.fromkeys(ARRAYS, (levels, b, n)) | {
        "grid_exp": (b, n),
        "mean": (b, n),
        "mean_f32": (b, n),
        "forward": (b, n, n),
        "inverse": (b, n, n),
        "num_live": (levels, b),
        "freqs": (tables, ALPHABET),
        "radius": (tables,),
    }


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
