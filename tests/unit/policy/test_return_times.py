"""The return-time estimator: it finds what returns, and is not followed where it does not help."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig

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
