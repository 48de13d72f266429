"""Refusals that need the loaded model's facts, and the sentences of settings made in code."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_cpu import launch
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.verdict import reference_releases
from sglang_ext.settings.arguments import FREE, LIMITED, OF_OLDER
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.images import ALONG_AXES, PLAIN, STATES, WITH_STATES, why_not_images
from sglang_ext.settings.model_kinds import MODEL_KINDS
from sglang_ext.settings.refusals import (
    Resolved,
    check_arguments,
    check_attention,
    check_heads,
    check_model,
    check_ranks,
    check_resolved,
    check_tree,
)


def named(name: str, **attributes: Any) -> Any:
    """An object of a class of this name."""
    return type(name, (SimpleNamespace,), {})(**attributes)


def context(**facts: Any) -> Any:
    """What SGLang tells the cache factory of a plain model, but for `facts`."""
    params = {
        "token_to_kv_pool_allocator": named("PagedTokenToKVPoolAllocator", page_size=64),
        "req_to_token_pool": named("ReqToTokenPool"),
        "page_size": 64,
        "swa_gates_prefix_match": True,
        "sliding_window_size": 128,
    }
    plain: dict[str, Any] = dict.fromkeys(
        ("disable_radix_cache", "is_hybrid_swa", "is_hybrid_ssm", "is_dsa"), False
    )
    plain["model_config"] = SimpleNamespace(attention_chunk_size=facts.pop("chunk", None))
    plain["server_args"] = SimpleNamespace(disaggregation_mode=facts.pop("mode", "null"))
    plain["params"] = SimpleNamespace(**{name: facts.pop(name, params[name]) for name in params})
    return SimpleNamespace(**{**plain, **facts})


def resolved(kind: str = "mha", given: Any = None, **values: Any) -> Resolved:
    """What SGLang decided: every argument at its only allowed value, but for `values`."""
    return Resolved(values, values if given is None else given, dict.fromkeys(values), kind)


@pytest.mark.parametrize("kind", ["mha", "swa", "state"])
def test_k_and_v_head_by_head_are_refused(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    kept = {"mamba_radix_cache_strategy": "extra_buffer"} if kind == "state" else {}
    for value in ("0", "false", ""):
        monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", value)
        check_resolved(resolved(kind, **kept), HierKVConfig())
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "True")
    with pytest.raises(HierKVConfigError, match=r"\(NHD\), got SGLANG_USE_HND_KVCACHE=1; unset"):
        check_resolved(resolved(kind, **kept), HierKVConfig())


@pytest.mark.parametrize("kind", ["mla", "indexed", "state beside latent rows"])
def test_latent_rows_are_never_head_by_head(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    kept = {"mamba_radix_cache_strategy": "extra_buffer"} if kind.startswith("state") else {}
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    check_resolved(resolved(kind, **kept), HierKVConfig())


def test_a_plain_model_is_taken() -> None:
    check_model(context())
    check_tree(["FULL"])
    check_ranks({"context parallelism": 1})
    assert check_resolved(resolved(), HierKVConfig()) == []


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"is_hybrid_swa": True}, "needs SWATokenToKVPoolAllocator"),
        ({"is_hybrid_swa": True, "swa_gates_prefix_match": False}, "a tree that keeps windows"),
        ({"is_hybrid_swa": True, "swa_gates_prefix_match": None}, "SGLang 0.5.23, got one without"),
        ({"is_hybrid_swa": True, "chunk": 128}, "needs SWATokenToKVPoolAllocator"),
        ({"is_hybrid_swa": True, "chunk": 129}, "keeps chunks of 129 tokens, got one of 128"),
        ({"is_hybrid_ssm": True}, "needs HybridReqToTokenPool, got ReqToTokenPool"),
        ({"is_hybrid_ssm": True, "is_hybrid_swa": True}, "a hybrid model with other states"),
        ({"is_hybrid_ssm": True, "swa_gates_prefix_match": None}, "SGLang 0.5.23, got one without"),
        ({"is_dsa": True, "is_hybrid_swa": True}, "sparse attention over another"),
        ({"is_dsa": True, "swa_gates_prefix_match": None}, "SGLang 0.5.23, got one without"),
        ({"mode": "decode"}, "needs DecodeReqToTokenPool, got ReqToTokenPool"),
        ({"mode": "decode", "is_hybrid_ssm": True}, "needs HybridMambaDecodeReqToTokenPool"),
        ({"mode": "prefill", "swa_gates_prefix_match": None}, "SGLang 0.5.23, got one without"),
        ({"disable_radix_cache": True}, "SGLang disables it"),
        ({"page_size": 32}, "pages of 32 tokens, got pages of 64 tokens"),
        ({"req_to_token_pool": named("HybridReqToTokenPool")}, "got HybridReqToTokenPool"),
        (
            {"token_to_kv_pool_allocator": named("PageInterleavePoolAllocator", page_size=64)},
            "got PageInterleavePoolAllocator",
        ),
    ],
)
def test_what_was_built_is_looked_at(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        check_model(context(**facts))
    sentence = str(caught.value)
    assert sentence.startswith("--enable-hier-kv needs ")
    assert words in sentence
    assert sentence.endswith("start this model without --enable-hier-kv.")


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("swa", "sliding-window layers"),
        ("swa of two shapes", "sliding-window layers"),
        ("state", "layers that have a state"),
        ("state beside latent rows", "layers that have a state"),
        ("indexed", "rows of an index"),
    ],
)
def test_an_older_sglang_is_refused_before_the_weights_load(kind: str, words: str) -> None:
    kept = {"mamba_radix_cache_strategy": "extra_buffer"} if kind.startswith("state") else {}
    for release in ("0.5.22", "0.5.22.post1"):
        with pytest.raises(HierKVConfigError, match=rf"SGLang 0.5.23 with {words}, got {release};"):
            check_resolved(replace(resolved(kind, **kept), release=release), HierKVConfig())
    check_resolved(replace(resolved(kind, **kept), release="0.5.23"), HierKVConfig())
    check_resolved(replace(resolved("mla"), release="0.5.22"), HierKVConfig())


def test_a_tree_of_more_than_pages_is_refused() -> None:
    with pytest.raises(HierKVConfigError, match="full attention only, got one of FULL, C128"):
        check_tree(["FULL", "C128"])


def test_a_tree_with_windows_is_taken_for_a_model_with_windows_alone() -> None:
    check_tree(["FULL", "SWA"], has_windows=True)
    for components, has_windows in (
        (["FULL", "SWA"], False),
        (["FULL"], True),
        (["FULL", "SWA", "MAMBA"], True),
    ):
        with pytest.raises(HierKVConfigError, match="radix tree"):
            check_tree(components, has_windows=has_windows)


@pytest.mark.parametrize(
    ("values", "config", "words"),
    [
        ({"enable_lora": True}, HierKVConfig(), "no --enable-lora"),
        ({"enable_streaming_session": True}, HierKVConfig(), "no --enable-streaming-session"),
        ({"swa_prefix_tails": 4}, HierKVConfig(), "no --swa-prefix-tails"),
        ({}, HierKVConfig(codec="host=hier"), "a --hier-kv-codec that loses nothing"),
        (
            {},
            HierKVConfig(codec="remote=lossless", remote_url="file:///d", slo_ms=5),
            "--hier-kv-slo-ms 0 with sliding-window layers, got 5",
        ),
        (
            {"tp_size": 2},
            HierKVConfig(truncation="match"),
            "--hier-kv-truncation overflow or off with sliding-window layers, got match",
        ),
        ({}, HierKVConfig(tree_core="rust"), "--hier-kv-tree-core python"),
    ],
)
def test_what_was_not_tried_with_windows_is_refused_with_them_alone(
    values: dict[str, Any], config: HierKVConfig, words: str
) -> None:
    check_resolved(resolved(**values), config)
    with pytest.raises(HierKVConfigError) as caught:
        check_resolved(resolved("swa", **values), config)
    assert words in str(caught.value)
    check_resolved(resolved("swa"), HierKVConfig(remote_url="file:///d"))
    check_resolved(resolved("swa", dp_size=2), HierKVConfig(truncation="all"))
    coded = HierKVConfig(codec="disk=lossless,remote=zstd", disk_dir="/d", remote_url="file:///d")
    check_resolved(resolved("swa"), coded)
    check_resolved(resolved("swa", tp_size=2), HierKVConfig(remote_url="file:///d"))
    for values in ({"attn_dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}):
        check_resolved(resolved("swa", tp_size=2, **values), HierKVConfig())
        check_resolved(resolved("swa", tp_size=2, nnodes=2, **values), HierKVConfig())


@pytest.mark.parametrize(
    "kind",
    [name for name, kind in MODEL_KINDS.items() if kind.is_served and name != "indexed"],
)
def test_whole_schedulers_are_taken(kind: str) -> None:
    """Each is a server of its own."""
    values = {"dp_size": 2, "mamba_radix_cache_strategy": "extra_buffer"}
    for num_ranks in (1, 2):
        check_resolved(resolved(kind, tp_size=num_ranks, **values), HierKVConfig())


@pytest.mark.parametrize("kind", [name for name, kind in MODEL_KINDS.items() if kind.is_served])
@pytest.mark.parametrize("num_groups", [1, 2])
def test_every_kind_that_is_served_is_on_several_nodes(kind: str, num_groups: int) -> None:
    values = {"nnodes": 2, "mamba_radix_cache_strategy": "extra_buffer"}
    check_resolved(resolved(kind, tp_size=4, attn_dp_size=num_groups, **values), HierKVConfig())


def test_window_layers_of_another_shape_are_refused_with_what_those_of_one_are() -> None:
    kind = "swa of two shapes"
    check_resolved(resolved(kind), HierKVConfig(remote_url="file:///d"))
    check_resolved(resolved(kind, tp_size=2), HierKVConfig(remote_url="file:///d"))
    for values, config, words in (
        ({"enable_lora": True}, HierKVConfig(), "no --enable-lora with sliding-window"),
        ({}, HierKVConfig(codec="lossless", disk_dir="/d"), "--hier-kv-codec none"),
        ({}, HierKVConfig(truncation="all"), "--hier-kv-truncation overflow or off"),
        ({"speculative_algorithm": "NGRAM"}, HierKVConfig(), "full attention in every layer"),
    ):
        with pytest.raises(HierKVConfigError) as caught:
            check_resolved(resolved(kind, **values), config)
        assert words in str(caught.value)
        # In one pool SGLang has no room for layers of two shapes.
        assert "--disable-hybrid-swa-memory" not in str(caught.value)


def test_a_tree_with_states_is_taken_for_a_model_with_states_alone() -> None:
    check_tree(["FULL", "MAMBA"], has_states=True)
    for components, has_windows, has_states in (
        (["FULL", "MAMBA"], False, False),
        (["FULL"], False, True),
        (["FULL", "SWA"], False, True),
        (["FULL", "SWA", "MAMBA"], True, True),
        (["FULL", "MAMBA"], True, False),
    ):
        with pytest.raises(HierKVConfigError, match="radix tree"):
            check_tree(components, has_windows=has_windows, has_states=has_states)


@pytest.mark.parametrize(
    ("values", "config", "words"),
    [
        ({"enable_lora": True}, HierKVConfig(), "no --enable-lora"),
        ({"enable_streaming_session": True}, HierKVConfig(), "no --enable-streaming-session"),
        ({"enable_session_radix_cache": True}, HierKVConfig(), "no --enable-session-radix-cache"),
        ({}, HierKVConfig(codec="host=hier"), "a --hier-kv-codec that loses nothing"),
        (
            {},
            HierKVConfig(codec="remote=lossless", remote_url="file:///d", slo_ms=5),
            "--hier-kv-slo-ms 0 with layers that have a state a sequence, got 5",
        ),
        ({}, HierKVConfig(truncation="match"), "--hier-kv-truncation overflow or off"),
        ({}, HierKVConfig(tree_core="rust"), "--hier-kv-tree-core python"),
    ],
)
def test_what_was_not_tried_with_states_is_refused_with_them_alone(
    values: dict[str, Any], config: HierKVConfig, words: str
) -> None:
    kept = {"mamba_radix_cache_strategy": "extra_buffer"}
    with pytest.raises(HierKVConfigError) as caught:
        check_resolved(resolved("state", **kept, **values), config)
    assert words in str(caught.value)
    for num_ranks in (1, 2):
        store = HierKVConfig(remote_url="file:///d")
        check_resolved(resolved("state", tp_size=num_ranks, **kept), store)
    for codec in ("lossless", "remote=lossless"):
        coded = HierKVConfig(codec=codec, disk_dir="/d", remote_url="file:///d")
        check_resolved(resolved("state", **kept), coded)
    groups = HierKVConfig(remote_url="file:///d")
    check_resolved(resolved("state", tp_size=2, attn_dp_size=2, **kept), groups)


def test_states_beside_latent_rows_are_refused_what_states_are() -> None:
    kind, kept = "state beside latent rows", {"mamba_radix_cache_strategy": "extra_buffer"}
    check_resolved(resolved(kind, tp_size=2, **kept), HierKVConfig(remote_url="file:///d"))
    for values, config, words in (
        ({"pp_size": 2}, HierKVConfig(), "--pp-size 1 with layers that have a state"),
        ({"mamba_radix_cache_strategy": "no_buffer"}, HierKVConfig(), "extra_buffer with layers"),
    ):
        with pytest.raises(HierKVConfigError, match=words):
            check_resolved(resolved(kind, **{**kept, **values}), config)
    groups = resolved(kind, tp_size=2, attn_dp_size=2, **kept)
    check_resolved(replace(groups, architecture="KimiK3ForConditionalGeneration"), HierKVConfig())
    with pytest.raises(HierKVConfigError, match="no data parallel attention with layers that"):
        check_resolved(replace(groups, architecture="KimiLinearForCausalLM"), HierKVConfig())


def test_prefills_that_replay_kda_without_waiting_for_its_states_are_refused() -> None:
    """SGLang leaves them out for these models, unless it is told to capture them."""
    kept = {"mamba_radix_cache_strategy": "extra_buffer"}
    config = SimpleNamespace(prefill=SimpleNamespace(backend="breakable"))
    check_resolved(resolved("state", cuda_graph_config=config, **kept), HierKVConfig())
    latent = "state beside latent rows"
    with pytest.raises(HierKVConfigError, match="no --cuda-graph-backend-prefill breakable with"):
        check_resolved(resolved(latent, cuda_graph_config=config, **kept), HierKVConfig())
    mixed = resolved("state", cuda_graph_config=config, **kept)
    with pytest.raises(HierKVConfigError, match="no --cuda-graph-backend-prefill breakable with"):
        check_resolved(replace(mixed, architecture="FalconH1ForCausalLM"), HierKVConfig())
    check_resolved(replace(mixed, architecture="NemotronHForCausalLM"), HierKVConfig())
    with pytest.raises(HierKVConfigError) as caught:  # nobody gave it
        check_resolved(replace(mixed, architecture="GraniteMoeHybridForCausalLM"), HierKVConfig())
    assert "got it, SGLang's default on a GPU; add --cuda-graph-backend-prefill disabled" in str(
        caught.value
    )
    for backend in ("disabled", "full"):  # of a full one SGLang waits in front
        config.prefill.backend = backend
        check_resolved(resolved(latent, cuda_graph_config=config, **kept), HierKVConfig())


def _with_images(**more: Any) -> SimpleNamespace:
    """Arguments with which images are stored."""
    off = dict.fromkeys(
        ("enable_lora", "lora_paths", "speculative_algorithm", "enable_mm_global_cache")
    )
    one: dict[str, Any] = {
        **off, "disaggregation_mode": "null", "pp_size": 1, "nnodes": 1, "tokenizer_worker_num": 1,
        "attn_dp_size": 1, "enable_dp_attention": False, "dp_size": 1,
        "speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0,
    }  # fmt: skip
    return SimpleNamespace(**one | more)


def test_images_are_stored_by_several_whole_schedulers_and_in_no_stages() -> None:
    assert why_not_images(_with_images(), WITH_STATES[0], STATES) == ""
    two, stages = _with_images(dp_size=2), _with_images(pp_size=2)
    for architecture, keeps in ((WITH_STATES[0], STATES), (ALONG_AXES[0], PLAIN)):
        assert why_not_images(two, architecture, keeps) == ""
        assert why_not_images(stages, architecture, keeps) == "several pipeline stages"


def test_images_are_stored_with_drafts_that_are_given_them() -> None:
    for architecture, keeps, taken in (
        (WITH_STATES[0], STATES, {"EAGLE", "NEXTN"}),
        (ALONG_AXES[0], PLAIN, {"EAGLE3"}),
    ):
        for name in ("EAGLE", "NEXTN", "EAGLE3", "STANDALONE", "NGRAM"):
            found = why_not_images(_with_images(speculative_algorithm=name), architecture, keeps)
            assert found == ("" if name in taken else f"drafts of {name}")


@pytest.mark.parametrize("name", ["single", "acc"])
def test_images_are_not_stored_where_a_drafts_rows_decide_what_is_answered(name: str) -> None:
    less = {f"speculative_accept_threshold_{name}": 0.9}
    eagle3 = _with_images(speculative_algorithm="EAGLE3", **less)
    assert "-acc below 1" in why_not_images(eagle3, ALONG_AXES[0], PLAIN)
    assert why_not_images(_with_images(**less), ALONG_AXES[0], PLAIN) == ""  # nothing is guessed


def test_fp8_is_refused_where_its_pool_has_scales() -> None:
    check_resolved(resolved(device="cuda", kv_cache_dtype="fp8_e4m3"), HierKVConfig())
    with pytest.raises(HierKVConfigError, match=r"auto on a CPU.*, got fp8_e4m3"):
        check_resolved(resolved(device="cpu", kv_cache_dtype="fp8_e4m3"), HierKVConfig())
    with pytest.raises(HierKVConfigError, match=r"auto on a CPU.*, got fp8_e5m2"):
        check_resolved(resolved(device="cpu", kv_cache_dtype="fp8_e5m2"), HierKVConfig())
    of_tests = resolved(device="cpu", kv_cache_dtype="fp8_e5m2", attention_backend="cpu_extend")
    check_resolved(of_tests, HierKVConfig())


@pytest.mark.parametrize("strategy", ["no_buffer", "extra_buffer_lazy"])
def test_states_are_taken_where_the_tree_keeps_them(strategy: str) -> None:
    with pytest.raises(HierKVConfigError, match="--mamba-radix-cache-strategy extra_buffer with"):
        check_resolved(resolved("state", mamba_radix_cache_strategy=strategy), HierKVConfig())


@pytest.mark.parametrize("kind", ["encoder_only", "decoder_bidirectional"])
def test_attention_to_later_tokens_is_refused(kind: str) -> None:
    check_attention({"", "decoder"})
    with pytest.raises(HierKVConfigError, match=f"from left to right, got .*{kind}"):
        check_attention({"", "decoder", kind})


def test_ranks_that_agree_on_nothing_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="one rank of context parallelism, got 2"):
        check_ranks({"decode context parallelism": 1, "context parallelism": 2})


@pytest.mark.parametrize("way", [{"attn_dp_size": 2}, {"dp_size": 2, "enable_dp_attention": True}])
@pytest.mark.parametrize(
    "name",
    [
        "enable_lora", "lora_paths", "enable_streaming_session", "enable_session_radix_cache",
        "enable_prefill_delayer",
    ],
)  # fmt: skip
def test_what_was_not_tried_with_attention_that_is_data_parallel_is_refused_with_it_alone(
    way: dict[str, Any], name: str
) -> None:
    for server_args in ({**way, "tp_size": 2}, {"tp_size": 2, name: True}):
        check_arguments(SimpleNamespace(**server_args), HierKVConfig())
    words = f"no --{name.replace('_', '-')} with data parallel attention"
    with pytest.raises(HierKVConfigError, match=words):
        check_arguments(SimpleNamespace(tp_size=2, **way, **{name: True}), HierKVConfig())


def test_control_messages_of_their_own_are_refused() -> None:
    server_args = SimpleNamespace(
        tp_size=2, attn_dp_size=2, enable_dp_attention_local_control_broadcast=True
    )
    with pytest.raises(HierKVConfigError, match="that reach all ranks in the same step"):
        check_arguments(server_args, HierKVConfig())


def test_an_architecture_without_data_parallel_attention_is_refused_with_it() -> None:
    check_heads({4}, 4)
    with pytest.raises(HierKVConfigError, match=r"\(4 query heads a rank\), got one with 2"):
        check_heads({2}, 4)


@pytest.mark.parametrize("kind", [name for name, kind in MODEL_KINDS.items() if kind.expected])
def test_a_model_of_another_kind_is_refused_by_its_configuration(kind: str) -> None:
    with pytest.raises(HierKVConfigError, match="without --enable-hier-kv") as caught:
        check_resolved(resolved(kind), HierKVConfig())
    assert MODEL_KINDS[kind].found in str(caught.value)


def test_what_sglang_chose_by_itself_is_refused_and_said() -> None:
    found = resolved(given={"disable_radix_cache": False}, disable_radix_cache=True)
    with pytest.raises(HierKVConfigError, match=r"got .*, which SGLang chose .*; change"):
        check_resolved(found, HierKVConfig())
    with pytest.raises(HierKVConfigError, match="got --dwdp-size 2; leave it out"):
        check_resolved(resolved(dwdp_size=2), HierKVConfig())


@pytest.mark.parametrize("name", ["enable_return_routed_experts", "enable_return_indexer_topk"])
def test_what_is_captured_by_row_of_the_pool_is_not_returned(name: str) -> None:
    """A loaded page's rows would have what was captured of others' tokens."""
    with pytest.raises(HierKVConfigError, match=r"needs answers without .*; remove one"):
        check_resolved(resolved("mha", None, **{name: True}), HierKVConfig())


def test_an_argument_that_nobody_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused when it is set; with untested releases allowed, a warning."""
    found = resolved(some_new_pool=True)
    words = "got --some-new-pool True, which this plugin does not know"
    with pytest.raises(HierKVConfigError, match=words):
        check_resolved(found, HierKVConfig())
    chosen = resolved(given={"some_new_pool": None}, some_new_pool=True)
    assert check_resolved(chosen, HierKVConfig()) == []
    monkeypatch.setenv("SGLANG_HIER_KV_ALLOW_UNTESTED", "1")
    assert "--some-new-pool was never tested" in check_resolved(found, HierKVConfig())[0]


def test_every_argument_of_sglang_is_classified_once() -> None:
    names = [*LIMITED, *(name for group in FREE.values() for name in group)]
    assert len(names) == len(set(names))
    code = (
        "import msgspec; from sglang.srt.server_args import ServerArgs;"
        "print(*(field.name for field in msgspec.structs.fields(ServerArgs)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=launch.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(done.stdout.splitlines()[-1].split())
    assert found <= set(names)  # of a release before the newest, too
    if version("sglang") == list(reference_releases())[-1]:
        assert sorted(found | OF_OLDER) == sorted(names)


def test_a_switch_does_not_pass_for_a_number() -> None:
    assert LIMITED["dcp_size"].allows(1)
    assert not LIMITED["dcp_size"].allows(True)
    assert LIMITED["enable_hisparse"].allows(False)
    assert not LIMITED["enable_hisparse"].allows(0)


def test_experts_that_are_reloaded_without_a_call_are_refused() -> None:
    """A recovered rank reads them from disk, whatever weights were sent since."""
    with pytest.raises(HierKVConfigError, match="--elastic-ep-backend mooncake; leave it out"):
        check_arguments(SimpleNamespace(elastic_ep_backend="mooncake"), HierKVConfig())


def test_diffusion_models_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="--dllm-algorithm LowConfidence; leave one"):
        check_arguments(SimpleNamespace(dllm_algorithm="LowConfidence"), HierKVConfig())


@pytest.mark.parametrize("page_size", [1, 0, -64])
def test_pages_of_less_than_two_tokens_are_refused(page_size: int) -> None:
    with pytest.raises(HierKVConfigError, match=f"at least 2, got {page_size}; leave the flag out"):
        check_arguments(SimpleNamespace(page_size=page_size), HierKVConfig())


def test_who_left_the_size_of_pages_to_sglang_is_told_what_to_give() -> None:
    """Of Qwen3-Next it chose pages of one token on some GPUs, where none were asked for."""
    chosen = resolved(given={"page_size": 64}, page_size=1)
    with pytest.raises(HierKVConfigError) as caught:
        check_resolved(chosen, HierKVConfig())
    assert "got 1, which SGLang chose" in str(caught.value)
    assert "give --attention-backend" in str(caught.value)
    assert "leave the flag out" not in str(caught.value)


def test_several_tokenizer_workers_are_refused_with_truncation() -> None:
    args = SimpleNamespace(tokenizer_worker_num=2)
    with pytest.raises(HierKVConfigError, match="got 2; leave it out or add"):
        check_arguments(args, HierKVConfig(truncation="overflow"))
    check_arguments(args, HierKVConfig())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"truncation": "match"}, "--hier-kv-truncation overflow or off with data parallel"),
        ({"truncation": "all"}, "got all; leave the flag out"),
    ],
)
def test_text_is_searched_for_by_tensor_parallel_ranks_without_data_parallel_attention(
    settings: dict[str, Any], words: str
) -> None:
    config = HierKVConfig(**settings)
    check_arguments(SimpleNamespace(tp_size=2), config)
    check_arguments(SimpleNamespace(dp_size=2), config)
    for attention in ({"attn_dp_size": 2}, {"enable_dp_attention": True, "dp_size": 2}):
        with pytest.raises(HierKVConfigError, match=words):
            check_arguments(SimpleNamespace(tp_size=2, **attention), config)
    config = HierKVConfig(truncation="overflow")
    check_arguments(SimpleNamespace(tp_size=2, attn_dp_size=2), config)


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
        (
            {"hostsize": 1},
            "hier_kv_hostsize; the nearest ones are hier_kv_host_size, hier_kv_disk_size",
        ),
        ({"host_size": "much"}, "must be a number, got 'much'"),
        ({"host_size": 64 << 30}, "at most 1,000,000,000 GiB, got 68719476736.0; give a smaller"),
        ({"host_size": True}, "must be a number, got True"),
        ({"rope": 1}, "must be a string, got 1"),
        ({"truncation": "front"}, "must be one of off, overflow, match, all, got 'front'"),
        ({"truncation_ratio": 1.0}, "between 0.01 and 0.99, got 1; give a share such as 0.5"),
        ({"truncation_ratio": 1e-9}, "between 0.01 and 0.99, got 1e-09; give a share"),
        ({"truncation_head": -1}, "must be 0 or more, got -1"),
        ({"truncation_longest": 0}, "must be 1 or more contexts, got 0"),
        ({"truncation_head": 4.5}, "must be a whole number, got 4.5"),
        ({"rope": "post"}, "must be one of pre, delta, got 'post'"),
        ({"base_order": "mru"}, "must be one of fifo, lru, tail_of_queue, got 'mru'"),
        ({"base_order": "fifo", "lookahead": "off"}, "needs --hier-kv-lookahead on"),
    ],
)
def test_values_from_code_are_checked(values: dict[str, Any], words: str) -> None:
    with pytest.raises(HierKVConfigError) as caught:
        HierKVConfig.from_dict(values)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", '{"host_size": 0}'])
def test_the_environment_is_checked(text: str) -> None:
    with pytest.raises(HierKVConfigError):
        HierKVConfig.from_json(text, {})


def test_settings_survive_the_way_to_other_processes() -> None:
    config = HierKVConfig.from_dict({"host_size": 2, "rope": "delta"})
    assert HierKVConfig.from_dict(config.to_dict()) == config
    assert config.host_size == 2.0


@pytest.mark.parametrize(
    ("values", "config", "words"),
    [
        ({"pp_size": 2}, HierKVConfig(), "--pp-size 1 with rows of an index beside latent ones"),
        ({"dp_size": 2}, HierKVConfig(), "--dp-size 1 with rows of an index"),
        ({"enable_lora": True}, HierKVConfig(), "no --enable-lora with rows of an index"),
        ({"speculative_algorithm": "NGRAM"}, HierKVConfig(), "full attention in every layer"),
        ({}, HierKVConfig(truncation="all"), "--hier-kv-truncation overflow or off"),
        ({}, HierKVConfig(tree_core="rust"), "--hier-kv-tree-core python"),
        ({}, HierKVConfig(codec="hier", disk_dir="/d"), "that loses nothing .*, got hier"),
        ({}, HierKVConfig(codec="remote=hier,disk=zstd", disk_dir="/d"), "nothing .*, got hier"),
    ],
)
def test_what_was_not_tried_with_an_index_is_refused_with_it_alone(
    values: dict[str, Any], config: HierKVConfig, words: str
) -> None:
    with pytest.raises(HierKVConfigError, match=words):
        check_resolved(resolved("indexed", **values), config)


@pytest.mark.parametrize("codec", ["", "none", "zstd", "lossless", "remote=lossless,disk=zstd"])
def test_codecs_that_lose_nothing_and_ranks_are_taken_with_an_index(codec: str) -> None:
    config = HierKVConfig(codec=codec, disk_dir="/d", remote_url="file:///d?size=1GB")
    assert check_resolved(resolved("indexed", tp_size=2), config) == []


def test_data_parallel_attention_is_taken_with_an_index() -> None:
    values = {"tp_size": 4, "attn_dp_size": 2, "enable_dp_attention": True}
    assert check_resolved(resolved("indexed", **values), HierKVConfig()) == []
