"""What the ranks' one vector a step comes to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from sglang_ext.admission.searches import DIGEST_BITS, AgreedSearch, SearchReport
from sglang_ext.admission.waiting_request import Readiness
from sglang_ext.ranks.consensus import (
    MAX_FLAGS,
    MAX_REQUESTS,
    MAX_SAVES,
    MAX_SEARCHES,
    Agreed,
    AgreedRequest,
    Consensus,
    Flags,
    RankDivergenceError,
    Report,
    RequestReport,
    Vector,
)

READY, WAITING, MOST = Readiness.READY, Readiness.WAITING, (1 << DIGEST_BITS) - 1


def agree_all(
    reports: Sequence[Report], notes: Sequence[Sequence[str]] | None = None
) -> list[Agreed]:
    """What each of some ranks takes from one step."""
    vectors: list[Vector] = []

    def keep(vector: Vector) -> None:
        vectors.append(vector.copy())

    def least(vector: Vector) -> None:
        vector[:] = np.min(vectors, axis=0)

    def rank(number: int, reduce: object) -> Consensus:
        consensus = Consensus(keep if reduce is keep else least)
        for note in notes[number] if notes is not None else ():
            consensus.note(note)
        return consensus

    for number, report in enumerate(reports):
        rank(number, keep)._min_reduce(rank(number, keep)._encode(report))
    assert len({len(vector) for vector in vectors}) == 1
    return [rank(number, least).agree(report) for number, report in enumerate(reports)]


def test_a_save_counts_when_it_ended_everywhere_and_succeeded_everywhere() -> None:
    found = agree_all([Report([True, True, True]), Report([True, False])])
    assert [agreed.saves for agreed in found] == [[True, False]] * 2
    assert agree_all([Report(), Report([True])])[0].saves == []


def test_saves_beyond_what_a_step_takes_wait() -> None:
    many = [True] * (MAX_SAVES + 5)
    assert agree_all([Report(many), Report(many)])[1].saves == [True] * MAX_SAVES


def test_a_request_is_promised_what_every_rank_has() -> None:
    ranks = [
        Report(
            requests=[
                RequestReport(2, 9, Readiness.READY, 0),
                RequestReport(0, 4, Readiness.READY, 1),
            ]
        ),
        Report(
            requests=[
                RequestReport(0, 7, Readiness.READY, 3),
                RequestReport(0, 4, Readiness.WAITING, 0),
            ]
        ),
        Report(
            requests=[
                RequestReport(1, 8, Readiness.READY, 0),
                RequestReport(0, 0, Readiness.READY, 0),
            ]
        ),
    ]
    wanted = [AgreedRequest(2, 7, True, 3), AgreedRequest(0, 0, False, 1)]
    assert [agreed.requests for agreed in agree_all(ranks)] == [wanted] * 3


@pytest.mark.parametrize(
    ("told", "admit"),
    [
        ((Readiness.READY, Readiness.READY), True),
        ((Readiness.READY, Readiness.WAITING), False),
        ((Readiness.WAITING, Readiness.LATE), True),
        ((Readiness.READY, Readiness.LATE), True),
    ],
)
def test_one_late_rank_ends_the_wait_and_one_waiting_rank_holds(
    told: tuple[Readiness, Readiness], admit: bool
) -> None:
    found = agree_all([Report(requests=[RequestReport(0, 3, readiness, 0)]) for readiness in told])
    assert [agreed.requests[0].admit for agreed in found] == [admit] * 2


def test_of_a_hybrids_prompt_what_every_rank_has_is_stored() -> None:
    found = agree_all(
        [Report(requests=[RequestReport(5, 5, Readiness.READY, 0, num)]) for num in (9, 7)]
    )
    assert [agreed.requests for agreed in found] == [[AgreedRequest(5, 5, True, 0, 7)]] * 2


@pytest.mark.parametrize(
    ("told", "agreed"),
    [
        (((READY, False, 7), (READY, False, 7)), (READY, False, 7)),
        (((READY, False, 7), (READY, False, 7 + (1 << 40))), (READY, False, None)),
        (((READY, False, 7), (READY, False, 0)), (READY, False, None)),
        (((READY, False, 0), (READY, True, 0)), (READY, False, 0)),
        (((READY, False, MOST), (READY, True, MOST)), (READY, False, MOST)),
        (((WAITING, True, 0), (WAITING, True, 0)), (WAITING, True, 0)),
        (((READY, False, 7), (WAITING, True, 0)), (WAITING, False, None)),
        (((READY, False, 7), (Readiness.LATE, False, 0)), (Readiness.LATE, False, None)),
    ],
)
def test_what_is_found_counts_where_all_ranks_found_the_same(
    told: tuple[SearchReport, SearchReport], agreed: AgreedSearch
) -> None:
    other = SearchReport(READY, False, 3)
    ranks = [Report(searches=[other, SearchReport(*each)]) for each in told]
    wanted = [AgreedSearch(*other), AgreedSearch(*agreed)]
    assert [each.searches for each in agree_all(ranks)] == [wanted] * 2


def test_ranks_that_search_for_other_numbers_of_requests_are_found_out() -> None:
    with pytest.raises(RankDivergenceError):
        agree_all([Report(searches=[SearchReport(READY, False, 7)]), Report()])


def test_loads_landed_when_they_landed_everywhere() -> None:
    assert agree_all([Report(), Report(loads_landed=False)])[0].loads_landed is False
    assert agree_all([Report(), Report()])[0].loads_landed is True


def test_ranks_with_other_histories_are_found_out() -> None:
    with pytest.raises(RankDivergenceError, match="restart the server"):
        agree_all([Report(), Report()], notes=[["+a", "-a"], ["-a", "+a"]])
    with pytest.raises(RankDivergenceError):  # another number of requests
        agree_all([Report(), Report(requests=[RequestReport(0, 0, Readiness.READY, 0)])])
    agree_all([Report(), Report()], notes=[["+a", "-a"], ["+a", "-a"]])


def test_the_vector_has_one_length_however_much_is_told() -> None:
    full = Report(
        [True] * MAX_SAVES,
        [RequestReport(0, 1, READY, 0)] * MAX_REQUESTS,
        searches=[SearchReport(READY, False, MOST)] * MAX_SEARCHES,
    )
    consensus = Consensus(lambda vector: None)
    assert len(consensus._encode(full)) == len(consensus._encode(Report()))


def everywhere_of(ranks: Sequence[Flags]) -> list[Flags]:
    """What each of some ranks hears of things that all of them ask for."""
    told: list[list[Vector]] = []
    for flags in ranks:
        told.append([])

        def keep(vector: Vector) -> None:
            told[-1].append(vector.copy())

        Consensus(keep).everywhere(flags)
    found = []
    for flags in ranks:
        rounds = iter(zip(*told, strict=False))

        def least(vector: Vector, rounds: Iterator[tuple[Vector, ...]] = rounds) -> None:
            vector[:] = np.min(next(rounds), axis=0)

        found.append(Consensus(least).everywhere(flags))
    return found


@pytest.mark.parametrize("num", [0, 1, MAX_FLAGS, MAX_FLAGS + 1, 3 * MAX_FLAGS])
def test_what_is_so_everywhere_is_so_on_every_rank(num: int) -> None:
    rng = np.random.default_rng(num)
    ranks = [rng.random(num) < 0.7 for _ in range(3)]
    for found in everywhere_of(ranks):
        assert (found == np.logical_and.reduce(ranks)).all()


@pytest.mark.parametrize("lengths", [(3, 4), (0, 1), (MAX_FLAGS, MAX_FLAGS + 1)])
def test_ranks_that_ask_for_other_numbers_of_things_have_drifted_apart(
    lengths: tuple[int, int],
) -> None:
    with pytest.raises(RankDivergenceError, match="do not hold the same"):
        everywhere_of([np.ones(num, np.bool_) for num in lengths])
