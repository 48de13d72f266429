"""Tokens of requests as they run: reused by tier, missed by reason, once each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.provenance.miss_counts import MissKeeper, Wanted, told
from sglang_ext.provenance.request_state import HitTier, state_of
from sglang_ext.seam.metrics.names import TOKENS, Series, count_of, from_start
from sglang_ext.tiers.records.quality import ANY
from tests.unit.store.store_rig import Make, Rig, pages, rigs

PAGE = 64


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def waits(rig: Rig, path: np.ndarray, num_cached: int) -> Any:
    """A request of so many pages and a token, that is about to run with some of them reused."""
    req = SimpleNamespace(
        rid="r", cached_tokens=num_cached, origin_input_ids=[0] * (len(path) * PAGE + 1)
    )
    room = WaitingRoom(rig.store, prefetch_policy="best_effort", prefetch_timeout_ms=1.0)
    room.enter("r", ReusablePrefix(rig.space, path, 0, ANY))
    waiting = room.find("r")
    assert waiting is not None
    state_of(req).note_enqueued(PAGE, [(HitTier.HOST, num_cached // PAGE)])
    state_of(req).note_loaded(0, num_cached, HitTier.HOST)
    state_of(req).wanted = Wanted(path, waiting)
    room.leave("r", admitted=True)
    return req


def counts(rig: Rig) -> dict[str, int]:
    kinds = ("requested_", "reused_", "missed_", "miss_report")
    return {n: c for n, c in rig.store.counters.snapshot().items() if n.startswith(kinds)}


def test_every_whole_page_counts_once(make: Make) -> None:
    rig = make(disk=False)
    lost, kept = pages("lost", 2), pages("kept", 8)
    rig.save(lost)
    rig.save(kept)
    path = np.concatenate([kept[:3], lost, pages("new", 4)])
    req, keeper = waits(rig, path, 3 * PAGE), MissKeeper(rig.store, PAGE)
    keeper.runs(req, rig.space)
    assert counts(rig) == {
        "requested_tokens": 9 * PAGE + 1,
        "reused_host_tokens": 3 * PAGE,
        "missed_evicted_host_tokens": 2 * PAGE,
        "missed_never_stored_tokens": 4 * PAGE,
        "missed_evicted_host_requests": 1,
    }
    assert state_of(req).missed == {"evicted_host": 2 * PAGE, "never_stored": 4 * PAGE}
    assert told(state_of(req).missed) == {"evicted_host": 2 * PAGE}  # new text is no news
    assert state_of(req).is_counted
    assert state_of(req).wanted is None  # what it waited with is let go


def test_what_may_not_be_reused_is_barred(make: Make) -> None:
    rig = make()
    req = SimpleNamespace(rid="r", cached_tokens=0, origin_input_ids=[0] * (2 * PAGE + 5))
    MissKeeper(rig.store, PAGE).runs(req, None)
    found = counts(rig)
    assert found["missed_barred_tokens"] == 2 * PAGE
    assert told(state_of(req).missed) == {}
    short = SimpleNamespace(rid="s", cached_tokens=0, origin_input_ids=[0] * PAGE)
    MissKeeper(rig.store, PAGE).runs(short, None)  # its last token is computed always
    assert counts(rig)["missed_barred_tokens"] == 2 * PAGE


def test_an_error_ends_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    req = waits(rig, pages("a", 2), 0)

    def fails(*_: object) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.store, "absences", fails)
    MissKeeper(rig.store, PAGE).runs(req, rig.space)
    assert counts(rig)["miss_report_failures"] == 1
    assert state_of(req).is_counted


def test_tenants_with_a_share_are_counted_apart(make: Make) -> None:
    rig = make(disk=False)
    path = pages("mine", 4)
    rig.save(path)
    keeper = MissKeeper(rig.store, PAGE, by_tenant=True)
    for tenant, whose in ((2, "tenant_2_"), (0, "tenant_others_")):
        keeper.runs(waits(rig, path, 3 * PAGE), rig.space._replace(tenant_number=tenant))
        found = rig.store.counters.snapshot()
        assert found[f"{whose}requested_tokens"] == 4 * PAGE + 1
        assert found[f"{whose}reused_host_tokens"] == 3 * PAGE
    assert count_of("tenant_2_requested_tokens") == Series(TOKENS, "tenant_2_requested_tokens")
    assert found["requested_tokens"] == 2 * (4 * PAGE + 1)
    counted = {name for name in found if name.startswith("tenant_")}
    assert counted <= set(from_start(2)), "they are published before they are first counted"
    assert not counted & set(from_start(0))


def test_a_request_that_nobody_sent_counts_nowhere(make: Make) -> None:
    rig = make()
    req = waits(rig, pages("check", 2), 0)
    MissKeeper(rig.store, PAGE).leave_out(req)
    assert counts(rig) == {}
    assert state_of(req).is_counted
    assert state_of(req).wanted is None


def test_a_request_counts_on_the_rank_that_keeps_the_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another one would call each miss new text, and what came from disk DRAM's."""
    rig = make()
    monkeypatch.setattr(rig.store, "keeps_pages", False)
    req = waits(rig, pages("kept elsewhere", 2), PAGE)
    MissKeeper(rig.store, PAGE).runs(req, rig.space)
    assert counts(rig) == {}
    assert state_of(req).is_counted
    assert state_of(req).wanted is None
