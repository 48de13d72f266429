"""Which set-ups are served behind SGLang's gateway (SMG, over gRPC), and what is refused there.

The gateway makes the tokens, and the requests that it sends have neither a salt nor an extra key.
SGLang's own front process, which cuts prompts and takes what an operator says of stored ones, does
not run. Allowed is what was run.
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

WITHOUT_GATEWAY = "change it or leave --smg-grpc-mode out"


def outside_gateway(
    read: Callable[[str], Any], config: HierKVConfig, release: str = ""
) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried behind the gateway.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
        release: of SGLang; empty where it is not known yet.
    """
    if not (read("smg_grpc_mode") or read("grpc_mode")):
        return
    rows = (
        (NEWEST_RELEASE, older_release(release)),
        ("--dp-size 1", read("dp_size") or 1),
        ("--attn-dp-size 1", read("attn_dp_size") or 1),
        ("--pp-size 1", read("pp_size") or 1),
        ("--nnodes 1", read("nnodes") or 1),
        ("--disaggregation-mode null", read("disaggregation_mode") or "null"),
        *adapters_and_sessions(read),
        ("no --hier-kv-quotas", on(config.quotas)),
        ("--hier-kv-truncation off", config.truncation),
    )
    yield from outside(rows, "with --smg-grpc-mode")


def advice_at_gateway(read: Callable[[str], Any], config: HierKVConfig) -> Iterator[str]:
    """Sentences to warn with: what works behind the gateway, and would work better otherwise.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
    """
    is_there = read("smg_grpc_mode") or read("grpc_mode")
    tells = read("kv_events_config") and config.tree_core == "python"
    if is_there and tells and config.disk_dir and config.kv_events_disk == "disk":
        yield (
            "SGLang's gateway sends nobody to where pages are on disk alone; with "
            "--hier-kv-kv-events-disk host it does"
        )
