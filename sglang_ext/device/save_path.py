"""The way from the device pool to DRAM, written once for every device.

`save_thread.py` runs it; from DRAM to disk pages go by `tiers/store/movers/spiller.py`.

On a CPU the copier writes pages where they lie. A device with memory of its own has two streams. On
one, kernels lay pages out as they will lie in DRAM, some layers of some pages at a time, in a ring
of buffers: K without its rotation, V, and a tail of those K values whose rotation could not be
undone exactly. On the other, these are copied to page-locked slots. Only the saving thread waits
for the device: `save` waits for the tails, which say how many corrections each page has, and at its
end for the copies; `has_rows_below` for its answer; `saving`, at its end, for both streams.

    gathers    [lay out 0][lay out 1][lay out 2][lay out 3].......[lay out 4]
    sends                 [send 0   ][send 1   ][send 2   ]...             [tails]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.copier import PageCopier, SavedPage
from sglang_ext.device.layout import HEADER_BYTES, ROPE_BOUND, ROPE_PRE, tail_head
from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.ring import Ring, take_memory
from sglang_ext.device.rope_discovery import refresh_spec
from sglang_ext.kernels.rope import Listing, PagedView

# One is laid out while the other is sent.
_NUM_BUFFERS = 2

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SaveRun:
    """Whole pages whose tokens follow one another on their path.

    Attributes:
        first_token: the first one's place among the rows of the save.
        position: its position.
        page_slots: i64 `[n]`, slots to fill.
    """

    first_token: int
    position: int
    page_slots: I64


@dataclass(frozen=True)
class _Batch:
    """Pages that are laid out together: as many as a buffer has room for one layer of.

    Attributes:
        rows: i64 `[n * P]`, rows of the pool, on the device.
        positions: i64 `[n * P]`, on the device.
        heads: i64 `[3 * n]`, heads of their tails, on the device.
        page_slots: i64 `[n]`.
    """

    rows: Any
    positions: Any
    heads: Any
    page_slots: I64


class SavePath:
    """Copies pages to DRAM; one thread saves.

    Attributes:
        busy_s: seconds that the last save kept the device, the link or a core, without what it
            waited for forwards.

    Args:
        port: the device.
        copier: what knows pages and pool.
        streams: those of the engine.
        ring_bytes: memory on the device to lay pages out in; unused where kernels write the arena.

    Raises:
        HierKVConfigError: the device has no room for the smallest ring.
    """

    def __init__(
        self, port: DevicePort, copier: PageCopier, streams: Streams, ring_bytes: int
    ) -> None:
        self._port = port
        self._copier = copier
        self._streams = streams
        self.busy_s = 0.0
        self._ring: Ring | None = None
        if port.brings_pages:
            self._ring = Ring(port, max(copier.layer_bytes), ring_bytes, _NUM_BUFFERS)
            self._make_room(self._ring)

    def _make_room(self, ring: Ring) -> None:
        copier, layout, port = self._copier, self._copier.layout, self._port
        self._most = ring.buffer_bytes // max(copier.layer_bytes)
        self._tail_bytes = layout.slot_bytes - layout.tail_offset
        tokens = self._most * layout.page_size
        values = tokens * max(layout.k_row_bytes) // layout.item_bytes
        sizes = (self._most * self._tail_bytes, values, 4 * tokens)
        self._tails, self._wrong, self._misses = take_memory(port, sizes)
        self._tails_sent: Any = None  # event; None while nothing was

    @property
    def ring_bytes(self) -> int:
        """Memory on the device that saves keep for themselves."""
        if self._ring is None:
            return 0
        return self._ring.num_bytes + sum(map(len, (self._tails, self._wrong, self._misses)))

    def ready_events(self) -> list[Any]:
        """Events after which the pages of a node are complete on the device; scheduler's thread."""
        return [] if self._ring is None else self._streams.behind_writers()

    def enter_thread(self) -> None:
        """To be called once by the thread that saves."""
        self._port.enter_thread()

    @contextmanager
    def saving(self, events: list[Any]) -> Iterator[None]:
        """Context in which pages are saved; when it ends, however it does, nothing is on its way.

        Only then may the caller publish the slots, or give them to others if the save failed.

        Args:
            events: after which the rows are complete on the device.
        """
        port = self._port
        if self._ring is None:
            yield
            return
        for event in events:
            port.wait(self._streams.gathers, event)
        try:
            yield
        finally:
            port.wait(self._streams.sends, port.record(self._streams.gathers))
            port.synchronize(port.record(self._streams.sends))

    def has_rows_below(self, end: int, token_slots: torch.Tensor) -> bool:
        """Whether a row of `token_slots` is below `end`; waits for the device, within `saving`."""
        with self._port.on(self._streams.gathers):
            return self._port.any_below(token_slots, end)

    def save(self, token_slots: torch.Tensor, runs: Sequence[SaveRun]) -> list[SavedPage]:
        """Copies whole pages to their slots, headers apart; blocks until they are there.

        Args:
            token_slots: rows of the pool, as SGLang has them.
            runs: what of them to save, and where to.

        Returns:
            One entry a page, in the order of the runs; `busy_s` is what it took.
        """
        begin = self._port.record(self._streams.gathers)
        if self._ring is None:
            saved = self._copy(token_slots, runs)
        else:
            saved = self._lay_out_all(self._ring, token_slots, runs)
        end = self._port.record(self._streams.sends)
        self._port.synchronize(end)
        self.busy_s = self._port.seconds_between(begin, end)
        return saved

    def _lay_out_all(
        self, ring: Ring, token_slots: torch.Tensor, runs: Sequence[SaveRun]
    ) -> list[SavedPage]:
        state = self._copier.rules.saved_state
        batches = self._batches(token_slots, runs, state)
        for batch in batches:
            self._lay_out_and_send(ring, batch, position_free=state == ROPE_PRE)
        self._port.synchronize(self._port.record(self._streams.sends))
        slots = np.concatenate([run.page_slots for run in runs])
        counts = self._copier.num_listed(slots)
        too_many = np.flatnonzero(counts > self._copier.layout.max_corrections)
        if len(too_many):
            self._keep_bound(ring, token_slots, runs, too_many)
        counts[too_many] = 0
        states = np.full(len(slots), state)
        states[too_many] = ROPE_BOUND
        payload = self._copier.layout.payload_bytes
        return [
            SavedPage(kind, payload(count), count)
            for kind, count in zip(states.tolist(), counts.tolist(), strict=True)
        ]

    def _copy(self, token_slots: torch.Tensor, runs: Sequence[SaveRun]) -> list[SavedPage]:
        rows, size = token_slots.cpu().numpy(), self._copier.page_size
        saved: list[SavedPage] = []
        for run in runs:
            tokens = rows[run.first_token : run.first_token + size * len(run.page_slots)]
            saved += self._copier.save(tokens, run.position, run.page_slots)
        return saved

    def _keep_bound(
        self, ring: Ring, token_slots: torch.Tensor, runs: Sequence[SaveRun], which: I64
    ) -> None:
        """Saves pages with more corrections than they have room for as the engine has them."""
        size = self._copier.page_size
        pages = [
            SaveRun(run.first_token + at * size, run.position + at * size, run.page_slots[at:][:1])
            for run in runs
            for at in range(len(run.page_slots))
        ]
        chosen = [pages[at] for at in which.tolist()]
        for batch in self._batches(token_slots, chosen, ROPE_BOUND):
            self._lay_out_and_send(ring, batch, position_free=False)

    def _batches(
        self, token_slots: torch.Tensor, runs: Sequence[SaveRun], state: int
    ) -> list[_Batch]:
        """Divides runs into batches; uploads the positions and heads of all of them at once."""
        size = self._copier.page_size
        positions = [
            run.position + np.arange(size * len(run.page_slots), dtype=np.int64) for run in runs
        ]
        flat_positions = np.concatenate(positions)
        if state == ROPE_PRE:
            self._copier.require_in_table(flat_positions)
        heads = np.stack([tail_head(state, first) for first in flat_positions[::size].tolist()])
        port, tokens = self._port, len(flat_positions)
        with port.on(self._streams.gathers):
            uploaded = port.upload(np.concatenate([flat_positions, heads.reshape(-1)]))
            rows = port.rows(token_slots)
        batches: list[_Batch] = []
        done = 0
        for run in runs:
            for begin in range(0, len(run.page_slots), self._most):
                slots = run.page_slots[begin : begin + self._most]
                first, num = run.first_token + begin * size, len(slots)
                batches.append(
                    _Batch(
                        rows[first : first + num * size],
                        uploaded[done * size : (done + num) * size],
                        uploaded[tokens + 3 * done : tokens + 3 * (done + num)],
                        slots,
                    )
                )
                done += num
        return batches

    def _lay_out_and_send(self, ring: Ring, batch: _Batch, *, position_free: bool) -> None:
        port, copier = self._port, self._copier
        gathers, sends = self._streams.gathers, self._streams.sends
        layout, num = copier.layout, len(batch.page_slots)
        if self._tails_sent is not None:
            port.wait(gathers, self._tails_sent)
        tails = self._tails[: num * self._tail_bytes].reshape(num, self._tail_bytes)
        capacity = layout.max_corrections
        listing = Listing(tails, layout.num_listed_layers, capacity, self._wrong, self._misses)
        with port.on(gathers):
            copier.kernels.begin_tails(tails, batch.heads)
        for layers in ring.groups(copier.layer_bytes, num):
            buffer, span = ring.take(), copier.span(layers)
            if buffer.free is not None:
                port.wait(gathers, buffer.free)
            pages = buffer.memory[: num * (span.stop - span.start)].reshape(num, -1)
            with port.on(gathers):
                if layout.gaps:
                    copier.kernels.clear(pages)
                for layer in layers:
                    view = self._view(pages, ring.index[:num], span.start)
                    self._lay_out(batch, layer, view, listing if position_free else None)
            self._send(batch, pages, span)
            buffer.free = port.record(sends)
        self._send(batch, tails, slice(layout.tail_offset, layout.slot_bytes))
        self._tails_sent = port.record(sends)

    def _view(self, pages: Any, index: Any, first_byte: int) -> Any:
        size = self._copier.page_size
        return lambda offset: PagedView(pages, index, offset - first_byte, size)

    def _lay_out(self, batch: _Batch, layer: int, view: Any, listing: Listing | None) -> None:
        copier, kernels, layout = self._copier, self._copier.kernels, self._copier.layout
        spec = None if listing is None else refresh_spec(copier.ropes[layer])
        k, out = copier.pool.k[layer], view(layout.k_offsets[layer])
        if spec is None:
            kernels.copy_rows_to_pages(k, batch.rows, out)
        else:
            kernels.save_to_pages(k, batch.rows, batch.positions, spec, out, listing, layer)
        if layout.v_row_bytes[layer]:
            out = view(layout.v_offsets[layer])
            kernels.copy_rows_to_pages(copier.pool.v[layer], batch.rows, out)

    def _send(self, batch: _Batch, pages: Any, span: slice) -> None:
        """Queues the copies of what was laid out so far."""
        assert span.start >= HEADER_BYTES
        port = self._port
        port.wait(self._streams.sends, port.record(self._streams.gathers))
        with port.on(self._streams.sends):
            port.send(self._copier.slots, batch.page_slots, span, pages)


class SaveParts:
    """Saves pages of models that keep their KV in several parts; one thread saves.

    Part 0 is the full layers; parts 1 and on are the groups of window layers, or part 1 is the
    states.

    Args:
        paths: one for each part, of one device. A `StateSavePath` may be among them.
    """

    def __init__(self, paths: Sequence[Any]) -> None:
        self._paths = paths

    @property
    def ring_bytes(self) -> int:
        """Memory on the device that saves keep for themselves."""
        return sum(path.ring_bytes for path in self._paths)

    def __getitem__(self, part: int) -> Any:
        """The path of a part."""
        return self._paths[part]

    def ready_events(self) -> list[Any]:
        """See `SavePath.ready_events`."""
        events: list[Any] = self._paths[0].ready_events()
        return events

    def enter_thread(self) -> None:
        """See `SavePath.enter_thread`."""
        self._paths[0].enter_thread()

    @contextmanager
    def saving(self, events: list[Any]) -> Iterator[None]:
        """See `SavePath.saving`; of any of the parts."""
        with ExitStack() as stack:
            for path in self._paths:
                stack.enter_context(path.saving(events))
            yield
