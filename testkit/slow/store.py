"""Delays at random, for tests of what depends on timing."""

from __future__ import annotations

import functools
import os
import random
import threading
import time
from collections.abc import Callable
from typing import Any


def add_jitter(
    target: Any, names: tuple[str, ...], max_s: float, *, seed: int | None = None
) -> None:
    """Makes methods of an object wait before they run.

    Args:
        target: the object; methods are replaced on it alone, and on its parts.
        names: of the methods, with that of the part before: `part.method`.
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
        *parts, method = name.split(".")
        owner = functools.reduce(getattr, parts, target)
        setattr(owner, method, delayed(getattr(owner, method)))
