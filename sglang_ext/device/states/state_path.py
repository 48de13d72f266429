"""The ways of a snapshot between the device and DRAM, beside those of the pages.

They do what `SavePath` and `LoadPath` do, with a state's slot in the place of rows. On a device
with memory of its own a snapshot is laid out in a buffer there, and copied from or to page-locked
slots, each way on one stream.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.copier import CopyError, SavedPage
from sglang_ext.device.layout import ROPE_BOUND, read_tails, write_tail
from sglang_ext.device.load_path import Fence, Landing
from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ports.streams import Streams
from sglang_ext.device.ring import take_memory
from sglang_ext.device.save_path import SaveRun
from sglang_ext.device.states.snapshots import Snapshots

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class _StatePath:
    """Memory that the device can reach, to copy a snapshot through.

    Args:
        port: the device.
        snapshots: what knows the states.
        slots: u8 `[num_slots, slot_bytes]`, the arena.
        streams: those of the engine.

    Attributes:
        ring_bytes: memory on the device that is kept for this.

    Raises:
        HierKVConfigError: the device has no room for a state.
    """

    def __init__(self, port: DevicePort, snapshots: Snapshots, slots: U8, streams: Streams) -> None:
        self._port = port
        self._snapshots = snapshots
        self._slots = slots
        self._streams = streams
        self.ring_bytes = snapshots.num_bytes if port.brings_pages else 0
        (memory,) = take_memory(port, (snapshots.num_bytes,))
        self._parts = memory.reshape(snapshots.num_parts, snapshots.part_bytes)


class StateSavePath(_StatePath):
    """Copies snapshots to DRAM; one thread saves.

    Attributes:
        busy_s: seconds that the last save kept the device, the link or a core.
    """

    busy_s = 0.0

    @property
    def _stream(self) -> Any:
        return self._streams.gathers

    def ready_events(self) -> list[Any]:
        """See `SavePath.ready_events`."""
        return self._streams.behind_writers() if self._port.brings_pages else []

    def enter_thread(self) -> None:
        """See `SavePath.enter_thread`."""
        self._port.enter_thread()

    @contextmanager
    def saving(self, events: list[Any]) -> Iterator[None]:
        """See `SavePath.saving`."""
        port = self._port
        for event in events:
            port.wait(self._stream, event)
        try:
            yield
        finally:
            if port.brings_pages:
                port.synchronize(port.record(self._stream))

    def has_rows_below(self, end: int, token_slots: torch.Tensor) -> bool:
        """Whether a state's slot is before `end`; waits for the device, within `saving`."""
        with self._port.on(self._stream):
            return self._port.any_below(token_slots, end)

    def save(self, token_slots: torch.Tensor, runs: Sequence[SaveRun]) -> list[SavedPage]:
        """Copies parts of one snapshot to their slots, headers apart; blocks until they are there.

        Args:
            token_slots: `[1]`, the state's slot, as SGLang has it.
            runs: parts that follow one another: the number of the first, the position of the page
                that the snapshot is behind, and the slots to fill.

        Returns:
            One entry a part.
        """
        port, snapshots = self._port, self._snapshots
        begin = port.record(self._stream)
        with port.on(self._stream):
            snapshots.gather(token_slots, self._parts)
            for run in runs:
                source = self._parts[run.first_token : run.first_token + len(run.page_slots)]
                port.send(self._slots, run.page_slots, snapshots.span, source)
        end = port.record(self._stream)
        port.synchronize(end)
        self.busy_s = port.seconds_between(begin, end)
        return [
            SavedPage(ROPE_BOUND, self._write_tail(slot, run.position), 0)
            for run in runs
            for slot in run.page_slots.tolist()
        ]

    def _write_tail(self, slot: int, position: int) -> int:
        """Says that a part is bound to a position; the payload's length."""
        layout = self._snapshots.layout
        return write_tail(self._slots[slot], layout, rope_state=ROPE_BOUND, position=position)


class StateLoadPath(_StatePath):
    """Queues loads of snapshots on a device. Threads may share it."""

    def __init__(self, port: DevicePort, snapshots: Snapshots, slots: U8, streams: Streams) -> None:
        super().__init__(port, snapshots, slots, streams)
        self._queueing = threading.Lock()

    @property
    def _stream(self) -> Any:
        return self._streams.states

    def fence(self) -> Fence:
        """See `LoadPath.fence`."""
        port, current = self._port, self._port.current_stream()
        self._streams.take(current)
        here = port.record(current)
        return Fence(here, (here,))

    def queue(
        self,
        loads: Sequence[tuple[torch.Tensor, Callable[[Any], I64]]],
        fence: Fence,
        on_layer: Callable[[Any], None],
    ) -> Landing:
        """Queues loads, and then tells of all layers.

        Args:
            loads: the slot of each state, `[1]`, and what names its parts' slots in DRAM.
            fence: made when the states' slots were known.
            on_layer: called for each layer with an event behind which it is there.

        Raises:
            CopyError: the slots do not hold a snapshot's parts; what was queued runs on.
        """
        port, snapshots = self._port, self._snapshots
        busy: list[tuple[Any, Any]] = []
        with self._queueing:
            for state_slot, name_parts in loads:
                page_slots = name_parts(state_slot)
                self._require_parts(page_slots)
                begin = port.record(self._stream)
                with port.on(self._stream):
                    port.bring(self._parts, self._slots, page_slots, snapshots.span)
                brought = port.record(self._stream)
                self._wait_for(fence)
                scattering = port.record(self._stream)
                with port.on(self._stream):
                    snapshots.scatter(self._parts, state_slot)
                busy += [(begin, brought), (scattering, port.record(self._stream))]
            self._wait_for(fence)  # what comes before a load without a state is behind it, too
            last = port.record(self._stream)
        for _ in snapshots.pool.layers:
            on_layer(last if port.brings_pages else None)
        return Landing(last, busy)

    def _wait_for(self, fence: Fence) -> None:
        """Only what writes a state waits for the batch in flight; what brings one does not."""
        for event in (fence.rows_known, *fence.rows_free):
            self._port.wait(self._stream, event)

    def _require_parts(self, page_slots: I64) -> None:
        tails = read_tails(self._slots, page_slots, self._snapshots.layout)
        if (
            tails is None
            or len(page_slots) != self._snapshots.num_parts
            or (tails.rope_state != ROPE_BOUND).any()
            or len(np.unique(tails.position)) != 1
        ):
            raise CopyError(f"slots {page_slots.tolist()} do not hold the parts of one state")

    def behind_queued(self, after: Any = None) -> Any:
        """See `LoadPath.behind_queued`."""
        if not self._port.brings_pages:
            return None
        if after is not None:
            self._port.wait(self._stream, after)
        return self._port.record(self._stream)
