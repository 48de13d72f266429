"""Counts what the Triton wrappers launch in a load and a save; run by test_transfer_counts.py.

The real port, paths, copier and wrappers, on memory of the host's: kernels are interpreted, and a
stand-in for `torch.cuda` does at once what is queued. A launch is one of a Triton kernel or a call
of torch's that works on values; copies that the port queues are none. A process of its own, because
`TRITON_INTERPRET` counts when the kernels are imported.
"""

from __future__ import annotations

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

from bench.gpu.in_place import read_in_place
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.load_pages import IndexMemory
from sglang_ext.device.load_path import LoadPath
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.ports import DevicePort, cuda
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.save_path import SavePath, SaveRun
from sglang_ext.kernels import rope as host_kernels
from sglang_ext.kernels.rope import gpu, naive
from testkit.simulated.cuda import Cuda, HappenedEvent
from testkit.simulated.device import SimulatedDevice
from testkit.simulated.kernels import SimulatedKernels
from tests.kernels.interpreted import patch_once_a_launch
from tests.kernels.rope.rope_cases import make_spec

PAGE, LAYERS, HEADS, DIM, PAGES = 8, 2, 2, 16, 5
PAGES_A_PART = 2


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The wrappers; what they launch is counted by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launched: Counter[str] = Counter()
        self._in_kernel = False

    def __getattr__(self, name: str) -> Any:
        work = getattr(gpu, name)

        def call(*args: Any) -> Any:
            with self:
                return work(*args)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not (self._in_kernel or func.is_view or name.startswith("empty")):
            self.launched[name] += 1
        return func(*args, **(kwargs or {}))

    def running(self, real: Callable[..., Any]) -> Callable[..., Any]:
        """A kernel is launched; what its interpreter does by torch is none of ours."""

        def run(kernel: Any, *args: Any, **options: Any) -> Any:
            self.launched[kernel.fn.__name__] += 1
            self._in_kernel = True
            try:
                return real(kernel, *args, **options)
            finally:
                self._in_kernel = False

        return run


class Bed:
    """A prompt in a pool, of whose K a little is not reached by any rotation, and its slots."""

    def __init__(self, kernels: Any) -> None:
        generator, num_tokens = torch.Generator().manual_seed(1), PAGES * PAGE
        self.rows = torch.randperm(num_tokens, generator=generator)
        spec = make_spec(DIM, "fma_a")
        k, v = (
            tuple(
                torch.randn(num_tokens, HEADS, DIM, generator=generator).bfloat16()
                for _ in range(LAYERS)
            )
            for _ in "kv"
        )
        for each in k:
            engine = naive.rotate(each, np.arange(num_tokens), spec)
            engine[::PAGE] = each[::PAGE]
            each[self.rows] = engine
        pool = DevicePool("mha", torch.bfloat16, k, v, 0, num_tokens)
        gpu.warm_up(k[0], spec, PAGE)  # as at a server's start
        self.tensors = (*k, *v)
        self.layout = pool.layout(PAGE)
        self.slots = np.zeros((PAGES, self.layout.slot_bytes), np.uint8)
        ropes = [LayerRope(spec, movable=True) for _ in range(LAYERS)]
        self.copier = PageCopier(pool, self.layout, ropes, self.slots, mode="pre", kernels=kernels)

    def ways(self, port: DevicePort) -> tuple[LoadPath, SavePath]:
        """Both, with rings for some pages of a layer at a time."""
        streams, part = Streams(port, None), PAGES_A_PART * max(self.copier.layer_bytes)
        return (
            LoadPath(port, self.copier, streams, 4 * part),
            SavePath(port, self.copier, streams, 2 * part),
        )

    def save(self, path: SavePath, events: list[Any]) -> None:
        """As the save thread does."""
        with path.saving(events):
            path.save(self.rows, [SaveRun(0, 0, np.arange(PAGES))])

    def forget(self) -> None:
        """The pool holds no KV."""
        for each in self.tensors:
            each.fill_(float("nan"))

    def require_loaded(self, want: list[torch.Tensor]) -> None:
        """The pool holds these bits; it forgets them."""
        for have, wanted in zip(self.tensors, want, strict=True):
            assert torch.equal(have.view(torch.int16), wanted.view(torch.int16))
        self.forget()

    def load(self, path: LoadPath) -> None:
        """As the load thread does."""
        copier, pages = self.copier, np.arange(PAGES)
        path.queue(
            [(self.rows, lambda rows: [copier.prepare_load(pages, rows, 0)])],
            path.fence(),
            lambda event: None,
        )


def real() -> tuple[dict[str, int], dict[str, int]]:
    """What the wrappers launch in a save, and in a load, which brings all bits back.

    So does a load whose kernels read the slots themselves.
    """
    counted = Counted()
    bed = Bed(counted)
    port = cuda.CudaPort(torch.device("cpu"), Cuda(num_streams=32, event=HappenedEvent))
    loads, saves = bed.ways(port)
    with patch.object(InterpretedFunction, "run", counted.running(InterpretedFunction.run)):
        bed.save(saves, saves.ready_events())
        saved = dict(counted.launched)
        counted.launched.clear()
        want = [each.clone() for each in bed.tensors]
        bed.forget()
        bed.load(loads)
        loaded = dict(counted.launched)
        bed.require_loaded(want)
        pages = np.arange(PAGES)
        read_in_place(port, bed.copier, IndexMemory(port, 4096), pages, bed.rows)
        bed.require_loaded(want)
    port.close()
    return saved, loaded


def simulated() -> tuple[int, int]:
    """What the simulated device's stand-in says of the same."""
    device = SimulatedDevice(3)
    bed = Bed(SimulatedKernels(device, host_kernels))
    device.add_memory(bed.slots, "slot", bed.layout.slot_bytes)
    with device.acting("assembly"):
        loads, saves = bed.ways(device)
        built = device.hand_over()
    device.take_over(built)
    events, offered = saves.ready_events(), device.hand_over()
    with device.acting("save"):
        device.take_over(offered)
        bed.save(saves, events)
        done = device.hand_over()
    device.take_over(done)
    saved = device.counts["launches"]
    bed.load(loads)
    device.run_all()
    return saved, device.counts["launches"] - saved


def main() -> None:
    """Prints both, of how many parts and layers."""
    patch_once_a_launch()
    parts = -(-PAGES // PAGES_A_PART)
    found = {"parts": parts, "layers": LAYERS, "real": real(), "simulated": simulated()}
    print(json.dumps(found))


if __name__ == "__main__":
    cuda.pinned = lambda count: torch.empty(count, dtype=torch.int64)
    main()
