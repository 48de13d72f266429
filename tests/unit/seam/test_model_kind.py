"""Kinds of models that are told by more than the pools that SGLang says it will build."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.configs.model_config import ModelConfig  # noqa: E402

from sglang_ext.errors import HierKVConfigError  # noqa: E402
from sglang_ext.seam.model_kind import hybrid_stages, model_kind  # noqa: E402
from sglang_ext.settings.refusals import check_kind  # noqa: E402
from testkit.hybrids.index_model import CONFIGS  # noqa: E402
from testkit.hybrids.oss_model import write_oss_model  # noqa: E402
from testkit.hybrids.shaped_models import SHAPED_MODELS  # noqa: E402
from testkit.hybrids.state_model import STATE_MODELS, publish  # noqa: E402
from testkit.hybrids.step_model import write_step_model  # noqa: E402

# For a model with images SGLang imports all models that it has, once, and leaves out what fails.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of a small Gemma 4."""
    folder = tmp_path_factory.mktemp("gemma")
    config = SHAPED_MODELS["gemma"].make_config()
    config.architectures = [SHAPED_MODELS["gemma"].class_name]
    config.save_pretrained(folder)
    return folder


def config_of(folder: Path, *, trust: bool = False, **options: Any) -> ModelConfig:
    return ModelConfig(str(folder), trust_remote_code=trust, **options)


def test_window_layers_of_another_shape_need_a_pool_of_their_own(folder: Path) -> None:
    assert model_kind(config_of(folder)) == "swa of two shapes"
    kind = model_kind(config_of(folder, disable_hybrid_swa_memory=True))
    with pytest.raises(HierKVConfigError, match="leave --disable-hybrid-swa-memory out"):
        check_kind(kind)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({}, "swa"),
        # SGLang's pool has as many heads of K and V for all layers.
        ({"num_attention_groups": 4}, "windows of another kind"),
        ({"architectures": ["Step3p7ForConditionalGeneration"]}, "windows of another kind"),
    ],
)
def test_step_is_told_by_its_heads_of_k_and_v_and_not_by_those_of_q(
    tmp_path: Path, changes: dict[str, Any], kind: str
) -> None:
    config = config_of(write_step_model(tmp_path / "step"), trust=True)
    config.hf_config.architectures = changes.get("architectures", ["Step3p5ForCausalLM"])
    window_heads = config.hf_config.attention_other_setting
    window_heads |= {name: value for name, value in changes.items() if name in window_heads}
    assert window_heads["num_attention_heads"] != config.num_attention_heads
    assert model_kind(config) == kind


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("glm", {}, "indexed"),
        ("deepseek", {}, "indexed"),
        ("deepseek", {"index_kpool": 4}, "sparse"),
        ("deepseek", {"architectures": ["MistralLarge3ForCausalLM"]}, "sparse"),
    ],
)
def test_an_index_of_a_row_a_token_is_told_from_others(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**CONFIGS[name], **changes}))
    assert model_kind(config_of(tmp_path)) == kind


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        ("qwen3_next", {}, "state"),
        ("kimi_linear", {}, "state beside latent rows"),
        ("kimi_k3", {}, "state beside latent rows"),
        # Of Kimi K3's text alone SGLang's tree keeps no states behind pages.
        ("kimi_linear", {"architectures": ["KimiK3LinearForCausalLM"]}, "state of another kind"),
    ],
)
def test_states_are_told_by_what_lies_beside_them(
    tmp_path: Path, name: str, changes: dict[str, Any], kind: str
) -> None:
    config = STATE_MODELS[name].make_config()
    config.architectures = changes.get("architectures", [STATE_MODELS[name].class_name])
    config.save_pretrained(tmp_path)
    publish(tmp_path)
    assert model_kind(config_of(tmp_path)) == kind


@pytest.mark.parametrize(
    ("name", "partition", "stages"),
    [
        ("qwen3_5", "", [(0, 2), (1, 1)]),
        ("qwen3_5", "1,3", [(0, 1), (1, 2)]),
        ("nemotron_h", "", [(1, 2), (1, 3)]),
        ("kimi_linear", "", [(1, 3), (1, 3)]),
        ("falcon_h1", "", []),  # refused in stages whatever they have
    ],
)
def test_layers_of_stages_are_known_before_any_is_built(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    partition: str,
    stages: list[tuple[int, int]],
) -> None:
    config = STATE_MODELS[name].make_config()
    config.architectures = [STATE_MODELS[name].class_name]
    config.save_pretrained(tmp_path)
    publish(tmp_path)
    model_config = config_of(tmp_path)
    if partition:
        monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", partition)
    assert list(hybrid_stages(model_config, 2)) == stages


def test_window_layers_in_one_pool_are_no_matter_of_stages(tmp_path: Path) -> None:
    write_oss_model(tmp_path)
    assert all(list(hybrid_stages(config_of(tmp_path), 2)))
    one_pool = config_of(tmp_path, disable_hybrid_swa_memory=True)
    assert list(hybrid_stages(one_pool, 2)) == []
