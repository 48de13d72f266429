"""``CPU_IDLE_SLEEP_MS``: what has nothing to do pauses between two looks for requests.

A scheduler, and the controller of data parallel ones, spin on a core otherwise, and of two cores
that is a half. Unlike ``--sleep-on-idle``, which looks once a second, a scheduler is soon back
where something other than a request ends the wait.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

ENV_IDLE_SLEEP_MS = "CPU_IDLE_SLEEP_MS"
_CONTROLLER_POLL_MS = 20  # it comes back as soon as there is a message


def load() -> None:
    """Hooks the pauses in where SGLang would sleep or spin; does nothing without the variable."""
    pause_s = float(os.environ.get(ENV_IDLE_SLEEP_MS) or 0) / 1e3
    if pause_s <= 0:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(
        "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
        lambda *_: time.sleep(pause_s),
    )
    HookRegistry.register(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        wait_for_messages,
        HookType.AROUND,
    )


def wait_for_messages(event_loop: Callable[..., Any], controller: Any) -> Any:
    """Runs the controller's loop, which waits for a message at each look instead of spinning."""
    feed = controller.soft_watchdog.feed  # the first thing that the loop does at each look

    def feed_and_wait() -> None:
        feed()
        controller.recv_from_tokenizer.poll(_CONTROLLER_POLL_MS)

    controller.soft_watchdog.feed = feed_and_wait
    return event_loop(controller)
