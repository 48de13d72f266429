"""What loads and saves of a long prompt cost a device, by count, on the simulated one.

That its stand-ins for kernels count as many launches as the Triton wrappers make is seen here, too.
Pages are as large as a small model's, so that headers and alignment weigh what they do in service.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import HEADER_BYTES, PageLayout
from sglang_ext.device.load_path import LoadPath
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.save_path import SavePath, SaveRun
from sglang_ext.device.states.snapshots import StatePool
from sglang_ext.device.states.state_path import StateLoadPath, StateSavePath
from sglang_ext.kernels import rope as kernels
from sglang_ext.kernels.rope import naive
from testkit.simulated.device import SimulatedDevice
from testkit.simulated.kernels import SimulatedKernels, SimulatedSnapshots
from tests.kernels.rope.rope_cases import make_spec
from tests.kernels.run_module import run_module

PAGE, LAYERS, HEADS, DIM = 64, 2, 1, 16
TOKENS = 128 << 10
# The rings, tails and marks, and 16 bytes a row of the pool; 128K tokens of this model are 16 MB.
BOUND_BYTES = (5 << 20) + 16 * TOKENS


class Quiet(SimulatedDevice):
    """One that does its work and counts, but does not look at the order: that is seen elsewhere."""

    def _note(self, *_: object) -> None: ...

    def cells_of(self, part: object) -> list[tuple[object, ...]]:
        """None."""
        return []


class Bed:
    """A pool with a prompt of 128K tokens, an arena with room for it, and both ways."""

    def __init__(self, num_tokens: int, ring_bytes: int) -> None:
        shape, generator = (num_tokens, HEADS, DIM), torch.Generator().manual_seed(1)
        k, v = (
            tuple(torch.randn(shape, generator=generator).bfloat16() for _ in range(LAYERS))
            for _ in "kv"
        )
        spec = make_spec(DIM, "fp32", max_pos=TOKENS)
        k = tuple(naive.rotate(each, np.arange(num_tokens), spec) for each in k)  # as an engine's
        self.pool = DevicePool("mha", torch.bfloat16, k, v, 0, num_tokens)
        self.layout = self.pool.layout(PAGE)
        self.num_pages = num_tokens // PAGE
        self.slots = np.full((self.num_pages, self.layout.slot_bytes), 0xEE, np.uint8)
        ropes = [LayerRope(spec, movable=True) for _ in range(LAYERS)]
        self.device = Quiet(3)
        self.device.eagerness = 1.0
        launching = SimulatedKernels(self.device, kernels)
        self.host = PageCopier(
            self.pool, self.layout, ropes, self.slots.copy(), mode="pre", kernels=kernels
        )
        copier = PageCopier(
            self.pool, self.layout, ropes, self.slots, mode="pre", kernels=launching
        )
        self.copier = copier
        with self.device.acting("assembly"):
            streams = Streams(self.device, self.device.new_stream(()))
            self.loads = LoadPath(self.device, copier, streams, ring_bytes)
            self.saves = SavePath(self.device, copier, streams, ring_bytes // 2)
        self.rows = torch.arange(num_tokens)
        self.pages = np.arange(self.num_pages)
        self.kept_bytes = self.device.counts["device_bytes"]
        self.device.counts.clear()

    def save(self) -> None:
        """As the save thread does."""
        events = self.saves.ready_events()
        with self.device.acting("save"), self.saves.saving(events):
            self.saves.save(self.rows, [SaveRun(0, 0, self.pages)])

    def load(self) -> None:
        """By the scheduler's thread, which may not wait."""
        self.loads.queue(
            [(self.rows, lambda rows: [self.copier.prepare_load(self.pages, rows, 0)])],
            self.loads.fence(),
            lambda event: None,
        )
        self.device.run_all()


class StateBed:
    """Layers with a state of about 60 pages' bytes, an arena, and both ways."""

    LAYERS, NUM_STATES = 9, 4

    def __init__(self) -> None:
        self.device = Quiet(3)
        self.device.eagerness = 1.0
        generator = torch.Generator().manual_seed(1)
        shapes = ((torch.bfloat16, (96, 3)), (torch.float32, (8, 56, 64)))
        self.pool = StatePool(
            tuple(
                torch.randn(self.LAYERS, self.NUM_STATES, *shape, generator=generator).to(dtype)
                for dtype, shape in shapes
            ),
            tuple(range(self.LAYERS)),
        )
        self.state_bytes = sum(t[:, 0].nbytes for t in self.pool.tensors)
        layout = PageLayout(PAGE, (HEADS * DIM * 2,) * 4, (HEADS * DIM * 2,) * 4, 2)
        self.snapshots = SimulatedSnapshots(
            SimulatedKernels(self.device, kernels), self.pool, layout
        )
        num_parts = self.snapshots.num_parts
        assert num_parts >= 60
        self.slots = np.full((num_parts, layout.slot_bytes), 0xEE, np.uint8)
        self.pages = np.arange(num_parts)[::-1].copy()
        with self.device.acting("assembly"):
            streams = Streams(self.device, self.device.new_stream(()))
            ways = (self.device, self.snapshots, self.slots, streams)
            self.loads, self.saves = StateLoadPath(*ways), StateSavePath(*ways)
        self.kept_bytes = self.device.counts["device_bytes"]
        self.device.counts.clear()

    def save(self, slot: int) -> None:
        """As the save thread does."""
        events = self.saves.ready_events()
        with self.device.acting("save"), self.saves.saving(events):
            self.saves.save(torch.tensor([slot]), [SaveRun(0, 640, self.pages)])

    def load(self, slot: int) -> list[object]:
        """By the scheduler's thread, which may not wait."""
        layers: list[object] = []
        loads = [(self.device.tensor(torch.tensor([slot])), lambda _: self.pages)]
        self.loads.queue(loads, self.loads.fence(), layers.append)
        self.device.run_all()
        return layers


def test_a_state_by_count() -> None:
    """However long the prompt is: a state's size does not depend on it."""
    bed = StateBed()
    counts = bed.device.counts
    bed.save(3)
    assert counts["launches"] <= 3  # not one a layer, but one for all
    assert counts["copies"] == 1
    assert "uploads" not in counts
    assert bed.device.bytes_out <= 1.02 * bed.state_bytes
    counts.clear()
    assert len(bed.load(1)) == bed.LAYERS
    assert counts["launches"] <= 3
    assert counts["copies"] == 1
    assert "uploads" not in counts
    assert "synchronize" not in counts
    assert bed.device.bytes_in <= 1.02 * bed.state_bytes
    assert "device_bytes" not in counts  # nothing beside what is kept from the start
    assert bed.kept_bytes == bed.saves.ring_bytes + bed.loads.ring_bytes
    assert bed.kept_bytes <= 2 * 1.02 * bed.state_bytes
    assert all(torch.equal(t[:, 1], t[:, 3]) for t in bed.pool.tensors)
    assert not any(torch.equal(t[:, 2], t[:, 3]) for t in bed.pool.tensors)


def test_the_wrappers_launch_what_is_counted_here() -> None:
    """At most three kernels a layer of a part, of the wrappers that a GPU is served by.

    A part is as many pages as a buffer of the ring has room for one layer of.
    """
    printed = run_module("tests.kernels.interpreted_launches", PYTHONWARNINGS="ignore")
    found = json.loads(printed)
    saved, loaded = found["real"]
    num_parts = found["parts"]
    layers = num_parts * found["layers"]
    of_layers = ("save_kernel", "list_kernel", "page_kernel")
    assert {name: saved.pop(name) for name in of_layers} == dict.fromkeys(of_layers, layers)
    assert sum(saved.values()) == 2 * num_parts  # each part's tails are begun
    assert loaded == dict.fromkeys(("load_kernel", "correct_kernel", "unpage_kernel"), layers)
    assert found["simulated"] == [3 * layers + 2 * num_parts, 3 * layers]


@pytest.fixture(scope="module")
def long_prompt() -> Bed:
    return Bed(TOKENS, 2 << 20)


def test_a_save_of_a_long_prompt_by_count(long_prompt: Bed) -> None:
    bed = long_prompt
    bed.save()
    counts = bed.device.counts
    num_parts = -(-bed.num_pages // bed.saves._most)
    assert counts["uploads"] == 1
    # Three a layer of a part, and two that begin its tails.
    assert counts["launches"] <= num_parts * (3 * LAYERS + 2)
    slot_bytes = bed.layout.slot_bytes - HEADER_BYTES
    assert bed.device.bytes_out <= 1.02 * bed.num_pages * slot_bytes
    assert bed.device.bytes_in == 0
    # What indices take grows with the prompt, by 8 bytes a token and 24 a page.
    assert counts["index_bytes"] <= 2 * (8 * TOKENS + 24 * bed.num_pages)
    assert "device_bytes" not in counts  # nothing beside what is kept from the start
    assert bed.kept_bytes == bed.saves.ring_bytes + bed.loads.ring_bytes <= BOUND_BYTES
    bed.host.save(bed.rows.numpy(), 0, bed.pages)
    first = bed.layout.payload_bytes(0)
    assert (bed.slots[:, :HEADER_BYTES] == 0xEE).all()
    assert np.array_equal(bed.slots[:, HEADER_BYTES:first], bed.host.slots[:, HEADER_BYTES:first])


def test_a_load_of_a_long_prompt_by_count(long_prompt: Bed) -> None:
    bed = long_prompt
    bed.host.save(bed.rows.numpy(), 0, bed.pages)
    bed.slots[:] = bed.host.slots
    want = [each.clone() for each in (*bed.pool.k, *bed.pool.v)]
    for each in (*bed.pool.k, *bed.pool.v):
        each.fill_(float("nan"))
    bed.device.counts.clear()
    bed.load()
    counts = bed.device.counts
    assert bed.loads._ring is not None
    pages_a_part = bed.loads._ring.buffer_bytes // max(bed.copier.layer_bytes)
    num_parts = -(-bed.num_pages // pages_a_part)
    assert "synchronize" not in counts
    assert counts["uploads"] == 1
    assert counts["launches"] <= num_parts * 3 * LAYERS
    assert bed.device.bytes_in <= 1.02 * bed.num_pages * bed.layout.kv_bytes
    assert "device_bytes" not in counts
    for have, wanted in zip((*bed.pool.k, *bed.pool.v), want, strict=True):
        assert torch.equal(have.view(torch.int16), wanted.view(torch.int16))
