"""KV that a prefill server sends to a decode server: what SGLang asks of a device for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

_PREFILL = "sglang.srt.disaggregation.prefill"


def load() -> None:
    """Hooks in where a request's KV is sent; in a scheduler process only."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_PREFILL}.PrefillBootstrapQueue.create_sender", _after_create)
    HookRegistry.register(
        f"{_PREFILL}.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        _around_early_sending,
        HookType.AROUND,
    )


def _after_create(is_created: bool, queue: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    """SGLang would copy page numbers to page-locked memory, which only a device has."""
    if is_created:
        req.disagg_kv_sender.supports_host_tensor_indices = False


def _around_early_sending(
    send: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any
) -> None:
    """With overlap SGLang has the transfer wait for an event; here a forward ends as it starts."""
    overlaps, scheduler.enable_overlap = scheduler.enable_overlap, False
    try:
        send(scheduler, *args, **kwargs)
    finally:
        scheduler.enable_overlap = overlaps
