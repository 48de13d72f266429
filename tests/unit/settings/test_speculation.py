"""What of speculative decoding is refused before the weights load, and with which sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.arguments import flag
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.refusals import (
    Resolved,
    check_branches,
    check_changes,
    check_keys,
    check_resolved,
)
from sglang_ext.settings.speculation import DRAFTED_HYBRIDS, WINDOW_TARGETS

CHAINS: dict[str, Any] = {"speculative_eagle_topk": 1, "speculative_num_steps": 3}
CHAINS["attention_backend"] = "triton"


def check(
    algorithm: str,
    kind: str = "mha",
    config: dict[str, Any] | None = None,
    architecture: str = "",
    draft: str = "",
    release: str = "0.5.23",
    **more: Any,
) -> None:
    values = {"speculative_algorithm": algorithm, **CHAINS, **more}
    settings = replace(HierKVConfig(), **(config or {}))
    resolved = Resolved(
        values, values, {}, kind, architecture=architecture, draft=draft, release=release
    )
    check_resolved(resolved, settings)


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_chains_of_drafts_are_served(algorithm: str) -> None:
    check(algorithm)


TREES: dict[str, Any] = {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 64}


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "fa3", "cpu_extend"])
@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE"])
def test_trees_of_drafts_are_served_where_sglang_has_them_in_pages(
    algorithm: str, backend: str
) -> None:
    check(algorithm, **TREES, attention_backend=backend)
    check(algorithm, **TREES, attention_backend=backend, tp_size=2)


def test_trees_of_drafts_are_served_over_latent_rows_where_attention_masks_them() -> None:
    check("EAGLE", "mla", **TREES, attention_backend="triton", tp_size=2)
    check_branches({**TREES, "speculative_algorithm": "EAGLE"}.get, "mla")


@pytest.mark.parametrize("backend", ["triton", "flashinfer", "intel_amx", "cpu_extend"])
def test_ngrams_are_served_where_attention_masks_branches(backend: str) -> None:
    check("NGRAM", attention_backend=backend)


def test_ngrams_are_served_by_the_release_before_where_results_are_processed_at_once() -> None:
    check("NGRAM", release="0.5.22", disable_overlap_schedule=True)
    check("EAGLE", release="0.5.22")


@pytest.mark.parametrize("algorithm", ["EAGLE", "NGRAM"])
def test_tensor_parallel_ranks_are_served(algorithm: str) -> None:
    check(algorithm, tp_size=2)


@pytest.mark.parametrize("kind", ["mla", "indexed"])
def test_draft_layers_of_models_with_latent_rows_are_served(kind: str) -> None:
    check("EAGLE", kind, tp_size=2)
    check("EAGLE", kind, tp_size=4, attn_dp_size=2)


ADAPTIVE: dict[str, Any] = {"speculative_adaptive": True}


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("EAGLE", "mha"), ("EAGLE3", "mha"), ("EAGLE", "mla"), ("EAGLE", "indexed")],
)
def test_chains_are_served_whose_length_sglang_adapts(algorithm: str, kind: str) -> None:
    check(algorithm, kind, **ADAPTIVE, tp_size=2)
    check(algorithm, **ADAPTIVE, release="0.5.22")


STATES: dict[str, Any] = {"kind": "state", "architecture": "Qwen3NextForCausalLM"}
GLM = {"architecture": "Glm4MoeForCausalLM", "draft": "Glm4MoeForCausalLMNextN"}
GROUPS: dict[str, Any] = {"tp_size": 4, "attn_dp_size": 2}


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        ("EAGLE", STATES),
        ("EAGLE", {**STATES, "architecture": "Qwen3_5MoeForConditionalGeneration"}),
        ("EAGLE3", {"kind": "swa", "architecture": "GptOssForCausalLM"}),
        ("EAGLE3", {}),
        ("EAGLE", GLM),
    ],
)
def test_drafts_that_sglang_has_whole_in_a_group_are_served_with_data_parallel_attention(
    algorithm: str, model: dict[str, Any]
) -> None:
    check(algorithm, **model, **GROUPS, config={"remote_url": "file:///d"})
    check(algorithm, **model, tp_size=2, dp_size=2, enable_dp_attention=True)
    check(algorithm, **model, **GROUPS, config={"codec": "lossless"})
    for more, words in (
        ({"release": "0.5.22"}, r"SGLang 0\.5\.23.* got 0\.5\.22"),
        ({"config": {"codec": "hier"}}, "a --hier-kv-codec that loses nothing .* got hier;"),
        (TREES, "--speculative-eagle-topk 1 .* got 8;"),
    ):
        with pytest.raises(HierKVConfigError, match=words):
            check(algorithm, **{**model, **more}, **GROUPS)


@pytest.mark.parametrize(
    ("algorithm", "model"), [("EAGLE3", {}), ("EAGLE", GLM), ("EAGLE", {"kind": "mla"})]
)
def test_prompts_are_cut_with_drafts_and_data_parallel_attention(
    algorithm: str, model: dict[str, Any]
) -> None:
    check(algorithm, **model, **GROUPS, config={"truncation": "overflow"})
    with pytest.raises(HierKVConfigError, match=r"--hier-kv-truncation .* got match"):
        check(algorithm, **model, **GROUPS, config={"truncation": "match"})


@pytest.mark.parametrize(("architecture", "draft"), DRAFTED_HYBRIDS.items())
def test_the_draft_layer_of_a_model_with_states_is_served(architecture: str, draft: str) -> None:
    states: dict[str, Any] = {"kind": "state", "architecture": architecture}
    check("EAGLE", **states, speculative_accept_threshold_single=1.0, kv_cache_dtype="fp8_e4m3")
    check("EAGLE", **states, draft=draft, tp_size=8, config={"remote_url": "file:///d"})


def test_ranks_of_a_hybrid_draw_no_guesses() -> None:
    """SGLang tells all ranks which guesses are right, and not which these were."""
    windows: dict[str, Any] = {"kind": "swa", "architecture": WINDOW_TARGETS[0]}
    drawn: dict[str, Any] = {"speculative_use_rejection_sampling": True}
    check("EAGLE", **drawn, tp_size=2)
    for algorithm, model in (("EAGLE", STATES), ("EAGLE3", windows)):
        check(algorithm, **model, **drawn)
        with pytest.raises(HierKVConfigError, match="no --speculative-use-rejection-sampling"):
            check(algorithm, **model, **drawn, tp_size=2)


def test_guesses_are_fewer_than_half_of_what_is_between_two_states() -> None:
    """A model's chunk may be shorter than 64 tokens, and then a page of states is no longer."""
    states: dict[str, Any] = {"kind": "state", "architecture": "NemotronHForCausalLM"}
    for page, interval, most in ((16, 16, 8), (16, 32, 16), (64, 64, 32), (16, 256, 32)):
        places: dict[str, Any] = {"page_size": page, "mamba_track_interval": interval}
        check("EAGLE", **states, **places, speculative_num_draft_tokens=most)
        words = f"--speculative-num-draft-tokens of at most {most} with .* got {most + 1};"
        with pytest.raises(HierKVConfigError, match=words):
            check("EAGLE", **states, **places, speculative_num_draft_tokens=most + 1)


@pytest.mark.parametrize("architecture", WINDOW_TARGETS)
def test_eagle3_is_served_where_layers_have_windows(architecture: str) -> None:
    check("EAGLE3", "swa", architecture=architecture, attention_backend="fa3")
    check("EAGLE3", "swa", architecture=architecture, kv_cache_dtype="fp8_e5m2")
    config = {"remote_url": "file:///d"}
    check("EAGLE3", "swa", config, architecture=architecture, tp_size=2)


def test_drafts_of_a_model_are_served_whatever_masks() -> None:
    check("EAGLE", attention_backend="fa3")


CACHEGEN = "disk=hier,remote=cachegen-paper"

OSS = {"kind": "swa", "architecture": "GptOssForCausalLM"}
REFUSED = [
    (
        "EAGLE",
        {**TREES, "kind": "indexed"},
        "--speculative-eagle-topk 1 (more with K and V of every head, or latent rows alone) with",
        "8",
    ),
    *(
        (
            "EAGLE",
            {**TREES, "kind": "mla", name: backend},
            f"--{flag(name)} triton (over latent rows it alone masks branches right)",
            backend,
        )
        for name in ("attention_backend", "speculative_draft_attention_backend")
        for backend in ("fa3", "flashinfer")
    ),
    (
        "EAGLE",
        {**TREES, **GROUPS, "kind": "mla"},
        "--speculative-eagle-topk 1 (with data parallel attention) with",
        "8",
    ),
    (
        "EAGLE",
        {**GROUPS, **GLM, "draft": "LlamaForCausalLMEagle"},
        "no data parallel attention (with K and V of every head EAGLE3 and GLM-4.5's own draft",
        "it",
    ),
    (
        "EAGLE",
        {**TREES, "disaggregation_mode": "prefill"},
        "--speculative-eagle-topk 1 (more without --disaggregation-mode) with",
        "8",
    ),
    (
        "NGRAM",
        {"release": "0.5.22"},
        "--disable-overlap-schedule (else KV may be moved to rows of another request) with",
        "SGLang 0.5.22",
    ),
    ("EAGLE3", {**TREES, "release": "0.5.22"}, "SGLang 0.5.23 (where guesses branch)", "0.5.22"),
    (
        "STANDALONE",
        {**TREES, "decode_attention_backend": "fa4"},
        "--attention-backend triton, flashinfer or fa3 (where guesses branch) with",
        "fa4",
    ),
    (
        "EAGLE",
        {**TREES, "speculative_draft_attention_backend": "trtllm_mha"},
        "--speculative-draft-attention-backend triton, flashinfer or fa3 (where guesses branch)",
        "trtllm_mha",
    ),
    ("NGRAM", {"speculative_eagle_topk": 10}, "(--speculative-ngram-max-bfs-breadth 1)", "10"),
    ("EAGLE", {"enable_multi_layer_eagle": True}, "no --enable-multi-layer-eagle (", "it"),
    (
        "EAGLE",
        {"kind": "swa of two shapes", "enable_multi_layer_eagle": True},
        "KV of their draft layers is of guesses, the wrong ones, too) with",
        "it",
    ),
    ("STANDALONE", ADAPTIVE, "no --speculative-adaptive (EAGLE and EAGLE3 have it) with", "it"),
    ("NGRAM", ADAPTIVE, "no --speculative-adaptive (EAGLE and EAGLE3 have it) with", "it"),
    ("EAGLE", {**TREES, **ADAPTIVE}, "no --speculative-adaptive (where guesses branch) with", "it"),
    (
        "EAGLE",
        {**ADAPTIVE, "kind": "mla", "tp_size": 2, "attn_dp_size": 2},
        "no --speculative-adaptive (with data parallel attention) with",
        "it",
    ),
    ("EAGLE", {**STATES, **ADAPTIVE}, "no --speculative-adaptive (with window layers or", "it"),
    ("EAGLE3", {**OSS, **ADAPTIVE}, "no --speculative-adaptive (with window layers or", "it"),
    (
        "EAGLE",
        {**ADAPTIVE, "disaggregation_mode": "prefill"},
        "no --speculative-adaptive (with --disaggregation-mode) with",
        "it",
    ),
    ("STANDALONE", {"enable_lora": True}, "no --enable-lora with", "it"),
    ("NGRAM", {"enable_streaming_session": True}, "no --enable-streaming-session with", "it"),
    (
        "EAGLE3",
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        "no --speculative-draft-kv-cache-dtype with",
        "fp8_e4m3",
    ),
    ("EAGLE", {"speculative_draft_window_size": 64}, "no --speculative-draft-window-size", "64"),
    ("EAGLE", {"speculative_num_steps": 0}, "--speculative-num-steps of at least 1 with", "0"),
    ("EAGLE", {**STATES, "speculative_num_steps": 0}, "--speculative-num-steps of at least", "0"),
    ("EAGLE", {"kind": "swa"}, "full attention in every layer (with window layers EAGLE3)", "a"),
    (
        "EAGLE3",
        {"kind": "swa", "architecture": "LagunaForCausalLM"},
        "GptOssForCausalLM, or full attention in every layer with",
        "LagunaForCausalLM",
    ),
    ("EAGLE3", {"kind": "swa of two shapes"}, "K and V of every head or latent rows in every", "a"),
    ("EAGLE3", {**OSS, "config": {"codec": "remote=hier"}}, "that loses nothing with", "hier"),
    ("EAGLE3", {**OSS, "config": {"truncation": "overflow"}}, "--hier-kv-truncation off", "over"),
    (
        "EAGLE",
        {**STATES, "architecture": "NemotronHForCausalLM", "tp_size": 2, "attn_dp_size": 2},
        "no data parallel attention (SGLang ends in a group without requests) with",
        "NemotronHForCausalLM",
    ),
    ("EAGLE3", {"kind": "mla"}, "K and V of every head (with latent rows EAGLE) with", "a model"),
    ("STANDALONE", {"kind": "indexed"}, "K and V of every head (with latent rows EAGLE)", "a"),
    ("NGRAM", {"kind": "swa"}, "full attention in every layer with", "a model with other layers"),
    ("NGRAM", {"attention_backend": "fa3"}, "--attention-backend triton (it masks", "fa3"),
    ("NGRAM", {"attention_backend": None}, "--attention-backend triton (it masks", "none"),
    (
        "NGRAM",
        {"decode_attention_backend": "trtllm_mha"},
        "--attention-backend triton (it masks branches) with",
        "trtllm_mha",
    ),
    (
        "NGRAM",
        {"kind": "mla", "attention_backend": "flashinfer"},
        "--attention-backend triton (it masks branches) with",
        "flashinfer",
    ),
    (
        "EAGLE",
        {"tp_size": 2, "attn_dp_size": 2},
        "no data parallel attention (with K and V of every head EAGLE3 and GLM-4.5's own draft",
        "it",
    ),
    (
        "NGRAM",
        {"kind": "mla", "enable_dp_attention": True},
        "no data parallel attention (SGLang has it with EAGLE and EAGLE3 alone) with",
        "it",
    ),
    (
        "STANDALONE",
        {"tp_size": 2, "attn_dp_size": 2},
        "no data parallel attention (SGLang has it with EAGLE and EAGLE3 alone) with",
        "it",
    ),
    (
        "EAGLE",
        {"kind": "mla", **GROUPS, "release": "0.5.22", "speculative_skip_dp_mlp_sync": True},
        "no --speculative-skip-dp-mlp-sync (with data parallel attention) with",
        "it",
    ),
    ("NGRAM", {"config": {"truncation": "overflow"}}, "--hier-kv-truncation off with", "overflow"),
    ("EAGLE", {"config": {"tree_core": "rust"}}, "--hier-kv-tree-core python with", "rust"),
    (
        "EAGLE",
        {"kind": "state", "architecture": "FalconH1ForCausalLM"},
        f"of hybrids with states {', '.join(DRAFTED_HYBRIDS)} with",
        "FalconH1ForCausalLM",
    ),
    ("EAGLE", {"kind": "state"}, "of hybrids with states Qwen3NextForCausalLM, ", "another"),
    ("EAGLE", {"kind": "state beside latent rows"}, "K and V of every head or latent rows", "a"),
    ("NGRAM", STATES, "full attention in every layer with", "a model with other layers"),
    ("EAGLE3", STATES, "K and V of every head (with states EAGLE) with", "a model of states"),
    ("STANDALONE", STATES, "K and V of every head (with states EAGLE) with", "a model of states"),
    (
        "EAGLE",
        {**STATES, "enable_linear_replayssm_spec": True},
        "no --enable-linear-replayssm-spec with",
        "it",
    ),
    (
        "EAGLE",
        {**STATES, "speculative_accept_threshold_acc": 0.5},
        "--speculative-accept-threshold-acc 1.0 with",
        "0.5",
    ),
    (
        "EAGLE",
        {**STATES, "speculative_num_draft_tokens": 33},
        "--speculative-num-draft-tokens of at most 32 with",
        "33",
    ),
    (
        "EAGLE",
        {**STATES, "draft": "LlamaForCausalLMEagle"},
        "its own draft layer (Qwen3NextForCausalLMMTP) with",
        "a draft of LlamaForCausalLMEagle",
    ),
    (
        "EAGLE",
        {"kind": "state", "architecture": "Qwen3_5ForCausalLM", "draft": "Qwen3NextForCausalLMMTP"},
        "its own draft layer (Qwen3_5ForCausalLMMTP) with",
        "a draft of Qwen3NextForCausalLMMTP",
    ),
    ("EAGLE", {**STATES, "config": {"codec": "hier"}}, "that loses nothing with", "hier"),
    (
        "EAGLE",
        {**STATES, "mamba_radix_cache_strategy": "extra_buffer_lazy"},
        "--mamba-radix-cache-strategy extra_buffer with",
        "extra_buffer_lazy",
    ),
    ("EAGLE", {"config": {"truncation": "all"}}, "--hier-kv-truncation off or overflow", "all"),
    (
        "EAGLE3",
        {"config": {"codec": CACHEGEN}},
        "that loses nothing, or hier with",
        "cachegen-paper",
    ),
    ("EAGLE", {"kind": "mla", "config": {"codec": "hier"}}, "that loses nothing with", "hier"),
    (
        "EAGLE",
        {"kind": "indexed", "config": {"codec": "remote=hier"}},
        "a --hier-kv-codec that loses nothing with",
        "hier",
    ),
    (
        "EAGLE",
        {"kind": "mla", "attn_dp_size": 2, "tp_size": 2, "config": {"codec": "hier"}},
        "a --hier-kv-codec that loses nothing (with data parallel attention) with",
        "hier",
    ),
    (
        "EAGLE",
        {"config": {"codec": "remote=hier", "slo_ms": 50.0}},
        "--hier-kv-slo-ms 0 with",
        "50",
    ),
    ("DFLASH", {}, "speculative decoding by EAGLE", "--speculative-algorithm DFLASH"),
    ("FROZEN_KV_MTP", {}, "speculative decoding by EAGLE", "--speculative-algorithm FROZEN_KV_MTP"),
]


@pytest.mark.parametrize(("algorithm", "more", "expected", "found"), REFUSED)
def test_what_was_not_tried_is_refused_by_one_sentence(
    algorithm: str, more: dict[str, Any], expected: str, found: str
) -> None:
    with pytest.raises(HierKVConfigError) as error:
        check(algorithm, **more)
    sentence = str(error.value)
    assert expected in sentence
    assert f"got {found}" in sentence
    assert sentence.count(". ") == 0


def test_of_branches_sglang_is_told_what_it_refused_by_itself() -> None:
    values = {"speculative_algorithm": "EAGLE", **TREES}
    check_branches(values.get, "mha")  # it stopped for something else, before it chose a backend
    check_branches({**values, "attention_backend": "triton"}.get, "mha")
    with pytest.raises(HierKVConfigError, match=r"or fa3 .* got torch_native;"):
        check_branches({**values, "attention_backend": "torch_native"}.get, "mha")


@pytest.mark.parametrize("algorithm", ["EAGLE", "EAGLE3", "STANDALONE", "NGRAM"])
def test_guesses_that_are_taken_for_right_are_refused(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's benchmark of acceptance keeps KV of guesses under the tokens that it answers."""
    for value in ("", "-1", "0"):
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", value)
        check(algorithm)
    for value in ("2.5", "three"):
        monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", value)
        words = f"no SGLANG_SIMULATE_ACC_LEN with .* {algorithm}, got {value};"
        with pytest.raises(HierKVConfigError, match=words):
            check(algorithm)


HYBRIDS = {"state": STATES["architecture"], "swa": WINDOW_TARGETS[0]}
CODECS = ["disk=lossless", "host=lossless,disk=lossless", "remote=lossless", "remote=zstd"]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    ("algorithm", "kind"),
    [
        *(("EAGLE", "mha"), ("EAGLE3", "mha"), ("STANDALONE", "mha"), ("EAGLE", "mla")),
        *(("EAGLE", "state"), ("EAGLE3", "swa")),
    ],
)
def test_codecs_that_lose_nothing_are_served(algorithm: str, kind: str, codec: str) -> None:
    named = {"architecture": HYBRIDS.get(kind, "")}
    check(algorithm, kind, {"codec": codec}, **named)
    check(algorithm, kind, {"codec": codec}, **named, tp_size=2, kv_cache_dtype="fp8_e4m3")


VARIABLES = [
    ("EAGLE", {}, "SGLANG_SIMULATE_ACC_LEN", "2.5", "2.5"),
    ("NGRAM", {}, "SGLANG_SIMULATE_ACC_LEN", "3", "3"),
    ("STANDALONE", {}, "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND", "yes", "it"),
    ("EAGLE", TREES, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "1", "it"),
    ("EAGLE3", GROUPS, "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1", "it"),
    ("EAGLE", {"kind": "mla", **GROUPS}, "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION", "1", "it"),
]


@pytest.mark.parametrize(("algorithm", "values", "name", "value", "found"), VARIABLES)
def test_variables_with_which_rows_are_not_what_their_tokens_give_are_refused(
    algorithm: str,
    values: dict[str, Any],
    name: str,
    value: str,
    found: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(name, "-1")
    check(algorithm, **values)
    monkeypatch.setenv(name, value)
    with pytest.raises(HierKVConfigError, match=rf"no {name} .*got {found};"):
        check(algorithm, **values)


@pytest.mark.parametrize("codec", ["hier", "remote=hier", "disk=hier,remote=lossless"])
def test_a_codec_that_loses_something_is_served_with_k_and_v_of_every_head(codec: str) -> None:
    check("EAGLE", "mha", {"codec": codec})


@pytest.mark.parametrize("kind", ["mha", "mla", "indexed"])
def test_prompts_may_be_cut_where_nothing_is_moved(kind: str) -> None:
    check("EAGLE", kind, {"truncation": "overflow"})


MHA, MLA = "K and V of every head", "latent rows"


@pytest.mark.parametrize(
    ("target", "draft", "found"),
    [
        (f"{MLA} in torch.bfloat16", f"{MHA} in torch.bfloat16", f"one of {MHA} in"),
        (f"{MHA} in torch.bfloat16", f"{MHA} in torch.float16", f"one of {MHA} in torch.float16"),
        # Of a quantized checkpoint the dtype follows from its weights' configuration.
        (MLA, f"{MHA} in torch.bfloat16", f"one of {MHA};"),
        (f"{MLA} with an index", MLA, f"one of {MLA};"),
        (f"{MHA} in torch.bfloat16", "window layers with a pool of their own", "one of window"),
        (
            f"{MHA} in torch.bfloat16",
            "layers with a state a sequence",
            "one of layers with a state",
        ),
    ],
)
def test_a_draft_with_other_rows_than_its_target_is_refused(
    target: str, draft: str, found: str
) -> None:
    values = {"speculative_algorithm": "EAGLE", **CHAINS}
    for rows in ((target, target), (target, ""), ("", draft)):
        check_resolved(Resolved(values, values, {}, "mla", rows=rows), HierKVConfig())
    with pytest.raises(HierKVConfigError) as error:
        check_resolved(Resolved(values, values, {}, "mla", rows=(target, draft)), HierKVConfig())
    assert f"a draft model with a KV pool as the target model's ({target.split(' in ')[0]}" in str(
        error.value
    )
    assert f"got {found}" in str(error.value)
    assert "choose another draft model" in str(error.value)


def test_rows_are_compared_as_far_as_both_are_known() -> None:
    values = {"speculative_algorithm": "EAGLE", **CHAINS}
    rows = MHA, f"{MHA} in torch.float16"
    check_resolved(Resolved(values, values, {}, "mha", rows=rows), HierKVConfig())


@pytest.mark.parametrize(
    ("algorithm", "are_pairs", "expected"),
    [("EAGLE", False, "keys of token pairs"), ("NGRAM", True, "keys of tokens")],
)
def test_a_tree_with_other_keys_is_refused(algorithm: str, are_pairs: bool, expected: str) -> None:
    check_keys(algorithm, are_pairs=not are_pairs)
    check_keys(algorithm, are_pairs=False, has_states=True)
    with pytest.raises(HierKVConfigError, match=f"{expected} with --speculative-algorithm"):
        check_keys(algorithm, are_pairs=are_pairs)


THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")


def change(algorithm: str | None, kind: str, *, stores_images: bool = False, **more: Any) -> None:
    values = {"speculative_algorithm": algorithm, **dict.fromkeys(THRESHOLDS, 1.0), **more}
    check_changes(values.get, kind, stores_images=stores_images)


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_running_server_keeps_the_thresholds_without_which_it_would_not_have_started(
    name: str,
) -> None:
    flag = f"--{name.replace('_', '-')}"
    for algorithm, kind, stores_images, expected in (
        ("EAGLE", "state", False, f"{flag} 1.0 with"),
        ("EAGLE", "state", True, f"{flag} 1.0 with"),
        ("EAGLE3", "mha", True, rf"{flag} of at least 1.0 \(on a server that stores prompts with"),
    ):
        change(algorithm, kind, stores_images=stores_images)
        words = f"{expected}.* --speculative-algorithm {algorithm}, got 0.5; leave it as it is"
        with pytest.raises(HierKVConfigError, match=words):
            change(algorithm, kind, stores_images=stores_images, **{name: 0.5})
    with pytest.raises(HierKVConfigError, match="got nan"):
        change("EAGLE3", "mha", stores_images=True, **{name: float("nan")})


@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_running_server_changes_thresholds_with_which_it_would_have_started(name: str) -> None:
    half: dict[str, Any] = {name: 0.5}
    for algorithm, kind in ((None, "state"), ("EAGLE", "mha"), ("EAGLE3", "swa"), ("NGRAM", "mla")):
        change(algorithm, kind, **half)
    change(None, "mha", stores_images=True, **half)
    check("EAGLE", "mha", **half)
