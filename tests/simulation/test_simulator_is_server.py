"""The simulator decides by the functions that a server decides by, and so as it does."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from bench.policies.replay import Replay  # noqa: E402
from bench.policies.workloads.bundled import BUNDLED  # noqa: E402
from sglang_ext.admission.cost_feeds import CostFeeds  # noqa: E402
from sglang_ext.assembly.parts.store import build_store  # noqa: E402
from sglang_ext.device.layout import PageLayout  # noqa: E402
from sglang_ext.settings.config import GIB, HierKVConfig  # noqa: E402
from sglang_ext.simulator.trace import read_trace  # noqa: E402
from sglang_ext.simulator.virtual_store import (  # noqa: E402
    ServerStore,
    StoreSizes,
    VirtualClock,
    VirtualExecutor,
    cost_feeds,
    virtual_store,
)
from sglang_ext.tiers.disk import DiskTier  # noqa: E402
from sglang_ext.tiers.policy import PolicyConfig  # noqa: E402
from sglang_ext.tiers.records.page_rules import AnyPage  # noqa: E402
from sglang_ext.tiers.records.record import HEADER_BYTES  # noqa: E402
from sglang_ext.tiers.store import EVERY_PAGE, PageStore  # noqa: E402
from sglang_ext.tiers.store.types import Hashes, SaveTicket  # noqa: E402
from tests.long_form import either  # noqa: E402

SLOT_BYTES = 4096
SIZES = StoreSizes(SLOT_BYTES - HEADER_BYTES, host_pages=64, disk_pages=192)
DECIDES = (
    "/tiers/policy/", "/admission/", "/tiers/store/books/", "/tiers/store/movers/",
    "/tiers/disk/reclaim", "/tiers/disk/reused_segments",
)  # fmt: skip


class _Idle(VirtualExecutor):
    """What a server's threads have to do is done."""

    def __init__(self) -> None:
        super().__init__(VirtualClock(), {})
        self.store: PageStore | None = None
        self.num_open = 0  # saves between two chunks, which end when the next one is computed

    def run_due(self) -> None:
        store = self.store
        assert store is not None
        deadline_s = time.monotonic() + 300
        while self._is_busy(store):
            assert time.monotonic() < deadline_s, store.stats()
            time.sleep(0.001)

    def _is_busy(self, store: PageStore) -> bool:
        with store._books.table.lock:
            num_in_flight = store._books.table.in_flight.num
        return num_in_flight > self.num_open or store.stats()["spill_queue_pages"] > 0


class _Served(ServerStore):
    """A server's store, whose threads are waited for beside the saves that are open."""

    def begin_save(self, hashes: Hashes, num_offered: int) -> SaveTicket:
        assert isinstance(self.executor, _Idle)
        self.executor.num_open += 1
        return super().begin_save(hashes, num_offered)

    def end_save(self, ticket: SaveTicket) -> None:
        assert isinstance(self.executor, _Idle)
        super().end_save(ticket)
        self.executor.num_open -= 1


@contextlib.contextmanager
def _called() -> Iterator[set[str]]:
    """Functions of the product that decide what is kept and fetched, as they are called."""
    calls: set[str] = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event == "call" and any(part in path for part in DECIDES):
            calls.add(f"{Path(path).name}:{frame.f_code.co_qualname}")

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


# Whether it is called is chance: where a page is about to leave DRAM and just being written.
BY_CHANCE = {"dram_order.py:DramOrder.put_back"}
# How a thread waits for work, and its end; a clock asks what there is.
OF_THREADS = {
    "dram_room.py:DramRoom.should_look", "promoter.py:Promoter.take", "promoter.py:Promoter.wait",
    "promoter.py:Promoter.wait.<locals>.<lambda>", "spill_queue.py:SpillQueue.has_work",
    "spiller.py:Spiller.wait", "spiller.py:Spiller.wait.<locals>.<lambda>",
    "waits.py:InFlight.wait", "waits.py:InFlight.wait.<locals>.<lambda>",
}  # fmt: skip


def _is_the_machines(call: str) -> bool:
    """Of how fast things are, which a disk that is never waited for does not say."""
    return call.startswith("speed_estimators.py:")


def _as_served(folder: Path, write_policy: str, feeds: CostFeeds) -> tuple[PageStore, DiskTier]:
    """A store as a server's scheduler builds it: threads, clock, bytes and all."""
    config = HierKVConfig(
        host_size=SIZES.host_pages * SLOT_BYTES / GIB, disk_dir=str(folder),
        disk_size=SIZES.disk_pages * SLOT_BYTES / GIB, disk_free_floor=0.0,
        write_policy=write_policy,
    )  # fmt: skip
    layout = PageLayout(1, (1024,), (1024,), 2, is_bound=True)
    assert layout.slot_bytes == SLOT_BYTES
    store, disk = build_store(
        config, layout, None, feeds, None, AnyPage(), EVERY_PAGE, None, is_hybrid=False,
        num_ranks=1,
    )  # fmt: skip
    assert isinstance(disk, DiskTier)
    return store, disk


@pytest.mark.parametrize("write_policy", ["write_through", "auto"])
def test_simulator_and_server_decide_by_the_same_functions(
    tmp_path: Path, write_policy: str
) -> None:
    """The same requests through the store that `assembly/parts/store.py` builds.

    The cache around it wants a device with a model; who asks the store here is in both the same.
    """
    paths = [line.hash_ids for line in read_trace(BUNDLED, limit=either(60, 120))]
    replay = partial(Replay, paths, 40, [0.0] * len(paths))
    with virtual_store(SIZES, PolicyConfig(), write_policy):
        pass  # the first policy of a process calls all of its loops once
    with _called() as simulated, virtual_store(SIZES, PolicyConfig(), write_policy) as server:
        in_simulator = replay().run(server)
    idle = _Idle()
    with _called() as served:
        feeds = cost_feeds(SIZES)
        idle.store, disk = _as_served(tmp_path / "disk", write_policy, feeds)
        with _Served(idle.store, disk, VirtualClock(), idle, SIZES, feeds) as server:
            in_server = replay().run(server)
    modules = {call.split(":")[0] for call in served}
    assert {
        "waiting.py", "load_or_compute.py", "dram_order.py", "tier_lists.py", "disk_order.py",
        "disk_pages.py", "dram_room.py", "spill_queue.py", "write_policy.py", "spiller.py",
        "promoter.py", "duplicate_copies.py", "reused_segments.py",
    } <= modules  # fmt: skip
    apart = {call for call in served ^ simulated if not _is_the_machines(call)}
    assert apart - BY_CHANCE - OF_THREADS == set()
    assert in_simulator.reusable == in_server.reusable
    assert in_simulator.hit_share == pytest.approx(in_server.hit_share, abs=0.03)
