"""What `bench stream` rests on: links in virtual time, the oracle, a profile made wider."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from bench.codec.bed import BUNDLED_PROFILE
from bench.stream.content import tile_profile
from bench.stream.links import ChunkLink, SteadyLink, TimedLink
from bench.stream.sim import REQUEST_S, fixed, oracle, stream
from sglang_ext.codec import create_codec
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.streaming import ChunkOffer, QualityScale, StreamCosts

OFFERS = [ChunkOffer(100, (10_000, 30_000, 80_000)), ChunkOffer(100, (12_000, 33_000, 90_000))]
QUALITY = QualityScale((0.03, 0.006, 0.001), default_level=2)
COSTS = StreamCosts(1_000, 1e12, lambda new, before: 0.01 * new, REQUEST_S)


def test_a_timed_link_carries_what_its_intervals_hold() -> None:
    link = TimedLink(1.0, (100.0, 10.0, 50.0))
    assert link.finish_s(0.0, 0, 50) == pytest.approx(0.5)
    assert link.finish_s(0.5, 0, 55) == pytest.approx(1.5)
    assert link.finish_s(0.0, 0, 1110) == pytest.approx(22.0)
    assert link.capacity_bytes(22.0) == pytest.approx(1110)


def test_a_steady_link_in_pieces_takes_as_long_as_at_once() -> None:
    link = SteadyLink(1e6)
    served = stream(OFFERS, COSTS, QUALITY, link, known_bytes_per_s=1e6)[0]
    assert served.ttft_s == pytest.approx(fixed(OFFERS, 2, COSTS, 0.001, link)[0].ttft_s)
    assert served.link_busy == pytest.approx(1.0)


@pytest.mark.parametrize("slo_s", [0.36, 0.4, 0.45, 0.6])
def test_the_oracle_finds_what_trying_everything_finds(slo_s: float) -> None:
    link = ChunkLink((2e6, 0.5e6))
    best = min(
        (
            (seconds > slo_s, seconds if seconds > slo_s else kl, seconds)
            for levels in product(range(3), repeat=2)
            for kl, seconds in [_by_hand(levels, link)]
        ),
    )
    found = oracle(OFFERS, COSTS, QUALITY, link, slo_s)
    assert found.text_tokens == 0
    assert (found.ttft_s > slo_s) == best[0]
    assert found.ttft_s == pytest.approx(best[2], rel=1e-3)


def _by_hand(levels: tuple[int, ...], link: ChunkLink) -> tuple[float, float]:
    seconds = REQUEST_S + COSTS.decode_s(100) + COSTS.prefill_s(32, 200)
    for at, level in enumerate(levels):
        seconds += OFFERS[at].prefix_bytes[level] / link.bytes_per_s[at]
    return sum(QUALITY.damage[level] for level in levels) / 2, seconds


def test_a_wider_profile_codes_each_part_as_the_profile_does() -> None:
    small = Profile.load(BUNDLED_PROFILE)
    wide = tile_profile(small, 8, 512)
    rng = np.random.default_rng(1)
    values = rng.normal(0, 1, (2, 40, small.num_planes * small.num_channels)).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    joined = np.concatenate(list(bits), axis=1).reshape(40, 8, 512).transpose(1, 0, 2)
    out = np.empty((8, 40, 512), np.uint16)
    codec = create_codec("hier", dtype="bf16", profile=wide)
    codec.decode(codec.encode(np.ascontiguousarray(joined), level=2, raw_tokens=0), out)
    parts = np.split(out.transpose(1, 0, 2).reshape(40, -1), 2, axis=1)
    plain = create_codec("hier", dtype="bf16", profile=small)
    for part, own in zip(parts, bits, strict=True):
        planes = own.reshape(40, small.num_planes, small.num_channels).transpose(1, 0, 2)
        back = np.empty(planes.shape, np.uint16)
        data = plain.encode(np.ascontiguousarray(planes), level=2, raw_tokens=0)
        plain.decode(data, back)
        assert np.array_equal(part, back.transpose(1, 0, 2).reshape(40, -1))
