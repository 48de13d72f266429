"""What a load costs a device, by count: copies, launches, uploads, memory; and nobody waits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device import load_path
from sglang_ext.device.copier import CopyError, PageCopier
from sglang_ext.device.load_path import LoadPath
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.ports import cuda
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.ring import NUM_BUFFERS
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.errors import HierKVConfigError
from sglang_ext.kernels import rope as kernels
from testkit.simulated.device import SimulatedDevice
from testkit.simulated.kernels import SimulatedKernels
from tests.unit.device.test_copier import HEADS, LAYERS, PAGE, spec


class Bed:
    """A pool, an arena of bare pages, and a path between them on a simulated device."""

    def __init__(
        self, num_pages: int, ring_bytes: int, seed: int = 1, *, is_bound: bool = False
    ) -> None:
        shape = (num_pages * PAGE, HEADS, 16)
        k, v = (
            tuple(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(LAYERS)) for _ in "kv"
        )
        pool = DevicePool("mha", torch.bfloat16, k, v, 0, len(k[0]))
        layout = pool.layout(PAGE, is_bound=is_bound)
        self.slots = np.zeros((num_pages, layout.slot_bytes), np.uint8)
        ropes = [LayerRope(spec(), movable=not is_bound) for _ in range(LAYERS)]
        host = PageCopier(pool, layout, ropes, self.slots, mode="pre", kernels=kernels)
        self.kv_bytes = layout.kv_bytes
        self.pages = np.arange(num_pages)
        self.rows = np.arange(num_pages * PAGE)
        host.save(self.rows, 0, self.pages)
        self.device = SimulatedDevice(seed)
        self.device.add_memory(self.slots, "slot", layout.slot_bytes)
        launching = SimulatedKernels(self.device, kernels)
        self.copier = PageCopier(pool, layout, ropes, self.slots, mode="pre", kernels=launching)
        with self.device.acting("assembly"):
            streams = Streams(self.device, self.device.new_stream(()))
            self.path = LoadPath(self.device, self.copier, streams, ring_bytes)
        self.device.counts.update(uploads=0, synchronize=0)

    def queue(self, position: int = 0) -> list[object]:
        layers: list[object] = []
        rows = torch.from_numpy(self.rows)
        self.device._kept.append(rows)
        self.path.queue(
            [(rows, lambda rows: [self.copier.prepare_load(self.pages, rows, position)])],
            self.path.fence(),
            layers.append,
        )
        return layers


def test_a_load_is_one_upload_three_launches_a_layer_and_the_bytes_of_its_pages() -> None:
    bed = Bed(12, 1 << 20)
    assert len(bed.queue()) == LAYERS  # by the scheduler's thread, which may not wait
    counts = bed.device.counts
    assert counts["uploads"] == 1
    assert counts["launches"] <= 3 * LAYERS
    assert bed.device.bytes_in <= 1.02 * 12 * bed.kv_bytes
    assert not counts["synchronize"]


def test_a_load_far_larger_than_the_ring_uses_no_more_memory_than_the_ring() -> None:
    ring_bytes = 16 << 10
    bed = Bed(300, ring_bytes)
    assert 300 * bed.kv_bytes > 50 * ring_bytes
    bed.queue()
    bed.device.run_all()
    index_bytes = 8 * 2 * len(bed.rows)  # 16 bytes for each row of the pool
    assert bed.device.counts["device_bytes"] == bed.path.ring_bytes == ring_bytes + index_bytes
    assert bed.device.counts["uploads"] == 1
    assert bed.device.bytes_in <= 1.02 * 300 * bed.kv_bytes


def test_pages_that_are_only_copied_take_room_for_one_of_them_beside_the_ring() -> None:
    """Kernels read nothing beside them and their rows."""
    bed = Bed(300, 16 << 10, is_bound=True)
    layers = bed.queue()
    bed.device.run_all()
    bed.device.require_order()
    assert len(layers) == LAYERS
    assert bed.device.counts["device_bytes"] == bed.path.ring_bytes == (16 << 10) + 8 * 2 * PAGE
    assert not bed.device.counts["uploads"]
    assert not bed.device.counts["synchronize"]


def test_a_load_takes_four_events_for_each_layer_of_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """131 for 8,192 tokens of an 8B model, of 512 that are made at start."""
    bed = Bed(12, 1 << 20)
    bed = Bed(12, NUM_BUFFERS * 12 * max(bed.copier.layer_bytes))  # a layer at a time
    events: list[object] = []
    real = SimulatedDevice.record

    def record(self: SimulatedDevice, stream: Any) -> Any:
        events.append(real(self, stream))
        return events[-1]

    monkeypatch.setattr(SimulatedDevice, "record", record)
    bed.queue()
    of_fence, of_begin = 2, 1
    assert len(events) == 4 * LAYERS + of_fence + of_begin
    assert 2 * (4 * 32 + of_fence + of_begin) < cuda._EVENTS  # two of such loads


def test_what_is_done_in_the_order_of_forwards_is_in_that_of_the_schedulers_stream() -> None:
    """SGLang's forwards run there with --disable-overlap-schedule: the next one reads the rows."""
    bed = Bed(2, 1 << 20)
    device, path = bed.device, bed.path
    source, target = ("row", 1), ("row", 2)

    def forward() -> None:
        device.launch("a forward", lambda: None, [target], [source, target])

    def copy_in_order() -> None:
        with path.in_forward_order():
            device.launch("a copy", lambda: None, [source], [target])
            raise RuntimeError("in between")

    forward()
    with path.in_forward_order():
        device.launch("a copy", lambda: None, [source], [target])
    forward()
    with pytest.raises(RuntimeError, match="in between"):
        copy_in_order()
    forward()


def test_a_load_needs_no_memory_that_was_not_taken_at_start() -> None:
    """Where it found none its request, whose forward runs, would fail."""
    bed = Bed(12, 1 << 20)
    bed.device.memory_left = 0
    with pytest.raises(torch.OutOfMemoryError):
        bed.device.upload(bed.rows)
    for _ in range(3):
        bed.queue()
    bed.device.run_all()
    bed.device.require_order()
    assert bed.device.counts["launches"] == 3 * 2 * LAYERS
    assert bed.device.counts["no memory on scheduler"] == 1  # of the one above


def test_indices_for_which_there_is_no_room_at_once_come_part_by_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(load_path, "_VALUES_A_ROW", 0)
    bed = Bed(300, 16 << 10)
    indices = bed.path._indices
    assert indices.num_values == 2 * PAGE + 3 * bed.copier.layout.max_corrections
    assert indices.num_values < len(bed.rows)
    for each in (*bed.copier.pool.k, *bed.copier.pool.v):
        each.fill_(float("nan"))
    bed.queue()
    bed.device.run_all()
    bed.device.require_order()
    assert bed.device.counts["uploads"] > LAYERS
    for each in (*bed.copier.pool.k, *bed.copier.pool.v):
        assert not each.any()  # no NaN: what was stored is zero


def test_where_memory_is_short_the_ring_is_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    free_bytes = 8192
    real = SimulatedDevice.empty

    def empty(self: SimulatedDevice, num_bytes: int) -> np.ndarray:
        if num_bytes > free_bytes:
            raise torch.OutOfMemoryError("none")
        return real(self, num_bytes)

    monkeypatch.setattr(SimulatedDevice, "empty", empty)
    bed = Bed(4, 1 << 20)
    assert bed.path.ring_bytes == NUM_BUFFERS * 8192 + bed.path._indices.num_bytes
    bed.queue()
    free_bytes = 16
    with pytest.raises(HierKVConfigError, match="lower --mem-fraction-static"):
        Bed(4, 1 << 20)


def test_pages_come_before_the_batch_in_flight_is_done() -> None:
    """Only the scatter waits for it."""
    bed = Bed(4, 1 << 20)
    fence = bed.path.fence()
    never = bed.device.record(bed.device.new_stream(()))
    never.at = None
    held = bed.device.new_stream(())
    held.queued.append((never, lambda: None))
    busy = bed.device.record(held)
    rows = torch.from_numpy(bed.rows)
    landing = bed.path.queue(
        [(rows, lambda rows: [bed.copier.prepare_load(bed.pages, rows, 0)])],
        type(fence)(fence.rows_known, (busy,)),
        lambda event: None,
    )
    bed.device.eagerness = 0.0
    for _ in range(200):
        if landing.busy[-2][1].at is None:
            bed.device.run(1)
    assert landing.busy[-2][1].at is not None  # all is brought
    assert landing.last.at is None  # nothing is scattered


def test_positions_outside_of_the_table_never_reach_the_device() -> None:
    bed = Bed(4, 1 << 20)
    with pytest.raises(CopyError, match="positions of pages must lie in"):
        bed.queue(position=4096 - 2 * PAGE)
    assert "launches" not in bed.device.counts
