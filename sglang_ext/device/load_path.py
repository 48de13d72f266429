"""The way from DRAM to the device pool, written once for every device.

On a CPU kernels read the arena, layer by layer, and a layer is done when they return. A device
with memory of its own has two streams. On one, pages are brought into a ring of buffers, some
layers of some pages at a time; it waits for nothing but a free buffer, so it works before and while
the batch in flight runs. On the other, kernels embed K and scatter K and V; it waits for the batch
in flight, which may still use the rows. No thread waits for either: what reads the rows waits, on
the device, for the event of its layer.

    copies    [bring 0][bring 1][bring 2][bring 3]......[bring 4]...
    forwards  -- batch in flight --------------------+
    scatters                                         [0][1][2][3][4]...   event of a layer
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.load_pages import IndexMemory, LoadPages, PageSource
from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.ring import Buffer, Ring

# For each row of the pool a position, and as much again for what pages list: some 10 in a million
# values of K are, three numbers each.
_VALUES_A_ROW = 2

I64 = npt.NDArray[np.int64]

# Hands rows of the pool, as the port keeps indices, to the copier's `prepare_load` or
# `prepare_runs`.
Prepare = Callable[[Any], list[LoadPages]]


@dataclass(frozen=True)
class Fence:
    """What loads must not overtake.

    Attributes:
        rows_known: event after which the rows to write can be read on the device.
        rows_free: events after which no forward uses them any more.
    """

    rows_known: Any
    rows_free: tuple[Any, ...]


@dataclass(frozen=True)
class Landing:
    """Queued loads, of which nothing can be said before `last` happened.

    Attributes:
        last: event behind all of them.
        busy: pairs of events: from one to the other the loads kept the device, or the link to it.
    """

    last: Any
    busy: list[tuple[Any, Any]]


class LoadPath:
    """Queues loads on a device. Threads may share it.

    All memory of the device is taken here: a load that found none would fail a request whose
    forward runs.

    Args:
        port: the device.
        copier: what knows pages and pool.
        streams: those of the engine.
        ring_bytes: memory on the device to bring pages to; unused where kernels read the arena.
    """

    def __init__(
        self, port: DevicePort, copier: PageCopier, streams: Streams, ring_bytes: int
    ) -> None:
        self._port = port
        self._copier = copier
        self._streams = streams
        self._queueing = threading.Lock()
        self._ring: Ring | None = None
        if port.brings_pages:
            self._ring = Ring(port, max(copier.layer_bytes), ring_bytes)
            of_page = 2 * copier.page_size + 3 * copier.layout.max_corrections
            # Kernels read nothing beside pages whose K is always as the engine has it.
            of_pool = 0 if copier.layout.is_bound else _VALUES_A_ROW * copier.pool.num_slots
            most = max(of_pool, of_page)
            self._indices = IndexMemory(port, most)
            # What one prompt needs; memory for more is page-locked when it comes to that.
            of_prompt = 2 * min(copier.pool.num_slots, copier.rules.max_position)
            port.prepare_uploads(max(of_prompt, of_page))

    @property
    def ring_bytes(self) -> int:
        """Memory on the device that loads keep for themselves."""
        return 0 if self._ring is None else self._ring.num_bytes + self._indices.num_bytes

    def fence(self) -> Fence:
        """What the next loads must not overtake; from the thread that launches forwards."""
        events = self._streams.behind_writers()
        return Fence(events[0], tuple(events))

    def queue(
        self,
        loads: Sequence[tuple[torch.Tensor, Prepare]],
        fence: Fence,
        on_layer: Callable[[Any], None],
    ) -> Landing:
        """Queues loads layer by layer.

        Args:
            loads: rows of the pool to write, as SGLang has them, and what prepares the pages.
            fence: made when the rows were known.
            on_layer: called for each layer in order with an event behind which it is there.

        Raises:
            CopyError: a page cannot be loaded as asked; what was queued runs on.
        """
        if self._ring is None:
            return self._copy(loads, on_layer)
        with self._queueing:
            return self._bring_and_scatter(self._ring, loads, fence, on_layer)

    def behind_queued(self, after: Any = None) -> Any:
        """An event behind all that was queued so far, and `after`; None where nothing is queued."""
        if self._ring is None:
            return None
        if after is not None:
            self._port.wait(self._streams.scatters, after)
        self._port.wait(self._streams.scatters, self._port.record(self._streams.copies))
        return self._port.record(self._streams.scatters)

    def before_forwards(self, event: Any) -> None:
        """Lets what SGLang launches from now on wait, on the device, for an event of a load."""
        self._port.wait(self._port.current_stream(), event)
        if self._streams.forwards is not None:
            self._port.wait(self._streams.forwards, event)

    @contextmanager
    def in_forward_order(self, *inputs: torch.Tensor) -> Iterator[None]:
        """Context whose work runs where the forwards do, behind the current stream's so far.

        What follows on the current stream is behind it: SGLang's forwards run there where it does
        not overlap them with its scheduling.

        Args:
            inputs: tensors of the current stream's that it uses.
        """
        port, current = self._port, self._port.current_stream()
        stream = self._streams.forwards
        if stream is None or not port.brings_pages:
            with port.on(current):
                yield
            return
        port.wait(stream, port.record(current))
        for tensor in inputs:
            tensor.record_stream(stream)
        try:
            with port.on(stream):
                yield
        finally:
            port.wait(current, port.record(stream))

    def _copy(
        self, loads: Sequence[tuple[torch.Tensor, Prepare]], on_layer: Callable[[Any], None]
    ) -> Landing:
        first = self._port.record(None)
        parts = [part for rows, prepare in loads for part in prepare(self._port.rows(rows))]
        for layer in range(self._copier.pool.num_layers):
            for part in parts:
                self._copier.load_layer(part, layer)
            on_layer(None)
        last = self._port.record(None)
        return Landing(last, [(first, last)])

    def _bring_and_scatter(
        self,
        ring: Ring,
        loads: Sequence[tuple[torch.Tensor, Prepare]],
        fence: Fence,
        on_layer: Callable[[Any], None],
    ) -> Landing:
        port, scatters = self._port, self._streams.scatters
        port.wait(scatters, fence.rows_known)
        with port.on(scatters):
            parts = self._parts(ring, loads)
            are_placed = self._indices.has_room(parts)
            if are_placed:
                parts = self._indices.place(parts)
        for event in fence.rows_free:
            port.wait(scatters, event)
        busy: list[tuple[Any, Any]] = []
        begun = last = port.record(scatters)
        most = max((len(part.page_slots) for part in parts), default=1)
        for layers in ring.groups(self._copier.layer_bytes, most):
            for part in parts:
                buffer, source = self._bring(ring, part, layers, busy)
                begun = port.record(scatters)
                try:
                    with port.on(scatters):
                        if not are_placed:  # each in its turn, behind the kernels of the one before
                            (part,) = self._indices.place([part.of_layers(layers)])
                        for layer in layers:
                            self._copier.load_layer(part, layer, source)
                finally:  # what was launched before an error reads the buffer all the same
                    last = buffer.free = port.record(scatters)
            for _ in layers:
                on_layer(last)
        # The other scatters run while the link is busy, or wait for the batch in flight.
        return Landing(last, [*busy, (begun, last)])

    def _parts(self, ring: Ring, loads: Sequence[tuple[torch.Tensor, Prepare]]) -> list[LoadPages]:
        size, most = self._copier.page_size, ring.buffer_bytes // max(self._copier.layer_bytes)
        parts: list[LoadPages] = []
        for rows, prepare in loads:
            prepared = prepare(self._port.rows(rows))
            split = [part for pages in prepared for part in pages.of_one_kind(size, most)]
            for part in split:
                self._copier.require_positions(part)
                parts += self._indices.split(part, size)
        return parts

    def _bring(
        self, ring: Ring, part: LoadPages, layers: range, busy: list[tuple[Any, Any]]
    ) -> tuple[Buffer, PageSource]:
        """Queues the copies of some layers of some pages; scatters wait for them from now on."""
        port, copies = self._port, self._streams.copies
        buffer, span = ring.take(), self._copier.span(layers)
        if buffer.free is not None:
            port.wait(copies, buffer.free)
        num_pages, num_bytes = len(part.page_slots), span.stop - span.start
        pages = buffer.memory[: num_pages * num_bytes].reshape(num_pages, num_bytes)
        begin = port.record(copies)
        with port.on(copies):
            port.bring(pages, self._copier.slots, part.page_slots, span)
        brought = port.record(copies)
        port.wait(self._streams.scatters, brought)
        busy.append((begin, brought))
        return buffer, PageSource(pages, ring.index[:num_pages], span.start)


class LoadParts:
    """Queues loads of pages whose layers lie in several parts. Threads may share it.

    Args:
        paths: one a part, of one device. A `StateLoadPath` may be among them.
        model_layers: the model's layer that each layer of each part is; every one at least once.
    """

    def __init__(self, paths: Sequence[Any], model_layers: Sequence[Sequence[int]]) -> None:
        self._paths = paths
        self._model_layers = model_layers
        self._num_layers = 1 + max(layer for layers in model_layers for layer in layers)

    @property
    def ring_bytes(self) -> int:
        """Memory on the device that loads keep for themselves."""
        return sum(path.ring_bytes for path in self._paths)

    def fence(self) -> Fence:
        """See `LoadPath.fence`."""
        fence: Fence = self._paths[0].fence()
        return fence

    def queue(
        self,
        loads: Sequence[Sequence[tuple[torch.Tensor, Prepare]]],
        fence: Fence,
        on_layer: Callable[[Any], None],
    ) -> Landing:
        """Queues the loads of each part; see `LoadPath.queue`.

        A part is ordered behind the one before it, by the stream that they share or, of states, by
        an event, so the last event is behind all.
        """
        if len(self._paths) == 1:
            alone: Landing = self._paths[0].queue(loads[0], fence, on_layer)
            return alone
        events: list[Any] = [None] * self._num_layers
        busy: list[tuple[Any, Any]] = []
        last: Any = None
        for path, layers, part in zip(self._paths, self._model_layers, loads, strict=True):
            found: list[Any] = []
            landing = path.queue(part, fence, found.append)
            for layer, event in zip(layers, found, strict=True):
                events[layer] = event
            busy += landing.busy
            last = landing.last
            fence = replace(fence, rows_free=(*fence.rows_free, last))
        events[-1] = last if events[-1] is not None else None  # behind all, of whatever part it is
        for event in events:
            on_layer(event)
        return Landing(last, busy)

    def behind_queued(self) -> Any:
        """See `LoadPath.behind_queued`."""
        event: Any = None
        for path in self._paths:
            event = path.behind_queued(event)
        return event

    def before_forwards(self, event: Any) -> None:
        """See `LoadPath.before_forwards`."""
        self._paths[0].before_forwards(event)

    def in_forward_order(self, *inputs: torch.Tensor) -> AbstractContextManager[None]:
        """See `LoadPath.in_forward_order`."""
        context: AbstractContextManager[None] = self._paths[0].in_forward_order(*inputs)
        return context
