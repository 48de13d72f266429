"""The kernels of a simulated device: they run when the device gets to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from sglang_ext.kernels.rope import Corrections
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

    def save_k(self, pool: torch.Tensor, rows: Any, positions: Any, spec: Any, view: Any) -> Any:
        """Waits for the list of corrections, as the real one does."""
        found: list[Any] = []

        def save() -> None:
            found.append(self._real.save_k(pool, rows, positions, spec, view))

        self._save("save_k", save, pool, rows, view)
        self._device.synchronize(self._device.record(self._device.current_stream()))
        return found[0]

    def copy_rows_to_pages(self, pool: torch.Tensor, rows: Any, view: Any) -> None:
        """Only queued."""
        self._save(
            "copy_rows_to_pages",
            lambda: self._real.copy_rows_to_pages(pool, rows, view),
            pool,
            rows,
            view,
        )

    def _save(self, name: str, work: Any, pool: torch.Tensor, rows: Any, view: Any) -> None:
        self._may_fail()
        reads = [pool_cell(pool, row) for row in rows.tolist()]
        slots = view.page_slots.tolist()
        writes = [cell for slot in slots for cell in self._device.cells_of(view.arena[slot])]
        self._device.launch(name, work, reads, writes)

    def _may_fail(self) -> None:
        if self.fails_in is not None:
            self.fails_in -= 1
            if self.fails_in < 0:
                raise RuntimeError("a launch that was meant to fail")

    def _not_kept(self, view: Any, args: tuple[Any, ...]) -> list[Any]:
        """Arguments by which work finds its memory, without keeping it for itself."""
        raw = self._device.raw
        rows = _rows(args)
        known = [replace(view, arena=raw(view.arena), page_slots=raw(view.page_slots))]
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
            width = pool.shape[1] * pool.shape[2] * pool.element_size()
            reads = [
                cell
                for row in range(len(view.page_slots))
                for cell in self._device.cells_of(
                    view.arena[row, view.byte_offset : view.byte_offset + view.page_size * width]
                )
            ]
            for array in arrays:
                reads += self._device.cells_of(array)
            writes = [pool_cell(pool, row) for row in rows.tolist()]
            known = self._not_kept(view, args)
            self._device.launch(name, lambda: work(*known), reads, writes)

        return launch


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
