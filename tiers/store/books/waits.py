"""Who waits: plans for pages that are being read, and whoever wants nothing to be in flight."""

from __future__ import annotations

import threading

from sglang_ext.tiers.store.types import Plan, Rows


class PageWaits:
    """The plans that wait for each row. The table's lock is held around every call."""

    def __init__(self) -> None:
        self._plans: dict[int, list[Plan]] = {}

    def __len__(self) -> int:
        return len(self._plans)

    def add(self, rows: Rows, plan: Plan) -> None:
        """A plan waits for these rows."""
        for row in rows.tolist():
            self._plans.setdefault(row, []).append(plan)

    def plans(self, rows: Rows) -> list[Plan]:
        """The plans that wait for any of these rows, one for each row that it waits for."""
        return [plan for row in rows.tolist() for plan in self._plans.get(row, ())]

    def end(self, rows: Rows, *, failed: bool) -> None:
        """These rows came, or will not come."""
        if not self._plans:
            return
        for row in rows.tolist():
            for plan in self._plans.pop(row, ()):
                plan.remaining -= 1
                plan.num_here_left -= 1
                plan.failed |= failed


class InFlight:
    """Counts saves and promotions that own `FILLING` rows.

    Args:
        lock: the table's; held around every call but `wait`, which takes it.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._idle = threading.Condition(lock)
        self.num = 0

    def begin(self) -> None:
        """One more."""
        self.num += 1

    def end(self) -> None:
        """One fewer."""
        self.num -= 1
        if self.num == 0:
            self._idle.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits until there is none; False when it takes longer."""
        with self._idle:
            return self._idle.wait_for(lambda: self.num == 0, timeout_s)
