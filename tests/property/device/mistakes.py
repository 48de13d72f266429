"""Ways to get the order of loads and saves wrong: each is put in, and must be found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import attrgetter
from typing import Any

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.load_counter import LoadCounter  # noqa: E402
from sglang_ext.device.load_pages import IndexMemory  # noqa: E402
from sglang_ext.device.load_path import Fence, Landing, LoadPath  # noqa: E402
from sglang_ext.device.load_thread import LoadThread  # noqa: E402
from sglang_ext.device.ring import Ring  # noqa: E402
from sglang_ext.device.save_path import SavePath  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from testkit.simulated.device import Event, SimulatedDevice  # noqa: E402

Mutation = Callable[[pytest.MonkeyPatch], None]

may_end_a_thread = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnhandledThreadExceptionWarning"
)
"""Of a test that puts a mistake in: the thread that meets the conflict may end of it."""


def say_layers_early(patch: pytest.MonkeyPatch, path: type, stream: str) -> None:
    """Each layer of a load is said to be there behind what was queued before it.

    Args:
        patch: takes it back.
        path: the load path, which has `queue`.
        stream: where its stream is that writes the layers.
    """
    real: Any = path.queue  # type: ignore[attr-defined]

    def queue(self: Any, loads: Any, fence: Any, on_layer: Any) -> Any:
        early = self._port.record(attrgetter(stream)(self))
        return real(self, loads, fence, lambda _: on_layer(early))

    patch.setattr(path, "queue", queue)


def forwards_not_awaited(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath.fence
    patch.setattr(LoadPath, "fence", lambda self: replace(real(self), rows_free=()))


def forward_stream_not_awaited(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath.fence

    def fence(self: LoadPath) -> Fence:
        made = real(self)
        return replace(made, rows_free=made.rows_free[:1])

    patch.setattr(LoadPath, "fence", fence)


def rows_not_awaited(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath.fence

    def fence(self: LoadPath) -> Fence:
        made = real(self)
        return Fence(Event(self._port, {}, 0.0), made.rows_free[1:])  # type: ignore[arg-type]

    patch.setattr(LoadPath, "fence", fence)


def copies_not_awaited(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath._bring

    def bring(self: LoadPath, *args: Any) -> Any:
        wait = self._port.wait
        self._port.wait = lambda stream, event: (  # type: ignore[method-assign]
            None if stream is self._streams.scatters else wait(stream, event)
        )
        try:
            return real(self, *args)
        finally:
            self._port.wait = wait  # type: ignore[method-assign]

    patch.setattr(LoadPath, "_bring", bring)


def buffer_reused_too_soon(patch: pytest.MonkeyPatch) -> None:
    real = Ring.take

    def take(self: Ring) -> Any:
        buffer = real(self)
        buffer.free = None
        return buffer

    patch.setattr(Ring, "take", take)


def buffer_freed_by_the_copy(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath._bring

    def bring(self: LoadPath, ring: Ring, *args: Any) -> Any:
        for buffer in ring._buffers:
            if buffer.free is not None:
                buffer.free = self._port.record(self._streams.copies)
        return real(self, ring, *args)

    patch.setattr(LoadPath, "_bring", bring)


def layer_event_too_early(patch: pytest.MonkeyPatch) -> None:
    say_layers_early(patch, LoadPath, "_streams.scatters")


def layer_event_of_the_copies(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath.queue

    def queue(self: LoadPath, loads: Any, fence: Fence, on_layer: Any) -> Any:
        return real(self, loads, fence, lambda _: on_layer(self._port.record(self._streams.copies)))

    patch.setattr(LoadPath, "queue", queue)


def layers_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadCounter, "wait_until", lambda self, threshold: None)


def pins_given_back_when_queued(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimulatedDevice, "when_done", lambda self, event, call: call())
    patch.setattr(SimulatedDevice, "seconds_between", lambda self, first, last: 0.0)


def pins_given_back_with_the_first_copy(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath.queue

    def queue(self: LoadPath, *args: Any) -> Landing:
        landing = real(self, *args)
        return Landing(landing.busy[0][0], [])

    patch.setattr(LoadPath, "queue", queue)


def restored_page_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadPath, "before_forwards", lambda self, event: None)


def failed_load_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadPath, "behind_queued", lambda self, after=None: None)


def failed_load_not_awaited_by_forwards(patch: pytest.MonkeyPatch) -> None:
    real = LoadCounter.fail
    patch.setattr(
        LoadCounter, "fail", lambda self, index, error, event=None: real(self, index, error)
    )


def pins_of_a_failed_load_given_back(patch: pytest.MonkeyPatch) -> None:
    real = LoadThread._fail

    def give_up(self: LoadThread, index: int, jobs: Any, error: BaseException) -> None:
        self._release(jobs)
        real(self, index, [], error)

    patch.setattr(LoadThread, "_fail", give_up)


def buffer_of_a_failed_launch_reused(patch: pytest.MonkeyPatch) -> None:
    real = LoadPath._bring_and_scatter

    def bring_and_scatter(self: LoadPath, ring: Ring, *args: Any) -> Any:
        before = [buffer.free for buffer in ring._buffers]
        try:
            return real(self, ring, *args)
        except RuntimeError:
            for buffer, free in zip(ring._buffers, before, strict=True):
                buffer.free = free
            raise

    patch.setattr(LoadPath, "_bring_and_scatter", bring_and_scatter)


def pins_of_a_restored_page_given_back(patch: pytest.MonkeyPatch) -> None:
    def end(self: HierKVLinker, ticket: Any, token_slots: Any, last: Any) -> None:
        self._load_path.before_forwards(last)
        self.store.release(ticket.slots)

    patch.setattr(HierKVLinker, "_end_restore", end)


def indices_written_over_those_in_use(patch: pytest.MonkeyPatch) -> None:
    """Uploaded where pages are brought: kernels of the load before may still read theirs."""
    real, place = LoadPath._bring_and_scatter, IndexMemory.place

    def bring_and_scatter(self: LoadPath, *args: Any) -> Any:
        indices, port = self._indices, self._port

        def elsewhere(parts: Any) -> Any:
            with port.on(self._streams.copies):
                made = place(indices, parts)
            port.wait(self._streams.scatters, port.record(self._streams.copies))
            return made

        indices.place = elsewhere  # type: ignore[method-assign]
        return real(self, *args)

    patch.setattr(LoadPath, "_bring_and_scatter", bring_and_scatter)


def saves_not_awaited(patch: pytest.MonkeyPatch) -> None:
    """Published when they are queued; the tails are what the last save left."""

    @contextmanager
    def saving(self: SavePath, events: list[Any]) -> Iterator[None]:
        for event in events:
            self._port.wait(self._streams.gathers, event)
        yield

    real = SavePath.save

    def save(self: SavePath, *args: Any) -> Any:
        synchronize = self._port.synchronize
        self._port.synchronize = lambda event: None  # type: ignore[method-assign]
        try:
            return real(self, *args)
        finally:
            self._port.synchronize = synchronize  # type: ignore[method-assign]

    patch.setattr(SavePath, "saving", saving)
    patch.setattr(SavePath, "save", save)


def failed_saves_not_awaited(patch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def saving(self: SavePath, events: list[Any]) -> Iterator[None]:
        for event in events:
            self._port.wait(self._streams.gathers, event)
        yield
        self._port.synchronize(self._port.record(self._streams.sends))

    patch.setattr(SavePath, "saving", saving)


def saved_before_it_was_written(patch: pytest.MonkeyPatch) -> None:
    real = SavePath.saving
    patch.setattr(SavePath, "saving", lambda self, events: real(self, []))


def forward_not_awaited_by_saves(patch: pytest.MonkeyPatch) -> None:
    """Only what knows the rows is: the forward that fills them may still run."""
    real = SavePath.ready_events
    patch.setattr(SavePath, "ready_events", lambda self: real(self)[:1])


def failed_copies_not_awaited(patch: pytest.MonkeyPatch) -> None:
    def behind_queued(self: LoadPath, after: Any = None) -> Any:
        if after is not None:
            self._port.wait(self._streams.scatters, after)
        return self._port.record(self._streams.scatters)

    patch.setattr(LoadPath, "behind_queued", behind_queued)


def sent_before_it_was_laid_out(patch: pytest.MonkeyPatch) -> None:
    def send(self: SavePath, part: Any, pages: Any, span: slice) -> None:
        with self._port.on(self._streams.sends):
            self._port.send(self._copier.slots, part.page_slots, span, pages)

    patch.setattr(SavePath, "_send", send)


def laid_out_over_what_is_sent(patch: pytest.MonkeyPatch) -> None:
    real = SavePath._lay_out_and_send

    def lay_out(self: SavePath, ring: Ring, *args: Any, **options: Any) -> None:
        take = ring.take

        def too_soon() -> Any:
            buffer = take()
            buffer.free = None
            return buffer

        ring.take = too_soon  # type: ignore[method-assign]
        real(self, ring, *args, **options)
        ring.take = take  # type: ignore[method-assign]

    patch.setattr(SavePath, "_lay_out_and_send", lay_out)


def tails_written_over_what_is_sent(patch: pytest.MonkeyPatch) -> None:
    real = SavePath._lay_out_and_send

    def lay_out(self: SavePath, *args: Any, **options: Any) -> None:
        self._tails_sent = None
        real(self, *args, **options)

    patch.setattr(SavePath, "_lay_out_and_send", lay_out)


def sent_before_it_was_restored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HierKVLinker, "restoring", lambda self: None)


def scheduler_waits(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadPath, "before_forwards", lambda self, event: self._port.synchronize(event))


MISTAKES: tuple[Mutation, ...] = (
    forwards_not_awaited,
    forward_stream_not_awaited,
    rows_not_awaited,
    copies_not_awaited,
    buffer_reused_too_soon,
    buffer_freed_by_the_copy,
    layer_event_too_early,
    layer_event_of_the_copies,
    layers_not_awaited,
    pins_given_back_when_queued,
    pins_given_back_with_the_first_copy,
    restored_page_not_awaited,
    failed_load_not_awaited,
    failed_load_not_awaited_by_forwards,
    pins_of_a_failed_load_given_back,
    buffer_of_a_failed_launch_reused,
    pins_of_a_restored_page_given_back,
    indices_written_over_those_in_use,
    saves_not_awaited,
    failed_saves_not_awaited,
    saved_before_it_was_written,
    forward_not_awaited_by_saves,
    failed_copies_not_awaited,
    sent_before_it_was_laid_out,
    laid_out_over_what_is_sent,
    tails_written_over_what_is_sent,
    sent_before_it_was_restored,
    scheduler_waits,
)
