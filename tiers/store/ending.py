"""The end of a store, which takes no longer than it is given, whatever hangs below it."""

from __future__ import annotations

import logging
import math
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
        self._errors: list[BaseException] = []

    def run(self, what: str, work: Callable[[], object], most_s: float = math.inf) -> bool:
        """Does a part of the work; returns whether it ended in time, and well.

        Args:
            what: it waits for, for the log.
            work: the part. May go on after this returned. What it raises is logged, and the next
                part is done all the same.
            most_s: for this part, of the time for all.
        """
        errors: list[BaseException] = []

        def do() -> None:
            try:
                work()
            except BaseException as error:
                logger.exception("hier-kv: an error while the server ends: %s", what)
                errors.append(error)

        thread = threading.Thread(target=do, name="hier-kv-close", daemon=True)
        thread.start()
        thread.join(min(most_s, max(_LEAST_S, self._end_s - time.monotonic())))
        if thread.is_alive():
            self._counters.add("shutdown_left_behind")
            logger.warning("hier-kv: the server ends without waiting any longer for %s", what)
            return False
        self._errors += errors
        return not errors

    def tell(self, num_lost: int) -> None:
        """Says in the log what the disk has not: nobody can ask a server that ends for its counts.

        Args:
            num_lost: pages in DRAM that the disk does not have.
        """
        left = "no page in DRAM was left to write"
        if num_lost:
            left = (
                f"{num_lost} pages were in DRAM only and are lost, as time was up or the disk did "
                "not take them"
            )
        logger.info("hier-kv: the server ends; %s", left)

    def raise_first(self) -> None:
        """All parts were tried: raises what the first one raised that failed, if one did."""
        if self._errors:
            raise self._errors[0]
