"""What a remote store is asked of a model with states, against all that it has."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.admission.state_question import StateQuestion
from sglang_ext.admission.waiting_request import Remote, ReusablePrefix, WaitingRequest
from sglang_ext.device.states.snapshots import part_hashes
from sglang_ext.seam.hybrids.place_questions import PlaceQuestions
from sglang_ext.tiers.store.types import TierCounts
from tests.unit.seam.hybrids.test_window_questions import Store, leading

PARTS = 3


class Parts:
    """What knows how many parts a state has."""

    def entries(self, page_hash: Any) -> Any:
        return np.concatenate(
            [part_hashes(page_hash.reshape(1, 32), part) for part in range(PARTS)]
        )


class Seekable(Store):
    """A store that is also asked for the first of some keys."""

    def answer(self) -> None:
        for question in self.questions:
            if question.seeks:
                there = [row.tobytes() in self.remote for row in question.hashes]
                question.first = there.index(True) if True in there else None
        super().answer()


def questions_of(store: Store, entered: dict[Any, ReusablePrefix]) -> PlaceQuestions:
    def enter(handle: Any, prefix: ReusablePrefix, key: Any) -> None:
        entered[handle] = prefix

    return PlaceQuestions(StateQuestion, Parts(), store, enter, lambda _: None, longest_s=30.0)  # type: ignore[arg-type]


def test_what_is_wished_for_is_there_and_is_the_furthest_of_what_was_asked_for() -> None:
    rng = random.Random(4)
    num_entered = num_with_last = 0
    for case in range(800):
        num = rng.randint(2, 14)
        hashes = np.frombuffer(rng.randbytes(32 * num), np.uint8).reshape(-1, 32)
        above, limit = rng.randint(0, num - 2), num - rng.randint(0, 1)
        tail, last = hashes[above:limit], hashes[limit:]
        share = rng.choice((0.7, 0.95, 1.0))
        here = {row.tobytes() for row in hashes if rng.random() < share}
        remote = {row.tobytes() for row in hashes if rng.random() < share}
        for page in range(len(tail)):
            if rng.random() < 0.4:  # a state, of which parts may lie in one place alone
                for row in Parts().entries(tail[page]):
                    place = rng.choice((here, remote, remote, remote))
                    if rng.random() < rng.choice((0.8, 1.0)):
                        place.add(row.tobytes())
        least = resumable(tail[: leading(tail, here)], here)
        entered: dict[Any, ReusablePrefix] = {}
        store = Seekable(here, remote)
        questions = questions_of(store, entered)
        space: Any = SimpleNamespace()
        prefix = ReusablePrefix(space, hashes[:above], above, 0)
        questions.begin("one", prefix, None, hashes[above:], limit, least)
        for _ in range(30):
            if store.questions:
                assert not questions.may_admit("one")
            questions.step()
            store.answer()
        assert questions.may_admit("one")
        num_full = leading(tail, here)
        num_full += leading(tail[num_full:], remote)
        best = resumable(tail[:num_full], here | remote)
        if "one" not in entered:
            # Nothing is there, or of too many states one part alone.
            assert best <= least or num_begun(tail[best:num_full], here | remote) >= 4, case
            continue
        num_entered += 1
        assert entered["one"].resumes_at == above + best, case
        found = entered["one"].hashes
        wanted = np.concatenate([hashes[: above + best], Parts().entries(tail[best - 1])])
        if best == len(tail) and len(last):
            num_with_last += 1
            wanted = np.concatenate([wanted, last])
        assert np.array_equal(found, wanted), case
    assert num_entered > 150
    assert num_with_last > 10


def resumable(tail: Any, keys: set[bytes]) -> int:
    """Pages behind the last of which a whole state is."""
    ends = [
        end
        for end in range(1, len(tail) + 1)
        if all(row.tobytes() in keys for row in Parts().entries(tail[end - 1]))
    ]
    return max(ends, default=0)


def num_begun(tail: Any, keys: set[bytes]) -> int:
    return sum(row.tobytes() in keys for row in part_hashes(tail, 0)) if len(tail) else 0


def test_the_page_behind_all_that_was_asked_for_is_had_where_it_is_there() -> None:
    """As one of several ranks asks, which follows its question itself."""
    hashes = np.frombuffer(random.Random(1).randbytes(32 * 4), np.uint8).reshape(-1, 32)
    keys = {row.tobytes() for row in (*hashes[:3], *Parts().entries(hashes[2]))}
    for has_last in (False, True):
        store = Seekable(set(), keys | ({hashes[3].tobytes()} if has_last else set()))
        questions = questions_of(store, {})
        space: Any = SimpleNamespace()
        question = questions.ask(space, hashes[:3], hashes[3:], 0, 0)
        assert question is not None
        while not question.step():
            store.answer()
        assert question.end == 3
        assert np.array_equal(question.resume_keys, Parts().entries(hashes[2]))
        assert np.array_equal(question.last_keys, hashes[3:] if has_last else hashes[:0])


def test_an_answer_that_is_late_is_not_waited_for() -> None:
    hashes = np.frombuffer(bytes(32), np.uint8).reshape(1, 32)
    store = Seekable(set(), set())
    now = [0.0]
    space: Any = SimpleNamespace()
    prefix = ReusablePrefix(space, hashes[:0], 0, 0)
    waiting = WaitingRequest("one", 1, prefix, TierCounts(0, 0, 0, 0), 0)
    questions = PlaceQuestions(
        StateQuestion,
        Parts(),
        store,  # type: ignore[arg-type]
        lambda *_: None,
        lambda _: waiting,
        longest_s=2.0,
        clock=lambda: now[0],
    )
    questions.begin("one", prefix, None, hashes, 1, 0)
    assert not questions.may_admit("one")
    (asked,) = store.questions
    now[0] = 2.0
    assert questions.may_admit("one")
    assert asked.cancelled
    assert waiting.remote is Remote.UNANSWERED  # as its misses will say


@pytest.mark.parametrize(("time_s", "wanted"), [(0.0, [6, 4, 2]), (1.0, [6, 4]), (2.0, [6])])
def test_what_could_not_be_fetched_has_a_nearer_state_asked_for_as_long_as_there_is_time(
    time_s: float, wanted: list[int]
) -> None:
    """Each time the store says that it has a state, and then does not give all of it."""
    hashes = np.frombuffer(random.Random(3).randbytes(32 * 6), np.uint8).reshape(-1, 32)
    states = np.concatenate([Parts().entries(hashes[page]) for page in (1, 3, 5)])
    store = Seekable(set(), {row.tobytes() for row in (*hashes, *states)})
    waiting: Any = SimpleNamespace(
        remote=Remote.NOT_ASKED, late=False, is_held_as=lambda before: None
    )
    ends: list[int | None] = []
    space: Any = SimpleNamespace()
    now = [0.0]
    questions = PlaceQuestions(
        StateQuestion,
        Parts(),
        store,  # type: ignore[arg-type]
        lambda handle, prefix, key: ends.append(prefix.resumes_at),
        lambda handle: waiting,
        longest_s=2.0,
        clock=lambda: now[0],
    )
    questions.begin("one", ReusablePrefix(space, hashes[:0], 0, 0), None, hashes, 6, 0)
    for _ in range(4):
        waiting.remote = Remote.ANSWERED
        while not questions.may_admit("one"):
            store.answer()
            questions.step()
        waiting.remote = Remote.FAILED  # what was fetched meanwhile
        now[0] += time_s
        if questions.may_admit("one"):
            break
    assert ends == wanted
