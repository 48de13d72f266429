"""The ways between DRAM and the device pool, on a pool with the shape of a model's.

The same objects as in a server do it: copier, load path, save path, and the device's port. Nothing
of SGLang is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch

from bench.core.case import CaseFailedError
from bench.gpu.in_place import read_in_place
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import HEADER_BYTES, ROPE_PRE, write_tail
from sglang_ext.device.load_pages import IndexMemory
from sglang_ext.device.load_path import Landing, LoadPath
from sglang_ext.device.pinning import pin_memory
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.ports import open_port
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.ring import NUM_BUFFERS
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.save_path import SavePath, SaveRun
from sglang_ext.kernels import rope as host_kernels
from sglang_ext.kernels.rope import RopeSpec
from sglang_ext.tiers.host import HostArena

PAGE = 64
# How the link is measured without looking at what goes over it: as one copy; a copy a slot; a copy
# for each page and layer, in one call a layer, as loads and saves copy; and the same in pieces as
# small as a page's of one layer of latent rows, 576 values a token.
BARE = ("whole", "pages", "layers", "latents")
LATENT_BYTES = PAGE * 576 * 2


@dataclass(frozen=True)
class Shape:
    """KV of one model in bf16, neox pairing over the whole head, rule `fma_a` as on CUDA.

    Attributes:
        layers: L.
        heads: KV heads.
        head_dim: D.
        tokens: of the prompt that is copied, whole pages.
        ring_bytes: of the load path; the save path has half as much.
    """

    layers: int
    heads: int
    head_dim: int
    tokens: int
    ring_bytes: int


LLAMA_8B = Shape(32, 8, 128, 8192, 128 << 20)
TINY = Shape(3, 2, 32, 256, 1 << 18)


class Engine:
    """A pool, an arena with room for a prompt twice, and the ways between them."""

    def __init__(self, device: torch.device, shape: Shape) -> None:
        self.shape, self.device = shape, device
        pool_shape = (shape.tokens, shape.heads, shape.head_dim)
        k, v = (
            tuple(
                torch.zeros(pool_shape, dtype=torch.bfloat16, device=device)
                for _ in range(shape.layers)
            )
            for _ in "kv"
        )
        self.pool = DevicePool("mha", torch.bfloat16, k, v, 0, shape.tokens)
        self.layout = self.pool.layout(PAGE)
        self.num_pages = shape.tokens // PAGE
        self.arena = HostArena(2 * self.num_pages, self.layout.slot_bytes)
        pinned = 0
        if device.type == "cuda":
            pinned = pin_memory(self.arena, torch.cuda.cudart())  # type: ignore[no-untyped-call]
        self.port = open_port(device, pinned=pinned == self.arena.nbytes)
        self.spec = _spec(shape)
        ropes = [LayerRope(self.spec, movable=True) for _ in range(shape.layers)]
        self.copier = PageCopier(
            self.pool, self.layout, ropes, self.arena.slots, mode="pre", kernels=kernels_of(device)
        )
        streams = Streams(self.port, None)
        self.loads = LoadPath(self.port, self.copier, streams, shape.ring_bytes)
        self.saves = SavePath(self.port, self.copier, streams, shape.ring_bytes // 2)
        self.rows = torch.randperm(self.num_pages)[:, None] * PAGE + torch.arange(PAGE)
        self.rows = self.rows.reshape(-1).to(device)
        self.pages = np.arange(self.num_pages)
        # Of what is measured beside loads and saves; torch has few streams, and takes none back.
        current = self.port.current_stream()
        self._indices = IndexMemory(self.port, 4 * shape.tokens)
        self._bare = self.port.new_stream((current,)) if self.loads.ring_bytes else None
        self._fill()

    def _fill(self) -> None:
        """Pages of normal values, in slots of the first half."""
        slots, layout = self.arena.slots, self.layout
        block = torch.randn((layout.tail_offset - HEADER_BYTES) // 2).bfloat16()
        for page in self.pages.tolist():
            rolled = torch.roll(block, 131 * page)  # no two pages are alike
            slots[page, HEADER_BYTES : layout.tail_offset] = rolled.view(torch.uint8).numpy()
            write_tail(slots[page], layout, rope_state=ROPE_PRE, position=page * PAGE)

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of the prompt."""
        return self.num_pages * self.layout.kv_bytes

    def load(self, pages: np.ndarray[Any, Any]) -> tuple[float, float]:
        """Loads the prompt; seconds until it is queued, and until it is there."""
        started_s = time.monotonic()
        fence = self.loads.fence()
        first = self.port.record(self.port.current_stream())
        landing: Landing = self.loads.queue(
            [(self.rows, lambda rows: [self.copier.prepare_load(pages, rows, 0)])],
            fence,
            lambda event: None,
        )
        queued_s = time.monotonic() - started_s
        self.port.synchronize(landing.last)
        return queued_s, self.port.seconds_between(first, landing.last)

    def read_in_place(self, pages: np.ndarray[Any, Any]) -> float:
        """Loads the prompt by kernels that read the slots themselves; seconds.

        On a CPU it is what a load is.
        """
        if not self.loads.ring_bytes:
            return self.load(pages)[1]
        port, stream = self.port, self._bare
        port.wait(stream, port.record(port.current_stream()))
        begin = port.record(stream)
        with port.on(stream):
            read_in_place(port, self.copier, self._indices, pages, self.rows)
        ended = port.record(stream)
        port.synchronize(ended)
        return port.seconds_between(begin, ended)

    def save(self) -> float:
        """Saves the prompt to slots of the second half; seconds."""
        started_s = time.monotonic()
        with self.saves.saving(self.saves.ready_events()):
            self.saves.save(self.rows, [SaveRun(0, 0, self.pages + self.num_pages)])
        return time.monotonic() - started_s

    def check(self) -> None:
        """Loads, saves, and loads what was saved, in both ways.

        Raises:
            CaseFailedError: other bits come back.
        """
        self.load(self.pages)
        want = [each.clone() for each in (*self.pool.k, *self.pool.v)]
        self.save()
        self._check(want, lambda: self.load(self.pages + self.num_pages))

    def check_in_place(self) -> None:
        """The same of `read_in_place`, of what the first half of the slots holds.

        Raises:
            CaseFailedError: other bits come back.
        """
        self.load(self.pages)
        want = [each.clone() for each in (*self.pool.k, *self.pool.v)]
        self._check(want, lambda: self.read_in_place(self.pages))

    def _check(self, want: list[torch.Tensor], load: Callable[[], object]) -> None:
        for each in (*self.pool.k, *self.pool.v):
            each.zero_()
        load()
        for have, wanted in zip((*self.pool.k, *self.pool.v), want, strict=True):
            if not torch.equal(have.view(torch.int16), wanted.view(torch.int16)):
                raise CaseFailedError("what was saved and loaded is not what the pool held")

    def bare_copies(self, *, back: bool, how: str) -> float:
        """Copies the prompt's slots, or what of them is KV, without looking at them; seconds.

        Args:
            back: to DRAM instead of from it.
            how: one of `BARE`.
        """
        slots, port = self.arena.slots[: self.num_pages], self.port
        if how == "whole":
            slots = slots.reshape(1, -1)
        memory, done = port.empty(slots.size), 0
        calls: list[tuple[Any, Any, slice]] = []
        for pages, span in self._pieces(slots, how):
            end = done + len(pages) * (span.stop - span.start)
            calls.append((memory[done:end].reshape(len(pages), -1), pages, span))
            done = end
        stream = self._bare
        begin = port.record(stream)
        with port.on(stream):
            for here, pages, span in calls:
                port.bring(here, slots, pages, span)
            if back:
                begin = port.record(stream)
                for here, pages, span in calls:
                    port.send(slots, pages, span, here)
        ended = port.record(stream)
        port.synchronize(ended)
        return port.seconds_between(begin, ended)

    def _pieces(
        self, slots: np.ndarray[Any, Any], how: str
    ) -> Iterator[tuple[np.ndarray[Any, Any], slice]]:
        """Which slots' which bytes are copied in each call."""
        if how in ("whole", "pages"):
            yield np.arange(len(slots)), slice(0, slots.shape[1])
            return
        layer_bytes = self.copier.layer_bytes[0]
        most = max(1, self.shape.ring_bytes // NUM_BUFFERS // layer_bytes)
        size = layer_bytes if how == "layers" else LATENT_BYTES
        for first in range(0, len(self.pages), most):
            for at in range(HEADER_BYTES, self.layout.tail_offset, size):
                span = slice(at, min(at + size, self.layout.tail_offset))
                yield self.pages[first : first + most], span

    def close(self) -> None:
        """Gives threads and memory back."""
        self.port.close()
        self.copier.close()
        self.arena.close()


def kernels_of(device: torch.device) -> ModuleType:
    """Triton on CUDA, as a server has it."""
    if device.type != "cuda":
        return host_kernels
    from sglang_ext.kernels.rope import gpu

    return gpu


def median_s(measure: Callable[[], float], repeats: int) -> float:
    """Of some runs, after one that does not count."""
    measure()
    return float(np.median([measure() for _ in range(repeats)]))


def _spec(shape: Shape) -> RopeSpec:
    half = shape.head_dim // 2
    angles = np.arange(shape.tokens + PAGE)[:, None] * 5e5 ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return RopeSpec(cos, sin, shape.head_dim, 0, False, "fma_a")
