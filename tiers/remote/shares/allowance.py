"""What shares come to where the store itself decides what leaves: a bound on what is put there.

Such a store drops what was not used for longest, whoever's it is. So what keeps one tenant's values
there from another's flood is that the flood is not let in: while the store is full, a tenant may
put its share of the store's size in an hour, and what is read in that time stays. Half of it may
come at once, and the other half as the hour goes.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from sglang_ext.tiers.remote.base import Deadline, RemoteEngine, RemoteError, Usage
from sglang_ext.tiers.remote.shares.division import Division

logger = logging.getLogger(__name__)

FULL_SHARE = 0.9
"""Of its size; from there on a store may have to drop something for each new value."""

TURNOVER_S = 3600.0
_ASK_EVERY_S = 10.0


class UploadAllowance:
    """How much each tenant may put now. Thread-safe.

    Args:
        division: who has which share.
        now_s: the clock.
    """

    def __init__(self, division: Division, now_s: Callable[[], float] = time.monotonic) -> None:
        self._parts = [right / division.num_putters / 2 for right in division.rights]
        self._now_s = now_s
        self._lock = threading.Lock()
        # All guarded by _lock.
        self._max_bytes = 0  # 0: the store has room, or does not say how much
        self._left = [math.inf] * len(self._parts)  # lasts while there is room
        self._counted_s = 0.0
        self._asked_s = -_ASK_EVERY_S
        self._has_warned = False

    def look(self, engine: RemoteEngine, deadline: Deadline) -> None:
        """Asks a store how full it is, if that was not done lately."""
        with self._lock:
            if self._now_s() - self._asked_s < _ASK_EVERY_S:
                return
            self._asked_s = self._now_s()
        try:
            self.told(engine.usage(deadline))
        except RemoteError as error:  # it stays what it was
            with self._lock:
                warns, self._has_warned = not self._has_warned, True
            if warns:
                logger.warning(
                    "hier-kv: the remote store does not say how full it is (%s); until it does, "
                    "shares of tenants are those of when it last did, and before that none",
                    error,
                )

    def told(self, usage: Usage) -> None:
        """How full the store is."""
        is_full = 0 < usage.max_bytes * FULL_SHARE <= usage.used_bytes
        with self._lock:
            self._max_bytes = usage.max_bytes if is_full else 0

    def admits(self, tenant: int, num_bytes: int) -> bool:
        """Whether a tenant may put a value now; counted as put."""
        with self._lock:
            if not self._max_bytes:
                return True
            self._refill()
            # The last value may be longer than what is left: also a small share lets some in.
            if self._left[tenant] <= 0:
                return False
            self._left[tenant] -= num_bytes
            return True

    def give_back(self, tenant: int, num_bytes: int) -> None:
        """What was counted as put was not."""
        with self._lock:
            if self._max_bytes:
                self._left[tenant] += num_bytes

    def _refill(self) -> None:
        now_s = self._now_s()
        hours = (now_s - self._counted_s) / TURNOVER_S
        self._counted_s = now_s
        for tenant, part in enumerate(self._parts):
            most = part * self._max_bytes
            self._left[tenant] = min(most, self._left[tenant] + hours * most)
