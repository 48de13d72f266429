"""Speed of encoding and decoding on one core, in MB of raw KV per second."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from bench.codec.hier import quantised_tiles
from bench.core.case import CaseFailedError
from bench.core.speed import Memcpy
from bench.core.stats import median
from sglang_ext.codec import Codec, create_codec
from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.float_bits import Bits
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.kernels import kvquant
from sglang_ext.kernels.rans import api as rans
from sglang_ext.kernels.rans.tables import Tables

_MEMCPY_BYTES = 256 << 20


@dataclass(frozen=True)
class Speed:
    """One engine's figures.

    Attributes:
        name: what ran.
        encode_mb_s, decode_mb_s: medians; MB (1e6 bytes) of raw KV, whatever was coded.
        bits_per_value: what came out.
        samples: seconds of each run of encode and of decode.
    """

    name: str
    encode_mb_s: float
    decode_mb_s: float
    bits_per_value: float
    samples: tuple[list[float], list[float]]


def measure(
    name: str,
    raw_bytes: int,
    num_values: int,
    encode: Callable[[], Any],
    decode: Callable[[Any], Any],
    size: Callable[[Any], int],
    repeats: int,
) -> Speed:
    """Runs both once to warm up, then `repeats` times in turns."""
    coded = encode()
    decode(coded)
    samples: tuple[list[float], list[float]] = ([], [])
    for _ in range(repeats):
        start_s = time.perf_counter()
        coded = encode()
        middle_s = time.perf_counter()
        decode(coded)
        samples[0].append(middle_s - start_s)
        samples[1].append(time.perf_counter() - middle_s)
    speeds = [raw_bytes / median(part) / 1e6 for part in samples]
    return Speed(name, speeds[0], speeds[1], 8 * size(coded) / num_values, samples)


def codec_speed(name: str, codec: Codec, planes: Bits, level: int, repeats: int) -> Speed:
    """From tensors to bytes and back."""
    out = np.empty_like(planes)
    return measure(
        name,
        planes.nbytes,
        planes.size,
        lambda: codec.encode(planes, level=level),
        lambda data: codec.decode(data, out),
        len,
        repeats,
    )


def head_dim_speeds(chunks: Sequence[Bits], dtype: str, repeats: int) -> list[Speed]:
    """The product's codec at D = 64 and 128, at about 2 bits a value, on the same values.

    For D = 128 two neighbouring layers' planes count as one of twice the channels. The profile is
    the one that is made without a model, of the same block size.
    """
    speeds = []
    for head_dim in (64, 128):
        shaped = [_wider(chunk, head_dim // 64) for chunk in chunks]
        profile = profile_from_planes(shaped, dtype, head_dim=head_dim)
        codec = create_codec("hier", dtype=dtype, profile=profile)
        level = profile.default_level
        speeds.append(codec_speed(f"D = {head_dim}", codec, shaped[0], level, repeats))
    return speeds


def _wider(planes: Bits, factor: int) -> Bits:
    """K (and V) planes of `factor` layers side by side."""
    num_planes, num_tokens, num_channels = planes.shape
    grouped = planes.reshape(-1, factor, 2, num_tokens, num_channels).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(grouped).reshape(num_planes // factor, num_tokens, -1)


def zstd_speed(planes: Bits, level: int, repeats: int) -> Speed:
    """zstandard on byte planes."""
    pieces = np.ascontiguousarray(planes.reshape(-1).view(np.uint8).reshape(planes.size, -1).T)
    encoder, decoder = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
    return measure(
        f"zstd-{level}, byte planes",
        planes.nbytes,
        planes.size,
        lambda: encoder.compress(pieces.data),
        decoder.decompress,
        len,
        repeats,
    )


def memcpy_mb_s(repeats: int) -> float:
    """One core copying, bytes counted once."""
    copier = Memcpy(_MEMCPY_BYTES)
    copier.run()
    return 1000 * median([copier.run() for _ in range(repeats)])


def entropy_stage(profile: Profile, dtype: str, planes: Bits, repeats: int) -> list[Speed]:
    """The default level's symbols alone: rANS, zstandard and constriction on the same ones.

    Raw MB are those of the planes that the symbols stand for.

    Raises:
        CaseFailedError: constriction or rANS gave other symbols back.
    """
    level = min(profile.default_level, profile.max_base_level)
    tiles = quantised_tiles(profile, dtype, planes, level, 0)
    layer, _ = kvquant.base_symbols(tiles, profile.transform, level)
    symbols, classes, tables = layer.symbols, layer.classes, Tables(profile.freqs)
    group = rans.tiles_per_group_for(planes.shape[1])
    out = np.empty_like(symbols)

    def size_of(coded: rans.Coded) -> int:
        return coded.nbytes + 4 * len(coded.states)

    common = (planes.nbytes, planes.size)
    speeds = [
        measure(
            "rANS",
            *common,
            lambda: rans.encode(symbols, classes, tables, group),
            lambda coded: rans.decode(coded, classes, tables, planes.shape[1], group, None, out),
            size_of,
            repeats,
        )
    ]
    if not np.array_equal(out, symbols):
        raise CaseFailedError("rANS decodes to other symbols")
    columns = np.ascontiguousarray(symbols.transpose(0, 2, 1))
    for zstd_level in (1, 3):
        encoder, decoder = zstandard.ZstdCompressor(level=zstd_level), zstandard.ZstdDecompressor()
        speeds.append(
            measure(
                f"zstd-{zstd_level} on symbols",
                *common,
                lambda encoder=encoder: encoder.compress(columns.data),  # type: ignore[misc]
                decoder.decompress,
                len,
                repeats,
            )
        )
    speeds.append(_constriction(columns, classes, profile, common, max(1, repeats // 3)))
    return speeds


def _constriction(
    columns: NDArray[np.uint8],
    classes: NDArray[np.uint16],
    profile: Profile,
    common: tuple[int, int],
    repeats: int,
) -> Speed:
    """constriction's ANS coder (a development dependency) under the same tables."""
    import constriction

    stream = constriction.stream
    rows = columns.reshape(-1, columns.shape[2]).astype(np.int32)
    numbers = classes.reshape(-1)
    order = np.argsort(numbers, kind="stable")
    used, starts = np.unique(numbers[order], return_index=True)
    groups = np.split(order, starts[1:])
    runs: list[tuple[Any, NDArray[np.int32]]] = []
    for table, members in zip(used.tolist(), groups, strict=True):
        width = 2 * int(profile.radius[table]) + 2
        shares = profile.freqs[table, :width].astype(np.float64)
        if np.count_nonzero(shares) < 2:
            continue  # nothing to code: padding
        model = stream.model.Categorical(shares / shares.sum(), perfect=False)
        runs.append((model, np.ascontiguousarray(rows[members].reshape(-1))))

    def encode() -> NDArray[np.uint32]:
        coder = stream.stack.AnsCoder()
        for model, values in reversed(runs):
            coder.encode_reverse(values, model)
        words: NDArray[np.uint32] = coder.get_compressed()
        return words

    def decode(words: NDArray[np.uint32]) -> list[NDArray[np.int32]]:
        coder = stream.stack.AnsCoder(words)
        return [coder.decode(model, len(values)) for model, values in runs]

    back = decode(encode())
    if any(not np.array_equal(b, values) for b, (_, values) in zip(back, runs, strict=True)):
        raise CaseFailedError("constriction decodes to other symbols")
    return measure("constriction ANS", *common, encode, decode, lambda words: words.nbytes, repeats)


def as_json(speeds: Sequence[Speed]) -> dict[str, dict[str, float]]:
    """Figures by name, for the report."""
    return {
        speed.name: {
            "encode_mb_s": speed.encode_mb_s,
            "decode_mb_s": speed.decode_mb_s,
            "bits_per_value": speed.bits_per_value,
        }
        for speed in speeds
    }
