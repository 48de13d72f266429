"""Which pipeline stages are served, and what others are refused with.

Stages are in different steps at one time. Allowed is what was run: what all of them decide alike
without waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.lossless import lossy_or_calibrated_codec
from sglang_ext.settings.untried import adapters_and_sessions, on, outside

# Hybrids that were run in stages. Of the others SGLang 0.5.23 runs no stages (Qwen3-Next, Falcon
# H1, Mellum, Llama 4), fails while it loads the weights (Granite 4) or at the first request (MiMo
# V2, Step 3.5), or nobody tried them.
STAGED_HYBRIDS = (
    "NemotronHForCausalLM",
    "KimiLinearForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "GptOssForCausalLM",
)
WITHOUT_STAGES = "change it or leave --pp-size out"


def outside_stages(read: Callable[[str], Any], config: HierKVConfig) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with pipeline stages.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
    """
    if (read("pp_size") or 1) == 1:
        return
    remote_codec = f"remote={config.of_tier('codec', 'remote')}"
    rows = (
        _of_nodes(read("pp_size"), read("nnodes") or 1),
        ("--dp-size 1", read("dp_size") or 1),
        ("--attn-dp-size 1", read("attn_dp_size") or 1),
        ("no --enable-dp-attention", on(read("enable_dp_attention"))),
        ("--pp-async-batch-depth 0", read("pp_async_batch_depth") or 0),
        ("no --enable-dynamic-chunking", on(read("enable_dynamic_chunking"))),
        ("no --enable-mixed-chunk", on(read("enable_mixed_chunk"))),
        ("no --enable-prefill-delayer", on(read("enable_prefill_delayer"))),
        ("--disaggregation-mode null", read("disaggregation_mode") or "null"),
        ("no --speculative-algorithm", read("speculative_algorithm") or ""),
        *adapters_and_sessions(read),
        ("a --hier-kv-codec that loses nothing", lossy_or_calibrated_codec(config)),
        ("--hier-kv-codec remote=none", remote_codec),
        ("no --hier-kv-profile", on(config.profile)),
        ("--hier-kv-truncation off", config.truncation),
        ("--hier-kv-tree-core python", config.tree_core),
    )
    yield from outside(rows, "with several pipeline stages")


def _of_nodes(num_stages: int, num_nodes: int) -> tuple[str, str]:
    """What is expected, and what came, of nodes that do not hold whole stages or parts of one.

    SGLang rounds down how many stages a node has, or how many nodes a stage. Some stages are then
    started by no node, or some nodes start stages that do not exist, and the others wait for them.
    """
    fits = num_stages % num_nodes == 0 or num_nodes % num_stages == 0
    expected = f"--nnodes that divides --pp-size {num_stages} or is a multiple of it,"
    return expected, "" if fits else f"{num_nodes}"
