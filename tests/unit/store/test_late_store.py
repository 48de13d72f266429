"""The kit's late stores: every operation waits a little, and does the same."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import PageStore, PageStoreConfig
from testkit.slow import make_stores_late
from testkit.slow.store import add_jitter


def store() -> PageStore:
    return PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())


def test_a_store_is_late_only_when_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "release" not in vars(store()._books.loads)
    monkeypatch.setattr(PageStore, "__init__", PageStore.__init__)  # for it to be put back
    make_stores_late(0.003)
    assert "release" in vars(store()._books.loads)


def test_jitter_delays_and_passes_everything_on() -> None:
    target = SimpleNamespace(double=lambda number, plus=0: 2 * number + plus)
    add_jitter(target, ("double",), 0.02, seed=1)
    started_s = time.monotonic()
    assert [target.double(number, plus=1) for number in range(5)] == [1, 3, 5, 7, 9]
    assert time.monotonic() - started_s > 0.01
