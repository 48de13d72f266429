"""What of pipeline stages is refused before the weights load, and with which sentence."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.assembly.state_setup import awaited_layers
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.refusals import Resolved, check_resolved

STAGES: dict[str, Any] = {"pp_size": 2, "pp_async_batch_depth": 0, "disaggregation_mode": "null"}


def check(kind: str = "mha", config: dict[str, Any] | None = None, **values: Any) -> None:
    settings = replace(HierKVConfig(), **(config or {}))
    check_resolved(Resolved(values, values, dict.fromkeys(values), kind), settings)


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_stages_are_served_with_tensor_parallel_ranks_and_without(kind: str) -> None:
    check(kind, **STAGES)
    check(kind, tp_size=2, **STAGES)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"dp_size": 2}, "--dp-size 1 with several pipeline stages, got 2"),
        ({"tp_size": 2, "attn_dp_size": 2}, "--attn-dp-size 1 with several"),
        ({"pp_async_batch_depth": 2}, "--pp-async-batch-depth 0 with several"),
        ({"enable_dynamic_chunking": True}, "no --enable-dynamic-chunking with several"),
        ({"enable_mixed_chunk": True}, "no --enable-mixed-chunk with several"),
        ({"enable_prefill_delayer": True}, "no --enable-prefill-delayer with several"),
        ({"speculative_algorithm": "NGRAM"}, "no --speculative-algorithm with several"),
        ({"enable_lora": True}, "no --enable-lora with several pipeline stages, got it"),
        ({"lora_paths": ["a"]}, "no --enable-lora with several"),
        ({"enable_streaming_session": True}, "no --enable-streaming-session with several"),
        ({"enable_session_radix_cache": True}, "no --enable-session-radix-cache with several"),
    ],
)
def test_what_was_not_tried_with_stages_is_refused_with_them_alone(
    values: dict[str, Any], words: str
) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        check(**{**STAGES, **values})
    assert words in str(caught.value)
    assert str(caught.value).endswith("change it or leave --pp-size out.")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"codec": "hier", "disk_dir": "/d"}, "that loses nothing with several pipeline stages"),
        ({"codec": "host=hier"}, "that loses nothing with several pipeline stages, got hier"),
        ({"codec": "remote=zstd"}, "--hier-kv-codec remote=none with several"),
        ({"codec": "disk=zstd,remote=zstd"}, "remote=none with several"),
        ({"profile": "/p"}, "no --hier-kv-profile with several pipeline stages"),
        ({"truncation": "overflow"}, "--hier-kv-truncation off with several"),
        ({"tree_core": "rust"}, "--hier-kv-tree-core python with several"),
    ],
)
def test_settings_that_were_not_tried_with_stages_are_refused_with_them_alone(
    config: dict[str, Any], words: str
) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        check(config=config, **STAGES)
    assert words in str(caught.value)


@pytest.mark.parametrize("codec", ["", "none", "zstd", "lossless", "host=zstd", "disk=lossless"])
def test_stages_keep_coded_what_codecs_give_back_bit_for_bit_and_share_it_raw(codec: str) -> None:
    tiers = {"disk_dir": "/d", "disk_size": 1.0, "remote_url": "file:///s?size=1GB"}
    check(config={"codec": codec, **tiers}, **STAGES)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_prefill_and_decode_servers_have_one_stage(mode: str) -> None:
    with pytest.raises(HierKVConfigError, match=r"pipeline stages|--disaggregation"):
        check(**{**STAGES, "disaggregation_mode": mode})


@pytest.mark.parametrize("kind", ["swa", "state"])
def test_hybrids_that_were_not_run_in_stages_have_one(kind: str) -> None:
    with pytest.raises(HierKVConfigError, match=r"--pp-size 1 with .*, got 2"):
        check(kind, mamba_radix_cache_strategy="extra_buffer", **STAGES)


def test_windows_that_were_run_in_stages_are_served() -> None:
    one = Resolved(STAGES, STAGES, dict.fromkeys(STAGES), "swa", architecture="GptOssForCausalLM")
    check_resolved(one, HierKVConfig())


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("NemotronHForCausalLM", "state"),
        ("Qwen3_5ForCausalLM", "state"),
        ("KimiLinearForCausalLM", "state beside latent rows"),
    ],
)
def test_models_with_states_that_were_run_in_stages_are_served_on_one_node_and_on_two(
    architecture: str, kind: str
) -> None:
    values = {"mamba_radix_cache_strategy": "extra_buffer", **STAGES}
    one = Resolved(values, values, dict.fromkeys(values), kind, architecture=architecture)
    check_resolved(one, HierKVConfig())
    check_resolved(replace(one, values={**values, "nnodes": 2}), HierKVConfig())


@pytest.mark.parametrize(("num_stages", "num_nodes"), [(3, 2), (2, 3), (6, 4), (4, 6)])
def test_nodes_that_would_wait_for_stages_that_nobody_starts_are_refused(
    num_stages: int, num_nodes: int
) -> None:
    """Of a stage SGLang starts as many ranks as fit; its own check is of all ranks together."""
    values = {**STAGES, "tp_size": 6, "pp_size": num_stages, "nnodes": num_nodes}
    words = (
        f"--enable-hier-kv needs --nnodes that divides --pp-size {num_stages} or is a multiple of "
        f"it, with several pipeline stages, got {num_nodes}; change it or leave --pp-size out."
    )
    with pytest.raises(HierKVConfigError, match=re.escape(words)):
        check(**values)
    for fitting in (1, num_stages, 2 * num_stages):
        check(**{**values, "nnodes": fitting})


@pytest.mark.parametrize(
    ("kind", "stages", "words"),
    [
        ("state", ((1, 3), (0, 4)), "layers with a state in each .* 0 of the former and 4 of"),
        ("state beside latent rows", ((4, 0), (1, 3)), "got a stage with 4 of the former and 0 of"),
        ("swa", ((2, 2), (4, 0)), "layers with a window in each pipeline stage, got"),
    ],
)
def test_a_stage_with_layers_of_one_kind_alone_is_refused(
    kind: str, stages: tuple[tuple[int, int], ...], words: str
) -> None:
    values = {"mamba_radix_cache_strategy": "extra_buffer", **STAGES}
    architecture = "GptOssForCausalLM" if kind == "swa" else "NemotronHForCausalLM"
    good = Resolved(values, values, dict.fromkeys(values), kind, "", architecture, ((1, 3), (2, 2)))
    check_resolved(good, HierKVConfig())
    with pytest.raises(HierKVConfigError, match=words):
        check_resolved(replace(good, stages=stages), HierKVConfig())


def test_layers_of_a_stage_are_waited_for_by_their_numbers_in_it() -> None:
    """SGLang waits at a layer less the stage's first; a larger number is one told too late.

    By the model's numbers a forward would go on in front of what was told for its own layers.
    """
    pool = SimpleNamespace(start_layer=5, full_attention_layer_id_mapping={8: 0})
    snapshots: Any = SimpleNamespace(pool=SimpleNamespace(layers=(5, 6, 9)))
    assert awaited_layers(snapshots, pool) == [(3,), (0, 1, 4)]


def test_layers_of_a_draft_are_told_behind_all_others() -> None:
    pool = SimpleNamespace(start_layer=0, full_attention_layer_id_mapping={1: 0, 3: 1})
    snapshots: Any = SimpleNamespace(pool=SimpleNamespace(layers=(0, 2)))
    assert awaited_layers(snapshots, pool, num_drafts=1) == [(1, 3, 4), (0, 2)]
