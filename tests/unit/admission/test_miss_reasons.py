"""Why pages of a prompt were missed: a waiting room over a real page store."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.admission.miss_reasons import REASONS, missed_pages
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import Remote, ReusablePrefix, WaitingRequest
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.remote.remote_lookup import RemoteLookup
from tests.unit.store.store_rig import Make, Rig, on_disk_only, pages, rigs


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


class Waits:
    """A request for some pages that waits."""

    def __init__(self, rig: Rig, path: np.ndarray, policy: str = "wait_complete") -> None:
        self.rig, self.path, self.now_s = rig, path, 1.0
        self.room = WaitingRoom(
            rig.store, prefetch_policy=policy, prefetch_timeout_ms=1.0, clock=lambda: self.now_s
        )
        self.room.enter("a", ReusablePrefix(rig.space, path, 0, ANY))
        found = self.room.find("a")
        assert found is not None
        self.waiting: WaitingRequest = found

    def until_admitted(self) -> None:
        def may_admit() -> bool:
            self.now_s += 0.01
            self.room.step(["a"])
            return self.room.may_admit("a")

        self.rig.until(may_admit)

    def missed(self, num_reused: int, resumable: int | None = None) -> dict[str, int]:
        self.room.leave("a", admitted=True)
        assert self.room.find("a") is None
        found = missed_pages(
            self.rig.store, self.rig.space, self.path, num_reused, self.waiting, resumable
        )
        assert set(found) <= set(REASONS)
        assert sum(found.values()) == len(self.path) - num_reused
        return found


def test_all_reused_is_no_miss(make: Make) -> None:
    rig = make()
    rig.save(pages("a", 3))
    assert Waits(rig, pages("a", 3)).missed(3) == {}


def test_each_page_counts_for_its_own_reason_the_first_one_first(make: Make) -> None:
    rig = make(disk=False)
    rig.save(pages("a", 2))
    rig.save(pages("b", 8))  # the two leave DRAM
    path = np.concatenate([pages("a", 2), pages("b", 1), pages("new", 2)])
    found = Waits(rig, path).missed(0)
    # The one that is stored behind them cannot be reached.
    assert list(found.items()) == [("evicted_host", 3), ("never_stored", 2)]


def test_a_read_that_comes_too_late(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 3))
    rig.io.open_gate.clear()
    request = Waits(rig, pages("a", 3), policy="timeout")
    request.until_admitted()
    assert request.missed(0) == {"too_slow": 3}


def test_a_disk_that_fails(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 3))
    rig.io.fail_reads = True
    request = Waits(rig, pages("a", 3))
    request.until_admitted()
    assert request.missed(0) == {"unreadable": 3}


def test_no_room_for_a_plan(make: Make) -> None:
    rig = make()
    on_disk_only(rig, pages("a", 3))
    held = rig.store.begin_save(rig.space, pages("held", 8), pages("none", 0))
    request = Waits(rig, pages("a", 3), policy="best_effort")
    assert request.room.may_admit("a")
    assert request.missed(0) == {"no_room": 3}
    rig.store.finish_save(held, ok=False)


def test_a_prompt_that_cannot_go_on_where_its_pages_end(make: Make) -> None:
    rig = make()
    rig.save(pages("a", 4))
    path = np.concatenate([pages("a", 4), pages("new", 1)])
    found = Waits(rig, path).missed(2, resumable=2)
    assert found == {"not_resumable": 2, "never_stored": 1}


def test_a_remote_store_that_was_not_waited_for_leaves_it_open(make: Make) -> None:
    rig = make(disk=False)
    request = Waits(rig, pages("new", 2))
    asked = RemoteLookup(rig.space, pages("new", 2), 0, ANY)
    request.waiting.ask(asked)
    request.room._asking[request.waiting.number] = request.waiting
    assert request.missed(0) == {"unanswered": 2}


def test_what_the_remote_store_had_and_did_not_give(make: Make) -> None:
    rig = make(disk=False)
    request = Waits(rig, pages("new", 3))
    asked = RemoteLookup(rig.space, pages("new", 3), 0, ANY)
    asked.sizes = np.array([100, 100], np.int64)
    request.waiting.remote, request.waiting.remote_lookup = Remote.FAILED, asked
    assert request.missed(0) == {"failed": 2, "never_stored": 1}
