"""What docs/parallel.md says of ranks, stages and nodes is refused, as set-ups to ask about.

Each row of the table "Refused at start" is here by its first cell, and each row of "Served but not
tried" that a start can be asked about; see `documented_refusals`.
"""

from __future__ import annotations

from functools import partial

from sglang_ext.settings.refusals import check_heads, check_ranks, check_stage
from tests.unit.settings.documented_refusals import (
    ADAPTERS,
    ANY_DRAFT,
    DECODE,
    GRANITE,
    GROUPS,
    INDEXED,
    KIMI,
    KIMI_K3,
    KV,
    LAGUNA,
    LATENT,
    LLAMA4,
    LOSSLESS,
    LOSSY,
    MATCH,
    MELLUM,
    NEMOTRON,
    NEXT,
    NGRAM,
    OSS,
    OVERFLOW,
    PREFILL,
    QWEN35,
    QWEN35_EXPERTS,
    QWEN35_IMAGES,
    REMOTE_LOSSY,
    RUST,
    SESSIONS,
    SEVERAL_NODES,
    STAGES,
    STANDALONE,
    ZSTD,
    Phrase,
    Row,
    SetUp,
    changed,
    setting,
)

GATEWAY = {"smg_grpc_mode": True}
TWO = {"tp_size": 2}
STAGED_HYBRIDS = tuple({**each, **STAGES} for each in (OSS, NEMOTRON, QWEN35, QWEN35_IMAGES, KIMI))
STAGED = ({**KV, **STAGES}, {**LATENT, **STAGES}, {**KV, **STAGES, **TWO}, *STAGED_HYBRIDS)
_WITH_GROUPS = ({**KV, **GROUPS}, {**KV, "enable_dp_attention": True})
_ALL_TEXT = setting(truncation="all")

OF_RANKS: dict[str, Row] = {
    "any ranks": Row(
        ({**KV, **TWO}, {**LATENT, **TWO}, {**KV, **STAGES}),
        (
            Phrase(
                "decode-context parallelism",
                ({"dcp_size": 2},),
                late=(partial(check_ranks, {"decode context parallelism": 2}),),
            ),
            Phrase("`--enable-kv-cache-sharding`", ({"enable_kv_cache_sharding": True},)),
            Phrase("`--enable-dsa-cache-layer-split`", ({"enable_dsa_cache_layer_split": True},)),
        ),
    ),
    "context parallel ranks (`--attn-cp-size`)": Row(),
    "whole schedulers (`--dp-size`)": Row(
        phrases=(
            Phrase(
                "rows of an index",
                ({"dp_size": 2},),
                on=(INDEXED,),
                served=tuple({**each, "dp_size": 2} for each in (KV, LATENT, OSS, NEXT, KIMI)),
            ),
            Phrase("pipeline stages", ({"dp_size": 2},), on=STAGED),
        ),
    ),
    "data parallel attention": Row(
        _WITH_GROUPS,
        (
            Phrase("adapters", ADAPTERS),
            Phrase("streaming sessions", ({"enable_streaming_session": True},)),
            Phrase("`--enable-session-radix-cache`", ({"enable_session_radix_cache": True},)),
            Phrase("`--enable-prefill-delayer`", ({"enable_prefill_delayer": True},)),
            Phrase(
                "`--hier-kv-truncation match` and `all`",
                (MATCH, _ALL_TEXT),
                served=tuple(changed(each, OVERFLOW) for each in _WITH_GROUPS),
            ),
            Phrase(
                "`--enable-dp-attention-local-control-broadcast`",
                ({"enable_dp_attention_local_control_broadcast": True},),
            ),
            Phrase(
                "drafts but those that [compatibility.md](compatibility.md#speculation) names",
                (GROUPS,),
                on=(NGRAM, STANDALONE, ANY_DRAFT[0]),
                served=({**ANY_DRAFT[1], **GROUPS},),
            ),
            Phrase("Kimi Linear", (GROUPS,), on=(KIMI,), served=({**KIMI_K3, **GROUPS},)),
            Phrase(
                "an architecture that SGLang does not run with it",
                late=(partial(check_heads, {4}, 2),),
            ),
        ),
    ),
    "pipeline stages (`--pp-size`)": Row(
        STAGED,
        (
            Phrase("`--dp-size`", ({"dp_size": 2},)),
            Phrase("data parallel attention", (GROUPS, {"enable_dp_attention": True})),
            Phrase("prefill and decode servers", (PREFILL, DECODE)),
            Phrase(
                "SGLang's gateway", (GATEWAY,), on=({**KV, **STAGES},), served=({**KV, **GATEWAY},)
            ),
            Phrase(
                "nodes of whose number and that of stages neither divides the other",
                ({"nnodes": 3}, {"nnodes": 4, "pp_size": 6}, {"nnodes": 6, "pp_size": 4}),
                served=tuple(
                    {**each, "tp_size": 2, "pp_size": num_stages, "nnodes": num_nodes}
                    for each in STAGED
                    for num_stages, num_nodes in ((2, 2), (2, 4), (4, 2), (3, 3))
                ),
            ),
            Phrase("`--pp-async-batch-depth`", ({"pp_async_batch_depth": 2},)),
            Phrase("`--enable-dynamic-chunking`", ({"enable_dynamic_chunking": True},)),
            Phrase("`--enable-mixed-chunk`", ({"enable_mixed_chunk": True},)),
            Phrase("`--enable-prefill-delayer`", ({"enable_prefill_delayer": True},)),
            Phrase("speculation", (STAGES,), on=(NGRAM, *ANY_DRAFT)),
            Phrase("adapters", ADAPTERS),
            Phrase("sessions", SESSIONS),
            Phrase(
                "hybrids other than gpt-oss, Nemotron-H, Qwen3.5 (dense) and Kimi Linear",
                (STAGES,),
                on=(MELLUM, LAGUNA, LLAMA4, NEXT, GRANITE, QWEN35_EXPERTS, KIMI_K3),
                served=STAGED_HYBRIDS,
            ),
            Phrase(
                "a stage of a hybrid with layers of one kind alone",
                late=(partial(check_stage, 4, 0), partial(check_stage, 0, 4, "a window")),
            ),
            Phrase("models whose pages have rows of an index", (STAGES,), on=(INDEXED,)),
            Phrase(
                "codecs that lose something",
                (LOSSY,),
                served=tuple(changed(each, LOSSLESS) for each in STAGED),
            ),
            Phrase("a calibrated profile", (setting(profile="/p"),)),
            Phrase("a codec for the remote store", (REMOTE_LOSSY, ZSTD)),
            Phrase("truncation", (OVERFLOW, MATCH, _ALL_TEXT)),
            Phrase("the tree in Rust", (RUST,)),
        ),
    ),
    "several nodes (`--nnodes`)": Row(
        ({**KV, **TWO, **SEVERAL_NODES},),
        (
            Phrase("prefill and decode servers", (PREFILL, DECODE)),
            Phrase("SGLang's gateway", (GATEWAY,)),
        ),
    ),
}

_NODES = {**TWO, **SEVERAL_NODES}
# By the first cell: set-ups of it, which a start takes.
SERVED_UNTRIED: dict[str, tuple[SetUp, ...]] = {
    "several nodes": ({**KV, **_NODES},),
    "MLA on one node": ({**LATENT, "tp_size": 4},),
    "MLA with one memory for all": (
        {**LATENT, **TWO, **STAGES},
        {**LATENT, "tp_size": 4, "attn_dp_size": 2},
        {**LATENT, **_NODES},
        *({**LATENT, **TWO, **mode} for mode in (PREFILL, DECODE)),
    ),
    "cut prompts": tuple(
        changed({**KV, **ranks}, OVERFLOW) for ranks in (_NODES, {"tp_size": 4, "attn_dp_size": 2})
    ),
    "quoted text": tuple(changed({**KV, **_NODES}, each) for each in (MATCH, _ALL_TEXT)),
    "pipeline stages": ({**KV, "pp_size": 8},),
}
