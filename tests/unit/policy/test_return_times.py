"""The return-time estimator: it finds what returns, and is not followed where it does not help."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig
from sglang_ext.tiers.policy import return_kernels as kernels
from sglang_ext.tiers.policy.base_orders.registry import base_order
from sglang_ext.tiers.policy.return_times import ReturnTimes

_PATH = 4


def _replay(paths: list[npt.NDArray[np.int64]], capacity: int, *, return_times: bool) -> int:
    """Hits of a tier of `capacity` pages over a sequence of paths, one each second."""
    policy = PlacementPolicy(
        int(max(path.max() for path in paths)) + 1, PolicyConfig(return_times=return_times)
    )
    tier = policy.add_tier(capacity)
    hits = 0
    for now_s, path in enumerate(paths):
        there = tier.has(path)
        hits += int(there.argmin()) if not there.all() else len(path)
        policy.used(path, float(now_s), names=path.astype(np.uint64))
        tier.enter(path[~there])
        policy.forget(tier.evict(len(tier) - capacity, float(now_s)))
        assert len(tier) <= capacity
    return hits


def _path(number: int) -> npt.NDArray[np.int64]:
    return np.arange(number * _PATH, number * _PATH + _PATH)


def _one_shots_and_regulars(num: int) -> list[npt.NDArray[np.int64]]:
    """Short paths that come once, and 30 long ones (so another class) that return in turn."""
    regular = [np.arange(i * 16, i * 16 + 16) for i in range(30)]
    first = 30 * 16
    once = [first + _path(i) for i in range(num)]
    return [
        each for i in range(num) for each in ((once[i], regular[i // 4 % 30]) if i % 4 == 0
        else (once[i],))
    ]  # fmt: skip


def test_what_returns_is_kept_over_what_comes_once() -> None:
    paths = _one_shots_and_regulars(4000)
    lru = _replay(paths, 600, return_times=False)
    learned = _replay(paths, 600, return_times=True)
    assert lru == 0  # between two uses of a regular come 120 one-shots: 480 + 480 pages
    possible = 16 * (1000 - 30)
    assert learned > 0.5 * possible


def test_where_lru_is_right_nothing_is_lost() -> None:
    rng = np.random.default_rng(3)
    recent: list[int] = []
    paths = []
    for i in range(4000):  # each path returns within the last 40, or is new
        again = recent and rng.random() < 0.6
        number = int(rng.choice(recent[-40:])) if again else i
        recent.append(number)
        paths.append(_path(number))
    lru = _replay(paths, 300, return_times=False)
    learned = _replay(paths, 300, return_times=True)
    assert learned >= 0.99 * lru


def test_random_uses_teach_nothing() -> None:
    rng = np.random.default_rng(4)
    paths = [_path(int(i)) for i in rng.integers(0, 400, 6000)]
    lru = _replay(paths, 800, return_times=False)
    learned = _replay(paths, 800, return_times=True)
    assert abs(learned - lru) < 0.03 * lru


def test_the_guard_counts_what_a_request_would_hit() -> None:
    """Pages behind one that is missing are no hits."""
    times = ReturnTimes(64, base_order("lru"))
    names = np.arange(1, 5, dtype=np.uint64)
    kinds = np.zeros(4, np.uint8)
    times.learn(names, kinds, 0.0, 0.0)
    directory = times.directory
    slot = kernels._find(directory, kernels._mix(names[1]))
    kernels._cut(directory.base_prev, directory.base_next, directory.base_ends, 0, slot)
    directory.counts[kernels.SIZE_BASE] -= 1
    times.learn(names, kinds, 1.0, 1.0)
    assert directory.counts[kernels.HITS_BASE] == 1
    assert directory.counts[kernels.HITS_SCORE] == 4
    assert directory.counts[kernels.ONLY_ONE] == 3


def test_what_a_running_request_saved_does_not_leave_before_what_seldom_returns() -> None:
    """It has not been used yet: its class at its last use, or none, says nothing of it."""
    policy = PlacementPolicy(64)
    tier = policy.add_tier(16)
    tier.return_times.active = True
    running, again, ended = np.arange(4), np.arange(4, 8), np.arange(8, 12)
    for rows in (again, ended):
        policy.used(rows, 0.0)
    tier.return_times.scores[:] = 0.5
    tier.return_times.scores[policy.pages.kind[ended]] = 0.0  # nobody comes back to such pages
    policy.link(running, 1.0)
    policy.touched(again, 1.0)
    policy.used(ended + 20, 2.0)
    for rows in (running, again, ended + 20, ended):
        tier.enter(rows)
    assert set(tier.evict(8, 3.0).tolist()) == {*ended.tolist(), *(ended + 20).tolist()}
    policy.used(running, 4.0)
    assert set(policy.pages.kind[running].tolist()) == set(policy.pages.kind[ended].tolist())
