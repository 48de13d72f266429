"""What docs/compatibility.md says in its own words is refused, as set-ups to ask the code about.

Each row of the two tables "by what they are given with" and "by what drafts", and each bullet under
"Speculation", is here by its first words. A phrase of it comes with changes that must be refused of
a set-up that is served without them, and with the exceptions that the row names, which must be
served. Who changes a refusal or a row changes the phrase here, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

from sglang_ext.assembly.draft_setup import check_planes
from sglang_ext.device.windows.block_groups import BlockGroups
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.refusals import check_attention

SetUp = Mapping[str, Any]
"""Arguments of SGLang by their names, and besides those of `FACTS`."""

FACTS = ("kind", "architecture", "draft", "release", "rows", "config", "variables")
"""Of the model and of SGLang, of the plugin's settings, and of the environment."""


def changed(before: SetUp, after: SetUp) -> SetUp:
    """A set-up with some of its values replaced."""
    inner = {
        name: {**before.get(name, {}), **after.get(name, {})} for name in ("config", "variables")
    }
    return {**before, **after, **inner}


@dataclass(frozen=True)
class Phrase:
    """A part of a row.

    Attributes:
        text: of the row, as it stands there.
        refused: changes of each set-up of `on`, each of which makes it one that is refused.
        on: set-ups that are served; empty: those of the row.
        served: whole set-ups that are named as exceptions.
        late: calls that refuse what is known later in the start alone.
    """

    text: str
    refused: tuple[SetUp, ...] = ()
    on: tuple[SetUp, ...] = ()
    served: tuple[SetUp, ...] = ()
    late: tuple[Callable[[], None], ...] = ()


@dataclass(frozen=True)
class Row:
    """A row of a table by its first cell, or a bullet by its first words.

    Attributes:
        on: set-ups that are served.
        phrases: all that it says; none where it names another page.
    """

    on: tuple[SetUp, ...] = ()
    phrases: tuple[Phrase, ...] = ()


def setting(**values: Any) -> SetUp:
    """Settings of the plugin."""
    return {"config": values}


def _codec_beside_blocks() -> None:
    pools = SimpleNamespace(groups=object.__new__(BlockGroups))
    check_planes(cast(Any, pools), HierKVConfig(codec="lossless"))


KV: SetUp = {"kind": "mha", "architecture": "LlamaForCausalLM"}
_GLM: SetUp = {
    "kind": "mha", "architecture": "Glm4MoeForCausalLM", "draft": "Glm4MoeForCausalLMNextN"
}  # fmt: skip
LATENT: SetUp = {"kind": "mla", "architecture": "DeepseekV3ForCausalLM"}
INDEXED: SetUp = {"kind": "indexed", "architecture": "DeepseekV32ForCausalLM"}
OSS, MELLUM, LAGUNA, LLAMA4 = (
    {"kind": "swa", "architecture": name}
    for name in (
        "GptOssForCausalLM", "MellumForCausalLM", "LagunaForCausalLM",
        "Llama4ForConditionalGeneration",
    )
)  # fmt: skip
_KEPT = {"mamba_radix_cache_strategy": "extra_buffer"}
NEMOTRON, QWEN35, QWEN35_IMAGES, QWEN35_EXPERTS, NEXT, GRANITE = (
    {"kind": "state", "architecture": name, **_KEPT}
    for name in (
        "NemotronHForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForConditionalGeneration",
        "Qwen3NextForCausalLM", "GraniteMoeHybridForCausalLM",
    )
)  # fmt: skip
KIMI, KIMI_K3 = (
    {"kind": "state beside latent rows", "architecture": name, **_KEPT}
    for name in ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")
)

STAGES = {"pp_size": 2}
SEVERAL_NODES = {"nnodes": 2}
GROUPS = {"tp_size": 2, "attn_dp_size": 2}
_CONTEXT: SetUp = {
    "kind": "mha", "architecture": "Qwen3ForCausalLM", "tp_size": 2, "attn_cp_size": 2
}  # fmt: skip
_ZIGZAG: SetUp = {
    **_CONTEXT, "enable_prefill_cp": True, "cp_strategy": "zigzag", "attention_backend": "fa3"
}  # fmt: skip
ADAPTERS = ({"enable_lora": True}, {"lora_paths": ["a"]})
SESSIONS = ({"enable_streaming_session": True}, {"enable_session_radix_cache": True})
RUST, _SLO = setting(tree_core="rust"), setting(slo_ms=100.0)
OVERFLOW, MATCH, _ALL = (setting(truncation=each) for each in ("overflow", "match", "all"))
LOSSLESS, LOSSY, REMOTE_LOSSY, ZSTD = (
    setting(codec=each, disk_dir="/d", remote_url="file:///d")
    for each in ("lossless", "hier", "remote=cachegen-paper", "remote=zstd")
)
_FP8 = ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8_e5m2"})
PREFILL = {"disaggregation_mode": "prefill"}
DECODE = {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True}

BY_MODE: dict[str, Row] = {
    "anything": Row(
        (KV,),
        (
            Phrase("`--page-size 1`", ({"page_size": 1},), served=({**KV, "page_size": 16},)),
            Phrase(
                "models with encoder attention",
                late=(lambda: check_attention({"decoder", "encoder_only"}),),
            ),
        ),
    ),
    "models of K and V (windows and Mamba2's states among them, latent rows not)": Row(
        (KV, OSS, NEMOTRON),
        (
            Phrase(
                "`SGLANG_USE_HND_KVCACHE`",
                ({"variables": {"SGLANG_USE_HND_KVCACHE": "1"}},),
                served=tuple(
                    {**each, "variables": {"SGLANG_USE_HND_KVCACHE": "1"}}
                    for each in (LATENT, INDEXED, KIMI)
                ),
            ),
        ),
    ),
    "`--hier-kv-truncation` other than `off`": Row(
        tuple(changed(KV, each) for each in (OVERFLOW, MATCH, _ALL)),
        (
            Phrase(
                "several tokenizer workers",
                ({"tokenizer_worker_num": 2},),
                served=({**KV, "tokenizer_worker_num": 2},),
            ),
        ),
    ),
    "pipeline stages": Row(),
    "context parallel ranks": Row(
        (_CONTEXT, _ZIGZAG),
        (
            Phrase("`--attn-cp-size` other than `--tp-size`", ({"tp_size": 4},)),
            Phrase(
                "other models than Qwen 3",
                ({"architecture": "LlamaForCausalLM"}, LATENT, INDEXED, MELLUM, NEXT, KIMI),
            ),
            Phrase(
                "prefill attention other than fa3, fa4 and trtllm_mha with `--enable-prefill-cp`",
                tuple({"attention_backend": each} for each in ("triton", "flashinfer")),
                on=(_ZIGZAG,),
            ),
            Phrase("`--kv-cache-dtype` other than auto", ({"kv_cache_dtype": "fp8_e4m3"},)),
            Phrase("several schedulers", ({"dp_size": 2},)),
            Phrase("data parallel attention", ({"attn_dp_size": 2}, {"enable_dp_attention": True})),
            Phrase("`--moe-dp-size`", ({"moe_dp_size": 2},)),
            Phrase("`--ep-size`", ({"ep_size": 2},)),
            Phrase("stages", (STAGES,)),
            Phrase("nodes", (SEVERAL_NODES,)),
            Phrase("`--disaggregation-mode`", (PREFILL, DECODE)),
            Phrase("`--enable-mixed-chunk`", ({"enable_mixed_chunk": True},)),
            Phrase("`--enable-two-batch-overlap`", ({"enable_two_batch_overlap": True},)),
            Phrase("`--speculative-algorithm`", ({"speculative_algorithm": "NGRAM"},)),
            Phrase("adapters", ADAPTERS),
            Phrase("sessions", SESSIONS),
            Phrase("codecs", (LOSSLESS, LOSSY, ZSTD)),
            Phrase("truncation", (OVERFLOW, MATCH, _ALL)),
            Phrase("`--hier-kv-tree-core rust`", (RUST,)),
            Phrase("SGLang 0.5.22", ({"release": "0.5.22"},)),
        ),
    ),
    "data parallel attention": Row(
        ({**KV, **GROUPS}, {**KV, "enable_dp_attention": True}),
        (
            Phrase(
                "`--hier-kv-truncation match` or `all`",
                (MATCH, _ALL),
                served=(changed({**KV, **GROUPS}, OVERFLOW),),
            ),
            Phrase(
                "but those of EAGLE and EAGLE3",
                tuple(
                    {"speculative_algorithm": each, "attention_backend": "triton"}
                    for each in ("STANDALONE", "NGRAM")
                ),
                served=tuple(
                    {**each, **GROUPS, "speculative_algorithm": "EAGLE"}
                    for each in (LATENT, INDEXED)
                ),
            ),
            Phrase("adapters", ADAPTERS),
            Phrase("streaming sessions", ({"enable_streaming_session": True},)),
            Phrase("`--enable-session-radix-cache`", ({"enable_session_radix_cache": True},)),
            Phrase("`--enable-prefill-delayer`", ({"enable_prefill_delayer": True},)),
            Phrase("Kimi Linear", (GROUPS,), on=(KIMI,), served=({**KIMI_K3, **GROUPS},)),
        ),
    ),
    "layers of windows in a pool of their own": Row(
        (OSS, MELLUM),
        (
            Phrase(
                "pipeline stages but for gpt-oss",
                (STAGES,),
                on=(MELLUM, LAGUNA, LLAMA4),
                served=({**OSS, **STAGES},),
            ),
            Phrase("`--hier-kv-tree-core rust`", (RUST,)),
            Phrase("`--swa-prefix-tails`", ({"swa_prefix_tails": 2},)),
            Phrase(
                "`--enable-encoder-swa-bounded-replay`",
                ({"enable_encoder_swa_bounded_replay": True},),
            ),
            Phrase(
                "`--enable-decoder-swa-bounded-replay`",
                ({"enable_decoder_swa_bounded_replay": True},),
            ),
            Phrase(
                "what the table of models names", (*ADAPTERS, *SESSIONS, _SLO, LOSSY)
            ),
        ),
    ),
    "layers with a state": Row(
        (NEMOTRON, NEXT, KIMI),
        (
            Phrase(
                "pipeline stages but for Nemotron-H, Qwen3.5 (dense) and Kimi Linear",
                (STAGES,),
                on=(NEXT, GRANITE, QWEN35_EXPERTS, KIMI_K3),
                served=tuple(
                    {**each, **STAGES} for each in (NEMOTRON, QWEN35, QWEN35_IMAGES, KIMI)
                ),
            ),
            Phrase("`--hier-kv-tree-core rust`", (RUST,)),
            Phrase(
                "`--mamba-radix-cache-strategy` other than `extra_buffer`",
                ({"mamba_radix_cache_strategy": "no_buffer"},),
            ),
            Phrase("`--hier-kv-slo-ms`", (_SLO,)),
            Phrase("what the table of models names", (*ADAPTERS, *SESSIONS, LOSSY)),
        ),
    ),
    "rows of an index beside latent ones": Row(
        (INDEXED,),
        (
            Phrase("whole schedulers", ({"dp_size": 2},)),
            Phrase("stages", (STAGES,)),
            Phrase("`--hier-kv-tree-core rust`", (RUST,)),
            Phrase("adapters", ADAPTERS),
            Phrase("sessions", SESSIONS),
            Phrase(
                "a codec that loses something",
                (LOSSY,),
                served=(changed(INDEXED, LOSSLESS),),
            ),
            Phrase("what the table of models names", (MATCH, _ALL)),
        ),
    ),
    "`--speculative-algorithm`": Row(),
    "`--disaggregation-mode`": Row(),
}  # fmt: skip


def _guesses(algorithm: str, model: SetUp, **more: Any) -> SetUp:
    return {
        **model, "speculative_algorithm": algorithm, "speculative_eagle_topk": 1,
        "attention_backend": "triton", **more,
    }  # fmt: skip


_DRAFTS = tuple(_guesses(each, KV) for each in ("EAGLE", "EAGLE3", "STANDALONE"))
NGRAM = _guesses("NGRAM", KV)
STANDALONE = _DRAFTS[2]
_LATENT_DRAFTS = tuple(_guesses("EAGLE", each) for each in (LATENT, INDEXED))
_OSS_DRAFT = _guesses("EAGLE3", OSS)
_STATE_DRAFTS = tuple(_guesses("EAGLE", each) for each in (NEXT, QWEN35, NEMOTRON))
_ANY = (*_DRAFTS, NGRAM, *_LATENT_DRAFTS, _OSS_DRAFT, *_STATE_DRAFTS)
ANY_DRAFT = tuple(each for each in _ANY if each is not NGRAM)
_GROUPED_DRAFTS = tuple(
    {**each, **GROUPS} for each in (_DRAFTS[1], *_LATENT_DRAFTS, _OSS_DRAFT, *_STATE_DRAFTS[:2])
)
TREE = {"speculative_eagle_topk": 8, "speculative_num_draft_tokens": 32}
_ADAPTIVE = {"speculative_adaptive": True}
_DRAWN = {"speculative_use_rejection_sampling": True}
_TWO = {"tp_size": 2}

OF_SPECULATION: dict[str, Row] = {
    "trees of drafts": Row(
        phrases=(
            Phrase(
                "trees of drafts (`--speculative-eagle-topk` over 1)",
                (TREE,),
                on=(NGRAM,),
                served=tuple({**each, **TREE} for each in _DRAFTS),
            ),
            Phrase(
                "K and V of every head or latent rows alone",
                (TREE,),
                on=(_LATENT_DRAFTS[1], *_STATE_DRAFTS),
                served=({**_LATENT_DRAFTS[0], **TREE},),
            ),
            Phrase(
                "SGLang 0.5.23",
                ({"release": "0.5.22"},),
                on=tuple({**each, **TREE} for each in _DRAFTS),
            ),
            Phrase(
                "`--attention-backend triton`, `flashinfer` or `fa3`",
                tuple(
                    {"attention_backend": each} for each in ("fa4", "trtllm_mha", "torch_native")
                ),
                on=tuple({**each, **TREE} for each in _DRAFTS),
                served=tuple(
                    {**each, **TREE, "attention_backend": backend}
                    for each in _DRAFTS
                    for backend in ("flashinfer", "fa3")
                ),
            ),
            Phrase(
                "for latent rows `triton` alone",
                ({"attention_backend": "flashinfer"}, {"attention_backend": "fa3"}),
                on=({**_LATENT_DRAFTS[0], **TREE},),
            ),
            Phrase(
                "no `--disaggregation-mode`",
                (PREFILL, DECODE),
                on=tuple({**each, **TREE} for each in (*_DRAFTS[:2], _LATENT_DRAFTS[0])),
            ),
        )
    ),
    "adapters and sessions": Row(
        _ANY, (Phrase("adapters", ADAPTERS), Phrase("sessions", SESSIONS))
    ),
    "`--hier-kv-truncation`": Row(
        phrases=(
            Phrase(
                "`--hier-kv-truncation`, but for `overflow` with a draft model",
                (MATCH, _ALL),
                on=_ANY,
                served=tuple(changed(each, OVERFLOW) for each in (*_DRAFTS, *_LATENT_DRAFTS)),
            ),
            Phrase(
                "without a second pool or states",
                (OVERFLOW,),
                on=(NGRAM, _OSS_DRAFT, *_STATE_DRAFTS),
            ),
        )
    ),
    "`--hier-kv-tree-core rust`": Row(_ANY, (Phrase("`--hier-kv-tree-core rust`", (RUST,)),)),
    "several draft models": Row(
        ANY_DRAFT,
        (Phrase("`--enable-multi-layer-eagle`", ({"enable_multi_layer_eagle": True},)),),
    ),
    "`--speculative-adaptive`": Row(
        phrases=(
            Phrase(
                "`--speculative-adaptive` with window layers, states",
                (_ADAPTIVE,),
                on=(_OSS_DRAFT, *_STATE_DRAFTS),
                served=tuple({**each, **_ADAPTIVE} for each in (*_DRAFTS[:2], *_LATENT_DRAFTS)),
            ),
            Phrase(
                "`--disaggregation-mode`",
                (_ADAPTIVE,),
                on=tuple({**each, **PREFILL} for each in _DRAFTS[:2]),
            ),
            Phrase(
                "with more than one branch and with data parallel attention",
                (_ADAPTIVE,),
                on=({**_DRAFTS[0], **TREE}, *_GROUPED_DRAFTS),
            ),
        )
    ),
    "`--speculative-num-steps 0` with a draft model": Row(
        ANY_DRAFT,
        (
            Phrase(
                "`--speculative-num-steps 0` with a draft model",
                ({"speculative_num_steps": 0},),
            ),
        ),
    ),
    "`SGLANG_SIMULATE_ACC_LEN`": Row(
        _ANY,
        (Phrase("`SGLANG_SIMULATE_ACC_LEN`", ({"variables": {"SGLANG_SIMULATE_ACC_LEN": "2"}},)),),
    ),
    "`--speculative-use-rejection-sampling`": Row(
        phrases=(
            Phrase(
                "`--speculative-use-rejection-sampling` with a draft model beside window layers or "
                "states by several ranks",
                (_DRAWN,),
                on=tuple({**each, **_TWO} for each in (_OSS_DRAFT, *_STATE_DRAFTS)),
                served=(
                    *({**each, **_DRAWN} for each in (_OSS_DRAFT, *_STATE_DRAFTS)),
                    *({**each, **_DRAWN, **_TWO} for each in (*_DRAFTS, *_LATENT_DRAFTS)),
                ),
            ),
        )
    ),
    "a draft's KV of another": Row(
        ANY_DRAFT,
        (
            Phrase("dtype", ({"speculative_draft_kv_cache_dtype": "float16"},)),
            Phrase("window", ({"speculative_draft_window_size": 128},)),
        ),
    ),
}

_K_AND_V, _ROWS = "K and V of every head in torch.bfloat16", "latent rows in torch.bfloat16"

BY_DRAFT: dict[str, Row] = {
    "NGRAM": Row(
        (NGRAM,),
        (
            Phrase(
                "attention that takes guesses for one chain",
                tuple({"attention_backend": each} for each in ("fa3", "fa4", "trtllm_mha")),
            ),
            Phrase(
                "`--attention-backend triton`, or `flashinfer` for models with K and V of every "
                "head (on a CPU `intel_amx`)",
                tuple({"attention_backend": each} for each in ("flashinfer", "intel_amx")),
                on=(_guesses("NGRAM", LATENT),),
                served=tuple(
                    {**NGRAM, "attention_backend": each}
                    for each in ("triton", "flashinfer", "intel_amx")
                ),
            ),
            Phrase(
                "Window layers in a pool of their own",
                ({"speculative_algorithm": "NGRAM"},),
                on=({**OSS, "attention_backend": "triton", "speculative_eagle_topk": 1},),
            ),
        ),
    ),
    "a draft model": Row(
        _DRAFTS,
        (
            Phrase("`--hier-kv-slo-ms`", (_SLO,), on=ANY_DRAFT),
            Phrase(
                "lossy codecs but `hier` with K and V of every head",
                (REMOTE_LOSSY,),
                served=(
                    *(changed(each, LOSSY) for each in _DRAFTS),
                    *(changed(each, LOSSLESS) for each in (*_DRAFTS, *_LATENT_DRAFTS)),
                    *(changed({**each, **PREFILL}, LOSSLESS) for each in _DRAFTS[:2]),
                ),
            ),
            Phrase(
                "one with K and V of every head for DeepSeek V3", ({"rows": (_ROWS, _K_AND_V)},)
            ),
            Phrase(
                "in float16 for a model in bfloat16",
                ({"rows": (_K_AND_V, "K and V of every head in torch.float16")},),
                served=tuple({**each, "rows": (_K_AND_V, _K_AND_V)} for each in _DRAFTS),
            ),
            Phrase(
                "states beside a model without", ({"rows": (_K_AND_V, "layers with a state")},)
            ),
        ),
    ),
    "a draft model, with latent rows": Row(
        _LATENT_DRAFTS,
        (
            Phrase(
                "all but EAGLE (NEXTN)",
                tuple({"speculative_algorithm": each} for each in ("EAGLE3", "STANDALONE")),
            ),
        ),
    ),
    "a draft model, with window layers in a pool of their own": Row(
        (_OSS_DRAFT,),
        (
            Phrase(
                "all but EAGLE3",
                tuple({"speculative_algorithm": each} for each in ("EAGLE", "STANDALONE")),
            ),
            Phrase(
                "for gpt-oss with a draft of full layers",
                tuple({"architecture": each["architecture"]} for each in (MELLUM, LAGUNA)),
            ),
            Phrase(
                "a codec, where K and V of the draft have another shape than the model's",
                late=(_codec_beside_blocks,),
                served=tuple(changed(_OSS_DRAFT, each) for each in (LOSSLESS, *_FP8)),
            ),
        ),
    ),
    "a draft model, beside states": Row(
        _STATE_DRAFTS,
        (
            Phrase(
                "all but Qwen3-Next, Qwen3.5 and Nemotron-H with their own draft layer",
                (
                    {"draft": "LlamaForCausalLMEagle"},
                    {"architecture": "GraniteMoeHybridForCausalLM"},
                    {"speculative_algorithm": "EAGLE3"},
                    {"speculative_algorithm": "STANDALONE"},
                ),
                served=(
                    {**_STATE_DRAFTS[0], "draft": "Qwen3NextForCausalLMMTP"},
                    *(changed(each, LOSSLESS) for each in _STATE_DRAFTS),
                    *({**each, **fp8} for each in _STATE_DRAFTS for fp8 in _FP8),
                ),
            ),
            Phrase(
                "`--enable-linear-replayssm-spec`", ({"enable_linear_replayssm_spec": True},)
            ),
            Phrase(
                "`--speculative-accept-threshold-single` or `-acc` below 1",
                (
                    {"speculative_accept_threshold_single": 0.9},
                    {"speculative_accept_threshold_acc": 0.9},
                ),
                served=tuple(
                    {
                        **each, "speculative_accept_threshold_single": 1.0,
                        "speculative_accept_threshold_acc": 1.0,
                    }
                    for each in _STATE_DRAFTS
                ),
            ),
            Phrase(
                "more draft tokens than 32",
                ({"speculative_num_draft_tokens": 33},),
                served=tuple(
                    {**each, "speculative_num_draft_tokens": 32} for each in _STATE_DRAFTS
                ),
            ),
            Phrase(
                "half of `--page-size` and of `--mamba-track-interval`",
                ({"speculative_num_draft_tokens": 17},),
                on=tuple(
                    {**each, "page_size": 16, "mamba_track_interval": 32}
                    for each in _STATE_DRAFTS
                ),
                served=(
                    {
                        **_STATE_DRAFTS[0], "page_size": 16, "mamba_track_interval": 32,
                        "speculative_num_draft_tokens": 16,
                    },
                ),
            ),
        ),
    ),
    "a draft model, with data parallel attention": Row(
        _GROUPED_DRAFTS,
        (
            Phrase(
                "a codec that loses something",
                (LOSSY, REMOTE_LOSSY),
                served=tuple(
                    changed(each, codec)
                    for each in _GROUPED_DRAFTS
                    for codec in (LOSSLESS, ZSTD)
                ),
            ),
            Phrase(
                "NGRAM and STANDALONE",
                ({"speculative_algorithm": "NGRAM"}, {"speculative_algorithm": "STANDALONE"}),
            ),
            Phrase(
                "with K and V of every head all but EAGLE3 and GLM-4.5 with its own draft layer",
                ({"speculative_algorithm": "EAGLE"},),
                on=({**_DRAFTS[1], **GROUPS},),
                served=({**_guesses("EAGLE", _GLM), **GROUPS},),
            ),
            Phrase("Nemotron-H", (GROUPS,), on=_STATE_DRAFTS[2:]),
            Phrase(
                "`SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION`",
                ({"variables": {"SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION": "1"}},),
            ),
            Phrase(
                "`--speculative-skip-dp-mlp-sync` (0.5.22)",
                ({"speculative_skip_dp_mlp_sync": True},),
            ),
            Phrase(
                "trees",
                (TREE,),
                on=({**_DRAFTS[1], **GROUPS}, {**_LATENT_DRAFTS[0], **GROUPS}),
            ),
            Phrase(
                "but for latent rows SGLang 0.5.22",
                ({"release": "0.5.22"},),
                on=({**_DRAFTS[1], **GROUPS},),
                served=({**_LATENT_DRAFTS[0], **GROUPS, "release": "0.5.22"},),
            ),
        ),
    ),
}  # fmt: skip
