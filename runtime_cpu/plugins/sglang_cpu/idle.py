"""``CPU_IDLE_SLEEP_MS``: what has nothing to do waits for requests instead of looking for them.

A scheduler, and the controller of data parallel ones, spin on a core otherwise, and of two cores
that is a half. A request ends the wait at once. Unlike ``--sleep-on-idle``, which waits for a
second, a scheduler is soon back where something other than a request is to be waited for; and it
waits, for much less, where requests are held and nothing runs.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any

ENV_IDLE_SLEEP_MS = "CPU_IDLE_SLEEP_MS"
_HELD_PAUSE_MS = 2  # what a held request waits for comes by itself
_CONTROLLER_POLL_MS = 20  # it comes back as soon as there is a message


def load() -> None:
    """Hooks the waits in where SGLang would sleep or spin; does nothing without the variable."""
    pause_ms = math.ceil(float(os.environ.get(ENV_IDLE_SLEEP_MS) or 0))
    if pause_ms <= 0:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.on_idle",
        lambda _, scheduler: wait_for_requests(scheduler, pause_ms),
    )
    HookRegistry.register(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        wait_for_messages,
        HookType.AROUND,
    )


def wait_for_requests(scheduler: Any, pause_ms: int) -> None:
    """Waits until a request is there, `pause_ms` at most; 2 ms where some are there but held.

    A rank that gets its requests from another one waits there, for that one's.
    """
    requests = scheduler.recv_from_tokenizer
    if requests is not None:
        requests.poll(pause_ms if scheduler.is_fully_idle() else min(pause_ms, _HELD_PAUSE_MS))


def wait_for_messages(event_loop: Callable[..., Any], controller: Any) -> Any:
    """Runs the controller's loop, which waits for a message at each look instead of spinning."""
    feed = controller.soft_watchdog.feed  # the first thing that the loop does at each look

    def feed_and_wait() -> None:
        feed()
        controller.recv_from_tokenizer.poll(_CONTROLLER_POLL_MS)

    controller.soft_watchdog.feed = feed_and_wait
    return event_loop(controller)
