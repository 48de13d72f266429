"""What the plugin runs with, and what it refuses: SGLang versions and server set-ups.

Every refusal is one sentence with what was expected, what came and what to do. ``check_arguments``
runs in the main process before the model loads; ``check_model`` where the KV pool exists.
"""

from __future__ import annotations

import os
from importlib import metadata
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig

TESTED_SGLANG = ("0.5.23",)
DEFAULT_PAGE_SIZE = 64


def check_sglang_version() -> None:
    """Refuses an SGLang release that the plugin was not tested with.

    Raises:
        HierKVConfigError: unless ``SGLANG_HIER_KV_ALLOW_UNTESTED=1`` is set.
    """
    found = metadata.version("sglang")
    if found in TESTED_SGLANG or os.environ.get("SGLANG_HIER_KV_ALLOW_UNTESTED") == "1":
        return
    raise HierKVConfigError(
        f"--enable-hier-kv was tested with SGLang {', '.join(TESTED_SGLANG)}, found {found}; "
        f"install sglang=={TESTED_SGLANG[-1]} or set SGLANG_HIER_KV_ALLOW_UNTESTED=1."
    )


def check_arguments(server_args: Any, config: HierKVConfig) -> None:
    """Refuses server arguments under which the plugin would be wrong or untested.

    Args:
        server_args: SGLang's ``ServerArgs`` before resolution.
        config: the plugin's settings.

    Raises:
        HierKVConfigError: naming the argument, its value and what to do.
    """
    check_sglang_version()
    for name in ("pp_size", "attn_cp_size", "dcp_size", "nnodes"):
        value = getattr(server_args, name, 1) or 1
        if value > 1:
            _refuse(
                f"--{name.replace('_', '-')} 1",
                f"{value}",
                "spread the model with --tp-size, on one machine",
            )
    if getattr(server_args, "speculative_algorithm", None):
        _refuse(
            "no speculative decoding",
            f"--speculative-algorithm {server_args.speculative_algorithm}",
            "leave it out",
        )
    if getattr(server_args, "dllm_algorithm", None):
        # KV of a token depends on the tokens after it in its block, which no page hash covers.
        _refuse(
            "a model that generates from left to right",
            f"--dllm-algorithm {server_args.dllm_algorithm}",
            "leave one of the two out",
        )
    if "fp4" in str(getattr(server_args, "kv_cache_dtype", "auto")):
        _refuse(
            "a KV cache of 8 bits or more",
            f"--kv-cache-dtype {server_args.kv_cache_dtype}",
            "choose auto, bfloat16 or fp8_e4m3",
        )
    if (getattr(server_args, "disaggregation_mode", "null") or "null") != "null":
        _refuse(
            "a server that both prefills and decodes",
            f"--disaggregation-mode {server_args.disaggregation_mode}",
            "leave it out",
        )
    workers = getattr(server_args, "tokenizer_worker_num", 1) or 1
    if workers > 1 and config.truncation != "off":
        # They are processes of their own, which check lengths before a prompt can be cut.
        _refuse(
            "--tokenizer-worker-num 1",
            f"{workers}",
            "leave it out or add --hier-kv-truncation off",
        )
    switches = {
        "disable_radix_cache": "SGLang's radix cache",
        "enable_hierarchical_cache": "no other hierarchical cache (HiCache)",
        "enable_lmcache": "no other hierarchical cache (LMCache)",
        "enable_flexkv": "no other hierarchical cache (FlexKV)",
        "enable_unified_cache_external_linker": "no other external linker",
        "use_ray": "SGLang's own process launcher",
        "enable_hisparse": "a plain KV pool",
        "enable_unified_memory": "a plain KV pool",
        "enable_dp_attention": "whole schedulers as data parallel ranks (--dp-size alone)",
        "enable_kv_cache_sharding": "a KV cache in one piece",
        "prefill_only_disable_kv_cache": "a KV cache",
    }
    for name, expected in switches.items():
        if getattr(server_args, name, False):
            _refuse(expected, f"--{name.replace('_', '-')}", "remove one of the two flags")
    if getattr(server_args, "elastic_ep_backend", None):
        # A rank that recovers reloads experts from disk by itself, whatever the weights are by now.
        _refuse(
            "experts that stay where they are",
            f"--elastic-ep-backend {server_args.elastic_ep_backend}",
            "leave it out",
        )
    if (getattr(server_args, "tp_size", 1) or 1) > 1:
        _check_tensor_parallel(config)
    backend = getattr(server_args, "radix_cache_backend", None)
    if backend not in (None, "", "hier_kv"):
        _refuse("its own radix cache backend", f"--radix-cache-backend {backend}", "remove it")
    if getattr(server_args, "page_size", None) == 1:
        _refuse(
            "--page-size of at least 2",
            "1",
            f"leave the flag out (default {DEFAULT_PAGE_SIZE}) or give 16, 32 or 64",
        )
    config.validate()


def _check_tensor_parallel(config: HierKVConfig) -> None:
    """Refuses what several tensor parallel ranks cannot agree on yet."""
    if config.profile:
        _refuse(
            "no --hier-kv-profile with several tensor parallel ranks",
            config.profile,
            "leave it out: each rank learns a profile of its own heads",
        )
    if config.truncation in ("match", "all"):
        # A search ends when it ends, on each rank at another time.
        _refuse(
            "--hier-kv-truncation overflow or off with several tensor parallel ranks",
            config.truncation,
            "leave the flag out",
        )


def check_model(ctx: Any) -> None:
    """Refuses models whose cache is more than one page table of full attention.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.
    """
    advice = "start this model without --enable-hier-kv"
    if ctx.disable_radix_cache:
        _refuse("SGLang's radix cache", "a model for which SGLang disables it", advice)
    if ctx.is_hybrid_swa:
        _refuse("full attention in every layer", "a model with sliding-window layers", advice)
    if ctx.is_hybrid_ssm:
        _refuse("attention in every layer", "a hybrid model with state-space layers", advice)


def _refuse(expected: str, found: str, advice: str) -> None:
    raise HierKVConfigError(f"--enable-hier-kv needs {expected}, got {found}; {advice}.")
