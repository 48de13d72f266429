"""Which context parallel ranks are refused before the weights load, and with which reason."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.ranks.context import CONTEXT_ARCHITECTURES
from sglang_ext.settings.refusals import Resolved, check_arguments, check_resolved

RANKS: dict[str, Any] = {"tp_size": 2, "attn_cp_size": 2}
ZIGZAG = {
    **RANKS, "enable_prefill_cp": True, "cp_strategy": "zigzag", "attention_backend": "fa3"
}  # fmt: skip


def check(kind: str = "mha", release: str = "0.5.23", name: str = "", **values: Any) -> None:
    config = replace(HierKVConfig(), **values.pop("config", {}))
    model = kind, release, name or CONTEXT_ARCHITECTURES[0]
    check_resolved(Resolved(values, values, dict.fromkeys(values), *model), config)


def sentence(**changes: Any) -> str:
    """What a set-up that differs from a served one is refused with."""
    with pytest.raises(HierKVConfigError) as caught:
        check(**{**ZIGZAG, **changes})
    assert len(str(caught.value)) <= 700
    return str(caught.value)


def test_ranks_that_share_a_prefill_or_repeat_it_are_served() -> None:
    check(**RANKS)
    for backend in ("fa3", "fa4", "trtllm_mha", "cpu_extend"):
        check(**{**ZIGZAG, "attention_backend": backend})
    check(**{**ZIGZAG, "attention_backend": "triton", "prefill_attention_backend": "fa3"})
    check(**ZIGZAG, config={"remote_url": "file:///d"})


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("mla", "experts spread by DeepEP"),
        ("indexed", "in CUDA kernels (dsa)"),
        ("swa", "windows, which nobody tried"),
        ("swa of two shapes", "windows, which nobody tried"),
    ],
)
def test_another_kind_of_model_is_refused_with_why(kind: str, words: str) -> None:
    assert words in sentence(kind=kind)


@pytest.mark.parametrize(
    "values",
    [
        {"attention_backend": "triton"},
        {"attention_backend": "flashinfer"},
        {"attention_backend": None},
        {"prefill_attention_backend": "torch_native"},
    ],
)
def test_attention_that_writes_what_a_rank_has_is_refused(values: dict[str, Any]) -> None:
    assert "fa3, fa4 or trtllm_mha with --enable-prefill-cp, got " in sentence(**values)
    check(**{**RANKS, **values})


def test_shared_prefills_of_one_rank_are_no_way_around() -> None:
    alone = {"tp_size": 1, "attn_cp_size": 1}
    assert "got LlamaForCausalLM" in sentence(**alone, name="LlamaForCausalLM")
    assert "--attn-cp-size 2 (as --tp-size)" in sentence(attn_cp_size=1)


@pytest.mark.parametrize("kind", ["state", "state beside latent rows"])
def test_states_are_refused_with_why(kind: str) -> None:
    found = sentence(kind=kind, mamba_radix_cache_strategy="extra_buffer")
    assert "states, which SGLang keeps in shares of all ranks" in found


def test_models_and_releases_that_were_not_run_are_refused() -> None:
    assert "got LlamaForCausalLM; change it" in sentence(name="LlamaForCausalLM")
    assert "needs SGLang 0.5.23 with context parallel ranks" in sentence(release="0.5.22")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"cp_strategy": "interleave"}, "needs --cp-strategy zigzag, got --cp-strategy interleave"),
        ({"tp_size": 4}, "--attn-cp-size 4 (as --tp-size) with context parallel ranks, got 2"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype auto or bfloat16 with context parallel"),
        ({"dcp_size": 2}, "--dcp-size 1 (with more a rank's pool has each N-th token of a page)"),
        ({"enable_cp_tp_group_sharing": True}, "prefills of a model with states that ranks do not"),
        ({"enable_cp_decode_attn_tp": True}, "decode steps that ranks do not divide where they"),
        ({"enable_dsa_cache_layer_split": True}, "all layers of a page on each rank"),
        ({"enable_kv_cache_sharding": True}, "a KV cache that is not divided among ranks by pages"),
    ],
)
def test_ways_in_which_a_rank_has_a_part_of_a_page_are_refused(
    values: dict[str, Any], words: str
) -> None:
    assert words in sentence(**values)
    with pytest.raises(HierKVConfigError, match=r"^--enable-hier-kv needs "):
        check_arguments(SimpleNamespace(**{**ZIGZAG, **values}), HierKVConfig())
