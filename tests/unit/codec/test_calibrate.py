"""Calibration: what the design does with known statistics, from planes and from the small model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from sglang_ext import cli
from sglang_ext.codec.calibration import design
from sglang_ext.codec.calibration.calibrate import (
    MomentSums,
    block_channels_for,
    calibrate_model,
    profile_from_planes,
)
from sglang_ext.codec.calibration.default_text import default_texts
from sglang_ext.codec.calibration.hf_capture import CausalLm, compare
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.calibration.profile_paths import FILE_NAME, find_profile, path_to_write
from sglang_ext.codec.float_bits import from_float32, to_float32
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.kernels import kvquant

MODEL = Path(__file__).parents[2] / "assets" / "tinylm"
TEXT = Path(__file__).parents[2] / "assets" / "text" / "python-docs" / "library-email.rst"
F32 = npt.NDArray[np.float32]


def random_planes(num_tokens: int = 1500, planes: int = 4, channels: int = 32) -> F32:
    """Correlated channels of very different sizes, some far from zero, one constant."""
    rng = np.random.default_rng(5)
    mix = rng.normal(size=(planes, channels, channels)) * np.geomspace(0.05, 2, channels)
    values = rng.normal(size=(planes, num_tokens, channels)) @ mix
    values += rng.normal(size=(planes, 1, channels)) * 5
    values[:, :, 3] = 1.25
    return values.astype(np.float32)


def coded(profile: Profile, bits: npt.NDArray[np.uint16], level: int) -> tuple[F32, int]:
    """Planes after a level, and the number of raw rows."""
    out = np.empty_like(bits)
    quantised = kvquant.quantise(bits, "bf16", profile.transform, level)
    kvquant.dequantise(quantised.tiles, "bf16", profile.transform, level, out, raw=quantised.raw)
    return to_float32(out, "bf16"), quantised.raw.index.size


@pytest.mark.parametrize(
    ("planes", "channels", "head_dim", "limit", "expected"),
    [
        (16, 128, 64, 512, 512),  # two layers
        (16, 128, 64, 300, 256),  # K and V of a layer
        (16, 128, 64, 128, 128),
        (16, 128, 64, 100, 64),
        (64, 1024, 128, 512, 512),  # four heads
        (24, 576, 576, 512, 288),  # MLA: one wide head is cut
        (3, 80, 16, 512, 240),
        (2, 16, 16, 1, 1),
    ],
)
def test_blocks_are_whole_planes_or_heads(
    planes: int, channels: int, head_dim: int, limit: int, expected: int
) -> None:
    assert block_channels_for(planes, channels, head_dim, limit) == expected


def test_a_profile_from_planes_quantises_by_its_levels() -> None:
    values = random_planes()
    bits = from_float32(values, "bf16")
    profile = profile_from_planes([bits], "bf16", head_dim=16)
    exact = to_float32(bits, "bf16")
    errors = []
    for level in range(profile.num_levels):
        back, raw_rows = coded(profile, bits, level)
        assert raw_rows <= 3
        errors.append(float(((back - exact) ** 2).mean()))
    ratios = np.array(errors[:-1]) / np.array(errors[1:])
    # A third of the step is a ninth of the noise, until what bf16 cannot hold is all that is left.
    assert (ratios[1:4] > 5).all()
    assert errors[-1] < 1e-4 * exact.var()


def test_a_constant_channel_comes_back() -> None:
    bits = from_float32(random_planes(), "bf16")
    profile = profile_from_planes([bits], "bf16", head_dim=16)
    back, _ = coded(profile, bits, profile.default_level)
    assert np.abs(back[:, :, 3] - 1.25).max() < 0.02


def test_few_and_odd_samples_still_make_a_profile() -> None:
    values = random_planes(20)
    bits = from_float32(values, "bf16")
    bits[0, 1, 0] = bits[0, 7, 1] = 0x7F80  # infinity
    bits[0, 8, 2] = 0x7FC0  # not a number
    bits[1, 9, 2] = 0x7F7F  # 3e38
    profile = profile_from_planes([bits], "bf16", head_dim=16)
    assert profile.block_channels <= 4
    zeros = profile_from_planes([np.zeros((2, 50, 16), np.uint16)], "fp16", head_dim=8)
    assert zeros.num_live.max() == 0
    with pytest.raises(ValueError, match="behind the first four"):
        profile_from_planes([bits[:, :5]], "bf16", head_dim=16)


def test_first_tokens_far_from_the_others_are_kept_raw() -> None:
    values = random_planes()
    usual = profile_from_planes([from_float32(values, "bf16")], "bf16", head_dim=16)
    values[:, :4] *= 30
    sinks = profile_from_planes([from_float32(values, "bf16")], "bf16", head_dim=16)
    assert (usual.raw_tokens, sinks.raw_tokens) == (0, 4)


def test_the_metric_moves_precision_to_what_matters() -> None:
    rng = np.random.default_rng(6)
    rows = rng.normal(size=(4000, 8)).astype(np.float32)
    gradients = rng.normal(size=(4000, 8)).astype(np.float32)
    gradients[:, 0] *= 10
    sums = MomentSums(8)
    sums.add(rows)
    sums.add_gradient(gradients)
    transform = design.transform_of(sums.moments(8), ridge=1e-6)
    error = ((design.restored(transform, rows, 1.0) - rows) ** 2).mean(0)
    assert error[0] < error[1:].min() / 30


def test_the_transform_decorrelates_and_inverts() -> None:
    rows = random_planes(planes=1)[0]
    sums = MomentSums(32)
    sums.add(rows)
    transform = design.transform_of(sums.moments(32))
    values = next(design.coefficients(transform, rows))
    covariance = np.cov(values.T)
    off = covariance - np.diag(np.diag(covariance))
    assert np.abs(off).max() < 0.05 * covariance.max()
    assert (np.diff(transform.sigma[0]) <= 1e-9).all()
    product = transform.forward[0] @ transform.inverse[0]
    assert np.allclose(product, np.eye(32), atol=1e-6)


@pytest.fixture(scope="module")
def model() -> CausalLm:
    return CausalLm(str(MODEL))


def test_untouched_kv_gives_the_same_predictions(model: CausalLm) -> None:
    import torch

    tokens = model.tokenize(TEXT.read_text())[:160]
    capture = model.prefill(tokens[:120])
    reference = model.continuation(capture.rotated, tokens[120:], rotated=True)
    free = model.continuation(capture.planes, tokens[120:])
    with torch.no_grad():
        logits = model.model(input_ids=torch.from_numpy(tokens)[None]).logits[0, 120:]
    whole = torch.log_softmax(logits, -1).numpy()
    assert compare(whole, reference, tokens[120:]).kl.mean() < 2e-5
    assert compare(reference, free, tokens[120:]).kl.mean() < 2e-5
    zeros = np.zeros_like(capture.planes)
    assert compare(reference, model.continuation(zeros, tokens[120:]), tokens[120:]).kl.mean() > 0.1


def test_unrotated_keys_do_not_depend_on_the_position(model: CausalLm) -> None:
    tokens = model.tokenize(TEXT.read_text())[:40]
    capture = model.prefill(tokens)
    moved = model.rotate(capture.planes, start=700)
    assert not np.array_equal(moved[0], capture.rotated[0])
    back = to_float32(model.unrotate(moved, start=700), "bf16")
    exact = to_float32(capture.planes, "bf16")
    assert np.abs(back - exact).max() < 0.02 * np.abs(exact).max()
    assert np.array_equal(moved[1::2], capture.planes[1::2])


def test_a_calibration_of_the_small_model(tmp_path: Path, model: CausalLm) -> None:
    options = CalibrationOptions(
        num_windows=3, prefix_tokens=180, continuation_tokens=40, held_out=1, num_draws=1,
        max_block_channels=64, num_levels=3, default_level=1, target_kl=0.003,
    )  # fmt: skip
    lines: list[str] = []
    text = TEXT.read_text()
    profile = calibrate_model(str(MODEL), [text[:6000]], options=options, progress=lines.append)
    assert (profile.block_channels, profile.num_levels, profile.default_level) == (64, 3, 1)
    assert any("KL" in line for line in lines)
    tokens = model.tokenize(text[6000:9000])[:220]
    capture = model.prefill(tokens[:180])
    reference = model.continuation(capture.rotated, tokens[180:], rotated=True)
    damage = []
    for level in range(3):
        out = np.empty_like(capture.planes)
        quantised = kvquant.quantise(capture.planes, "bf16", profile.transform, level)
        kvquant.dequantise(
            quantised.tiles, "bf16", profile.transform, level, out, raw=quantised.raw
        )
        other = model.continuation(out, tokens[180:])
        damage.append(float(compare(reference, other, tokens[180:]).kl.mean()))
    assert damage[0] > damage[1] > damage[2]
    assert 0.0003 < damage[1] < 0.03


def test_too_little_text_is_refused_with_what_is_wanted() -> None:
    with pytest.raises(ValueError, match="tokens of text, got"):
        calibrate_model(str(MODEL), ["too short"])


@pytest.mark.parametrize(
    "wrong", [{"num_levels": 0}, {"default_level": 9}, {"num_draws": 0}, {"target_kl": 0.0}]
)
def test_options_are_checked_before_anything_runs(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"wanted|positive"):
        CalibrationOptions(**wrong)  # type: ignore[arg-type]


def test_where_profiles_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HIER_KV_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    assert path_to_write(str(folder)) == folder / FILE_NAME
    assert find_profile(str(folder)) is None
    (folder / FILE_NAME).touch()
    assert find_profile(str(folder)) == folder / FILE_NAME
    remote = path_to_write("some/model")
    assert remote.parent == tmp_path / "cache"
    assert remote != path_to_write("other/model")


def test_a_user_without_a_home_has_no_cache_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as of a user without a name

    for name in ("SGLANG_HIER_KV_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", home)
    assert find_profile("some/model") is None
    (tmp_path / FILE_NAME).touch()
    assert find_profile(str(tmp_path)) == tmp_path / FILE_NAME
    with pytest.raises(OSError, match="no home, so no cache folder; set HOME or SGLANG_HIER_KV_CA"):
        path_to_write("some/model")


def test_the_default_text_is_there() -> None:
    assert sum(map(len, default_texts())) > 400_000


def test_the_command_reports_errors(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    out = tmp_path / "out.hkp"
    assert cli.main(["calibrate", str(MODEL), "--text", str(short), "--out", str(out)]) == 1
    assert "tokens of text" in capsys.readouterr().err
    assert not out.exists()
