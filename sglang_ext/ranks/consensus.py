"""What the ranks of one group agree on, once a scheduler step, in one reduction.

Every rank runs the same scheduler on the same requests, and the collectives inside its forwards
must be entered by all ranks alike. So whatever depends on what one rank's DRAM holds, on its disk,
its threads or its clock, is told to all before anything is decided on it:

- which saves have ended, and whether they succeeded;
- of each waiting request: which of its pages are pinned in DRAM, what they are worth, how many the
  rank would use at most, and whether it would still wait for more;
- of each search for stored text: whether it has ended, and a digest of what it found;
- whether the loads of the last batch landed;
- where one rank keeps the pages of all: how many of the oldest loads are over.

When a prompt that was cut enters the queue, the ranks ask each other in a reduction of its own
which of the pages that it could be made of all of them have (`everywhere`).

All of it is one vector of a fixed length that is reduced by MIN: a count becomes what every rank
has, a flag becomes true where it is true everywhere. What is not told is the same on all ranks by
construction, and a digest of it rides along, so that ranks that drifted apart stop with an error
instead of answering with each other's mistakes.

Pure: knows neither SGLang nor torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.searches import DIGEST_BITS, AgreedSearch, SearchReport
from sglang_ext.admission.waiting_request import NO_LIMIT, Readiness

Vector = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]
MinReduce = Callable[[Vector], None]

# Bounds of one step; the rest is reported in the next one. They suffice: few saves end in one step,
# and a request, or a search, that was agreed on is not reported again.
MAX_SAVES = 64
MAX_REQUESTS = 256
MAX_SEARCHES = 32

_HISTORY, _MINUS_HISTORY, _NUM_SAVES, _LOADS, _READINGS, _SAVES = 0, 1, 2, 3, 4, 5
_REQUESTS = _SAVES + MAX_SAVES
_COLUMNS = 5
_SEARCHES = _REQUESTS + _COLUMNS * MAX_REQUESTS
# How far a search is, whether it is needless, and the halves of its digest, each twice: the second
# time negated, so that it is seen whether all tell the same.
_SEARCH_COLUMNS = 6
_VECTOR_LENGTH = _SEARCHES + _SEARCH_COLUMNS * MAX_SEARCHES
_HALF = DIGEST_BITS // 2
_FLAGS = _NUM_SAVES  # in a vector that asks for something else than a step's
MAX_FLAGS = _VECTOR_LENGTH - _FLAGS


class RankDivergenceError(RuntimeError):
    """The ranks were asked to agree on different things: a bug, or one rank missed a request."""


class RequestReport(NamedTuple):
    """What a rank tells of one waiting request.

    Attributes:
        first_page: index of the first page that this rank has pinned in DRAM for it.
        end_page: end of these pages.
        readiness: whether the rank would wait.
        quality: the worst of these pages; 0 is exact.
        most_pages: leading pages of its prompt that this rank would use at most: those that are on
            the device or stored, as far as they are worth their time.
    """

    first_page: int
    end_page: int
    readiness: Readiness
    quality: int
    most_pages: int = NO_LIMIT


class AgreedRequest(NamedTuple):
    """What all ranks know of one waiting request.

    Attributes:
        first_page: index of the first page that every rank has pinned in DRAM.
        end_page: end of these pages; not behind `first_page` where there are none.
        admit: whether it waits no longer: all ranks are ready, or one is late.
        quality: the worst of these pages on any rank.
        most_pages: leading pages of its prompt that every rank would use.
        is_late: whether it is `admit` because one rank has waited long enough.
    """

    first_page: int
    end_page: int
    admit: bool
    quality: int
    most_pages: int = NO_LIMIT
    is_late: bool = False


@dataclass(frozen=True)
class Report:
    """What one rank knows at the start of a step.

    Attributes:
        saves: results of the saves that ended, oldest first; from `MAX_SAVES` on they wait.
        requests: at most `MAX_REQUESTS`, the same ones in the same order on every rank.
        loads_landed: whether the loads of the last batch landed; true when there were none.
        num_ended_readings: how many of the oldest `shared_readings` are over.
        searches: at most `MAX_SEARCHES`, the same ones in the same order on every rank.
    """

    saves: Sequence[bool] = ()
    requests: Sequence[RequestReport] = ()
    loads_landed: bool = True
    num_ended_readings: int = 0
    searches: Sequence[SearchReport] = ()


@dataclass(frozen=True)
class Agreed:
    """What all ranks know after the step's reduction; the same on each of them.

    Attributes:
        saves: of those that ended on every rank, whether they succeeded on every rank.
        requests: one for each that was told.
        loads_landed: whether the loads of the last batch landed on every rank.
        num_ended_readings: how many of the oldest `shared_readings` are over on every rank.
        searches: one for each that was told.
    """

    saves: list[bool] = field(default_factory=list)
    requests: list[AgreedRequest] = field(default_factory=list)
    loads_landed: bool = True
    num_ended_readings: int = 0
    searches: list[AgreedSearch] = field(default_factory=list)


class Consensus:
    """Agreement among ranks. Scheduler thread only.

    Attributes:
        num_rounds: reductions so far.
    """

    def __init__(self, min_reduce: MinReduce) -> None:
        """Starts with an empty history.

        Args:
            min_reduce: replaces an i32 vector by the element-wise minimum over all ranks; entered
                by all of them, and blocking.
        """
        self.num_rounds = 0
        self._min_reduce = min_reduce
        self._history = 0

    def note(self, event: str) -> None:
        """Enters something into the history that must be the same on all ranks, in this order."""
        self._history = zlib.crc32(event.encode(), self._history)

    def agree(self, report: Report) -> Agreed:
        """One reduction; every rank calls it at the same point of the step.

        Raises:
            RankDivergenceError: the ranks' histories differ.
        """
        vector = self.begin(report)
        self._min_reduce(vector)
        return self.end(vector, len(report.requests), len(report.searches))

    def begin(self, report: Report) -> Vector:
        """The vector of a round that is reduced by the caller; `end` takes what came of it."""
        return self._encode(report)

    def end(self, vector: Vector, num_requests: int, num_searches: int = 0) -> Agreed:
        """What was agreed in a round.

        Args:
            vector: of `begin`, reduced.
            num_requests: how many waiting requests the report of `begin` told of.
            num_searches: how many searches it told of.

        Raises:
            RankDivergenceError: the ranks' histories differed when the round began.
        """
        self.num_rounds += 1
        self._compare(vector)
        return _decode(vector, num_requests, num_searches)

    def everywhere(self, flags: Flags) -> Flags:
        """Which of some things are so on every rank; all ranks ask for the same things now.

        One reduction for each `MAX_FLAGS`, one at least.

        Args:
            flags: bool `[N]`, what this rank knows of them.

        Raises:
            RankDivergenceError: the ranks' histories differ, or the numbers of things.
        """
        self.note(f"?{len(flags)}")
        found = [np.empty(0, np.bool_)]
        for start in range(0, max(1, len(flags)), MAX_FLAGS):
            part = flags[start : start + MAX_FLAGS]
            vector = self._begin_vector()
            vector[_FLAGS : _FLAGS + len(part)] = part
            self._min_reduce(vector)
            self._compare(vector)
            found.append(vector[_FLAGS : _FLAGS + len(part)].astype(np.bool_))
        return np.concatenate(found)

    def _begin_vector(self) -> Vector:
        """All vectors have one length, so that histories are compared whatever ranks came to."""
        vector = np.zeros(_VECTOR_LENGTH, np.int32)
        history = self._history & 0x7FFF_FFFF
        vector[_HISTORY], vector[_MINUS_HISTORY] = history, -history
        return vector

    def _compare(self, vector: Vector) -> None:
        if vector[_HISTORY] != -vector[_MINUS_HISTORY]:
            raise RankDivergenceError(
                "the ranks of hier-kv do not hold the same waiting requests any more (round "
                f"{self.num_rounds}); restart the server and report this"
            )

    def _encode(self, report: Report) -> Vector:
        self.note(f"{len(report.requests)}:{len(report.searches)}")
        vector = self._begin_vector()
        saves = report.saves[:MAX_SAVES]
        vector[_NUM_SAVES] = len(saves)
        vector[_LOADS] = report.loads_landed
        vector[_READINGS] = report.num_ended_readings
        # Places of saves that have not ended here hold 1, which MIN ignores; the least count wins.
        vector[_SAVES:_REQUESTS] = 1
        vector[_SAVES : _SAVES + len(saves)] = saves
        columns = vector[_REQUESTS:_SEARCHES].reshape(_COLUMNS, MAX_REQUESTS)
        for column, (first_page, end_page, readiness, quality, most) in enumerate(report.requests):
            columns[:, column] = -first_page, end_page, readiness, -quality, most
        columns = vector[_SEARCHES:].reshape(_SEARCH_COLUMNS, MAX_SEARCHES)
        for column, (readiness, is_needless, digest) in enumerate(report.searches):
            high, low = divmod(digest, 1 << _HALF)
            columns[:, column] = readiness, is_needless, high, low, -high, -low
        return vector


def _decode(vector: Vector, num_requests: int, num_searches: int = 0) -> Agreed:
    saves = vector[_SAVES : _SAVES + int(vector[_NUM_SAVES])]
    columns = vector[_REQUESTS:_SEARCHES].reshape(_COLUMNS, MAX_REQUESTS)[:, :num_requests]
    searches = vector[_SEARCHES:].reshape(_SEARCH_COLUMNS, MAX_SEARCHES)[:, :num_searches]
    return Agreed(
        saves=[bool(result) for result in saves],
        requests=[
            AgreedRequest(
                -minus_first,
                end_page,
                readiness != Readiness.WAITING,
                -minus_worst,
                most,
                readiness == Readiness.LATE,
            )
            for minus_first, end_page, readiness, minus_worst, most in columns.T.tolist()
        ],
        loads_landed=bool(vector[_LOADS]),
        num_ended_readings=int(vector[_READINGS]),
        searches=[
            AgreedSearch(
                Readiness(readiness),
                bool(is_needless),
                (high << _HALF) + low if (high, low) == (-minus_high, -minus_low) else None,
            )
            for readiness, is_needless, high, low, minus_high, minus_low in searches.T.tolist()
        ],
    )
