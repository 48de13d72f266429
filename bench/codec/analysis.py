"""CacheGen's own analyses, of the product's codec: layers, groupings, stored levels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.codec.hier import quantised_tiles
from bench.codec.methods import Method
from bench.codec.quality import Point, Prepared
from sglang_ext.codec import create_codec
from sglang_ext.codec.calibration.hf_capture import CausalLm, compare
from sglang_ext.codec.float_bits import Bits
from sglang_ext.codec.hier.profile import Profile


def layer_sensitivity(
    lm: CausalLm, method: Method, prepared: Sequence[Prepared]
) -> list[dict[str, Any]]:
    """KL when only one layer's K and V went through the codec (CacheGen, figure 4)."""
    rows = []
    chunks = [window.planes(method) for window in prepared]
    backs = [method.decode(method.encode(chunk, True), chunk) for chunk in chunks]
    for layer in range(lm.num_layers):
        parts = []
        for window, back in zip(prepared, backs, strict=True):
            mixed = window.planes(method).copy()
            mixed[2 * layer : 2 * layer + 2] = back[2 * layer : 2 * layer + 2]
            said = lm.continuation(mixed, window.following, rotated=method.rotated)
            parts.append(float(compare(window.reference, said, window.following).kl.mean()))
        rows.append({"layer": layer, "kl": float(np.mean(parts)), "samples": parts})
    return rows


def grouping_entropy(profile: Profile, dtype: str, chunks: Sequence[Bits]) -> dict[str, float]:
    """Bits a live coefficient by what symbols are grouped by (CacheGen, figure 5).

    Of the quantised coefficients at the default level: empirical entropy within each group,
    weighted by the groups' sizes.
    """
    level = profile.default_level
    layout = profile.transform.layout(level)
    blocks = np.repeat(np.arange(len(layout.starts) - 1), np.diff(layout.starts))
    places = np.arange(layout.num_live) - layout.starts[blocks]
    values = []
    for chunk in chunks:
        tiles = quantised_tiles(profile, dtype, chunk, level, profile.raw_tokens)
        flat = tiles.transpose(0, 2, 1).reshape(-1, tiles.shape[1])
        values.append(flat[: layout.num_live, profile.raw_tokens :])
    symbols = np.concatenate(values, axis=1)
    tokens = np.arange(symbols.shape[1])[None]
    return {
        "none": entropy(symbols, np.zeros((1, 1), np.int64)),
        "token": entropy(symbols, tokens),
        "block of layers": entropy(symbols, blocks[:, None]),
        "coefficient": entropy(symbols, places[:, None]),
        "block and coefficient": entropy(symbols, np.arange(len(symbols))[:, None]),
    }


def entropy(symbols: NDArray[Any], groups: NDArray[np.int64]) -> float:
    """Mean bits a symbol [M, T] when each group, numbers that broadcast to [M, T], has a model."""
    low, high = int(symbols.min()), int(symbols.max())
    keys = groups * (high - low + 1) + (symbols.astype(np.int64) - low)
    _, counts = np.unique(keys, return_counts=True)
    _, sizes = np.unique(np.broadcast_to(groups, symbols.shape), return_counts=True)
    total = symbols.size
    return float((sizes @ np.log2(sizes) - counts @ np.log2(counts)) / total)


def storing_levels(
    profile: Profile, dtype: str, planes: Bits, baseline: Sequence[Method]
) -> dict[str, float]:
    """Bits a value to store every level at once (CacheGen, figure 14d).

    Args:
        profile: the product's.
        dtype: the KV dtype.
        planes: a chunk of position-free planes.
        baseline: a codec's levels, each of which is a stream of its own; coded on the same planes.
    """
    codec = create_codec("hier", dtype=dtype, profile=profile)
    last = profile.num_levels - 1

    def bits(data: bytes) -> float:
        return 8 * len(data) / planes.size

    alone = [bits(codec.encode(planes, level=level)) for level in range(last + 1)]
    return {
        "layered": bits(codec.encode(planes, level=0, last_level=last)),
        "finest alone": alone[-1],
        "each level alone, summed": sum(alone),
        f"{baseline[0].codec}, all levels": sum(bits(m.encode(planes, True)) for m in baseline),
    }


def bits_at(points: Sequence[Point], kl: float) -> float | None:
    """Bits a value at which a codec's points reach a KL, between two of them on a log scale.

    None where all are better or all are worse.
    """
    known = sorted((p.kl, p.bits_per_value) for p in points if p.kl > 0)
    if len(known) < 2 or not known[0][0] <= kl <= known[-1][0]:
        return None
    kls, bits = zip(*known, strict=True)
    return float(np.interp(np.log(kl), np.log(kls), bits))


def cheapest(points: Sequence[Point], kl: float) -> Point | None:
    """The point of fewest bits whose KL is no higher."""
    good = [point for point in points if point.kl <= kl]
    return min(good, key=lambda point: point.bits_per_value) if good else None


def kl_at(points: Sequence[Point], bits: float) -> float | None:
    """The KL that a codec's points have at a rate, between two of them on a log scale.

    Beyond the dearest point its KL: nobody has to spend more. None below the cheapest one.
    """
    known = sorted((p.bits_per_value, max(p.kl, 1e-12)) for p in points)
    if not known or bits < known[0][0]:
        return None
    rates, kls = zip(*known, strict=True)
    return float(np.exp(np.interp(bits, rates, np.log(kls))))


def select(points: Sequence[Point], **wanted: Any) -> list[Point]:
    """Points whose attributes are those asked for."""
    return [point for point in points if all(getattr(point, k) == v for k, v in wanted.items())]
