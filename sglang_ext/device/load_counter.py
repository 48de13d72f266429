"""Layer-wise load counter: the forward waits at each layer for that layer's pages only.

SGLang's KV pool calls `wait_until(layer)` from `get_key_buffer`. On a CPU the wait lasts until the
layer was copied; on CUDA it lasts until the copy was *queued*, and the forward's stream then waits
for the copy's event on the device. No thread waits for the device here: queueing needs nothing
that the device has yet to do.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass
class _Batch:
    """One batch of loads; guarded by the counter's lock."""

    num_done: int = 0
    error: BaseException | None = None
    error_event: Any = None
    events: list[Any] = field(default_factory=list)
    first_wait_over_s: float = 0.0
    last_done_s: float = 0.0


class LoadCounter:
    """Counts copied layers of each batch of loads. Layers complete in order.

    Attributes:
        num_layers: L.
        consumer_index: the batch that the current forward reads, -1 for none.
    """

    def __init__(self, num_layers: int) -> None:
        self.num_layers = num_layers
        self.consumer_index = -1
        self._producer_index = -1
        self._batches: dict[int, _Batch] = {}
        self._changed = threading.Condition()

    def update_producer(self) -> int:
        """Opens a batch, which the next forward reads, and returns its index.

        The batch is made the consumer's here, as SGLang 0.5.23 calls `set_consumer` only before a
        forward that generates, and not before one that embeds. Both read the batch opened last.
        """
        with self._changed:
            self._producer_index += 1
            self._batches[self._producer_index] = _Batch()
            self.consumer_index = self._producer_index
            return self._producer_index

    def set_consumer(self, index: int) -> None:
        """Names the batch that the next forward reads; SGLang calls it before it generates."""
        self.consumer_index = index

    def complete(self, index: int, event: Any = None) -> None:
        """Says that the next layer of a batch is copied (or queued, with a CUDA event)."""
        with self._changed:
            batch = self._batches.get(index)
            if batch is None:
                return
            batch.events.append(event)
            batch.last_done_s = time.monotonic()
            batch.num_done += 1  # last: waiters look at it without the lock
            self._changed.notify_all()

    def fail(self, index: int, error: BaseException, event: Any = None) -> None:
        """Ends a batch with an error; waiters go on, `finish` reports it.

        Args:
            index: of the batch.
            error: what happened.
            event: behind what was queued before; None where nothing is queued.
        """
        with self._changed:
            batch = self._batches.get(index)
            if batch is not None:
                batch.error_event = event  # first: waiters look at the error without the lock
                batch.error = error
                self._changed.notify_all()

    def wait_until(self, threshold: int) -> None:
        """Waits for layer `threshold` of the consumer's batch. Never raises."""
        index = self.consumer_index
        if index < 0:
            return
        batch = self._batches.get(index)
        if batch is None:
            return
        if batch.num_done <= threshold and batch.error is None:
            with self._changed:
                self._changed.wait_for(
                    lambda: batch.num_done > threshold or batch.error is not None
                )
        if threshold == 0 and not batch.first_wait_over_s:
            batch.first_wait_over_s = time.monotonic()
        event = batch.events[threshold] if batch.error is None else batch.error_event
        if event is not None:
            event.wait()

    def finish(self, index: int) -> tuple[bool, float, Any]:
        """Waits until a batch is copied, or queued, and closes it.

        Returns:
            Whether every layer landed (or will), by how many seconds layer 0 was released to the
            forward before the last layer was copied (the overlap; 0 where there was none), and the
            event behind all that was queued (None without).
        """
        with self._changed:
            batch = self._batches.get(index)
            if batch is None:
                return True, 0.0, None
            self._changed.wait_for(
                lambda: batch.num_done >= self.num_layers or batch.error is not None
            )
            del self._batches[index]
        overlap_s = batch.last_done_s - batch.first_wait_over_s if batch.first_wait_over_s else 0.0
        last = batch.events[-1] if batch.error is None else batch.error_event
        return batch.error is None, max(overlap_s, 0.0), last

    def reset(self) -> None:
        """Forgets all batches; none may be running."""
        with self._changed:
            self.consumer_index = -1
            self._batches.clear()
