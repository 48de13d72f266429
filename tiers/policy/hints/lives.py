"""How long pages may live after their last use, by what was said of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy.hints import timers as kernels
from sglang_ext.tiers.policy.page_kernels import Pages

Rows = npt.NDArray[np.int64]
_PAGES_A_CALL = 4096
# Of each its end is noted by itself, some 50 us of the scheduler's thread: thousands may be due in
# one second.
_CONVERSATIONS_A_CALL = 16


class Lives:
    """Pages with a time after which they are as those of a conversation that is over.

    Not locked. Every call costs time in proportion to the rows that it is about. Memory: 19 bytes a
    row, committed as rows are given times.

    Args:
        num_rows: rows are 0 to `num_rows` - 1.
    """

    def __init__(self, num_rows: int) -> None:
        self._timers = kernels.new_timers(num_rows)

    def __len__(self) -> int:
        """Pages with a time."""
        return kernels.num_timed(self._timers)

    def has_due(self, now_s: float) -> bool:
        """Whether there may be pages whose time is over. O(1)."""
        return kernels.has_due(self._timers, now_s)

    def limit(self, pages: Pages, path: Rows, ttl_s: float, owner: int, now_s: float) -> int:
        """Gives the pages of a conversation a time from now, in place of what they had.

        Pages that other paths share are passed over, and so are those that do not exist.

        Args:
            pages: what is known of pages.
            path: root first.
            ttl_s: seconds from now.
            owner: who says it.
            now_s: time.

        Returns:
            Pages that have the time.
        """
        path = path[(path >= 0) & (path < len(pages.known))]
        own = path[(pages.known[path] != 0) & (pages.shared[path] == 0)]
        kernels.set_times(self._timers, own, now_s + ttl_s, owner, now_s)
        return len(own)

    def forget(self, rows: Rows) -> None:
        """Pages were used or left the system: nothing is said of them any more."""
        kernels.clear(self._timers, rows)

    def take_due(self, now_s: float) -> Iterator[tuple[int, Rows]]:
        """Takes pages whose time is over, of a bounded number of conversations, and of pages.

        The next call goes on.

        Yields:
            For each conversation who said it and its pages, root first.
        """
        if not len(self):
            return
        out = np.empty(_PAGES_A_CALL, np.int64)
        rows = out[: kernels.take_due(self._timers, now_s, _CONVERSATIONS_A_CALL, out)]
        if not len(rows):
            return
        # What was said at once and by one is of one conversation.
        due_s, owners = self._timers.due_s[rows], self._timers.owner[rows]
        parts = np.flatnonzero((np.diff(due_s) != 0) | (np.diff(owners) != 0)) + 1
        for part in np.split(rows, parts):
            yield int(self._timers.owner[part[0]]), part
