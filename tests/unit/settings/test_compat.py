"""Refusals that need the loaded model's facts, and the sentences of settings made in code."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.compat import check_arguments, check_model, check_sglang_version
from sglang_ext.settings.config import HierKVConfig


def context(**facts: bool) -> Any:
    """What SGLang tells the cache factory of a plain model, but for `facts`."""
    plain = {"disable_radix_cache": False, "is_hybrid_swa": False, "is_hybrid_ssm": False}
    return SimpleNamespace(**{**plain, **facts})


def test_a_plain_model_is_taken() -> None:
    check_model(context())


@pytest.mark.parametrize(
    ("fact", "words"),
    [
        ("is_hybrid_swa", "sliding-window layers"),
        ("is_hybrid_ssm", "state-space layers"),
        ("disable_radix_cache", "SGLang disables it"),
    ],
)
def test_a_model_of_another_kind_is_refused(fact: str, words: str) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        check_model(context(**{fact: True}))
    sentence = str(caught.value)
    assert sentence.startswith("--enable-hier-kv needs ")
    assert words in sentence
    assert sentence.endswith("; start this model without --enable-hier-kv.")


def test_experts_that_are_reloaded_without_a_call_are_refused() -> None:
    """A recovered rank reads them from disk, whatever weights were sent since."""
    with pytest.raises(HierKVConfigError, match="--elastic-ep-backend mooncake; leave it out"):
        check_arguments(SimpleNamespace(elastic_ep_backend="mooncake"), HierKVConfig())


def test_diffusion_models_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="--dllm-algorithm LowConfidence; leave one"):
        check_arguments(SimpleNamespace(dllm_algorithm="LowConfidence"), HierKVConfig())


def test_several_tokenizer_workers_are_refused_with_truncation() -> None:
    args = SimpleNamespace(tokenizer_worker_num=2)
    with pytest.raises(HierKVConfigError, match="got 2; leave it out or add"):
        check_arguments(args, HierKVConfig())
    check_arguments(args, HierKVConfig(truncation="off"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"truncation": "match"}, "--hier-kv-truncation overflow or off with several"),
        ({"truncation": "all"}, "got all; leave the flag out"),
    ],
)
def test_what_tensor_parallel_ranks_cannot_agree_on_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    config = HierKVConfig(**settings)
    with pytest.raises(HierKVConfigError, match=words):
        check_arguments(SimpleNamespace(tp_size=2), config)
    check_arguments(SimpleNamespace(dp_size=2), config)


def test_an_untested_release_runs_only_when_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_ext.settings.compat.metadata.version", lambda name: "0.6.0")
    with pytest.raises(HierKVConfigError, match=r"found 0\.6\.0"):
        check_sglang_version()
    monkeypatch.setenv("SGLANG_HIER_KV_ALLOW_UNTESTED", "1")
    check_sglang_version()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize(
    "name", ["host_size", "disk_size", "disk_free_floor", "prefetch_timeout_ms"]
)
def test_numbers_must_be_finite(name: str, value: float) -> None:
    with pytest.raises(HierKVConfigError, match="finite"):
        HierKVConfig.from_dict({name: value})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"nonsense": 1}, "unknown setting hier_kv_nonsense"),
        ({"host_size": "much"}, "must be a number, got 'much'"),
        ({"host_size": True}, "must be a number, got True"),
        ({"rope": 1}, "must be a string, got 1"),
        ({"truncation": "front"}, "must be one of off, overflow, match, all, got 'front'"),
        ({"truncation_ratio": 1.0}, "must lie between 0 and 1, got 1; give a share such as 0.5"),
        ({"truncation_head": -1}, "must be 0 or more, got -1"),
        ({"truncation_longest": 0}, "must be 1 or more contexts, got 0"),
        ({"truncation_head": 4.5}, "must be a whole number, got 4.5"),
        ({"rope": "post"}, "must be one of pre, delta, got 'post'"),
    ],
)
def test_values_from_code_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        HierKVConfig.from_dict(values)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"host_size": 0}'])
def test_the_environment_is_checked(text: str) -> None:
    with pytest.raises(HierKVConfigError):
        HierKVConfig.from_json(text)


def test_settings_survive_the_way_to_other_processes() -> None:
    config = HierKVConfig.from_dict({"host_size": 2, "rope": "delta"})
    assert HierKVConfig.from_dict(config.to_dict()) == config
    assert config.host_size == 2.0
