"""Which prefill servers and decode servers are served, and what they are refused with.

A prefill server saves and loads as any server does. A decode server only saves: SGLang asks its
cache for nothing but what is on the device. Allowed is what was run; both ends of a transfer must
keep a page alike, so both are checked by the same list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.lossless import lossy_codec
from sglang_ext.settings.model_kinds import STATE_KINDS
from sglang_ext.settings.untried import (
    NEWEST_RELEASE,
    adapters_and_sessions,
    older_release,
    on,
    outside,
)
from sglang_ext.settings.values import NO, YES

PREFILL, DECODE = "prefill", "decode"
WITHOUT_DISAGGREGATION = "change it or leave --disaggregation-mode out"
_STAGING = "SGLANG_DISAGG_STAGING_BUFFER"  # KV that leaves by way of a copy was never tried
# Without it rows of a request that was aborted go to the next one while a transfer may write them,
# and what it wrote would be stored as that one's.
_DEFERRED = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE"
_TRANSFERS = ("mooncake", "mooncake_tcp")
_KINDS = ("mha", "mla", "indexed", "swa", *STATE_KINDS)
# Drafts whose rows SGLang sends with the target's. Others it does not take for a decode server that
# keeps a tree; NEXTN is its other name of EAGLE.
_DRAFTS = ("EAGLE", "EAGLE3", "NEXTN")


def is_disaggregated(mode: str | None) -> bool:
    """Whether a value of --disaggregation-mode makes a server do prefills or answers alone."""
    return mode not in (None, "null")


def outside_disaggregation(
    read: Callable[[str], Any], config: HierKVConfig, kind: str = "mha", release: str = ""
) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with separate servers.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
        kind: of the model, a key of ``MODEL_KINDS``.
        release: of SGLang; empty where it is not known yet.
    """
    mode = read("disaggregation_mode")
    if mode not in (PREFILL, DECODE):
        return
    backend = read("disaggregation_transfer_backend") or _TRANSFERS[0]
    algorithm = read("speculative_algorithm")
    found = [
        (NEWEST_RELEASE, older_release(release)),
        ("--dp-size 1", read("dp_size") or 1),
        ("no --attn-dp-size", "it" if (read("attn_dp_size") or 1) > 1 else ""),
        ("no --enable-dp-attention", on(read("enable_dp_attention"))),
        ("--nnodes 1", read("nnodes") or 1),
        (
            "latent rows, with an index or none, or K and V of every head, alike in all layers",
            "a model of another kind" if kind not in _KINDS else "",
        ),
        (
            "--speculative-algorithm EAGLE, EAGLE3 or NEXTN, or none",
            "" if algorithm in _DRAFTS else algorithm,
        ),
        *adapters_and_sessions(read),
        ("a --hier-kv-codec that loses nothing", lossy_codec(config)),
        ("--hier-kv-truncation off", config.truncation),
        ("--hier-kv-tree-core python", config.tree_core),
        (
            "--disaggregation-transfer-backend mooncake",
            "mooncake" if backend in _TRANSFERS else backend,
        ),
        (
            "--disaggregation-decode-allocation-policy early",
            read("disaggregation_decode_allocation_policy"),
        ),
        ("--optimistic-prefill-attempts 0", read("optimistic_prefill_attempts")),
        ("no --disaggregation-enable-kv-checksum", on(read("disaggregation_enable_kv_checksum"))),
        (f"no {_STAGING}", _variable(_STAGING, NO)),
        (f"{_DEFERRED}=1 or none", _variable(_DEFERRED, YES)),
    ]
    if mode == DECODE:
        found += _outside_decoding(read)
    yield from outside(found, f"with --disaggregation-mode {mode}")


def _outside_decoding(read: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """The same of what only a decode server has."""
    if not read("disaggregation_decode_enable_radix_cache"):
        # What is stored are the nodes of SGLang's tree, which such a server has only if told to.
        yield "--disaggregation-decode-enable-radix-cache", "none"
    offloads = read("disaggregation_decode_enable_offload_kvcache")
    yield "no --disaggregation-decode-enable-offload-kvcache", on(offloads)
    threshold = read("disaggregation_decode_host_receive_threshold")
    if threshold is not None and threshold < 1:
        yield "--disaggregation-decode-host-receive-threshold 1", f"{threshold}"


def _variable(name: str, allowed: tuple[str, ...]) -> str:
    """An environment variable's value; empty where it is not set, or is an allowed one."""
    value = os.environ.get(name, "")
    return "" if value.lower() in allowed else value


def check_handed_windows(page_size: int, window: int | None, *, is_chunk: bool) -> None:
    """Refuses windows of which nobody knows where those that a decode server gets begin.

    Args:
        page_size: tokens.
        window: tokens that SGLang's layers with a pool of their own see, without the last.
        is_chunk: they see a chunk of the sequence.

    Raises:
        HierKVConfigError: one sentence.
    """
    # With a shorter one a prompt's last page in the tree would have no window.
    expected, found = f"windows of a page ({page_size} tokens) or more", ""
    if window is not None and window < page_size:
        found = f"one of {window} tokens"
    if is_chunk:
        expected, found = "layers that see a window", "layers that see a chunk of the sequence"
    if found:
        raise HierKVConfigError(
            f"--enable-hier-kv needs {expected} with --disaggregation-mode, got {found}; choose "
            "another --page-size or leave --disaggregation-mode out."
        )
