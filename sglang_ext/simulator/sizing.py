"""What a size of DRAM and disk would bring: the server's own page store under given traffic."""

from __future__ import annotations

import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any

from sglang_ext.child_processes import ChildProcesses
from sglang_ext.simulator.engine import run
from sglang_ext.simulator.traffic import Traffic
from sglang_ext.simulator.types import DRAM_GB_S, Conversation, System
from sglang_ext.simulator.virtual_store import DEFAULT_PREFETCH_POLICY
from sglang_ext.tiers.base import BLOCK_BYTES, record_blocks
from sglang_ext.tiers.disk.config import MIN_SLOTS

GIB = 1 << 30
# Of what is worth keeping at a time: DRAM alone, and a little DRAM with a disk.
_DRAM_SHARES = (0.25, 0.5, 1.0, 2.0)
_DISK_SHARES = (1.0, 2.0)
_WITH_DISK = 0.125
_LEAST_PAGES = 8
_LEAST_DISK_PAGES = 2 * MIN_SLOTS + 4  # two segments, with their own heads
_MOST_PAGES = 1 << 31
_SLACK = 1e-6  # of a page, for what was rounded
_LONG = 1 << 22  # no prompt is cut
_LOOK_S = 0.2  # how often what is simulated is looked at
_NEAR = 0.02  # of the best hit rate: more memory is not worth it


@dataclass(frozen=True)
class Size:
    """Memory of one server, in GiB, as `--hier-kv-host-size` and `--hier-kv-disk-size` have it."""

    host_gib: float
    disk_gib: float = 0.0


@dataclass(frozen=True)
class Prediction:
    """What a size brings.

    Attributes:
        size: the size.
        hit_rate: share of prompt tokens that are not computed.
        possible: the same with room for everything.
        from_host, from_disk: shares of prompt tokens by where they lay at the request's turn.
        num_requests: that were measured.
        load: share of the time in which the device computes what is not reused; above 1 requests
            wait ever longer.
    """

    size: Size
    hit_rate: float
    possible: float
    from_host: float
    from_disk: float
    num_requests: int
    load: float


def slot_bytes(page_tokens: int, kv_bytes_per_token: int) -> int:
    """Bytes of a page in DRAM or on disk, with its header."""
    return record_blocks(page_tokens * kv_bytes_per_token) * BLOCK_BYTES


def sizes_for(traffic: Traffic, kv_bytes_per_token: int) -> list[Size]:
    """Sizes to look at, smallest first."""
    page_bytes = slot_bytes(traffic.page_tokens, kv_bytes_per_token)
    all_gib = traffic.tokens / traffic.page_tokens * page_bytes / GIB
    page_gib = page_bytes / GIB / traffic.scale  # of those in the simulation

    def size(host: float, disk: float) -> Size:
        host_gib = max(host * all_gib, _LEAST_PAGES * page_gib)
        disk_gib = max(disk * all_gib, _LEAST_DISK_PAGES * page_gib) if disk else 0.0
        return Size(_rounded(host_gib), _rounded(disk_gib))

    found = [size(share, 0.0) for share in _DRAM_SHARES]
    found += [size(_WITH_DISK, share) for share in _DISK_SHARES]
    return list(dict.fromkeys(found))


def predict(
    traffic: Traffic, kv_bytes_per_token: int, sizes: Sequence[Size], disk_gb_s: float,
    prefetch_policy: str = DEFAULT_PREFETCH_POLICY,
    progress: Callable[[float], None] = lambda share: None,
) -> Iterator[Prediction]:  # fmt: skip
    """Simulates each size, several at a time where there are cores; in the order of the sizes.

    Args:
        traffic: what is asked.
        kv_bytes_per_token: of all ranks together.
        sizes: to look at.
        disk_gb_s: reading speed of the disk, 10^9 bytes a second.
        prefetch_policy: the server's flag.
        progress: is told now and then which share of all requests was simulated.

    Raises:
        ValueError: a size holds too few pages, or too many; or its process was ended.
    """
    systems = [
        replace(
            _system(traffic, kv_bytes_per_token, size, disk_gb_s), prefetch_policy=prefetch_policy
        )
        for size in sizes
    ]
    return _simulated(traffic, sizes, systems, progress)


def _simulated(
    traffic: Traffic,
    sizes: Sequence[Size],
    systems: Sequence[System],
    progress: Callable[[float], None],
) -> Iterator[Prediction]:
    """See `predict`."""
    num_workers = min(len(sizes), len(os.sched_getaffinity(0)))
    total = _num_requests(traffic)
    if num_workers < 2:
        for at, (system, size) in enumerate(zip(systems, sizes, strict=True)):

            def on_admitted(num: int, at: int = at) -> None:
                progress((at + num / total) / len(sizes))

            yield _predict(traffic, system, size, on_admitted)
        return
    done = multiprocessing.get_context("spawn").Array("q", len(sizes), lock=False)
    try:
        with ChildProcesses(num_workers, _set_up, traffic, done) as pool:
            jobs = list(enumerate(zip(systems, sizes, strict=True)))
            futures = [pool.submit(_predict_there, at, *each) for at, each in jobs[:1]]
            # The others begin behind its first request: the loops are compiled then, and kept. Each
            # process would spend a minute of a core on the same ones.
            while not done[0] and wait(futures, _LOOK_S).not_done:
                progress(0.0)
            futures += [pool.submit(_predict_there, at, *each) for at, each in jobs[1:]]
            for future in futures:
                while wait([future], _LOOK_S).not_done:
                    progress(sum(done) / total / len(sizes))
                yield future.result()
    except BrokenProcessPool as error:
        raise ValueError(
            "a process that simulated a size was ended, perhaps for want of memory"
        ) from error


# Of a process that simulates.
_traffic: Traffic
_done: Any  # requests that were admitted, by size


def _set_up(traffic: Traffic, done: Any) -> None:
    """A process that simulates begins."""
    global _traffic, _done
    _traffic, _done = traffic, done


def _predict_there(at: int, system: System, size: Size) -> Prediction:
    def on_admitted(num: int) -> None:
        _done[at] = num

    return _predict(_traffic, system, size, on_admitted)


def _num_requests(traffic: Traffic) -> int:
    return sum(
        len(each.turns) if isinstance(each, Conversation) else 1 for each in traffic.workload
    )


def _system(traffic: Traffic, kv_bytes_per_token: int, size: Size, disk_gb_s: float) -> System:
    """A machine for the part of the traffic that is simulated: that part of the real one."""
    page_bytes = slot_bytes(traffic.page_tokens, kv_bytes_per_token)
    host = _num_pages(size.host_gib, "host", _LEAST_PAGES, page_bytes / traffic.scale)
    least = _LEAST_DISK_PAGES if size.disk_gib else 0
    disk = _num_pages(size.disk_gib, "disk", least, page_bytes / traffic.scale)
    return System(
        page_tokens=traffic.page_tokens,
        kv_bytes_per_token=kv_bytes_per_token,
        dram_bytes=float(host * traffic.page_tokens * kv_bytes_per_token),
        disk_bytes=float(disk * traffic.page_tokens * kv_bytes_per_token),
        prefill_tokens_per_s=traffic.prefill_tokens_per_s,
        decode_tokens_per_s=traffic.decode_tokens_per_s,
        dram_gb_s=DRAM_GB_S * traffic.scale,
        disk_gb_s=disk_gb_s * traffic.scale,
        disk_write_gb_s=disk_gb_s * traffic.scale,
        batch=traffic.batch,
        context_window=_LONG,
        truncation=False,
    )


def _num_pages(gb: float, tier: str, least: int, page_bytes: float) -> int:
    """Pages in the simulation; `page_bytes` of reality are one of them."""
    num = gb * GIB / page_bytes + _SLACK
    if not least <= num < _MOST_PAGES:
        at_least, at_most = (pages * page_bytes / GIB for pages in (least, _MOST_PAGES))
        smaller = ", or a smaller --page-size" if num < least else ""
        raise ValueError(
            f"--{tier}-size must be from {at_least:.3g} to {at_most:.3g} GiB with these pages and "
            f"this traffic, got {gb:g}; give another{smaller}"
        )
    return int(num)


def _predict(
    traffic: Traffic, system: System, size: Size, on_admitted: Callable[[int], None]
) -> Prediction:
    found = run(
        traffic.workload, system, "lookahead", warmup_turns=traffic.warmup_turns,
        on_admitted=on_admitted,
    )  # fmt: skip
    prompt = max(found.prompt_tokens, 1)
    hit_rate = found.reused_tokens / prompt
    return Prediction(
        size,
        hit_rate,
        found.reusable_tokens / prompt,
        found.host_tokens / prompt,
        found.disk_tokens / prompt,
        found.num_turns,
        traffic.demand.load(traffic.prefill_tokens_per_s / traffic.scale, hit_rate),
    )


def choose(predictions: Sequence[Prediction]) -> Prediction:
    """The one with the least DRAM, and then the least disk, among those near the best.

    One that cannot keep up is chosen only where none can.
    """
    best = max(each.hit_rate for each in predictions)
    near = [each for each in predictions if each.hit_rate >= best - _NEAR]
    near = [each for each in near if each.load < 1] or near
    return min(near, key=lambda each: (each.size.host_gib, each.size.disk_gib))


def _rounded(gb: float) -> float:
    """Up to two digits: what one would write."""
    if gb <= 0:
        return 0.0
    unit = 10.0 ** (math.floor(math.log10(gb)) - 1)
    return float(f"{math.ceil(gb / unit - 1e-9) * unit:.12g}")
