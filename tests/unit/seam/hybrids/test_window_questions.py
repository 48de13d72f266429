"""What a remote store is asked of a model with window layers, against all that it has."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.admission.window_question import WindowQuestion
from sglang_ext.device.windows.window_layers import WindowLayers, resume_length
from sglang_ext.seam.hybrids.place_questions import PlaceQuestions

GROUPS, PAGES = 2, 2
LAYERS = WindowLayers(PAGES, 64, (None,) * GROUPS, [])  # type: ignore[arg-type]


class Store:
    """Keys that are here, and keys that the remote store has; it answers when it is told to."""

    def __init__(self, here: set[bytes], remote: set[bytes]) -> None:
        self.here = here
        self.remote = remote
        self.questions: list[Any] = []
        self.remote_stalled_s = 0.0
        self.counters = SimpleNamespace(add=lambda *_: None)

    def locate_prefix(self, space: Any, hashes: Any, max_quality: int) -> Any:
        return SimpleNamespace(total=leading(hashes, self.here))

    def page_states(self, space: Any, hashes: Any) -> Any:
        return np.array([row.tobytes() in self.here for row in hashes], np.uint8), None

    def ask_remote(self, question: Any) -> bool:
        self.questions.append(question)
        return True

    def answer(self) -> None:
        for question in self.questions:
            question.sizes = np.ones(leading(question.hashes, self.remote), np.int64)
            question.done = True
        self.questions.clear()


def leading(hashes: Any, keys: set[bytes]) -> int:
    num = 0
    while num < len(hashes) and hashes[num].tobytes() in keys:
        num += 1
    return num


def test_what_is_wished_for_is_there_and_is_the_furthest_of_what_was_asked_for() -> None:
    rng = random.Random(3)
    num_entered = 0
    for case in range(600):
        num = rng.randint(1, 12)
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(-1, 32)
        above = rng.randint(0, num - 1)
        tail = hashes[above:]
        share = rng.choice((0.6, 0.9, 1.0))
        keys = [*tail, *LAYERS.entries(tail)]
        here = {row.tobytes() for row in tail if rng.random() < share}
        # A window's groups are saved together, and are asked for together where one lacks.
        for page in range(len(tail)):
            if rng.random() < share / 2:
                here |= {row.tobytes() for row in LAYERS.entries(tail[page : page + 1])}
        remote = {row.tobytes() for row in keys if rng.random() < share}
        least = resumable(tail, here)
        entered: dict[str, ReusablePrefix] = {}
        store = Store(here, remote)
        window_questions = questions_of(store, enter=partial(enter, entered))
        space: Any = SimpleNamespace()
        wish = ReusablePrefix(space, hashes[:above], above, 0)
        window_questions.begin("one", wish, None, tail, num, least)
        for _ in range(20):
            if store.questions:
                assert not window_questions.may_admit("one")
            window_questions.step()
            store.answer()
        assert window_questions.may_admit("one")
        num_full = leading(tail, here)
        num_full += leading(tail[num_full:], remote)
        best = resumable(tail[:num_full], here | remote)
        if "one" in entered:
            num_entered += 1
            found = entered["one"].hashes
            end = next(
                end
                for end in range(least + 1, best + 1)
                if len(found) == above + end + GROUPS * min(end, PAGES)
            )
            assert (found[: above + end] == hashes[: above + end]).all()
            assert (found[above + end :] == LAYERS.entries(tail[LAYERS.window_of(end)])).all()
            wanted = {row.tobytes() for row in found[above:]}
            assert wanted <= here | remote, case
            assert end == best, case
        else:
            # It is given up for a gap that is far behind what was asked for, or nothing is there.
            assert best <= least or best <= num_full - 4, (case, best, least)
    assert num_entered > 100


def resumable(tail: Any, keys: set[bytes]) -> int:
    full = np.array([row.tobytes() in keys for row in tail], bool)
    entries = [row.tobytes() in keys for row in LAYERS.entries(tail)]
    window = np.asarray(np.array(entries, bool).reshape(GROUPS, -1).all(axis=0))
    return resume_length(full, window, PAGES)


def questions_of(
    store: Store, *, enter: Callable[..., None] = lambda *_: None, longest_s: float = 30.0,
    clock: Callable[[], float] = time.monotonic,
) -> PlaceQuestions:  # fmt: skip
    of_store: Any = store
    return PlaceQuestions(
        WindowQuestion, LAYERS, of_store, enter, lambda _: None, longest_s=longest_s, clock=clock
    )


def enter(entered: dict[Any, ReusablePrefix], handle: Any, wish: ReusablePrefix, key: Any) -> None:
    entered[handle] = wish


def test_a_store_that_does_not_answer_is_waited_for_as_long_as_was_said() -> None:
    hashes = np.frombuffer(random.Random(1).randbytes(32 * 4), np.uint8).reshape(-1, 32)
    now, store = [0.0], Store(set(), set())
    window_questions = questions_of(store, longest_s=2.0, clock=lambda: now[0])
    space: Any = SimpleNamespace()
    window_questions.begin("one", ReusablePrefix(space, hashes[:0], 0, 0), None, hashes, 4, 0)
    (asked,) = store.questions
    assert not window_questions.may_admit("one")
    now[0] = 2.0
    assert window_questions.may_admit("one")
    assert asked.cancelled
    store.remote_stalled_s = 3.0
    window_questions.begin("two", ReusablePrefix(space, hashes[:0], 0, 0), None, hashes, 4, 0)
    assert window_questions.may_admit("two")


def test_a_rank_is_told_of_the_last_page_only_where_all_of_it_is_there() -> None:
    rng = random.Random(5)
    told = set()
    for _ in range(300):
        num = rng.randint(1, 5)
        hashes = np.frombuffer(rng.randbytes(32 * (num + 1)), np.uint8).reshape(-1, 32)
        tail, last = hashes[:num], hashes[num:]
        parts = [row.tobytes() for row in (*last, *LAYERS.entries(last))]
        here = {part for part in parts if rng.random() < 0.5}
        remote = {row.tobytes() for row in (*tail, *LAYERS.entries(tail))}
        remote |= {part for part in parts if rng.random() < 0.8}
        store = Store(here, remote)
        window_questions = questions_of(store)
        space: Any = SimpleNamespace()
        question = window_questions.ask(space, tail, last, 0, 0)
        assert question is not None
        while not question.step():
            store.answer()
        assert question.end == num
        is_there = all(part in here | remote for part in parts)
        assert [row.tobytes() for row in question.last_keys] == parts * is_there
        assert (question.resume_keys == LAYERS.entries(tail[LAYERS.window_of(num)])).all()
        told.add(is_there)
    assert told == {False, True}


def test_nothing_is_asked_for_a_rank_that_waits_for_nothing() -> None:
    hashes = np.frombuffer(random.Random(1).randbytes(32 * 4), np.uint8).reshape(-1, 32)
    store, space = Store(set(), set()), SimpleNamespace()
    window_questions = questions_of(store, longest_s=0.0)
    assert window_questions.ask(space, hashes, hashes[:0], 0, 0) is None  # type: ignore[arg-type]
    assert not store.questions
