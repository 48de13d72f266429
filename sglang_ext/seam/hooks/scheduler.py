"""Hooks in a scheduler process: the cache backend, the gates, the report, and `/server_info`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import Any

from sglang_ext.device.rope_discovery import rope_digest
from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.tenancy import note_tenant
from sglang_ext.provenance.miss_counts import told
from sglang_ext.provenance.request_state import find_state, wants_exact
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.admin.changes import register_change_hooks
from sglang_ext.seam.hooks.admin.steering_endpoint import CARRIER
from sglang_ext.seam.hooks.admin.steering_scheduler import steer
from sglang_ext.seam.hooks.disaggregation import check_transfer, register_disaggregation_hooks
from sglang_ext.seam.hooks.hooking import check_hooks, hook
from sglang_ext.seam.hooks.loaded_models import register_model_hooks
from sglang_ext.seam.hooks.request_observers import request_observers
from sglang_ext.seam.hooks.truncation import build_truncator, register_truncation_hooks
from sglang_ext.seam.hooks.weights import register_weight_hooks
from sglang_ext.seam.reuse_report import DETAILS_KEY, pack_details, pack_quality
from sglang_ext.seam.self_check import run_self_check
from sglang_ext.seam.session_turns import part_from_another_turn
from sglang_ext.seam.start.orphan import end_orphan
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.quality import Quality, name_of
from sglang_ext.truncation.lineage import lineage_of

logger = logging.getLogger(__name__)

BACKEND = "hier_kv"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_REQUEST = "sglang.srt.managers.schedule_batch.Req"
_BATCH = "sglang.srt.managers.schedule_batch.ScheduleBatch"
_ADDER = "sglang.srt.managers.schedule_policy.PrefillAdder"
_OUT_OF_PLACE = "The prompt has tokens in it that stand for images where none of its images is."
_COMPONENTS = "sglang.srt.managers.scheduler_components"


def register_scheduler_hooks(
    build_cache: Callable[[Any], Any], check_before_weights: Callable[[Any, Any], None]
) -> None:
    """Registers everything that runs in a scheduler process. Without the flag none of it acts.

    Args:
        build_cache: makes the cache from what SGLang hands to a backend of its radix cache.
        check_before_weights: looks at SGLang's model runner and its model without weights.
    """
    from sglang.srt.mem_cache import registry

    def build_hooked(ctx: Any) -> Any:
        check_hooks()  # all have been applied by now, or the start ends
        return build_cache(ctx)

    if BACKEND not in registry.registered_radix_cache_backends():
        registry.register_radix_cache_backend(BACKEND, build_hooked)
    hook(f"{_SCHEDULER}.__init__", end_orphan, "before")
    hook(f"{_SCHEDULER}.__init__", _after_init)
    request_observers.add(_note_tenant)
    request_observers.add(_part_from_another_turn)
    request_observers.add(_made)
    hook(f"{_REQUEST}.extend_image_inputs", _after_images)
    hook(f"{_BATCH}.check_decode_mem", _around_room_for_decode, "around")
    hook(f"{_ADDER}.preempt_to_schedule", _around_preemption, "around")
    hook(f"{_SCHEDULER}._record_scheduler_state_for_paused_engine", _in_pause, "before")
    hook(f"{_SCHEDULER}.run_batch", _before_run_batch, "before")
    hook(f"{_SCHEDULER}.run_batch", _after_run_batch)
    hook(f"{_SCHEDULER}.process_batch_result", _after_process_batch_result)
    hook(
        f"{_COMPONENTS}.output_streamer.SchedulerOutputStreamer.get_cached_tokens_details",
        _after_details,
    )
    hook(
        f"{_COMPONENTS}.internal_state.SchedulerInternalStateController.get_internal_state",
        _after_internal_state,
    )
    hook(f"{_SCHEDULER}.process_batch_result", _before_result, "before")
    register_model_hooks(check_before_weights)
    register_disaggregation_hooks()
    register_weight_hooks()
    register_change_hooks()
    register_truncation_hooks()


def _after_init(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    cache = self.tree_cache
    if not isinstance(cache, HierKVRadixCache):
        return
    # SGLang's switches for an external store: polling, loads under the prefill, the admission
    # gate, the idle check and the clear endpoint. HiCache's own switch must stay off.
    self.enable_unified_cache_external_linker = True
    self.enable_lmcache = True
    cache.bind_scheduler(self, build_truncator(self, cache.hier_config, cache.page_size))
    cache.hier_linker.take_streams(_streams_of(self))
    check_transfer(self, cache)
    run_self_check(self, cache)
    # Window layers are stored as the full ones are: where these are bound, all are.
    copiers = cache.hier_linker.copiers if cache.hier_linker.movable else [cache.hier_linker.copier]
    ropes = [rope for copier in copiers for rope in copier.ropes]
    cache.identity.add_rope(rope_digest(ropes, cache.hier_config.rope))
    try:
        cache.identity.open(cache.store)
    except TierConfigError as error:
        raise HierKVConfigError(f"{error}.") from error


def _streams_of(scheduler: Any) -> list[Any]:
    """SGLang's streams beside the one for forwards, as far as they are known when it has started.

    A stream of ours that were one of them would wait for it, and it for ours. That may still happen
    where SGLang's for scheduling is its one for forwards at this time: it draws another when its
    event loop begins, behind the self check, which has used ours by then. What the scheduler
    launches there and what we do then run one behind the other, so less overlaps; every wait is for
    what was queued before, so no order is lost and nothing stops.
    """
    return [
        scheduler.schedule_stream,
        scheduler.copy_stream,
        getattr(scheduler.future_map, "fwd_prepare_d2h_stream", None),
    ]


def _note_tenant(scheduler: Any, req: Any, message: Any) -> None:
    if isinstance(scheduler.tree_cache, HierKVRadixCache):
        note_tenant(req, message)


def _part_from_another_turn(scheduler: Any, req: Any, message: Any) -> None:
    if isinstance(scheduler.tree_cache, HierKVRadixCache):
        part_from_another_turn(scheduler, req)


def _made(scheduler: Any, req: Any, message: Any) -> None:
    if isinstance(scheduler.tree_cache, HierKVRadixCache):
        scheduler.tree_cache.media.made(req, getattr(message, "session_params", None))


def _after_images(result: None, self: Any, *args: Any, **kwargs: Any) -> None:
    """A request was given its images. Of one that SGLang made itself, no client, none are known."""
    cache = getattr(request_observers.scheduler, "tree_cache", None)
    if isinstance(cache, HierKVRadixCache):
        cache.media.arrived(self)
        if not cache.media.placeholders_match(self):
            self.set_finish_with_abort(_OUT_OF_PLACE)


def _around_room_for_decode(original: Any, self: Any, *args: Any, **kwargs: Any) -> bool:
    has_room = bool(original(self, *args, **kwargs))
    cache = self.tree_cache
    if has_room or not isinstance(cache, HierKVRadixCache) or not cache.free_saved_pages():
        return has_room
    return bool(original(self, *args, **kwargs))


def _around_preemption(original: Any, self: Any, req: Any, *args: Any, **kwargs: Any) -> bool:
    """Nobody gives way to a request that is held.

    SGLang makes others give way first, and asks then whether the request may run. They would run
    again in the next step, and give way in the one behind it, for as long as it is held. True: it
    asks, and goes on with the next request.
    """
    cache = self.tree_cache
    if (
        isinstance(cache, HierKVRadixCache)
        and _others_would_give_way(self, req, cache.scheduler)
        and cache.is_held(req.cache_request_handle)
    ):
        return True
    return bool(original(self, req, *args, **kwargs))


def _others_would_give_way(adder: Any, req: Any, scheduler: Any) -> bool:
    """Whether any priority in the batch is low enough; else a request's time to wait begins later.

    As far as SGLang looks at priorities: whether enough rows would come of it is not asked.
    """
    sign = -1 if scheduler.schedule_low_priority_values_first else 1
    least = adder.priority_scheduling_preemption_threshold
    return any(
        sign * (req.priority - running.priority) > least
        for running in adder.running_batch.reqs
        if not running.finished()
    )


def _in_pause(self: Any) -> None:
    """SGLang's paused loop takes no results of saves, and it waits for them before it flushes."""
    if isinstance(self.tree_cache, HierKVRadixCache):
        self.tree_cache.take_saves_in_pause()


def _before_run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    cache = self.tree_cache
    if isinstance(cache, HierKVRadixCache) and batch.forward_mode.is_extend():
        cache.runs(batch.reqs, batch.hicache_consumer_index)


def _after_run_batch(result: Any, self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    timer = getattr(self.tree_cache, "forward_timer", None)
    if timer is not None:
        timer.launched(batch, result)


def _after_process_batch_result(_: Any, self: Any, batch: Any, result: Any, *args: Any) -> None:
    timer = getattr(self.tree_cache, "forward_timer", None)
    if timer is not None:
        timer.finished(result)


def _before_result(self: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    if isinstance(self.tree_cache, HierKVRadixCache):
        self.tree_cache.before_result(batch.reqs)


def _after_details(result: Any, self: Any, req: Any) -> Any:
    if not isinstance(self.tree_cache, HierKVRadixCache):
        return result
    state, lineage = find_state(req), lineage_of(req)
    if state is None:
        return result
    if state.received is not None:  # where its tokens came from is told by the other server
        is_told = state.reused > Quality.EXACT or wants_exact(req)
        return pack_quality(result, name_of(state.reused)) if is_told else result
    missed = told(state.missed)
    if req.cached_tokens <= 0 and lineage is None and not missed:
        return result
    details: dict[str, Any] = {**state.by_tier(max(0, int(req.cached_tokens)))}
    if lineage is not None:
        details["moved"] = lineage.num_moved
        if lineage.num_dropped:
            details["dropped"] = lineage.num_dropped
    if state.reused > Quality.EXACT or wants_exact(req):
        details["quality"] = name_of(state.reused)
    if missed:
        details["missed"] = missed
    return pack_details(result, details)


def _after_internal_state(result: Any, self: Any, recv_req: Any) -> None:
    cache = self.scheduler.tree_cache
    if isinstance(cache, HierKVRadixCache):
        carried = recv_req.rid or ""
        if carried.startswith(CARRIER):  # all ranks got it in this step; no round with the others
            done = steer(cache, carried.removeprefix(CARRIER))
            result.internal_state = {DETAILS_KEY: {"steered": done}}
            return
        result.internal_state[DETAILS_KEY] = _state_of_all_ranks(cache)


def _state_of_all_ranks(cache: HierKVRadixCache) -> dict[str, Any]:
    """This rank's state, with those of its tensor parallel group where it is one of several."""
    state = cache.metrics_reporter_hier.state()
    admission = cache.admission
    if not isinstance(admission, Lockstep):
        return state
    state["agreements"] = admission.num_rounds
    others = admission.gather(json.dumps(state).encode())
    return {**state, "tp_ranks": [json.loads(other) for other in others]}
