"""What is expected of pages and states before there are any is at most what comes, and nearly."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.arg_groups.overrides import declare_resolution  # noqa: E402
from sglang.srt.configs.model_config import ModelConfig  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_ext.assembly.codec_setup import try_profile  # noqa: E402
from sglang_ext.assembly.early_checks import check_slots  # noqa: E402
from sglang_ext.assembly.state_setup import check_state_bytes  # noqa: E402
from sglang_ext.codec.calibration.calibrate import profile_from_planes  # noqa: E402
from sglang_ext.codec.calibration.hf_capture import float_to_bits  # noqa: E402
from sglang_ext.codec.calibration.options import CalibrationOptions  # noqa: E402
from sglang_ext.device.layout import PageLayout  # noqa: E402
from sglang_ext.device.pools import check_block_sizes  # noqa: E402
from sglang_ext.errors import HierKVConfigError  # noqa: E402
from sglang_ext.ranks.rank import RankPlace  # noqa: E402
from sglang_ext.seam.expected_pages import (  # noqa: E402
    expected_layout,
    page_tokens,
    window_rows,
)
from sglang_ext.seam.hooks.loaded_models import check_layers  # noqa: E402
from sglang_ext.settings.config import HierKVConfig  # noqa: E402
from testkit.drafts.nextn import PLAIN, rows_of, write_nextn_model  # noqa: E402
from testkit.hybrids.oss_model import (  # noqa: E402
    HEAD_DIM,
    KV_HEADS,
    NUM_FULL_LAYERS,
    write_oss_model,
)
from testkit.hybrids.shaped_models import SHAPED_MODELS, write_shaped_model  # noqa: E402
from testkit.hybrids.state_model import STATE_MODELS, write_state_model  # noqa: E402
from testkit.server import TINYLM  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
PAGE = 64


def config_of(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(str(folder), trust_remote_code=True, **options)


def kv_bytes(folder: Path, item_bytes: int) -> int:
    return expected_layout(config_of(folder), PAGE, 1, item_bytes).kv_bytes


def test_a_plain_model() -> None:
    assert kv_bytes(TINYLM, 2) == 8 * 2 * 2 * 64 * 2 * PAGE
    of_two = expected_layout(config_of(TINYLM), PAGE, 2, 2)
    assert of_two.kv_bytes == 8 * 2 * 64 * 2 * PAGE


def test_layers_that_run_more_than_once() -> None:
    """As SGLang counts them for the pool, which has more rows than the model has layers."""
    config = config_of(TINYLM)
    config.num_attention_layers *= 2
    assert expected_layout(config, PAGE, 1, 2).kv_bytes == 2 * kv_bytes(TINYLM, 2)


def test_latent_rows(tmp_path: Path) -> None:
    write_nextn_model(tmp_path / "model", PLAIN)
    latent, _ = rows_of(PLAIN)
    assert kv_bytes(tmp_path / "model", 2) == sum(latent[:-1]) * PAGE  # the draft's is the last


def test_full_layers_beside_windows(tmp_path: Path) -> None:
    write_oss_model(tmp_path / "oss")
    assert kv_bytes(tmp_path / "oss", 2) == NUM_FULL_LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 2


@pytest.mark.parametrize("name", SHAPED_MODELS)
def test_layers_of_two_shapes(name: str, tmp_path: Path) -> None:
    """Rows that no layer reads are left out, and K and V of a window layer are its own."""
    write_shaped_model(tmp_path / "model", name=name)
    config = config_of(tmp_path / "model")
    layout = expected_layout(config, PAGE, 1, 4)
    assert layout.kv_bytes == SHAPED_MODELS[name].full_values * PAGE * 4
    check_block_sizes(window_rows(config, 1, 4), layout)


@pytest.mark.parametrize("name", ["granite", "qwen3_next", "nemotron_h", "kimi_linear"])
def test_layers_beside_states(name: str, tmp_path: Path) -> None:
    write_state_model(tmp_path / "model", name=name)
    model = STATE_MODELS[name]
    item = 4 if model.dtype_name == "float32" else 2
    assert kv_bytes(tmp_path / "model", item) == model.page_bytes


def test_pages_are_as_long_as_sglang_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attention backend may have pages of its own size; SGLang's record keeps what was given."""
    place = SimpleNamespace(attn_dp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: place)
    write_oss_model(tmp_path / "oss")
    args = ServerArgs(model_path="none", page_size=PAGE, disaggregation_mode="prefill")
    runner = SimpleNamespace(model_config=config_of(tmp_path / "oss"), server_args=args)
    check_layers(runner, torch.nn.Module())  # whose windows are of two pages
    declare_resolution(args, "a backend", page_size=4 * PAGE)
    assert args.page_size == PAGE
    assert page_tokens(args) == 4 * PAGE
    with pytest.raises(HierKVConfigError, match=rf"a page \({4 * PAGE} tokens\) or more"):
        check_layers(runner, torch.nn.Module())


@pytest.mark.parametrize(
    ("algorithm", "num_branches", "window", "is_refused"),
    [
        ("NGRAM", 1, 31, True),
        ("EAGLE3", 4, 31, True),
        ("EAGLE3", 1, 31, False),
        (None, 4, 31, False),
        ("NGRAM", 1, -1, False),
        ("EAGLE3", 4, -1, False),
    ],
)
def test_windows_in_one_pool_are_refused_where_guesses_branch(
    algorithm: str | None,
    num_branches: int,
    window: int,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang measures a window by a guess's number, whatever pool the layer's KV is in."""
    place = SimpleNamespace(attn_dp_size=1)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: place)
    args = ServerArgs(model_path="none", speculative_algorithm=algorithm)
    declare_resolution(args, "the drafts", speculative_eagle_topk=num_branches)
    runner = SimpleNamespace(model_config=config_of(TINYLM), server_args=args)
    layers = [RadixAttention(4, 64, 1.0, 2, at, sliding_window_size=each)
              for at, each in enumerate((-1, window))]  # fmt: skip
    refusal = pytest.raises(HierKVConfigError, match=r"full attention in .*got a window of 31 tok")
    with refusal if is_refused else nullcontext():
        check_layers(runner, torch.nn.ModuleList(layers))


def test_a_window_layer_larger_than_a_page_is_refused() -> None:
    layout = PageLayout(PAGE, (64,), (64,), 2, is_bound=True)
    check_block_sizes((128, 128), layout)
    with pytest.raises(HierKVConfigError, match="as large as K or V of one window layer, got a bl"):
        check_block_sizes((192, 64), layout)
    with pytest.raises(HierKVConfigError, match="as large as K or V of one window layer, got a bl"):
        check_block_sizes((64, 192), layout)


def test_too_little_dram_is_refused() -> None:
    check_slots(2, 4096, 0.5)
    with pytest.raises(HierKVConfigError, match="at least 2 pages of 4096 bytes a rank, got 0"):
        check_slots(1, 4096, 0.5)
    check_state_bytes(0, 0)
    check_state_bytes(100, 400)
    with pytest.raises(HierKVConfigError, match="at least 400 bytes a rank, four states"):
        check_state_bytes(100, 399)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers with two heads of 16."""
    path = tmp_path_factory.mktemp("profile") / "two.hkp"
    values = np.random.default_rng(5).normal(size=(4, 600, 32)).astype(np.float32)
    options = CalibrationOptions(max_block_channels=16)
    planes = float_to_bits(values, "bf16")
    profile_from_planes([planes], "bf16", head_dim=16, options=options).save(path)
    return path


@pytest.mark.parametrize(("layers", "fits"), [(2, True), (3, False)])
@pytest.mark.parametrize("codec", ["hier", "remote=hier"])
def test_a_profile_is_tried_before_there_are_pages(
    profile: Path, codec: str, layers: int, fits: bool
) -> None:
    config = HierKVConfig(codec=codec, profile=str(profile), disk_dir="/none", disk_size=1.0)
    rows = (2 * 16 * 2,) * layers
    layout = PageLayout(PAGE, rows, rows, 2, is_bound=True)
    of_pages = config, layout, "bf16", 16, str(profile.parent), RankPlace()
    if fits:
        try_profile(*of_pages)
        return
    with pytest.raises(HierKVConfigError, match=f"--hier-kv-codec {codec}: "):
        try_profile(*of_pages)
