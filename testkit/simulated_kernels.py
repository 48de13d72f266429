"""The kernels of a simulated device: they run when the device gets to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_ext.kernels.rope import Corrections, Listing
from testkit.simulated_device import Cell, SimulatedDevice


class SimulatedKernels:
    """Kernels that run on a simulated device when it gets to them.

    Attributes:
        fails_in: launches until one raises; None: never.
    """

    def __init__(self, device: SimulatedDevice, real: Any) -> None:
        self.fails_in: int | None = None
        self._device = device
        self._real = real

    def begin_tails(self, tails: Any, heads: Any) -> None:
        """One launch."""
        known = self._device.raw(tails), self._device.raw(heads)
        self._run("begin_tails", [(tails, "w"), (heads, "r")], known, ())

    def clear(self, pages: Any) -> None:
        """One launch."""
        self._run("clear", [(pages, "w")], (self._device.raw(pages),), ())

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
        raw = self._device.raw
        self._device.count("launches")
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
        self._may_fail()
        self._device.count("launches")
        cells_of, work = self._device.cells_of, getattr(self._real, name)
        also = [cell for array, how in memory if how == "r" for cell in cells_of(array)]
        writes = [cell for array, how in memory if how == "w" for cell in cells_of(array)]
        self._device.launch(name, lambda: work(*known), [*reads, *also], writes)

    def _raw_view(self, view: Any) -> Any:
        raw = self._device.raw
        return replace(view, arena=raw(view.arena), page_slots=raw(view.page_slots))

    def _may_fail(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("a launch that was meant to fail")

    def _not_kept(self, view: Any, args: tuple[Any, ...]) -> list[Any]:
        """Arguments by which work finds its memory, without keeping it for itself."""
        raw = self._device.raw
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
            self._may_fail()
            self._device.count("launches")
            pool, rows, arrays = _arguments(args)
            blocks = _blocks(view, pool)
            reads = [cell for block in blocks for cell in self._device.cells_of(block)]
            for array in arrays:
                reads += self._device.cells_of(array)
            writes = [pool_cell(pool, row) for row in rows.tolist()]
            known = self._not_kept(view, args)
            self._device.launch(name, lambda: work(*known), reads, writes)

        return launch


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
