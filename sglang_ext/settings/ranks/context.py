"""Which context parallel ranks are served, and what others are refused with.

Those are of which each has K and V of every head and every token: SGLang's zigzag strategy gathers
them from all ranks and writes them into the pool of each, and without prefill context parallelism
each rank computes all of them. docs/parallel.md says what the other ways keep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.untried import (
    NEWEST_RELEASE,
    adapters_and_sessions,
    older_release,
    on,
    outside,
)

# Of which prefills were run so.
CONTEXT_ARCHITECTURES = ("Qwen3ForCausalLM",)
# Attention that gathers K and V of all ranks before it writes them. Others write what a rank has.
_GATHERING = ("fa3", "fa4", "trtllm_mha", "cpu_extend")
_WHOLE_VALUES = ("auto", "bfloat16", "bf16")  # others have scales, which the ranks would share
WITHOUT_CONTEXT = "change it or leave --attn-cp-size and --enable-prefill-cp out"
_MODE = "with context parallel ranks"
# Why a model of another kind has no tried way, by the key of `MODEL_KINDS`.
_OTHER_KINDS = {
    "mla": "latent rows, of which SGLang shards prefills only with experts spread by DeepEP",
    "indexed": "rows of an index, of which SGLang shards prefills in CUDA kernels (dsa)",
    "swa": "windows, which nobody tried",
    "swa of two shapes": "windows, which nobody tried",
    "state": "states, which SGLang keeps in shares of all ranks",
    "state beside latent rows": "states, which SGLang keeps in shares of all ranks",
}


def has_context_ranks(read: Callable[[str], Any]) -> bool:
    """Whether several ranks share the tokens of a prefill, or repeat the heads of others.

    Args:
        read: an argument's value by its name.
    """
    return (read("attn_cp_size") or 1) > 1 or bool(read("enable_prefill_cp"))


def outside_context(read: Callable[[str], Any], config: HierKVConfig) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with these ranks.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
    """
    if not has_context_ranks(read):
        return
    ranks = read("tp_size") or 1
    dtype = str(read("kv_cache_dtype") or "auto")
    rows = (
        # Else some ranks have other heads than others, and some the same.
        (f"--attn-cp-size {ranks} (as --tp-size)", read("attn_cp_size") or 1),
        ("--dp-size 1", read("dp_size") or 1),
        ("--attn-dp-size 1", read("attn_dp_size") or 1),
        ("no --enable-dp-attention", on(read("enable_dp_attention"))),
        ("--moe-dp-size 1", read("moe_dp_size") or 1),
        ("--ep-size 1", read("ep_size") or 1),
        ("--pp-size 1", read("pp_size") or 1),
        ("--nnodes 1", read("nnodes") or 1),
        ("no --enable-mixed-chunk", on(read("enable_mixed_chunk"))),
        ("no --enable-two-batch-overlap", on(read("enable_two_batch_overlap"))),
        ("--kv-cache-dtype auto or bfloat16", "" if dtype in _WHOLE_VALUES else dtype),
        ("--disaggregation-mode null", read("disaggregation_mode") or "null"),
        ("no --speculative-algorithm", read("speculative_algorithm") or ""),
        *adapters_and_sessions(read),
        ("--hier-kv-codec none", config.codec or "none"),
        ("--hier-kv-truncation off", config.truncation),
        ("--hier-kv-tree-core python", config.tree_core),
    )
    yield from outside(rows, _MODE)


def outside_context_models(
    read: Callable[[str], Any], kind: str, architecture: str, release: str
) -> Iterator[tuple[str, str]]:
    """The same of the model and of SGLang's release.

    Args:
        read: an argument's value by its name.
        kind: of the model, a key of `MODEL_KINDS`.
        architecture: of the model, by SGLang's name.
        release: of SGLang; empty where it is not known.
    """
    if not has_context_ranks(read):
        return
    if older_release(release):
        yield f"{NEWEST_RELEASE} {_MODE}", release
    backend = read("prefill_attention_backend") or read("attention_backend") or "none"
    if read("enable_prefill_cp") and backend not in _GATHERING:
        yield "--prefill-attention-backend fa3, fa4 or trtllm_mha with --enable-prefill-cp", backend
    if kind in _OTHER_KINDS:
        yield f"K and V of every head in one pool {_MODE}", _OTHER_KINDS[kind]
    if architecture not in CONTEXT_ARCHITECTURES:
        yield f"a model that was run so ({', '.join(CONTEXT_ARCHITECTURES)}) {_MODE}", architecture
