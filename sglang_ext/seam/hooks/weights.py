"""Hooks around everything in SGLang that changes weights or adapters while the server runs."""

from __future__ import annotations

from typing import Any

from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.hooking import hook

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
# Every path on which SGLang 0.5.23 writes weights. Releasing and resuming memory may leave
# weights undefined until the caller loads them again.
_WEIGHT_METHODS = (
    "update_weights_from_disk",
    "update_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
    "begin_weight_update",
    "end_weight_update",
    "release_memory_occupation",
    "resume_memory_occupation",
)
_ADAPTER_METHODS = (
    "load_lora_adapter",
    "load_lora_adapter_from_tensors",
    "unload_lora_adapter",
)


def register_weight_hooks() -> None:
    """Registers the hooks; in a scheduler process, before the scheduler is built."""
    for method in _WEIGHT_METHODS:
        hook(f"{_UPDATER}.{method}", _around_weight_change, "around")
    for method in _ADAPTER_METHODS:
        hook(f"{_SCHEDULER}.{method}", _around_adapter_change, "around")
    hook(f"{_UPDATER}.check_weights", _around_check, "around")
    hook(f"{_SCHEDULER}.flush_cache", _before_flush, "before")


def _around_weight_change(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_of(self.scheduler)
    if cache is None:
        return original(self, *args, **kwargs)
    cache.weights_change()
    cache.identity.begin_update(device_is_empty=_device_is_empty(self.scheduler, cache))
    try:
        answer = original(self, *args, **kwargs)
    finally:
        cache.identity.end_update(
            device_is_empty=_device_is_empty(self.scheduler, cache),
            # Within a session a peer may write weights (P2P, RDMA) that no call announces.
            incomplete=self._session is not None or bool(self.offload_tags),
        )
    # Not where the call raised: the other ranks may be in a collective of the call itself, and an
    # exchange with them would keep the error, which ends the server, from ever being seen.
    cache.identity.open_at_once(cache.store)
    return answer


def _around_check(original: Any, self: Any, recv_req: Any) -> Any:
    """SGLang's weight checker overwrites the weights when it is asked to reset them."""
    if recv_req.action == "reset_tensors":
        return _around_weight_change(original, self, recv_req)
    return original(self, recv_req)


def _around_adapter_change(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _cache_of(self)
    if cache is not None:
        cache.weights_change()
    answer = original(self, *args, **kwargs)
    if cache is not None:  # not where the call raised, as with weights
        cache.identity.adapters_changed(cache.store)
    return answer


def _before_flush(self: Any, *args: Any, **kwargs: Any) -> None:
    """A save in the background must not make `/flush_cache` fail.

    A call that changes weights has waited for them, on all ranks. What it flushes is no point that
    all come to: a rank on which the weights could not be loaded does not flush.
    """
    cache = _cache_of(self)
    if cache is not None and not cache.identity.is_updating:
        cache.quiesce()


def _cache_of(scheduler: Any) -> HierKVRadixCache | None:
    cache = getattr(scheduler, "tree_cache", None)
    return cache if isinstance(cache, HierKVRadixCache) else None


def _device_is_empty(scheduler: Any, cache: HierKVRadixCache) -> bool:
    """No KV anywhere on the device: not in the tree, and not in a session's rows either."""
    allocator = scheduler.token_to_kv_pool_allocator
    whole = allocator.size // cache.page_size * cache.page_size
    return allocator.available_size() == whole and bool(
        scheduler.is_fully_idle(ignore_waiting=True)
    )
