"""The end of a store, which takes no longer than it is given, whatever hangs below it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from sglang_ext.tiers.store.types import StoreCounters

logger = logging.getLogger(__name__)

_LEAST_S = 0.1  # what each part gets, even where the one before took all: it mostly needs less


class Ending:
    """Ends the parts of a store, one behind the other, until one deadline for all of them.

    A system call into a disk or a network that hangs cannot be ended. So each part ends on a daemon
    thread of its own, which is left behind when the time is over, as the process ends with it.

    Args:
        counters: where parts that were left behind are counted.
        timeout_s: for all parts.
    """

    def __init__(self, counters: StoreCounters, timeout_s: float) -> None:
        self._counters = counters
        self._end_s = time.monotonic() + timeout_s

    def run(self, what: str, work: Callable[[], object]) -> bool:
        """Does a part of the work; returns whether it ended in time.

        Args:
            what: it waits for, for the log.
            work: the part. May go on after this returned.

        Raises:
            BaseException: what the work raised.
        """
        errors: list[BaseException] = []

        def do() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=do, name="hier-kv-close", daemon=True)
        thread.start()
        thread.join(max(_LEAST_S, self._end_s - time.monotonic()))
        if thread.is_alive():
            self._counters.add("shutdown_left_behind")
            logger.warning("hier-kv: the server ends without waiting any longer for %s", what)
            return False
        if errors:
            raise errors[0]
        return True
