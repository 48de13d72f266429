"""What is streamed: KV in the shape of Mistral-7B, coded for real, and what its levels are worth.

The bundled model's KV is too small to be worth a network. Its statistics are kept: the channels of
32 captures, each of another window of text, lie side by side in 32 layers of 8 heads of 128, and so
do the blocks of its profile. Encoder and bytes are real; the damage of a level is the bundled
model's at that level, measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from bench.codec.bed import BUNDLED_MODEL, BUNDLED_PROFILE
from bench.codec.corpus import bundled_corpus
from bench.codec.hier import hier_methods
from bench.codec.methods import per_token_methods
from bench.codec.quality import Prepared, measure, prepare
from bench.core.output import Progress
from sglang_ext.codec import create_codec
from sglang_ext.codec.calibration.hf_capture import CausalLm
from sglang_ext.codec.container import read_header
from sglang_ext.codec.float_bits import Bits
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.streaming import ChunkOffer

CHUNK_TOKENS = 1500
TOP_LEVEL = 4  # a KL of 5e-5: finer ones cost bytes and show nothing
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 32, 8, 128
NUM_PLANES, NUM_CHANNELS = 2 * NUM_LAYERS, NUM_KV_HEADS * HEAD_DIM
RAW_BYTES_PER_TOKEN = 2 * NUM_PLANES * NUM_CHANNELS
_WIDTHS = (8, 7, 6, 5, 4)  # bits of uniform quantisation
# Lengths at which sizes are measured; those between are interpolated.
_LENGTHS = (25, 50, 100, 200, 400, 800, CHUNK_TOKENS)


@dataclass(frozen=True)
class Content:
    """Sizes and damage of what can be sent.

    Attributes:
        sizes: prefix bytes by level, for chunks of `_LENGTHS` tokens.
        chunks: prefix bytes by level of whole chunks, each of its own text.
        damage: KL by level.
        uniform: (bits a value with side information, KL) of uniform quantisation by bits.
        streams: streams of whole chunks with their profile and planes, for links and decoders.
    """

    sizes: dict[int, tuple[int, ...]]
    chunks: list[tuple[int, ...]]
    damage: tuple[float, ...]
    uniform: dict[int, tuple[float, float]]
    streams: list[bytes]
    profile: Profile
    dtype: str

    def offers(self, num_tokens: int) -> list[ChunkOffer]:
        """A context's chunks."""
        whole, rest = divmod(num_tokens, CHUNK_TOKENS)
        offers = [
            ChunkOffer(CHUNK_TOKENS, self.chunks[at % len(self.chunks)]) for at in range(whole)
        ]
        return offers + ([ChunkOffer(rest, self._interpolated(rest))] if rest else [])

    def uniform_bytes(self, bits: int, num_tokens: int) -> int:
        """Bytes of a context under uniform quantisation."""
        return round(self.uniform[bits][0] / 16 * RAW_BYTES_PER_TOKEN * num_tokens)

    @cached_property
    def uniform_bits_at_default(self) -> int:
        """The fewest bits of uniform quantisation that do no more damage than the default level."""
        most = self.damage[self.profile.default_level]
        good = [bits for bits, (_, kl) in self.uniform.items() if kl <= most]
        return min(good, default=max(self.uniform))

    def _interpolated(self, num_tokens: int) -> tuple[int, ...]:
        table = np.array([self.sizes[length] for length in _LENGTHS], np.float64)
        return tuple(
            round(float(np.interp(num_tokens, _LENGTHS, table[:, level])))
            for level in range(table.shape[1])
        )


def make_content(num_windows: int, num_chunks: int, progress: Progress) -> Content:
    """Captures, tiles, encodes and measures.

    Args:
        num_windows: windows behind each figure of damage.
        num_chunks: whole chunks that are encoded, each of its own arrangement of text.
        progress: told what is going on.
    """
    lm, small = CausalLm(str(BUNDLED_MODEL)), Profile.load(BUNDLED_PROFILE)
    progress.update("KV of the test text")
    windows = prepare(lm, bundled_corpus(lm).test)
    profile = tile_profile(small, NUM_PLANES, NUM_CHANNELS)
    codec = create_codec("hier", dtype=lm.kv_dtype, profile=profile)
    streams, chunks = [], []
    sizes: dict[int, tuple[int, ...]] = {}
    for number in range(num_chunks):
        progress.update(f"encoding chunk {number + 1} of {num_chunks}")
        planes = tile_planes(windows, number)
        kept = None if number == 0 else 0
        stream = codec.encode(planes, level=0, last_level=TOP_LEVEL, raw_tokens=kept)
        streams.append(stream)
        chunks.append(_prefixes(stream))
        if number == min(1, num_chunks - 1):
            for length in _LENGTHS:
                part = np.ascontiguousarray(planes[:, :length])
                sizes[length] = _prefixes(codec.encode(part, level=0, last_level=TOP_LEVEL))
    few = windows[:num_windows]
    methods = hier_methods(small, lm.kv_dtype, levels=range(TOP_LEVEL + 1))
    damage = []
    for method in methods:
        progress.update(f"damage of {method.name}")
        damage.append(measure(lm, method, few, CHUNK_TOKENS).kl)
    uniform = {}
    for bits, method in zip(_WIDTHS, per_token_methods(lm.kv_dtype, _WIDTHS), strict=True):
        progress.update(f"damage of {method.name}")
        point = measure(lm, method, few, CHUNK_TOKENS)
        # A range for a plane of 128 channels costs more than for one of 1,024.
        uniform[bits] = (bits + 32 / NUM_CHANNELS, point.kl)
    return Content(
        sizes,
        chunks,
        tuple(np.minimum.accumulate(damage).tolist()),
        uniform,
        streams,
        profile,
        lm.kv_dtype,
    )


def tile_planes(windows: Sequence[Prepared], number: int) -> Bits:
    """Planes [64, 1500, 1024] of as many captures as fit, those of one `number` in one order."""
    first = windows[0].capture.planes
    own = first.shape[0] * first.shape[2]
    count = NUM_PLANES * NUM_CHANNELS // own
    rows = [
        windows[(number + at) % len(windows)].capture.planes.transpose(1, 0, 2).reshape(-1, own)
        for at in range(count)
    ]
    tiled = np.concatenate(rows, axis=1).reshape(-1, NUM_PLANES, NUM_CHANNELS)
    return np.ascontiguousarray(tiled.transpose(1, 0, 2))


def tile_profile(profile: Profile, num_planes: int, num_channels: int) -> Profile:
    """A profile for a wider model: the blocks of one, over and over.

    Raises:
        ValueError: the wider model is no multiple of the other.
    """
    own, wanted = profile.num_planes * profile.num_channels, num_planes * num_channels
    if wanted % own or num_channels % profile.block_channels:
        raise ValueError(f"{wanted} channels are not made of {own} in blocks")
    times = wanted // own

    def along(axis: int, name: str) -> Any:
        return np.concatenate([getattr(profile, name)] * times, axis=axis)

    by_block = ("grid_exp", "mean", "forward", "inverse", "mean_f32")
    by_level = ("inv_step", "recon_shift", "out_scale", "num_live", "classes", "refine_classes")
    wider: dict[str, Any] = {name: along(0, name) for name in by_block}
    wider |= {name: along(1, name) for name in by_level}
    return replace(
        profile,
        num_planes=num_planes,
        num_channels=num_channels,
        head_dim=HEAD_DIM,
        source=f"{times} times: {profile.source}",
        **wider,
    )


def _prefixes(stream: bytes) -> tuple[int, ...]:
    header = read_header(stream)
    return tuple(header.prefix_bytes(level) for level in range(TOP_LEVEL + 1))
