"""Speed of the placement policy, for the `policies` case: what one scheduler step asks of it."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import PlacementPolicy, PolicyConfig, TierLists

_PATH_PAGES = 64
_EVICTED = 64


def decisions_per_s(
    num_waiting: int = 1000, num_pages: int = 1_000_000, steps: int = 2000, num_tenants: int = 0
) -> dict[str, Any]:
    """Measures whole steps: all decisions that the scheduler may ask for in one.

    A step is: the head of the queue is admitted and its pages are used, one request of 64 pages
    arrives, the order is handed over (every eighth step a request moved within it), the prefetch
    window is asked for, and 64 pages are evicted from the tier.

    Args:
        num_waiting: requests.
        num_pages: in the tier, all of it.
        steps: measured.
        num_tenants: with equal shares, all pages theirs; 0: without shares.

    Returns:
        `decisions_per_s`: calls of the policy per second; `step_ms`: median, `step_p99_ms`; the
        same of the thread's own processor time as `step_cpu_ms`, `step_cpu_p99_ms`,
        `step_cpu_max_ms`; `reshuffle_cpu_ms`: median for a queue in an entirely new order,
        `reshuffle_shared_cpu_ms` where all requests begin with the same 32 pages; `n`;
        `num_waiting`, `num_pages`.
    """
    rng = np.random.default_rng(5)
    policy, tier, paths = _filled(num_pages, num_tenants)
    num_paths = len(paths)
    queue = list(range(num_waiting))
    waiting = {request: paths[rng.integers(num_paths)] for request in queue}
    for request in queue:
        policy.enqueue(request, waiting[request], 0.0)
    now_s, calls = num_paths * 0.01, 0
    took_s: list[float] = []
    cpu_s: list[float] = []
    for step in range(steps):
        now_s += 0.01
        head, new = queue.pop(0), num_waiting + step
        queue.append(new)
        if step % 8 == 0:
            queue.insert(num_waiting // 2, queue.pop(int(rng.integers(num_waiting))))
        waiting[new] = paths[rng.integers(num_paths)]
        path = waiting.pop(head)
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        policy.leave(head)
        policy.used(path, now_s)
        policy.enqueue(new, waiting[new], now_s)
        policy.set_order(queue)
        policy.window(num_pages // 20)
        policy.wanted(path)
        gone = tier.evict(_EVICTED, now_s)
        took_s.append(time.perf_counter() - start_s)
        cpu_s.append(time.thread_time() - start_cpu_s)
        calls += 7
        tier.enter(np.sort(gone))
    return {
        "decisions_per_s": calls / sum(took_s),
        "step_ms": 1e3 * float(np.median(took_s)),
        "step_p99_ms": 1e3 * float(np.percentile(took_s, 99)),
        "step_cpu_ms": 1e3 * float(np.median(cpu_s)),
        "step_cpu_p99_ms": 1e3 * float(np.percentile(cpu_s, 99)),
        "step_cpu_max_ms": 1e3 * max(cpu_s),
        **_reshuffles(policy, queue, waiting),
        "n": steps,
        "num_waiting": num_waiting,
        "num_pages": num_pages,
    }


def eviction_us(
    num_pages: int = 10_000_000, batch_pages: int = 16, num_waiting: int = 1000,
    steps: int = 20_000, *, hinted: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Measures what it takes to decide which pages leave a full tier, a few at a time.

    As many pages enter again after each batch. 1,000 requests of 64 pages wait for some of them.

    Args:
        num_pages: of the tier.
        batch_pages: that leave at a time.
        num_waiting: requests.
        steps: batches.
        hinted: whether of all paths was said when they come back, within 2 s to 6 days, or that
            they are over.

    Returns:
        `evict_us`: microseconds of processor time for each page that leaves, the mean of all;
        `evict_p99_us`: of the slowest in a hundred batches; `enter_us`: for each that enters;
        `hint_us`: for each page of a hint, 0 without.
    """
    rng = np.random.default_rng(5)
    policy, tier, paths = _filled(num_pages)
    hint_s = _say_all(policy, paths, rng) if hinted else 0.0
    for request, number in enumerate(rng.integers(len(paths), size=num_waiting).tolist()):
        policy.enqueue(request, paths[number], 0.0)
    now_s = len(paths) * 0.01
    evict_s: list[float] = []
    enter_s: list[float] = []
    for _ in range(steps):
        now_s += 0.01
        started_s = time.thread_time()
        gone = tier.evict(batch_pages, now_s)
        evict_s.append(time.thread_time() - started_s)
        gone.sort()
        started_s = time.thread_time()
        tier.enter(gone)
        enter_s.append(time.thread_time() - started_s)
    page_us = 1e6 / batch_pages
    return {
        "evict_us": page_us * float(np.mean(evict_s)),
        "evict_p99_us": page_us * float(np.percentile(evict_s, 99)),
        "enter_us": page_us * float(np.mean(enter_s)),
        "hint_us": 1e6 * hint_s / num_pages,
        "num_pages": num_pages,
        "batch_pages": batch_pages,
    }


def _filled(
    num_pages: int, num_tenants: int = 0
) -> tuple[PlacementPolicy, TierLists, npt.NDArray[np.int64]]:
    """A policy with a full tier of paths of 64 pages, by turns of each tenant; the paths."""
    policy = PlacementPolicy(
        num_pages, PolicyConfig(shares=(1 / (num_tenants or 1),) * num_tenants)
    )
    tier = policy.add_tier(num_pages)
    num_paths = num_pages // _PATH_PAGES
    paths = np.arange(num_paths * _PATH_PAGES).reshape(num_paths, _PATH_PAGES)
    for i in range(num_paths):
        policy.used(paths[i], i * 0.01)
        tier.enter(paths[i])
        policy.assign(paths[i], 1 + i % max(num_tenants, 1))
    return policy, tier, paths


def _say_all(
    policy: PlacementPolicy, paths: npt.NDArray[np.int64], rng: np.random.Generator
) -> float:
    """Gives a hint of each path; returns the processor time in seconds."""
    now_s = len(paths) * 0.01
    times_s = np.exp2(rng.uniform(1, 19, len(paths)))
    started_s = time.thread_time()
    for number, (path, time_s) in enumerate(zip(paths, times_s.tolist(), strict=True)):
        returns_in_s = time_s if number % 4 else None
        policy.hint(path, now_s, owner=number % 256, returns_in_s=returns_in_s)
    return time.thread_time() - started_s


def _reshuffles(
    policy: PlacementPolicy, queue: list[int], waiting: dict[int, npt.NDArray[np.int64]]
) -> dict[str, float]:
    """Puts the queue into a new order, then once more with a prefix that everybody needs."""
    shared = next(iter(waiting.values()))[: _PATH_PAGES // 2]
    apart_ms = _reshuffle_cpu_ms(policy, queue)
    for request in queue:
        path = np.concatenate([shared, np.setdiff1d(waiting[request], shared)])
        policy.enqueue(request, path, 0.0)
    return {
        "reshuffle_cpu_ms": apart_ms,
        "reshuffle_shared_cpu_ms": _reshuffle_cpu_ms(policy, queue),
    }


def _reshuffle_cpu_ms(policy: PlacementPolicy, queue: list[int]) -> float:
    rng = np.random.default_rng(6)
    took_s = []
    for _ in range(20):
        order = rng.permutation(queue).tolist()
        start_s = time.thread_time()
        policy.set_order(order)
        took_s.append(time.thread_time() - start_s)
    return 1e3 * float(np.median(took_s))


if __name__ == "__main__":
    for num_pages in (10_000, 100_000, 1_000_000):
        print(decisions_per_s(num_pages=num_pages))
    for hinted in (False, True):
        print(eviction_us(hinted=hinted))
