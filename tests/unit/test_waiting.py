"""A waiting request whose plan found no slot in DRAM."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext import cache as cache_module  # noqa: E402
from sglang_ext.cache import HierKVRadixCache, _Waiting  # noqa: E402
from sglang_ext.tiers.store import KeySpace, Plan  # noqa: E402

NO_ROWS = np.empty(0, np.int64)


class FullStore:
    """Has room for a plan, and no slot."""

    def __init__(self) -> None:
        self.attempts = 0
        self.plan_to_give = Plan(NO_ROWS, 0, starved=True)

    def has_plan_room(self) -> bool:
        return True

    def cancel_plan(self, plan: Plan) -> None:
        plan.cancelled = True

    def plan(self, *_: object) -> Plan:
        self.attempts += 1
        return self.plan_to_give


def test_a_starved_plan_is_made_again_now_and_then_not_at_every_poll() -> None:
    store = FullStore()
    cache = HierKVRadixCache.__new__(HierKVRadixCache)
    cache.linker = SimpleNamespace(cache_linker=SimpleNamespace(store=store))  # type: ignore[assignment]
    cache.hier_config = SimpleNamespace(prefetch_policy="wait_complete")  # type: ignore[assignment]
    space = KeySpace(0, bytes(32), b"")
    hashes = np.zeros((4, 32), np.uint8)
    cache._plans = {"a": _Waiting(store.plan_to_give, space, hashes, 255)}
    end_s, polls = time.monotonic() + 0.3, 0
    while time.monotonic() < end_s:
        assert cache.check_prefetch_progress("a") is False
        polls += 1
    # 1, 2, 4, 8, 16 and then every 32 ms.
    assert 3 <= store.attempts <= 15 < polls

    store.plan_to_give = Plan(NO_ROWS, 0)
    time.sleep(cache_module._LONGEST_PAUSE_S)
    assert cache.check_prefetch_progress("a") is True
