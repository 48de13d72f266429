"""Several ranks take what all of them have found alike, and wait for each other no longer."""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_ext.admission.searches import AgreedSearch, SearchReport
from sglang_ext.admission.waiting_request import Readiness
from sglang_ext.identity.tenancy import note_tenant
from sglang_ext.ranks.consensus import MAX_SEARCHES, Agreed, Consensus, Report, Vector
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.truncation.agreed_quotes import AgreedQuotes
from sglang_ext.truncation.lineage import lineage_of

PAGE, HEAD = 4, 3
STORED = list(range(100, 140))


class Thread:
    """Runs what it was asked for when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]] = []

    def submit(self, job: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, job, args))
        return future

    def run(self) -> None:
        jobs, self.jobs = self.jobs, []
        for future, job, args in jobs:
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(job(*args))
            except Exception as error:
                future.set_exception(error)


def request(tokens: Sequence[int], name: str = "r") -> Any:
    req = SimpleNamespace(
        rid=name, cache_request_handle=name, origin_input_ids=array("q", tokens), session=None,
        full_untruncated_fill_ids=array("q", tokens), lora_id=None, extra_key=None,
        cache_salt="salt", sampling_params=SimpleNamespace(custom_params=None),
    )  # fmt: skip
    note_tenant(req, SimpleNamespace(extra_key=None, cache_salt="salt", session_id=None))
    return req


class Rank:
    """One rank, which has stored a conversation.

    Attributes:
        entered: names of the requests that entered the queue anew, with what the search found.
    """

    def __init__(
        self, number: int, *, knows: bool = True, movable: bool = True, keeps_pages: bool = True
    ) -> None:
        self.counts: dict[str, int] = {}
        self.entered: list[tuple[str, str, Any]] = []
        counters: Any = SimpleNamespace(add=self._count)
        store: Any = SimpleNamespace(counters=counters, keeps_pages=keeps_pages)
        reuse: Any = SimpleNamespace(is_movable=lambda: movable, enqueue=self._enqueue)
        truncator: Any = SimpleNamespace(
            secret=b"secret",
            head_of=lambda tokens: HEAD,
            hash_of=self._hashes_of,
            may_quote=lambda req: True,
            wants_match=lambda req: True,
        )
        self.quotes = AgreedQuotes(
            store, reuse, truncator, page_size=PAGE, key_of=lambda req: f"key of {req.rid}"
        )
        self.quotes._thread.shutdown()
        self.thread = Thread()
        self.quotes._thread = self.thread  # type: ignore[assignment]
        # Ranks have namespaces of their own.
        space: Any = SimpleNamespace(digest=bytes([number]) * 32, lora=b"")
        self.space = space
        if knows:
            self.quotes.note(request(STORED), space, len(STORED))
            self.thread.run()

    def _count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def _enqueue(
        self, req: Any, lineage: Any, space: Any, device_pages: int, hashes: Any, key: Any
    ) -> None:
        assert (space, device_pages) == (self.space, 0)
        assert key == f"key of {req.rid}"
        self.entered.append((req.rid, lineage.key, lineage.run.hashes.tobytes()))

    @staticmethod
    def _hashes_of(tokens: array[int], extra_key: str | None, salt: str | None) -> Any:
        whole = np.array(tokens[: len(tokens) // PAGE * PAGE], np.int64).reshape(-1, PAGE)
        return np.repeat(whole[:, :1].astype(np.uint8), 32, axis=1)

    def begin(self, name: str, num_stored: int = 0, num_on_device: int = 0) -> Any:
        req = request([*STORED[:HEAD], *STORED[11:], 1, 2], name)
        self.quotes.begin(req, self.space, num_on_device, num_stored)
        return req


def step(ranks: Sequence[Rank]) -> None:
    """All tell what they know and take what was agreed."""
    reports = [rank.quotes.report(MAX_SEARCHES) for rank in ranks]
    vectors = [Consensus(lambda vector: None).begin(Report(searches=told)) for told in reports]
    least: Vector = np.min(vectors, axis=0)
    for rank, told in zip(ranks, reports, strict=True):
        agreed: Agreed = Consensus(lambda vector: None).end(least.copy(), 0, len(told))
        rank.quotes.settle(agreed.searches)


def may_admit(ranks: Sequence[Rank], name: str = "r") -> bool:
    found = {rank.quotes.may_admit(name) for rank in ranks}
    assert len(found) == 1
    return found.pop()


def run_threads(ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        rank.thread.run()


def test_what_all_have_found_is_taken_under_one_name() -> None:
    ranks = [Rank(0), Rank(1), Rank(2)]
    reqs = [rank.begin("r") for rank in ranks]
    run_threads(ranks[:2])
    step(ranks)
    assert not may_admit(ranks)
    assert not ranks[0].entered
    run_threads(ranks)
    step(ranks)
    assert may_admit(ranks)
    assert len(ranks[0].entered) == 1
    assert all(rank.entered == ranks[0].entered for rank in ranks)
    assert len({req.extra_key for req in reqs}) == 1
    assert all(rank.counts["quoting_requests"] == 1 for rank in ranks)
    assert all(rank.quotes._results == {} for rank in ranks)


def nobody_takes_anything(ranks: Sequence[Rank], reqs: Sequence[Any]) -> None:
    assert may_admit(ranks)
    assert not any(rank.entered for rank in ranks)
    assert not any(rank.counts.get("quoting_requests") for rank in ranks)
    assert all(lineage_of(req) is None for req in reqs)


@pytest.mark.parametrize("lacks", [{"knows": False}, {"movable": False}])
def test_what_one_rank_lacks_is_found_on_none(lacks: dict[str, bool]) -> None:
    ranks = [Rank(0), Rank(1, **lacks), Rank(2)]
    reqs = [rank.begin("r") for rank in ranks]
    run_threads(ranks)
    step(ranks)
    nobody_takes_anything(ranks, reqs)
    assert [rank.counts["quote_search_disagreements"] for rank in ranks] == [1] * 3


def test_where_nobody_finds_anything_nobody_differs() -> None:
    ranks = [Rank(0, knows=False), Rank(1, knows=False)]
    reqs = [rank.begin("r") for rank in ranks]
    run_threads(ranks)
    step(ranks)
    nobody_takes_anything(ranks, reqs)
    assert not any("quote_search_disagreements" in rank.counts for rank in ranks)


def test_a_search_that_fails_on_one_rank_finds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    ranks = [Rank(0), Rank(1)]

    def fail(*args: Any) -> None:
        raise MemoryError

    ranks[0].quotes._text.find = fail  # type: ignore[method-assign,assignment]
    reqs = [rank.begin("r") for rank in ranks]
    run_threads(ranks)
    step(ranks)
    nobody_takes_anything(ranks, reqs)
    assert ranks[0].counts["quote_search_failures"] == 1


def test_the_first_rank_whose_time_is_over_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    ranks = [Rank(0), Rank(1)]
    reqs = [rank.begin("r") for rank in ranks]
    ranks[0].thread.run()
    step(ranks)
    assert not may_admit(ranks)
    now = 1.0
    step(ranks)
    nobody_takes_anything(ranks, reqs)
    assert [rank.counts["quote_search_timeouts"] for rank in ranks] == [1, 1]
    run_threads(ranks)
    step(ranks)
    nobody_takes_anything(ranks, reqs)


def test_a_prompt_that_all_ranks_have_is_not_searched() -> None:
    ranks = [Rank(0), Rank(1)]
    reqs = [rank.begin("r", num_stored=20) for rank in ranks]
    step(ranks)
    nobody_takes_anything(ranks, reqs)
    reqs = [rank.begin("r", num_on_device=20) for rank in ranks]
    nobody_takes_anything(ranks, reqs)
    assert not any(rank.counts.get("quote_searches") for rank in ranks)


def test_a_rank_that_has_what_another_lacks_searches_too() -> None:
    ranks = [Rank(0), Rank(1)]
    ranks[0].begin("r", num_stored=20)
    ranks[1].begin("r")
    run_threads(ranks)
    step(ranks)
    assert not may_admit(ranks)
    run_threads(ranks)
    step(ranks)
    assert may_admit(ranks)
    assert len(ranks[0].entered) == 1
    assert ranks[0].entered == ranks[1].entered


@pytest.mark.parametrize("num_stored", [0, 20])
def test_whose_pages_another_rank_keeps_leaves_it_to_that_one(num_stored: int) -> None:
    ranks = [Rank(0), Rank(1, keeps_pages=False)]
    ranks[0].begin("r", num_stored=num_stored)
    ranks[1].begin("r")
    run_threads(ranks)
    step(ranks)
    assert may_admit(ranks)
    assert [len(rank.entered) for rank in ranks] == [int(not num_stored)] * 2


def test_a_request_that_leaves_takes_its_search_along() -> None:
    ranks = [Rank(0), Rank(1)]
    for name in ("a", "b"):
        for rank in ranks:
            rank.begin(name)
    run_threads(ranks)
    for rank in ranks:
        rank.quotes.report(MAX_SEARCHES)
        rank.quotes.drop("a")
        assert not rank.quotes._results.keys() - {"b"}
    step(ranks)
    assert [[name for name, *_ in rank.entered] for rank in ranks] == [["b"]] * 2


def test_searches_beyond_what_a_step_takes_wait() -> None:
    ranks = [Rank(0), Rank(1)]
    names = [f"r{number}" for number in range(MAX_SEARCHES + 3)]
    for rank in ranks:
        for name in names:
            rank.begin(name)
    run_threads(ranks)
    step(ranks)
    assert [may_admit(ranks, name) for name in names] == [True] * MAX_SEARCHES + [False] * 3
    step(ranks)
    assert all(may_admit(ranks, name) for name in names)


def test_no_other_round_than_a_steps_tells_of_searches() -> None:
    """What is found makes other requests, which a flush or a result must not meet halfway."""
    told: list[int] = []
    settled: list[int] = []
    transfers: Any = SimpleNamespace(
        ended_saves=lambda most: [],
        take_completed_offloads=lambda count: None,
        commit_completed_offloads=lambda successes: None,
    )

    def report(most: int) -> list[SearchReport]:
        told.append(most)
        return [SearchReport(Readiness.READY, False, 5)]

    def settle(agreed: Sequence[AgreedSearch]) -> None:
        settled.extend(one.digest or 0 for one in agreed)

    store: Any = SimpleNamespace()
    room: Any = SimpleNamespace(step=lambda queue: None)
    lockstep = Lockstep(
        store, room, list, transfers, page_size=PAGE, min_reduce=lambda vector: None,
        find_damaged=lambda slots, position: np.empty(0, np.int64), num_on_device=lambda key: 0,
        gather=lambda content: [content],
    )  # fmt: skip
    searches: Any = SimpleNamespace(report=report, settle=settle)
    lockstep.agree_on(searches)
    assert lockstep.step() == []
    assert (told, settled) == ([MAX_SEARCHES], [5])
    lockstep.drain_saves()
    lockstep.loads_ended(["r"], landed=False)
    assert lockstep.settle_loads(["r"]) == ["r"]
    assert (told, settled) == ([MAX_SEARCHES], [5])
    assert lockstep.num_rounds == 3
