"""How far knowledge carries: Belady's optimum with parts of its knowledge taken away.

    python -m bench.policies_bounds [--quick]

LLaMA-13B with 128 GB of DRAM and 2 TB of SSD, where the queue is longer than the store. The
arrivals of one look-ahead run are replayed under each, so all serve the same requests in the same
order. What they show is told in docs/policies.md.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator

import numpy as np

from bench.policies_engine import run
from bench.policies_engine_tiers import NEVER, Future
from bench.policies_plan import FULL, QUICK, Sizes, chat_jobs
from bench.policies_sharegpt import THINK_S
from bench.policies_types import Ids, Recorded

_JOB = "LLaMA-13B 128G/2T"
_BEHIND = 1 << 40  # behind every request that waits
_LIMIT_S = 3 * THINK_S


class _Guess(Future):
    """A future in which some next uses are guesses, that count as "never" after `limit_s`."""

    def __init__(self, recorded: Recorded, limit_s: float) -> None:
        super().__init__(recorded)
        self._limit_s = limit_s
        self._guesses: deque[tuple[float, Ids, Ids]] = deque()

    def _guess(self, rows: Ids, values: Ids, now_s: float) -> None:
        self.next_use[rows] = values
        self._guesses.append((now_s, rows, values))

    def arrived(self, number: int, now_s: float) -> None:
        while self._guesses and self._guesses[0][0] < now_s - self._limit_s:
            _, rows, values = self._guesses.popleft()
            ended = rows[self.next_use[rows] == values]
            self.next_use[ended] = NEVER
            self._tell(ended)


class EndsUnknown(_Guess):
    """All is known, but that a conversation has ended: it looks like one that returns soon."""

    def __init__(self, recorded: Recorded) -> None:
        super().__init__(recorded, _LIMIT_S)
        self._arrivals_s = np.array([request.arrival_s for request in recorded.requests])

    def admitted(self, number: int, now_s: float) -> None:
        super().admitted(number, now_s)
        path = self._paths[number]
        ended = path[self.next_use[path] == NEVER]
        at = int(np.searchsorted(self._arrivals_s, now_s + THINK_S))
        self._guess(ended, np.full(len(ended), at), now_s)
        self._tell(ended)


class QueueOnly(_Guess):
    """Of the future only what waits is known; everything else is needed behind it.

    Args:
        ends: ended conversations are known, too.
        newest_first: of what nobody waits for the newest leaves first, instead of the oldest.
    """

    def __init__(self, recorded: Recorded, *, ends: bool, newest_first: bool) -> None:
        super().__init__(recorded, _LIMIT_S if newest_first else np.inf)
        self._ends = ends
        self._newest_first = newest_first
        self._num_arrived = 0

    def arrived(self, number: int, now_s: float) -> None:
        super().arrived(number, now_s)
        self._num_arrived = number + 1
        path = self._prompts[number]
        self.next_use[path] = np.minimum(self.next_use[path], number)
        self._tell(path)

    def admitted(self, number: int, now_s: float) -> None:
        super().admitted(number, now_s)
        path = self._paths[number]
        unknown = self.next_use[path] >= self._num_arrived
        if self._ends:
            unknown &= self.next_use[path] != NEVER
        rows = path[unknown]
        age = self._num_arrived if self._newest_first else -self._num_arrived
        self._guess(rows, np.full(len(rows), 2 * _BEHIND + age), now_s)
        self._tell(rows)


def hit_rates(sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Each kind of knowledge and its hit rate."""
    job = next(job for job in chat_jobs(sizes) if job.name == _JOB)
    workload = job.build()
    recorded = run(workload, job.system, "lookahead").recorded
    known = {
        "optimum": Future(recorded),
        "optimum, ends unknown": EndsUnknown(recorded),
        "queue and ends": QueueOnly(recorded, ends=True, newest_first=False),
        "queue, oldest first": QueueOnly(recorded, ends=False, newest_first=False),
        "queue, newest first": QueueOnly(recorded, ends=False, newest_first=True),
        "lookahead": None,
        "lru": None,
    }
    for name, future in known.items():
        outcome = run(
            workload, job.system, "belady" if future else name, warmup_turns=job.warmup_turns,
            measured_turns=job.measured_turns, recorded=recorded, future=future,
        )  # fmt: skip
        yield name, outcome.hit_rate


if __name__ == "__main__":
    for name, rate in hit_rates(QUICK if "--quick" in sys.argv[1:] else FULL):
        print(f"{name:24} {100 * rate:5.1f} %", flush=True)
