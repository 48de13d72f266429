"""No load or save has Triton compile what the server's start has not; run by test_rope_triton.py.

Triton compiles a kernel again where a type of its arguments, or what it makes a constant of, is
another: an integer that is 1 or a multiple of 16, an address that is a multiple of 16. What it
would compile for a GPU is asked of its own code; nothing runs. The port, the paths, the copier and
the wrappers are the real ones, a stand-in for `torch.cuda` is below them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sglang_ext.assembly.parts.kernel_choice import choose_kernels
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import ROPE_BOUND, ROPE_PRE, PageLayout, write_tail
from sglang_ext.device.load_pages import PageRun
from sglang_ext.device.load_path import LoadPath, Prepare
from sglang_ext.device.pools import INDEXED, DevicePool, HybridPools
from sglang_ext.device.ports import cuda
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.save_path import SavePath, SaveRun
from sglang_ext.kernels.rope import RopeSpec, gpu
from testkit.simulated.cuda import Cuda, HappenedEvent
from tests.kernels.rope.rope_cases import make_spec

PAGE, LAYERS, MOST_PAGES, PAGES_A_PART = 64, 2, 32, 5
# One page, odd numbers, multiples of 16: what becomes of lengths and addresses.
NUMBERS = (1, 2, 3, 5, 16, 17, MOST_PAGES)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


class Launches:
    """Kinds of launches: of each kernel what Triton would compile it for."""

    def __init__(self) -> None:
        self.kinds: set[tuple[str, ...]] = set()

    def note(self, kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        """A kernel is launched."""
        _, kind, _ = _binder(kernel)(*args, **options)
        self.kinds.add((kernel.fn.__name__, str(kind), str(sorted(options.items()))))

    def take(self) -> set[tuple[str, ...]]:
        """Those since the last call."""
        kinds, self.kinds = self.kinds, set()
        return kinds


@cache
def _binder(kernel: Any) -> Any:
    return create_function_from_signature(kernel.signature, kernel.params, BACKEND)


def check_pool(launches: Launches, pool: DevicePool, spec: RopeSpec | None) -> int:
    """Compares what a start compiles with what saves and loads launch; how many kinds these are."""
    ropes = [LayerRope(spec, movable=spec is not None) for _ in range(LAYERS)]
    on_cuda = DevicePoolOnCuda(**vars(pool))
    config: Any = type("Config", (), {"kernels": "auto"})
    assert choose_kernels(config, HybridPools(on_cuda), [ropes], PAGE) is gpu
    compiled = launches.take()
    layout = pool.layout(PAGE)
    slots = np.zeros((MOST_PAGES, layout.slot_bytes), np.uint8)
    copier = PageCopier(pool, layout, ropes, slots, mode="pre", kernels=gpu)
    port = CudaPort(torch.device("cpu"), Cuda(num_streams=32, event=HappenedEvent))
    streams, part = Streams(port, None), PAGES_A_PART * max(copier.layer_bytes)
    try:
        loads = LoadPath(port, copier, streams, 4 * part)
        saves = SavePath(port, copier, streams, 2 * part)
        for number in NUMBERS:
            _save_and_load(copier, layout, loads, saves, number)
    finally:
        port.close()
    launched = launches.take()
    late = launched - compiled
    assert not late, ("compiled at a request", late, "at start", compiled)
    return len(launched)


class DevicePoolOnCuda(DevicePool):
    """One that says so; its memory is the host's."""

    @property
    def device(self) -> torch.device:
        """A GPU."""
        return torch.device("cuda")


def _save_and_load(
    copier: PageCopier, layout: PageLayout, loads: LoadPath, saves: SavePath, number: int
) -> None:
    pages, rows = np.arange(number), torch.arange(number * PAGE)
    with saves.saving(saves.ready_events()):
        saves.save(rows, [SaveRun(0, PAGE, pages)])

    def load(rows: torch.Tensor, prepare: Prepare) -> None:
        loads.queue([(rows, prepare)], loads.fence(), lambda event: None)

    states = (ROPE_BOUND,) if layout.is_bound or not copier.movable else (ROPE_PRE, ROPE_BOUND)
    for state in states:
        for page in pages.tolist():
            _write(copier.slots[page], layout, state, page)
        load(rows, lambda rows: [copier.prepare_load(pages, rows, 0)])
    if copier.movable:  # from within a page on, at another position
        run = PageRun(pages, 3, number * PAGE - 3)
        for position in (3, 77):
            load(rows[3:], lambda rows, at=position: copier.prepare_runs([run], rows, at))  # type: ignore[misc]


def _write(slot: Any, layout: PageLayout, state: int, page: int) -> None:
    """A page at its position; a position-free one lists up to two values."""
    counts = np.zeros(layout.num_listed_layers, np.uint32)
    entries = np.array([[1, 5]] * (page % 3), np.uint32).reshape(-1, 2)
    if state == ROPE_BOUND:
        write_tail(slot, layout, rope_state=state, position=page * PAGE)
        return
    counts[1] = len(entries)
    write_tail(slot, layout, rope_state=state, position=page * PAGE, counts=counts, entries=entries)


def mha(heads: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> DevicePool:
    """K and V of every head."""
    shape = (MOST_PAGES * PAGE, heads, dim)
    k, v = (tuple(torch.zeros(shape, dtype=dtype) for _ in range(LAYERS)) for _ in "kv")
    return DevicePool("mha", dtype, k, v, 0, shape[0])


def latent(width: int, dtype: torch.dtype = torch.bfloat16) -> DevicePool:
    """One compressed row a token."""
    shape = (MOST_PAGES * PAGE, 1, width)
    rows = tuple(torch.zeros(shape, dtype=dtype) for _ in range(LAYERS))
    return DevicePool("mla", dtype, rows, (), 512, shape[0])


def indexed() -> DevicePool:
    """Latent rows in bytes, and beside each the words of an index."""
    rows = latent(656, torch.uint8)
    words = tuple(torch.zeros(rows.num_slots, 1, 33, dtype=torch.int32) for _ in range(LAYERS))
    return replace(rows, kind=INDEXED, v=words)


def main() -> None:
    launches = Launches()
    plain = make_spec(128, "fma_a", max_pos=4096)
    odd = make_spec(80, "fma_a", max_pos=4096)
    full = make_spec(128, "fp32", max_pos=4096)
    near = make_spec(64, "fma_a", max_pos=4096, first=512, interleaved=True)
    cases = (
        (mha(8, 128), plain),
        (mha(1, 128), plain),  # of 8 ranks
        (mha(3, 80), odd),
        (mha(2, 128, torch.float32), full),
        (mha(8, 128, torch.uint8), None),  # fp8
        (latent(576), near),
        (latent(656, torch.uint8), None),
        (indexed(), None),
    )

    def launch(kernel: Any, *args: Any, **options: Any) -> None:
        launches.note(kernel, *args, **options)

    with (
        patch.object(JITFunction, "run", launch),
        patch.object(cuda, "pinned", lambda count: torch.empty(count, dtype=torch.int64)),
    ):
        number = sum(check_pool(launches, *case) for case in cases)
    print(f"{number} kinds of launches, all compiled at start")


if __name__ == "__main__":
    main()
