"""What docs/disaggregation.md says is refused, as set-ups to ask the code about.

Each row of the table "What is refused", and each bullet behind it, is here by its first words; see
`documented_refusals`.
"""

from __future__ import annotations

from tests.unit.settings.documented_refusals import (
    ADAPTERS,
    ANY_DRAFT,
    DECODE,
    INDEXED,
    KIMI,
    KV,
    LATENT,
    LOSSLESS,
    LOSSY,
    MATCH,
    MELLUM,
    NEXT,
    NGRAM,
    OVERFLOW,
    PREFILL,
    REMOTE_LOSSY,
    RUST,
    STANDALONE,
    TREE,
    Phrase,
    Row,
    SetUp,
    changed,
)


def _both(model: SetUp) -> tuple[SetUp, ...]:
    """A model's prefill server, and its decode server."""
    return tuple({**model, **mode} for mode in (PREFILL, DECODE))


_SPLIT = _both(KV)
_DECODES = _SPLIT[1:]

OF_DISAGGREGATION: dict[str, Row] = {
    "ranks and nodes": Row(
        _SPLIT,
        (
            Phrase("`--dp-size`", ({"dp_size": 2},)),
            Phrase("`--pp-size`", ({"pp_size": 2},)),
            Phrase(
                "data parallel attention",
                ({"tp_size": 2, "attn_dp_size": 2}, {"enable_dp_attention": True}),
            ),
            Phrase("several nodes", ({"nnodes": 2},)),
        ),
    ),
    "models": Row(
        _SPLIT,
        (
            Phrase(
                "all but those with K and V of every head",
                ({"kind": "two shapes in one pool"}, {"kind": "windows of another kind"}),
                served=_both(KV),
            ),
            Phrase(
                "with window layers whose K and V have the same shape",
                ({"kind": "swa of two shapes"},),
                served=_both(MELLUM),
            ),
            Phrase(
                "with MLA, with an index of one row a token or without",
                ({"kind": "sparse"},),
                served=(*_both(LATENT), *_both(INDEXED)),
            ),
            Phrase(
                "with a state beside K and V of every head or beside latent rows",
                ({"kind": "state without pages"}, {"kind": "state of another kind"}),
                served=(*_both(NEXT), *_both(KIMI)),
            ),
        ),
    ),
    "codecs": Row(
        _SPLIT,
        (
            Phrase(
                "a `--hier-kv-codec` that loses something",
                (LOSSY, REMOTE_LOSSY),
                served=tuple(
                    changed({**each, **PREFILL}, LOSSLESS)
                    for each in (KV, *ANY_DRAFT)
                    if each is not STANDALONE
                ),
            ),
        ),
    ),
    "other flags of the plugin": Row(
        _SPLIT,
        (
            Phrase("`--hier-kv-truncation`", (OVERFLOW, MATCH)),
            Phrase("`--hier-kv-tree-core rust`", (RUST,)),
        ),
    ),
    "speculation": Row(
        phrases=(
            Phrase(
                "other than with chains of `EAGLE`, `EAGLE3` or `NEXTN`",
                (PREFILL, DECODE),
                on=({**ANY_DRAFT[0], **TREE},),
                served=tuple({**each, **PREFILL} for each in ANY_DRAFT[:2]),
            ),
            Phrase("`STANDALONE` or `NGRAM`", (PREFILL, DECODE), on=(STANDALONE, NGRAM)),
            Phrase(
                "drafts that are refused without `--disaggregation-mode`, too",
                ({"speculative_num_steps": 0},),
                on=tuple({**each, **PREFILL} for each in ANY_DRAFT[:2]),
            ),
        ),
    ),
    "adapters and sessions": Row(
        _SPLIT,
        (
            Phrase("adapters", ADAPTERS),
            Phrase("`--enable-streaming-session`", ({"enable_streaming_session": True},)),
            Phrase("`--enable-session-radix-cache`", ({"enable_session_radix_cache": True},)),
        ),
    ),
    "transfers": Row(
        _SPLIT,
        (
            Phrase(
                "backends other than `mooncake` (and `mooncake_tcp`)",
                tuple({"disaggregation_transfer_backend": each} for each in ("nixl", "ascend")),
                served=tuple(
                    {**each, "disaggregation_transfer_backend": "mooncake_tcp"} for each in _SPLIT
                ),
            ),
            Phrase(
                "`--disaggregation-decode-allocation-policy prefill_complete`",
                ({"disaggregation_decode_allocation_policy": "prefill_complete"},),
            ),
            Phrase("`--optimistic-prefill-attempts`", ({"optimistic_prefill_attempts": 2},)),
            Phrase(
                "`--disaggregation-enable-kv-checksum`",
                ({"disaggregation_enable_kv_checksum": True},),
            ),
            Phrase("`--enable-pd-role-switch`", ({"enable_pd_role_switch": True},)),
        ),
    ),
    "variables": Row(
        _SPLIT,
        (
            Phrase(
                "`SGLANG_DISAGG_STAGING_BUFFER`",
                ({"variables": {"SGLANG_DISAGG_STAGING_BUFFER": "1"}},),
            ),
            Phrase(
                "`SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE=0`",
                ({"variables": {"SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE": "0"}},),
            ),
        ),
    ),
    "releases": Row(_SPLIT, (Phrase("SGLang 0.5.22", ({"release": "0.5.22"},)),)),
    "the lack of `--disaggregation-decode-enable-radix-cache`": Row(
        _DECODES,
        (
            Phrase(
                "the lack of `--disaggregation-decode-enable-radix-cache`",
                ({"disaggregation_decode_enable_radix_cache": False},),
            ),
        ),
    ),
    "`--disaggregation-decode-enable-offload-kvcache`": Row(
        _DECODES,
        (
            Phrase(
                "`--disaggregation-decode-enable-offload-kvcache`",
                ({"disaggregation_decode_enable_offload_kvcache": True},),
            ),
        ),
    ),
    "`--disaggregation-decode-retraction-backup host_pool`": Row(
        _DECODES,
        (
            Phrase(
                "`--disaggregation-decode-retraction-backup host_pool`",
                ({"disaggregation_decode_retraction_backup": "host_pool"},),
            ),
        ),
    ),
    "`--disaggregation-decode-host-receive-threshold` below 1": Row(
        _DECODES,
        (
            Phrase(
                "`--disaggregation-decode-host-receive-threshold` below 1",
                ({"disaggregation_decode_host_receive_threshold": 0.5},),
                served=({**_DECODES[0], "disaggregation_decode_host_receive_threshold": 1.0},),
            ),
        ),
    ),
}
