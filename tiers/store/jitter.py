"""Delays in the page store at random, for tests of what depends on its timing.

`SGLANG_HIER_KV_DEBUG_JITTER_MS=50` makes every process of a server wait 0 to 50 ms before each
operation of its page store, each process with delays of its own. Unset, nothing is wrapped.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any

ENV_JITTER = "SGLANG_HIER_KV_DEBUG_JITTER_MS"


def max_jitter_s() -> float:
    """The longest delay that the environment asks for, in seconds; 0 for none."""
    return float(os.environ.get(ENV_JITTER, "0")) / 1e3


def add_jitter(
    target: Any, names: tuple[str, ...], max_s: float, *, seed: int | None = None
) -> None:
    """Makes methods of an object wait before they run.

    Args:
        target: the object; its methods are replaced on it alone.
        names: of the methods.
        max_s: the longest delay.
        seed: of the delays; None for those of this process.
    """
    rng, lock = random.Random(os.getpid() if seed is None else seed), threading.Lock()

    def delayed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with lock:
                delay_s = rng.uniform(0.0, max_s)
            time.sleep(delay_s)
            return method(*args, **kwargs)

        return run

    for name in names:
        setattr(target, name, delayed(getattr(target, name)))
