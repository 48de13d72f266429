"""The kernels of a simulated device: they run when the device gets to them.

How many launches each is, is what the Triton wrappers make of it (test_transfer_counts.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_ext.device.layout import PageLayout
from sglang_ext.device.states.snapshots import Snapshots, StatePool
from sglang_ext.kernels.rope import Corrections, Listing
from testkit.simulated.device import Cell, SimulatedDevice, cell_of, plain


class SimulatedKernels:
    """Kernels that run on a simulated device when it gets to them.

    Attributes:
        device: where they run.
        fails_in: launches until one raises; None: never.
    """

    def __init__(self, device: SimulatedDevice, real: Any) -> None:
        self.fails_in: int | None = None
        self.device = device
        self._real = real

    def begin_tails(self, tails: Any, heads: Any) -> None:
        """Two launches: all is cleared, then the heads are written."""
        self.device.count("launches")
        known = self.device.raw(tails), self.device.raw(heads)
        self._run("begin_tails", [(tails, "w"), (heads, "r")], known, ())

    def clear(self, pages: Any) -> None:
        """One launch."""
        self._run("clear", [(pages, "w")], (self.device.raw(pages),), ())

    def save_to_pages(
        self,
        pool: torch.Tensor,
        rows: Any,
        positions: Any,
        spec: Any,
        view: Any,
        listing: Listing,
        layer: int,
    ) -> None:
        """Two launches, of which the second reads what the first marked."""
        raw = self.device.raw
        self.device.count("launches")
        memory: list[tuple[Any, str]] = [
            *((block, "w") for block in _blocks(view, pool)),
            *((each, "w") for each in (listing.wrong, listing.misses, listing.tails)),
            (listing.tails, "r"),
            (positions, "r"),
        ]
        there = replace(listing, tails=raw(listing.tails), wrong=None, misses=None)
        known = (pool, rows, raw(positions), spec, self._raw_view(view), there, layer)
        self._run("save_to_pages", memory, known, [pool_cell(pool, row) for row in rows.tolist()])

    def copy_rows_to_pages(self, pool: torch.Tensor, rows: Any, view: Any) -> None:
        """One launch."""
        memory = [(block, "w") for block in _blocks(view, pool)]
        known = (pool, rows, self._raw_view(view))
        reads = [pool_cell(pool, row) for row in rows.tolist()]
        self._run("copy_rows_to_pages", memory, known, reads)

    def _run(
        self,
        name: str,
        memory: list[tuple[Any, str]],
        known: tuple[Any, ...],
        reads: Iterable[Cell],
    ) -> None:
        self.may_fail()
        self.device.count("launches")
        cells_of, work = self.device.cells_of, getattr(self._real, name)
        also = [cell for array, how in memory if how == "r" for cell in cells_of(array)]
        writes = [cell for array, how in memory if how == "w" for cell in cells_of(array)]
        self.device.launch(name, lambda: work(*known), [*reads, *also], writes)

    def _raw_view(self, view: Any) -> Any:
        raw = self.device.raw
        return replace(view, arena=raw(view.arena), page_slots=raw(view.page_slots))

    def may_fail(self) -> None:
        """Raises when it is this launch's turn to fail."""
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("a launch that was meant to fail")

    def _not_kept(self, view: Any, args: tuple[Any, ...]) -> list[Any]:
        """Arguments by which work finds its memory, without keeping it for itself."""
        raw = self.device.raw
        rows = _rows(args)
        known = [self._raw_view(view)]
        for each in args:
            if isinstance(each, np.ndarray) and each is not rows and len(each):
                known.append(raw(each))
            elif isinstance(each, Corrections):
                known.append(Corrections(raw(each.page), raw(each.element), raw(each.bits)))
            else:
                known.append(each)
        return known

    def __getattr__(self, name: str) -> Any:
        work = getattr(self._real, name)

        def launch(view: Any, *args: Any) -> None:
            self.may_fail()
            has_corrections = any(isinstance(each, Corrections) for each in args)
            self.device.count("launches", 2 if has_corrections else 1)
            pool, rows, arrays = _arguments(args)
            blocks = _blocks(view, pool)
            reads = [cell for block in blocks for cell in self.device.cells_of(block)]
            for array in arrays:
                reads += self.device.cells_of(array)
            writes = [pool_cell(pool, row) for row in rows.tolist()]
            known = self._not_kept(view, args)
            self.device.launch(name, lambda: work(*known), reads, writes)

        return launch


class SimulatedSnapshots(Snapshots):
    """States whose copies run on a simulated device when it gets to them.

    Args:
        kernels: of the device.
        pool: the states.
        layout: of the pages in whose slots parts lie.
    """

    def __init__(self, kernels: SimulatedKernels, pool: StatePool, layout: PageLayout) -> None:
        super().__init__(pool, layout)
        self._kernels = kernels

    def gather(self, slot: torch.Tensor, out: Any) -> None:
        """One launch that clears, and one a tensor."""
        device, index, there = self._kernels.device, plain(slot), self._kernels.device.raw(out)
        self._kernels.may_fail()
        device.count("launches", 1 + len(self.pool.tensors))
        reads = [cell_of(slot), *self.cells(int(index))]
        work = super().gather
        device.launch("gather state", lambda: work(index, there), reads, device.cells_of(out))

    def scatter(self, parts: Any, slot: torch.Tensor) -> None:
        """One launch a tensor."""
        device, index, there = self._kernels.device, plain(slot), self._kernels.device.raw(parts)
        self._kernels.may_fail()
        device.count("launches", len(self.pool.tensors))
        reads = [cell_of(slot), *device.cells_of(parts)]
        work = super().scatter
        device.launch("scatter state", lambda: work(there, index), reads, self.cells(int(index)))

    def cells(self, slot: int, layers: Iterable[int] | None = None) -> list[Cell]:
        """A slot of some layers, by index; of all by default."""
        every = range(len(self.pool.layers)) if layers is None else layers
        return [
            ("state", tensor.data_ptr(), layer, slot)
            for tensor in self.pool.tensors
            for layer in every
        ]


def _blocks(view: Any, pool: torch.Tensor) -> list[Any]:
    """A layer's block in each page of a view."""
    width = pool.shape[1] * pool.shape[2] * pool.element_size()
    span = slice(view.byte_offset, view.byte_offset + view.page_size * width)
    return [view.arena[row, span] for row in range(len(view.page_slots))]


def pool_cell(pool: torch.Tensor, row: int) -> Cell:
    """A row of one layer's K or V."""
    return ("pool", pool.data_ptr(), row)


def _arguments(args: tuple[Any, ...]) -> tuple[torch.Tensor, Any, list[Any]]:
    """Pool, rows, and what lies on the device of the arguments behind the view."""
    at = _pool_at(args)
    arrays = [each for each in args[:at] if isinstance(each, np.ndarray)]
    for each in args[at + 2 :]:
        if hasattr(each, "element"):
            arrays += [each.page, each.element, each.bits]
    return args[at], args[at + 1], [each for each in arrays if len(each)]


def _pool_at(args: tuple[Any, ...]) -> int:
    return next(index for index, each in enumerate(args) if isinstance(each, torch.Tensor))


def _rows(args: tuple[Any, ...]) -> Any:
    """Rows of the pool, which are as SGLang has them."""
    return args[_pool_at(args) + 1]
