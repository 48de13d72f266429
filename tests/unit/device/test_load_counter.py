"""The forward waits for the layer it needs and for no other."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sglang_ext.device import load_counter
from sglang_ext.device.load_counter import LoadCounter


class Event:
    def __init__(self) -> None:
        self.waits = 0

    def wait(self) -> None:
        self.waits += 1


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    return thread


def test_waits_for_its_layer_only() -> None:
    counter = LoadCounter(3)
    index = counter.update_producer()
    counter.set_consumer(index)
    counter.complete(index)
    counter.wait_until(0)  # does not block
    waiting = in_thread(lambda: counter.wait_until(1))
    waiting.join(0.05)
    assert waiting.is_alive()
    counter.complete(index)
    waiting.join(300)
    assert not waiting.is_alive()
    counter.complete(index)
    landed, overlap_s, _ = counter.finish(index)
    assert landed
    assert overlap_s > 0.03  # layer 0 was released long before the last layer


@pytest.mark.parametrize("fails", [False, True])
def test_who_sees_that_a_layer_is_there_sees_its_event(
    fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiters look without the lock, so they may look between any two assignments."""
    counter, event, looks = LoadCounter(2), Event(), []

    class Batch(load_counter._Batch):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if self in counter._batches.values() and (self.num_done or self.error is not None):
                counter.wait_until(0)
                looks.append(name)

    monkeypatch.setattr(load_counter, "_Batch", Batch)
    index = counter.update_producer()
    if fails:
        counter.fail(index, RuntimeError("a bug"), event)
    else:
        counter.complete(index, event)
    assert event.waits == len(looks) > 0


def test_the_next_forward_waits_without_being_told_which_batch_it_reads() -> None:
    """SGLang runs embedding forwards without naming the consumer."""
    counter = LoadCounter(1)
    index = counter.update_producer()
    waiting = in_thread(lambda: counter.wait_until(0))
    waiting.join(0.05)
    assert waiting.is_alive()
    counter.complete(index)
    waiting.join(300)
    assert not waiting.is_alive()
    assert counter.finish(index)[0]
    counter.wait_until(0)  # later forwards do not


def test_no_overlap_where_the_forward_came_late() -> None:
    counter = LoadCounter(2)
    index = counter.update_producer()
    counter.complete(index)
    counter.complete(index)
    counter.set_consumer(index)
    counter.wait_until(0)
    assert counter.finish(index) == (True, 0.0, None)


def test_without_a_batch_nothing_waits() -> None:
    counter = LoadCounter(2)
    counter.wait_until(0)
    counter.set_consumer(-1)
    counter.wait_until(1)
    counter.set_consumer(17)
    counter.wait_until(1)
    assert counter.finish(17) == (True, 0.0, None)
    assert counter.finish(-1) == (True, 0.0, None)


def test_a_failure_frees_the_waiters_and_is_reported_at_the_end() -> None:
    counter = LoadCounter(3)
    index = counter.update_producer()
    counter.set_consumer(index)
    waiting = in_thread(lambda: counter.wait_until(2))
    counter.complete(index)
    counter.fail(index, RuntimeError("disk"))
    waiting.join(300)
    assert not waiting.is_alive()
    assert counter.finish(index)[0] is False


def test_finish_waits_for_the_last_layer() -> None:
    counter = LoadCounter(2)
    index = counter.update_producer()
    counter.complete(index)
    done: list[tuple[bool, float, object]] = []
    finishing = in_thread(lambda: done.append(counter.finish(index)))
    finishing.join(0.05)
    assert finishing.is_alive()
    counter.complete(index)
    finishing.join(300)
    assert done == [(True, 0.0, None)]
    counter.complete(index)  # after the end: ignored
    counter.fail(index, RuntimeError())


def test_several_batches_are_apart() -> None:
    counter = LoadCounter(1)
    first, second, third = (counter.update_producer() for _ in range(3))
    assert len({first, second, third}) == 3
    counter.complete(third)
    counter.fail(second, RuntimeError())
    counter.set_consumer(third)
    counter.wait_until(0)
    assert counter.finish(third)[0]
    assert not counter.finish(second)[0]
    counter.complete(first)
    assert counter.finish(first)[0]


def test_on_cuda_it_waits_for_the_layers_event_on_the_device() -> None:
    counter = LoadCounter(2)
    index = counter.update_producer()
    events = [Event(), Event()]
    counter.set_consumer(index)
    for event in events:
        counter.complete(index, event)
    counter.wait_until(1)
    assert [event.waits for event in events] == [0, 1]


def test_reset_forgets() -> None:
    counter = LoadCounter(1)
    index = counter.update_producer()
    counter.set_consumer(index)
    counter.reset()
    assert counter.consumer_index == -1
    counter.wait_until(0)
    assert counter.finish(index)[0]  # would wait for ever if the batch were still known
    assert counter.update_producer() != index
