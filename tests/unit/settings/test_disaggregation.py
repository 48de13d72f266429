"""Which prefill and decode servers are refused before the weights load, and with which sentence."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.disaggregation import check_handed_windows
from sglang_ext.settings.model_kinds import STATE_KINDS
from sglang_ext.settings.refusals import Resolved, check_arguments, check_resolved
from sglang_ext.settings.speculation import DRAFTED_HYBRIDS

SERVED: dict[str, Any] = {
    "disaggregation_transfer_backend": "mooncake",
    "disaggregation_decode_allocation_policy": "early",
    "disaggregation_decode_enable_radix_cache": True,
    "disaggregation_decode_host_receive_threshold": 1.0,
    "optimistic_prefill_attempts": 0,
    "tp_size": 1,
    "enable_dp_attention": False,
}
MODES = ["prefill", "decode"]


def check(
    mode: str,
    kind: str = "mha",
    config: dict[str, Any] | None = None,
    *,
    architecture: str = "",
    draft: str = "",
    **more: Any,
) -> None:
    values = {"disaggregation_mode": mode, **SERVED, **more}
    resolved = Resolved(values, values, {}, kind, architecture=architecture, draft=draft)
    check_resolved(resolved, replace(HierKVConfig(), **(config or {})))


@pytest.mark.parametrize("mode", [*MODES, "null"])
def test_what_was_tried_is_served(mode: str) -> None:
    check(mode)


DRAFTS: dict[str, Any] = {
    "speculative_eagle_topk": 1,
    "speculative_num_steps": 3,
    "attention_backend": "triton",
}


with_drafts = pytest.mark.parametrize(
    ("algorithm", "kind"),
    [("EAGLE", "mha"), ("EAGLE3", "mha"), ("EAGLE", "mla"), ("EAGLE", "indexed")],
)


@pytest.mark.parametrize("mode", MODES)
@with_drafts
def test_drafts_are_served_where_a_server_of_its_own_would_be(
    mode: str, algorithm: str, kind: str
) -> None:
    check(mode, kind, speculative_algorithm=algorithm, **DRAFTS)


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_beside_window_layers_is_served_where_a_server_of_its_own_would_be(
    mode: str,
) -> None:
    model: dict[str, Any] = {"kind": "swa", "speculative_algorithm": "EAGLE3", **DRAFTS}
    check(mode, architecture="GptOssForCausalLM", tp_size=2, **model)
    with pytest.raises(HierKVConfigError, match=r"GptOssForCausalLM.*EAGLE3, got Mellum"):
        check(mode, architecture="MellumForCausalLM", **model)
    check(mode, architecture="GptOssForCausalLM", config={"codec": "lossless"}, **model)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["mha", "mla", "indexed"])
def test_codecs_that_lose_nothing_are_served(mode: str, kind: str) -> None:
    codec = "host=lossless,disk=lossless,remote=lossless"
    check(mode, kind, {"codec": codec, "remote_url": "file:///mnt/kv"})


@pytest.mark.parametrize("mode", MODES)
@with_drafts
def test_codecs_that_lose_nothing_are_served_with_drafts(
    mode: str, algorithm: str, kind: str
) -> None:
    drafts: dict[str, Any] = {"speculative_algorithm": algorithm, **DRAFTS}
    for codec in ("zstd", "host=lossless,disk=lossless,remote=lossless"):
        check(mode, kind, {"codec": codec, "remote_url": "file:///mnt/kv"}, **drafts)
    with pytest.raises(HierKVConfigError, match=r"loses nothing with --.*, got hier;"):
        check(mode, kind, {"codec": "hier"}, **drafts)


@pytest.mark.parametrize("mode", MODES)
def test_a_draft_layer_by_its_other_name_is_served(mode: str) -> None:
    values = {"disaggregation_mode": mode, **SERVED, "speculative_algorithm": "NEXTN"}
    check_arguments(SimpleNamespace(**values), HierKVConfig())


def test_mooncake_by_its_name_for_tcp_is_served() -> None:
    by_name = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "mooncake_tcp"}
    check_arguments(SimpleNamespace(**by_name), HierKVConfig())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("arguments", "expected", "found"),
    [
        ({"dp_size": 2}, "--dp-size 1", "2"),
        ({"attn_dp_size": 2, "tp_size": 1}, "no --attn-dp-size", "it"),
        ({"enable_dp_attention": True}, "no --enable-dp-attention", "it"),
        ({"nnodes": 2}, "--nnodes 1", "2"),
        ({"speculative_algorithm": "NGRAM"}, "-algorithm EAGLE, EAGLE3 or NEXTN, or none", "NGRAM"),
        ({"speculative_algorithm": "STANDALONE"}, "EAGLE3 or NEXTN, or none", "STANDALONE"),
        ({"enable_lora": True}, "no --enable-lora", "it"),
        ({"lora_paths": ["a"]}, "no --enable-lora", "it"),
        ({"enable_streaming_session": True}, "no --enable-streaming-session", "it"),
        ({"enable_session_radix_cache": True}, "no --enable-session-radix-cache", "it"),
        ({"disaggregation_transfer_backend": "nixl"}, "-backend mooncake", "nixl"),
        ({"disaggregation_enable_kv_checksum": True}, "no --disaggregation-enable-kv", "it"),
        ({"optimistic_prefill_attempts": 2}, "--optimistic-prefill-attempts 0", "2"),
        (
            {"disaggregation_decode_allocation_policy": "prefill_complete"},
            "--disaggregation-decode-allocation-policy early",
            "prefill_complete",
        ),
    ],
)
def test_arguments_that_were_not_tried_are_refused(
    mode: str, arguments: dict[str, Any], expected: str, found: str
) -> None:
    with pytest.raises(HierKVConfigError) as refusal:
        check(mode, **arguments)
    sentence = str(refusal.value)
    assert expected in sentence
    assert f"with --disaggregation-mode {mode}, got {found};" in sentence


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"codec": "hier"}, "a --hier-kv-codec that loses nothing"),
        ({"codec": "remote=hier", "remote_url": "file:///mnt/kv"}, "codec that loses nothing"),
        ({"truncation": "overflow"}, "--hier-kv-truncation off"),
        ({"tree_core": "rust"}, "--hier-kv-tree-core python"),
    ],
)
def test_settings_that_were_not_tried_are_refused(
    mode: str, settings: dict[str, Any], expected: str
) -> None:
    with pytest.raises(HierKVConfigError, match=f"{expected} with --disaggregation-mode {mode}"):
        check(mode, config=settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["swa of two shapes", "sparse"])
def test_other_models_are_refused(mode: str, kind: str) -> None:
    with pytest.raises(
        HierKVConfigError, match=f"alike in all layers with --.* {mode}, got a model"
    ):
        check(mode, kind)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["mha", "mla", "indexed"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_these_kinds_of_models_are_served_by_several_ranks(
    mode: str, kind: str, num_ranks: int
) -> None:
    check(mode, kind, tp_size=num_ranks)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", STATE_KINDS)
def test_models_with_states_are_served(mode: str, kind: str) -> None:
    kept: dict[str, Any] = {"mamba_radix_cache_strategy": "extra_buffer"}
    check(mode, kind, {"remote_url": "file:///mnt/kv"}, tp_size=2, **kept)
    coded = {"codec": "host=lossless,disk=lossless,remote=lossless", "disk_dir": "/d"}
    check(mode, kind, {"remote_url": "file:///mnt/kv", **coded}, **kept)
    with pytest.raises(HierKVConfigError, match="loses nothing"):
        check(mode, kind, {"codec": "hier", "disk_dir": "/d"}, **kept)
    drafted: dict[str, Any] = {**kept, "speculative_algorithm": "EAGLE", **DRAFTS}
    if kind == "state":
        for architecture, draft in DRAFTED_HYBRIDS.items():
            check(mode, kind, architecture=architecture, draft=draft, tp_size=2, **drafted)
        with pytest.raises(HierKVConfigError, match="its own draft layer"):
            check(mode, kind, architecture="Qwen3NextForCausalLM", draft="Other", **drafted)
    else:
        with pytest.raises(HierKVConfigError, match="or latent rows in every layer"):
            check(mode, kind, **drafted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("release", "is_served"), [("0.5.22", False), ("0.5.22.post1", False), ("0.5.23", True)]
)
def test_an_older_sglang_is_refused_before_the_weights_load(
    mode: str, release: str, is_served: bool
) -> None:
    values = {"disaggregation_mode": mode, **SERVED}
    resolved = Resolved(values, values, {}, "mha", release)
    if is_served:
        check_resolved(resolved, HierKVConfig())
        return
    sentence = f"SGLang 0.5.23 with --disaggregation-mode {mode}, got {release};"
    with pytest.raises(HierKVConfigError, match=sentence):
        check_resolved(resolved, HierKVConfig())


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            {"disaggregation_decode_enable_radix_cache": False},
            "--disaggregation-decode-enable-radix-cache",
        ),
        (
            {"disaggregation_decode_enable_offload_kvcache": True},
            "no --disaggregation-decode-enable-offload-kvcache",
        ),
        (
            {"disaggregation_decode_host_receive_threshold": 0.5},
            "--disaggregation-decode-host-receive-threshold 1",
        ),
    ],
)
def test_a_decode_server_is_refused_what_a_prefill_server_may(
    arguments: dict[str, Any], expected: str
) -> None:
    check("prefill", **arguments)
    with pytest.raises(HierKVConfigError, match=f"{expected} with --disaggregation-mode decode"):
        check("decode", **arguments)


@pytest.mark.parametrize("mode", MODES)
def test_rows_that_a_transfer_may_still_write_are_not_given_away(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
    monkeypatch.setenv(name, "True")
    check(mode)
    monkeypatch.setenv(name, "0")
    with pytest.raises(HierKVConfigError, match=f"{name}=1 or none with .* {mode}, got 0"):
        check(mode)


@pytest.mark.parametrize("mode", MODES)
def test_sending_by_way_of_a_copy_is_refused(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "no")
    check(mode)
    monkeypatch.setenv("SGLANG_DISAGG_STAGING_BUFFER", "1")
    with pytest.raises(HierKVConfigError, match=f"no SGLANG_DISAGG_STAGING_BUFFER with .* {mode}"):
        check(mode)


def test_servers_that_change_their_mode_are_refused() -> None:
    with pytest.raises(HierKVConfigError, match="stays what it is, got --enable-pd-role-switch"):
        check("prefill", enable_pd_role_switch=True)


@pytest.mark.parametrize(
    ("window", "is_chunk", "found"),
    [
        (64, False, ""),
        (None, False, ""),
        (63, False, "one of 63 tokens"),
        (64, True, "a chunk of the sequence"),
    ],
)
def test_windows_that_are_not_sent_whole_are_refused(
    window: int | None, is_chunk: bool, found: str
) -> None:
    if not found:
        check_handed_windows(64, window, is_chunk=is_chunk)
        return
    with pytest.raises(HierKVConfigError, match=found):
        check_handed_windows(64, window, is_chunk=is_chunk)
