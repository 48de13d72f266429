"""States, windows and drafts on a simulated device: in no order that it runs them do two race.

As `test_device_orders.py`, for models that keep more of a request than rows of one pool.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.assembly import draft_setup  # noqa: E402
from sglang_ext.device.load_path import Fence, Landing, LoadParts, LoadPath  # noqa: E402
from sglang_ext.device.load_thread import LoadThread  # noqa: E402
from sglang_ext.device.ports.streams import Streams  # noqa: E402
from sglang_ext.device.save_path import SaveParts, SavePath  # noqa: E402
from sglang_ext.device.states.state_path import StateLoadPath, StateSavePath  # noqa: E402
from sglang_ext.device.transfers import LoadJob  # noqa: E402
from sglang_ext.seam.linker import HierKVLinker  # noqa: E402
from testkit.simulated.device import ConflictError  # noqa: E402
from testkit.simulated.kernels import SimulatedKernels, SimulatedSnapshots  # noqa: E402
from tests.property.device.device_hybrids import (  # noqa: E402
    BlockWorld,
    DraftWorld,
    IndexWorld,
    MadeWindowWorld,
    StateWorld,
    WindowWorld,
)
from tests.property.device.device_world import (  # noqa: E402
    MUST_HAPPEN,
    DeviceWorld,
    run_seeds,
    run_world,
    run_worlds,
)
from tests.property.device.mistakes import Mutation, say_layers_early  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "also"),
    [
        (DraftWorld, ()),
        (IndexWorld, ()),
        (StateWorld, ("track", "save_unplaced_pages")),
        (WindowWorld, ("slide", "offer_window", "save_unplaced_pages")),
        (MadeWindowWorld, ("slide", "offer_window", "save_unplaced_pages")),
        (BlockWorld, ("slide", "offer_window", "save_unplaced_pages")),
    ],
)
def test_nothing_is_read_or_written_out_of_order(
    kind: type[DeviceWorld], also: tuple[str, ...]
) -> None:
    run_worlds(kind, (*MUST_HAPPEN, *also))


@pytest.mark.parametrize("kind", [StateWorld, WindowWorld, BlockWorld])
def test_all_parts_share_five_streams(kind: type[DeviceWorld]) -> None:
    """torch has 32 a device, of which SGLang has some."""
    world = run_world(kind, 1)
    of_threads = [stack for stack in world.device._on.values() if stack]
    assert len(world.device._streams) == 5 + len(of_threads) + 1  # and the one for forwards


# Ways to get the order wrong: each is put in, and must be found.


def state_saved_before_it_was_written(patch: pytest.MonkeyPatch) -> None:
    real = SaveParts.saving
    patch.setattr(SaveParts, "saving", lambda self, events: real(self, []))


def slot_given_away_before_its_copy(patch: pytest.MonkeyPatch) -> None:
    """A state is said to be saved when that is queued; pages, on its stream, wait in `save`."""

    @contextmanager
    def saving(self: SaveParts, events: list[Any]) -> Iterator[None]:
        path = self._paths[1]
        for event in events:
            path._port.wait(path._stream, event)
        yield

    real = StateSavePath.save

    def save(self: StateSavePath, *args: Any) -> Any:
        port = self._port
        synchronize, seconds_between = port.synchronize, port.seconds_between
        port.synchronize = lambda event: None  # type: ignore[method-assign]
        port.seconds_between = lambda first, last: 0.0  # type: ignore[method-assign]
        try:
            return real(self, *args)
        finally:
            port.synchronize = synchronize  # type: ignore[method-assign]
            port.seconds_between = seconds_between  # type: ignore[method-assign]

    patch.setattr(SaveParts, "saving", saving)
    patch.setattr(StateSavePath, "save", save)


def state_sent_before_it_was_laid_out(patch: pytest.MonkeyPatch) -> None:
    """It is laid out on a stream that begins with what the save waits for, and nobody waits for."""
    real = SimulatedSnapshots.gather

    def gather(self: SimulatedSnapshots, slot: Any, out: Any) -> None:
        device = self._kernels.device
        known, other = device.record(device.current_stream()), device.new_stream(())
        device.wait(other, known)
        with device.on(other):
            real(self, slot, out)

    patch.setattr(SimulatedSnapshots, "gather", gather)


def forwards_not_awaited_by_states(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StateLoadPath, "_wait_for", lambda self, fence: None)


def state_scattered_beside_its_copy(patch: pytest.MonkeyPatch) -> None:
    """A state is brought on a stream that no scatter waits for."""

    class Elsewhere:
        def __init__(self, port: Any) -> None:
            self._port, self._stream = port, port.new_stream(())

        def __getattr__(self, name: str) -> Any:
            return getattr(self._port, name)

        def bring(self, *args: Any) -> None:
            with self._port.on(self._stream):
                self._port.bring(*args)

    real = StateLoadPath.queue

    def queue(self: StateLoadPath, *args: Any) -> Landing:
        if not isinstance(self._port, Elsewhere):
            self._port = Elsewhere(self._port)  # type: ignore[assignment]
        return real(self, *args)

    patch.setattr(StateLoadPath, "queue", queue)


def state_brought_over_one_that_is_scattered(patch: pytest.MonkeyPatch) -> None:
    """Each load has a stream of its own, and all have one buffer."""
    real = StateLoadPath.queue

    def queue(self: StateLoadPath, *args: Any) -> Landing:
        self._streams.states = self._port.new_stream(())
        return real(self, *args)

    patch.setattr(StateLoadPath, "queue", queue)


def states_said_to_be_there_too_early(patch: pytest.MonkeyPatch) -> None:
    say_layers_early(patch, StateLoadPath, "_stream")


def states_said_to_be_there_with_the_rows(patch: pytest.MonkeyPatch) -> None:
    """Each layer's event is that of the attention layers."""
    real = StateLoadPath.queue

    def queue(self: StateLoadPath, loads: Any, fence: Fence, on_layer: Any) -> Landing:
        return real(self, loads, fence, lambda _: on_layer(fence.rows_free[-1]))

    patch.setattr(StateLoadPath, "queue", queue)


def pins_given_back_with_the_first_part(patch: pytest.MonkeyPatch) -> None:
    real = LoadParts.queue

    def queue(self: LoadParts, *args: Any) -> Landing:
        landings: list[Landing] = []
        first = self._paths[0]
        real_first = first.queue

        def note(*its: Any) -> Landing:
            landings.append(real_first(*its))
            return landings[0]

        first.queue = note
        try:
            real(self, *args)
        finally:
            first.queue = real_first
        return landings[0]

    patch.setattr(LoadParts, "queue", queue)


def failed_state_load_not_awaited(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LoadParts, "behind_queued", lambda self: self._paths[0].behind_queued())


def parts_on_streams_of_their_own(patch: pytest.MonkeyPatch) -> None:
    """The last one's event stands for all, and layers in two groups are written by both."""

    class Own(Streams):
        pass

    real = LoadPath.queue

    def queue(self: LoadPath, loads: Any, fence: Fence, on_layer: Any) -> Landing:
        if not isinstance(self._streams, Own):
            self._streams = Own(self._port, self._streams.forwards)
            self._streams.take()
        return real(self, loads, replace(fence, rows_free=fence.rows_free[:2]), on_layer)

    patch.setattr(LoadPath, "queue", queue)


def states_not_behind_the_pages(patch: pytest.MonkeyPatch) -> None:
    """A state has a stream of its own, and its event stands for the pages, too."""
    real = StateLoadPath.queue

    def queue(self: StateLoadPath, loads: Any, fence: Fence, on_layer: Any) -> Landing:
        return real(self, loads, replace(fence, rows_free=fence.rows_free[:2]), on_layer)

    patch.setattr(StateLoadPath, "queue", queue)


def gaps_left_as_they_were(patch: pytest.MonkeyPatch) -> None:
    """What a page had in its slot, or another save in its buffer, goes on in this one's."""
    patch.setattr(SimulatedKernels, "clear", lambda self, pages: None)


def rows_looked_at_before_they_are_known(patch: pytest.MonkeyPatch) -> None:
    def has_rows_below(self: Any, end: int, token_slots: Any) -> bool:
        with self._port.on(self._port.new_stream(())):
            return bool(self._port.any_below(token_slots, end))

    patch.setattr(SavePath, "has_rows_below", has_rows_below)
    patch.setattr(StateSavePath, "has_rows_below", has_rows_below)


def tensors_given_up_when_the_load_is_queued(patch: pytest.MonkeyPatch) -> None:
    """torch gives their memory to the next ones, and a stream of ours still reads there."""
    real = LoadThread.load

    def load(self: LoadThread, index: int, jobs: list[LoadJob], fence: Fence) -> None:
        real(self, index, jobs, fence)
        jobs[:] = [replace(job, token_slots=torch.empty(0), state=None) for job in jobs]

    patch.setattr(LoadThread, "load", load)


def draft_waits_for_its_own_layer(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        draft_setup._WholeLoads,
        "wait_until",
        lambda self, threshold: self._counter.wait_until(threshold),
    )


def scheduler_reads_a_slot(patch: pytest.MonkeyPatch) -> None:
    real = HierKVLinker.start_layer_wise_loading

    def start(self: HierKVLinker) -> int:
        for job in self._pending_loads.values():
            assert job.state is not None
            assert int(job.state.slot) >= 0
        return real(self)

    patch.setattr(HierKVLinker, "start_layer_wise_loading", start)


def scheduler_uploads_indices(patch: pytest.MonkeyPatch) -> None:
    real = HierKVLinker.start_layer_wise_loading

    def start(self: HierKVLinker) -> int:
        for job in self._pending_loads.values():
            assert len(job.token_slots[[0]])
        return real(self)

    patch.setattr(HierKVLinker, "start_layer_wise_loading", start)


@pytest.mark.parametrize(
    ("kind", "mutate"),
    [
        (StateWorld, state_saved_before_it_was_written),
        (StateWorld, slot_given_away_before_its_copy),
        (StateWorld, state_sent_before_it_was_laid_out),
        (StateWorld, forwards_not_awaited_by_states),
        (StateWorld, state_scattered_beside_its_copy),
        (StateWorld, state_brought_over_one_that_is_scattered),
        (StateWorld, states_said_to_be_there_too_early),
        (StateWorld, states_said_to_be_there_with_the_rows),
        (StateWorld, pins_given_back_with_the_first_part),
        (StateWorld, failed_state_load_not_awaited),
        (StateWorld, rows_looked_at_before_they_are_known),
        (StateWorld, scheduler_reads_a_slot),
        (StateWorld, scheduler_uploads_indices),
        (StateWorld, states_not_behind_the_pages),
        (WindowWorld, parts_on_streams_of_their_own),
        (WindowWorld, pins_given_back_with_the_first_part),
        (WindowWorld, rows_looked_at_before_they_are_known),
        (WindowWorld, tensors_given_up_when_the_load_is_queued),
        (BlockWorld, parts_on_streams_of_their_own),
        (BlockWorld, gaps_left_as_they_were),
        (DraftWorld, draft_waits_for_its_own_layer),
    ],
)
def test_a_mistake_in_the_order_is_found(
    kind: type[DeviceWorld], mutate: Mutation, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutate(monkeypatch)
    with pytest.raises(ConflictError):
        run_seeds(kind, 20)
