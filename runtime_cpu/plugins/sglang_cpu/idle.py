"""``CPU_IDLE_SLEEP_MS``: an idle scheduler pauses between two looks for requests.

It spins on a core otherwise, and of two cores that is a half. Unlike ``--sleep-on-idle``, which
looks once a second, it is soon back where something other than a request ends the wait.
"""

from __future__ import annotations

import os
import time

ENV_IDLE_SLEEP_MS = "CPU_IDLE_SLEEP_MS"


def load() -> None:
    """Hooks the pause in where SGLang would sleep; does nothing without the variable."""
    pause_s = float(os.environ.get(ENV_IDLE_SLEEP_MS) or 0) / 1e3
    if pause_s > 0:
        from sglang.srt.plugins.hook_registry import HookRegistry

        HookRegistry.register(
            "sglang.srt.managers.scheduler.Scheduler.maybe_sleep_on_idle",
            lambda *_: time.sleep(pause_s),
        )
