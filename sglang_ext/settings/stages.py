"""Which set-ups of pipeline stages are served, and what they are refused with.

Stages are in different steps at one time. Allowed is what was run: what all of them decide alike
without waiting for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig

WITHOUT_STAGES = "change it or leave --pp-size out"


def outside_stages(read: Callable[[str], Any], config: HierKVConfig) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with pipeline stages.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
    """
    if (read("pp_size") or 1) == 1:
        return
    for expected, value in (
        ("--dp-size 1", read("dp_size") or 1),
        ("--attn-dp-size 1", read("attn_dp_size") or 1),
        ("no --enable-dp-attention", _on(read("enable_dp_attention"))),
        ("--pp-async-batch-depth 0", read("pp_async_batch_depth") or 0),
        ("no --enable-dynamic-chunking", _on(read("enable_dynamic_chunking"))),
        ("no --enable-mixed-chunk", _on(read("enable_mixed_chunk"))),
        ("no --enable-prefill-delayer", _on(read("enable_prefill_delayer"))),
        ("--disaggregation-mode null", read("disaggregation_mode") or "null"),
        ("no --speculative-algorithm", read("speculative_algorithm") or ""),
        ("no --enable-lora", _on(read("enable_lora") or read("lora_paths"))),
        ("no --enable-streaming-session", _on(read("enable_streaming_session"))),
        ("no --enable-session-radix-cache", _on(read("enable_session_radix_cache"))),
        ("--hier-kv-codec none", config.codec or "none"),
        ("--hier-kv-truncation off", config.truncation),
        ("--hier-kv-tree-core python", config.tree_core),
        ("no --hier-kv-remote-url", _on(config.remote_url)),
    ):
        if value and not expected.endswith(f" {value}"):
            yield f"{expected} with several pipeline stages", f"{value}"


def _on(value: Any) -> str:
    return "it" if value else ""
