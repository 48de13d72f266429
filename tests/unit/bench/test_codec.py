"""The codec bench's own parts: its simple codecs, its figures, and its refusal of wrong bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.codec import ablations as ablation
from bench.codec import analysis
from bench.codec.hier import hier_methods, stream_parts, zstd_methods
from bench.codec.kvtc import Allocator, KvtcLike, fit_bases
from bench.codec.methods import Method, cachegen_methods, exact_methods
from bench.codec.quality import Point, mean_interval, through
from bench.codec.report import rate_table, size_ratios
from bench.codec.simple import KiviLike, PerToken, num_packed_bytes, pack_bits, unpack_bits
from bench.codec.speed import head_dim_speeds, measure
from bench.core.case import CaseFailedError
from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.calibration.design import transform_of
from sglang_ext.codec.float_bits import to_float32
from sglang_ext.codec.hier.profile import Profile
from tests.unit.codec.cachegen_cases import make_planes


def point(codec: str, bits: float, kl: float, level: str = "", chunk: int = 1500) -> Point:
    return Point(codec, level, chunk, bits, kl, kl, (kl, kl), 0.0, 1.0)


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_from_planes([make_planes(1, 4, 900, 16)], "bf16", head_dim=8)


@given(
    bits=st.integers(1, 8),
    count=st.integers(0, 70),
    seed=st.integers(0, 99),
    rest=st.binary(max_size=3),
)
def test_packed_codes_come_back(bits: int, count: int, seed: int, rest: bytes) -> None:
    codes = np.random.default_rng(seed).integers(0, 1 << bits, count).astype(np.uint8)
    data = pack_bits(codes, bits)
    assert len(data) == num_packed_bytes(count, bits)
    assert np.array_equal(unpack_bits(data + rest, bits, count), codes)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_per_token_bytes_are_what_is_said(bits: int, num_tokens: int) -> None:
    planes = make_planes(2, 4, num_tokens, 24)
    coder = PerToken(bits, "bf16")
    data = coder.encode(planes)
    assert len(data) == 12 + 4 * num_tokens * 4 + 4 * num_tokens * 24 * bits // 8
    assert np.array_equal(coder.decode(data), coder.simulate(planes))
    values, back = (to_float32(words, "bf16") for words in (planes, coder.decode(data)))
    spread = np.ptp(values, axis=2, keepdims=True)
    assert (np.abs(values - back) <= spread / ((1 << bits) - 1) + 0.02 * spread).all()


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize(("num_tokens", "num_channels"), [(64, 64), (77, 40), (5, 3)])
def test_kivi_counts_groups_and_what_is_left(bits: int, num_tokens: int, num_channels: int) -> None:
    planes = make_planes(3, 2, num_tokens, num_channels)
    coder = KiviLike(bits, "bf16")
    data = coder.encode(planes)
    groups = {
        "k": (num_tokens // 32 * num_channels, num_tokens % 32 * num_channels),
        "v": (num_channels // 32 * num_tokens, num_channels % 32 * num_tokens),
    }
    size = 12 + sum(count * (4 + 32 * bits // 8) + 2 * rest for count, rest in groups.values())
    assert len(data) == size
    back = coder.decode(data)
    assert np.array_equal(back, coder.simulate(planes))
    assert np.array_equal(back[0, num_tokens // 32 * 32 :], planes[0, num_tokens // 32 * 32 :])


def make_kvtc(price: float) -> tuple[KvtcLike, Any]:
    planes = make_planes(4, 4, 300, 16)
    bases = fit_bases([planes], "bf16")
    allocators = [Allocator(basis.project(to_float32(planes, "bf16"))) for basis in bases]
    return KvtcLike.make(bases, allocators, price, "bf16"), planes


@pytest.mark.parametrize("price", [1e-6, 1e-2, 1.0, 1e6])
def test_kvtc_bytes_decode_to_the_simulated_values(price: float) -> None:
    coder, planes = make_kvtc(price)
    for raw_tokens in (0, 4):
        back = coder.decode(coder.encode(planes, raw_tokens=raw_tokens))
        assert np.array_equal(back, coder.simulate(planes, raw_tokens=raw_tokens))
        assert np.array_equal(back[:, :raw_tokens], planes[:, :raw_tokens])


def test_a_dearer_bit_buys_fewer_of_them() -> None:
    spent, damage = [], []
    for price in (1e-6, 1e-3, 1e-1, 1e3):
        coder, planes = make_kvtc(price)
        spent.append(len(coder.encode(planes)))
        error = to_float32(coder.simulate(planes), "bf16") - to_float32(planes, "bf16")
        damage.append(float(np.square(error).mean()))
    assert spent == sorted(spent, reverse=True)
    assert damage == sorted(damage)
    assert spent[0] > 3 * spent[-1]


def test_chunks_count_whole_and_come_back_in_order() -> None:
    planes = make_planes(5, 2, 70, 4)
    starts: list[bool] = []

    def encode(chunk: NDArray[Any], is_first: bool) -> bytes:
        starts.append(is_first)
        return chunk.tobytes()

    method = Method(
        "raw",
        "",
        True,
        encode,
        lambda data, like: np.frombuffer(data, like.dtype).reshape(like.shape),
    )
    back, num_bytes, num_values = through(method, planes, 32)
    assert np.array_equal(back, planes)
    assert starts == [True, False, False]
    assert (num_bytes, num_values) == (2 * num_values, 2 * 64 * 4)
    assert through(method, planes, 500)[2] == planes.size


def test_a_method_whose_bytes_say_something_else_is_refused() -> None:
    planes = make_planes(6, 2, 40, 8)
    for method in (
        *cachegen_methods([planes], "bf16", rotated=True),
        *exact_methods("bf16", ("zstd",)),
    ):
        method.check(planes, is_first=True)
        wrong = Method(
            method.codec,
            method.level,
            method.rotated,
            method.encode,
            lambda data, like, inner=method: inner.decode(data, like) ^ np.uint16(1),  # type: ignore[misc]
            method.expected,
            method.exact,
        )
        with pytest.raises(CaseFailedError, match="decode"):
            wrong.check(planes, is_first=True)


def test_the_product_and_its_ablations_decode_to_their_quantisers(profile: Profile) -> None:
    planes = make_planes(7, 4, 60, 16)
    planes[1, 3, 2] = 0x7FC0  # a row that is kept as it is
    rows = ablation.rows_of([make_planes(1, 4, 900, 16)], "bf16", 4)
    turns = np.eye(16)[None].repeat(3, axis=0)
    methods = ablation.ablations(profile, "bf16", rows, rows, turns, 2.0)
    names = {method.codec for method in methods}
    assert {
        "hier/zstd",
        "hier/no-klt",
        "hier/no-metric",
        "hier/rotated-k",
        "hier/4-raw-sinks",
    } <= names
    for method in (*hier_methods(profile, "bf16"), *methods):
        for is_first in (True, False):
            method.check(planes, is_first=is_first)


def test_zstd_ablation_holds_large_coefficients(profile: Profile) -> None:
    planes = make_planes(8, 4, 30, 16)
    planes[2, 5] |= 0x4400  # some hundred times as large
    for method in zstd_methods(profile, "bf16"):
        method.check(planes, is_first=False)


@pytest.mark.parametrize("level", [0, 2, 4])
def test_a_streams_parts_add_up(profile: Profile, level: int) -> None:
    planes = make_planes(1, 4, 900, 16)[:, :300].copy()
    for kept in (0, 4):
        parts = stream_parts(profile, "bf16", planes, level, kept)
        (method,) = hier_methods(profile, "bf16", levels=[level], raw_tokens=kept)
        total = parts.words + parts.states + parts.escapes + parts.raw + parts.other
        assert total == len(method.encode(planes, True))
        assert 0 < parts.other < 1000
        assert (parts.raw > 0) == (kept > 0)
        assert 0 <= parts.gap < 1


def test_the_metric_of_a_profile_is_the_one_it_was_made_for(profile: Profile) -> None:
    rows = ablation.rows_of([make_planes(1, 4, 900, 16)], "bf16", 4)
    found = ablation.metric_of(profile)
    moments = ablation.moments_of(rows, found)
    plain = ablation.without_metric(moments, profile.num_channels).metric
    ratio = np.diagonal(found, axis1=1, axis2=2) / np.diagonal(plain, axis1=1, axis2=2)
    assert ratio == pytest.approx(ratio.mean(), rel=0.1)


def test_channels_alone_keep_their_variance_order(profile: Profile) -> None:
    rows = ablation.rows_of([make_planes(1, 4, 900, 16)], "bf16", 4)
    moments = ablation.moments_of(rows, ablation.metric_of(profile))
    alone = ablation.without_klt(moments)
    eye = np.eye(alone.forward.shape[1])
    assert alone.forward @ alone.inverse == pytest.approx(np.broadcast_to(eye, alone.forward.shape))
    assert (np.diff(alone.sigma, axis=1) <= 0).all()
    assert ((alone.forward != 0).sum(axis=1) == 1).all()
    together = transform_of(moments)
    assert np.log(together.sigma).sum() < np.log(alone.sigma).sum()  # what the KLT gains


def test_rotation_turns_the_metric_of_keys_only() -> None:
    metric = np.diag([1.0, 4.0, 9.0, 16.0])[None]
    quarter = np.array([[[0.0, 1.0], [-1.0, 0.0]]])
    turned = ablation.rotated_metric(metric, quarter)
    assert turned[0] == pytest.approx(np.diag([4.0, 1.0, 9.0, 16.0]))
    half = ablation.rotated_metric(metric, np.concatenate([quarter, np.eye(2)[None]]))
    assert half[0] == pytest.approx(np.diag([2.5, 2.5, 9.0, 16.0]))


def test_entropy_by_grouping() -> None:
    symbols = np.array([[0, 0, 0, 0], [0, 1, 0, 1]])
    assert analysis.entropy(symbols, np.zeros((1, 1), np.int64)) == pytest.approx(0.8112781)
    assert analysis.entropy(symbols, np.arange(2)[:, None]) == pytest.approx(0.5)
    assert analysis.entropy(symbols, np.arange(4)[None]) == pytest.approx(0.5)


def test_rates_and_damage_between_levels() -> None:
    points = [point("a", 1.0, 1e-2), point("a", 2.0, 1e-4), point("a", 4.0, 1e-5)]
    assert analysis.bits_at(points, 1e-3) == pytest.approx(1.5)
    assert analysis.bits_at(points, 1e-6) is None
    assert analysis.bits_at(points, 1.0) is None
    assert analysis.kl_at(points, 1.5) == pytest.approx(1e-3)
    assert analysis.kl_at(points, 0.5) is None
    assert analysis.kl_at(points, 6.0) == pytest.approx(1e-5)
    cheapest = analysis.cheapest(points, 1e-3)
    assert cheapest is not None
    assert cheapest.bits_per_value == 2.0
    assert analysis.cheapest(points, 1e-9) is None


def test_ratios_are_at_no_higher_kl() -> None:
    points = [
        point("cachegen-paper", 4.0, 1e-3, "x0.5"),
        point("hier", 1.0, 1e-2, "0"),
        point("hier", 2.0, 1e-4, "1"),
    ]
    (row,) = size_ratios("hier", points)
    assert row["ratio"] == pytest.approx(0.5)
    assert row["ratio_interpolated"] == pytest.approx(0.375)
    assert row["product_level"] == "1"
    rows = {row["bits_per_value"]: row for row in rate_table("hier", points)}
    assert rows[5.0]["best_baseline"] == "cachegen-paper"
    assert rows[5.0]["kl"] == pytest.approx(1e-4)
    assert rows[0.5]["kl"] is None


def test_mean_interval_holds_the_mean() -> None:
    low, high = mean_interval([1.0, 2.0, 3.0, 4.0])
    assert 1.0 <= low < 2.5 < high <= 4.0


def test_speed_counts_raw_bytes() -> None:
    speed = measure("x", 2_000_000, 1_000_000, lambda: b"12345", lambda _: None, len, 3)
    assert speed.bits_per_value == pytest.approx(40e-6)
    assert len(speed.samples[0]) == len(speed.samples[1]) == 3
    assert speed.encode_mb_s > 1000


def test_speed_at_other_head_dims_uses_the_same_values() -> None:
    speeds = head_dim_speeds([make_planes(1, 4, 700, 128)], "bf16", 1)
    assert [speed.name for speed in speeds] == ["D = 64", "D = 128"]
    assert all(1.0 < speed.bits_per_value < 4.0 for speed in speeds)


def test_outlier_channels_change_the_cache_and_nothing_else() -> None:
    from bench.codec.bed import BUNDLED_MODEL, add_outliers
    from bench.codec.corpus import make_recall
    from sglang_ext.codec.calibration.hf_capture import CausalLm

    lm = CausalLm(str(BUNDLED_MODEL))
    prompt = make_recall(lm, 3, num_pairs=8)
    given = prompt.questions[0].given
    assert "".join(lm.tokenizer.decode(prompt.prefix)).count("register") == 8
    before = lm.prefill(prompt.prefix)
    said = lm.continuation(before.rotated, given, rotated=True)
    add_outliers(lm)
    after = lm.prefill(prompt.prefix)
    again = lm.continuation(after.rotated, given, rotated=True)
    assert np.abs(said - again).max() < 1e-3
    old, new = (to_float32(capture.planes, "bf16") for capture in (before, after))
    changed = np.abs(new).max(axis=1) > 4 * np.abs(old).max(axis=1)
    assert (changed.sum(axis=1) == [8, 4] * lm.num_layers).all()


def test_plots_are_written(tmp_path: Path) -> None:
    from bench.codec.plots import plot_layers, plot_rate_against_damage, plot_speed

    points = [point("hier", 1.0, 1e-2), point("hier", 2.0, 1e-3), point("zstd", 9.0, 0.0)]
    paths = [
        plot_rate_against_damage(tmp_path / "a.png", "t", points, "hier"),
        plot_layers(tmp_path / "b.png", "t", ["0", "1"], [0.1, 0.2]),
        plot_speed(tmp_path / "c.png", "t", [("x", 10.0, 20.0)]),
    ]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
