"""A trace replayed in its order through the server's page store, beside optima of the same order.

    python -m bench.policies.replay [--quick] [--shares 0.05 0.2] [--known 50 400 0]
    python -m bench.policies.replay --quick --known 10 --hints exact noisy shuffled ttl ttl-short
    python -m bench.policies.replay --workload documents --quick --shares 0.2 --known 10
    python -m bench.policies.replay --quick --shares 0.2 --known 50 400 --coded-shares 0.3
    python -m bench.policies.replay --kv-bytes-per-token 131072   # 70B's pages: five times slower

First come, first served, with so many requests waiting that the store knows; the disk is fast
enough that nothing waits for it, so what is measured is what was kept. What is driven is
`sglang_ext.simulator.virtual_store`: the product's own code, and nothing here decides what leaves.
Columns:

- hits: leading pages that were loaded, as a share of those that an unbounded store would have had;
- in DRAM: share of the hits that lay in DRAM before the request's turn;
- written: pages written to disk, as a share of new pages; those moved within the disk count too;
- a hit: pages written to disk for each page that hit, which of pages of one size is the bytes;
- amplification: pages written, over those that were new on disk, which a page that the disk gave up
  and got again is not; at steady state: without the first DRAM full of these;
- coded DRAM: with `--coded-shares`, of the pages that are read from below the slots the share that
  lies there, and need not be read from the disk; plain LRU: that of records in order of their last
  use, whatever waits;
- lost: pages that left the last tier that had them while a waiting request needed them;
- held: different pages in DRAM and on disk, the mean over the second half of the requests, and
  what the rule that knows the same requests hits over so many: what is written ahead lies twice.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.core.trace_flags import add_chunk_flag
from bench.policies.order import RequestOrder, known_ahead, replay_order
from bench.policies.workloads.agents import agent_tasks, document_questions
from bench.policies.workloads.bundled import BUNDLED
from bench.policies.workloads.models import LLAMA_70B
from bench.policies.workloads.session_lines import session_lines
from bench.policies.writes import Writes
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.hints.handing import hand_on
from sglang_ext.hints.request_hints import MAX_PIN_S, RequestHints
from sglang_ext.settings.config import PREFETCH_POLICIES
from sglang_ext.simulator.prefill import ChunkedPrefill, chunks_of
from sglang_ext.simulator.trace import BLOCK_TOKENS, Line, read_trace
from sglang_ext.simulator.types import CHUNK_TOKENS
from sglang_ext.simulator.virtual_store import (
    DEFAULT_PREFETCH_POLICY,
    Ids,
    ServerStore,
    StoreSizes,
    page_hashes,
    virtual_store,
)
from sglang_ext.tiers.coded_host import CachedDiskTier
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.store import DEFAULT_POLICY
from sglang_ext.tiers.store.types import Hashes, LoadTicket

SHARES = (0.05, 0.2, 0.5)
KNOWN = (50, 400, 0)
DRAM_SHARE = 0.2
PIN_SHARE = 0.05  # the server's default
KV_BYTES_PER_TOKEN = 8 << 10  # small pages go to disk in batches, which is what takes the time
_TICK_S = 0.001  # the scheduler's, while a request waits for its pages
_STEPS_S = 4 * _TICK_S  # of one request, beside its prefill
HINTS = ("exact", "noisy", "shuffled", "ttl", "ttl-short", "pin-all")
_MAX_TICKS = 10_000
_PROGRESS_REQUESTS = 500
_QUICK_REQUESTS = 1500
_SEED, _SESSIONS_PER_S = 11, 0.05  # of agents and documents


@dataclass
class Replayed:
    """What came of a replay, in pages.

    Attributes:
        reusable: leading pages that an unbounded store would have had.
        hits: of those, pages that were loaded.
        early: hits that lay in DRAM before the request's turn.
        new: pages that were computed.
        writes: what went to disk.
        held: different pages in the store, after each request.
        counters: of the store.
        num_from_coded, num_read: that came to DRAM from coded DRAM, and from there or the disk.
    """

    reusable: int = 0
    hits: int = 0
    early: int = 0
    new: int = 0
    writes: Writes = field(default_factory=Writes)
    held: list[int] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    num_from_coded: int = 0
    num_read: int = 0

    @property
    def hit_share(self) -> float:
        """Hits of what was reusable."""
        return self.hits / max(self.reusable, 1)

    @property
    def early_share(self) -> float:
        """Hits that were in DRAM in time."""
        return self.early / max(self.hits, 1)

    @property
    def written_per_hit(self) -> float:
        """Pages written to disk for each page that hit."""
        return self.writes.all / max(self.hits, 1)

    @property
    def coded_share(self) -> float:
        """Pages from coded DRAM, of those that did not lie in slots."""
        return self.num_from_coded / max(self.num_read, 1)

    @property
    def mean_held(self) -> int:
        """Different pages that the store held in the second half."""
        return round(float(np.mean(self.held[len(self.held) // 2 :])))


class Replay:
    """One replay.

    Args:
        paths: pages of each request in order, by number.
        num_known: requests that wait at a time, the one whose turn it is included.
        prefill_s: seconds of each request.
        progress: called with one line every 500 requests.
        hints: what each request says; None: nobody says anything.
        chunk_tokens: most of a prompt that are computed at once, and saved.
    """

    def __init__(
        self,
        paths: Sequence[Ids],
        num_known: int,
        prefill_s: Sequence[float],
        progress: Callable[[str], None] | None = None,
        hints: Sequence[RequestHints | None] | None = None,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self._chunk_tokens = chunk_tokens
        self._hints = hints
        self._paths = paths
        self._progress = progress
        self._num_known = num_known
        self._prefill_s = prefill_s
        self._hashes: dict[int, Hashes] = {}  # of the waiting requests
        self._arrived_s: dict[int, float] = {}

    def run(self, server: ServerStore) -> Replayed:
        """Replays all of it through an empty store."""
        result = Replayed()
        seen = np.zeros(1 + max(int(path.max()) for path in self._paths), np.bool_)
        for number, path in enumerate(self._paths):
            self._arrive(server, number)
            known = seen[path]
            reusable = len(path) if known.all() else int(np.argmin(known))
            seen[path] = True
            early, hits = self._serve(server, number)
            result.reusable += reusable
            result.hits += hits
            result.early += min(early, hits)
            result.new += len(path) - hits
            result.held.append(server.store.num_known_pages)
            if self._progress is not None and (number + 1) % _PROGRESS_REQUESTS == 0:
                share = f"hits {result.hit_share:.3f} so far"
                self._progress(f"{number + 1:,} of {len(self._paths):,} requests, {share}")
        result.counters = server.store.stats()
        if server.disk is not None:
            moved = server.disk.stats().records_salvaged
            result.writes = Writes.of(result.counters, moved)
            result.num_read = server.disk.stats().records_read
        if isinstance(server.disk, CachedDiskTier):
            result.num_from_coded = server.disk.num_hits
            result.num_read += server.disk.num_hits
        return result

    def _arrive(self, server: ServerStore, turn: int) -> None:
        """The queue is filled up."""
        for number in range(
            turn + len(self._hashes), min(turn + self._num_known, len(self._paths))
        ):
            hashes = self._hashes[number] = page_hashes(self._paths[number])
            self._arrived_s[number] = server.clock.now_s
            prefix = ReusablePrefix(
                server.space, hashes, 0, max_quality=255,
                prompt_tokens=len(hashes) * server.page_tokens,
            )  # fmt: skip
            server.room.enter(number, prefix)

    def _serve(self, server: ServerStore, number: int) -> tuple[int, int]:
        """A request's turn; returns its pages in DRAM before that, and those that it loaded."""
        store, room, hashes = server.store, server.room, self._hashes[number]
        early = store.ready_prefix(server.space, hashes)
        order = list(self._hashes)
        room.step(order)
        for _ in range(_MAX_TICKS):
            if room.may_admit(number):
                break
            server.executor.run_due()
            server.clock.now_s += _TICK_S
            room.step(order)
        else:
            raise RuntimeError(f"Request {number} was held back for {_MAX_TICKS} steps.")
        ticket = server.pin_worth(number, hashes)
        room.leave(number, admitted=True)
        del self._hashes[number]
        self._fetch_ahead(server)
        self._compute(server, number, hashes, ticket)
        if store.lookahead is not None:
            store.lookahead.used(server.space, hashes, self._arrived_s.pop(number))
            said = None if self._hints is None else self._hints[number]
            if said is not None:
                hand_on(store.lookahead, server.space, hashes, 0, said)
        self._fetch_ahead(server)
        return early, len(ticket.rows)

    def _compute(self, server: ServerStore, number: int, hashes: Hashes, loads: LoadTicket) -> None:
        """A request is computed behind what it loads; its answer takes what it spares of its time.

        So the next request comes at the same time, whatever this one could reuse.
        """
        size, end_s = server.page_tokens, server.clock.now_s + self._prefill_s[number]
        tokens, order = len(hashes) * size, list(self._hashes)
        chunks = chunks_of(tokens, len(loads.rows) * size, self._chunk_tokens, size)
        token_s = self._prefill_s[number] / tokens
        prefill = ChunkedPrefill(server, hashes, loads, chunks)
        for took_s in prefill.run(0.0, [token_s * each.num_tokens for each in chunks]):
            server.clock.now_s += took_s
            server.executor.run_due()
            server.room.step(order)
        server.clock.now_s = max(server.clock.now_s, end_s)

    def _fetch_ahead(self, server: ServerStore) -> None:
        """What the scheduler's steps and the disk do while the device computes."""
        order = list(self._hashes)
        for _ in range(2):
            server.executor.run_due()
            server.room.step(order)
            server.clock.now_s += _TICK_S
        server.executor.run_due()


def return_times(
    paths: Sequence[Ids], prefill_s: Sequence[float], num_known: int
) -> npt.NDArray[np.float64]:
    """When each request's conversation comes back.

    It comes back with the next request that has all of its pages but the last, which is a partial
    one, and its time is to when that one begins to wait.

    Args:
        paths: pages of each request in order, by number.
        prefill_s: seconds of each request.
        num_known: requests that wait at a time.

    Returns:
        Seconds from the request's end to when the next one comes; infinity where none comes, not
        above 0 where it waits already: then there is nothing to say.
    """
    ends_s = np.cumsum(np.asarray(prefill_s) + _STEPS_S)
    starts_s = ends_s - np.asarray(prefill_s)
    times = np.full(len(paths), np.inf)
    next_use: dict[int, int] = {}
    for number in range(len(paths) - 1, -1, -1):
        path = paths[number].tolist()
        following = next_use.get(path[max(len(path) - 2, 0)])
        if following is not None:
            times[number] = starts_s[max(following - num_known + 1, 0)] - ends_s[number]
        next_use.update(dict.fromkeys(path, number))
    return times


def request_hints(
    times: npt.NDArray[np.float64], kind: str, seed: int = 7
) -> list[RequestHints | None]:
    """What clients could say of each request.

    Args:
        times: from `return_times`.
        kind: `exact`: when it comes back, or that it does not; `noisy`: each time is off by up to
            half of it; `shuffled`: each request says what is true of another one; `ttl`: only for
            how long its pages are of use, which is a second where it does not come back;
            `ttl-short`: the same, and half of what it takes where it does; `pin-all`: each wants to
            stay for a day.
        seed: of what is random.
    """
    rng = np.random.default_rng(seed)
    if kind == "noisy":
        times = times * rng.uniform(0.5, 1.5, len(times))
    elif kind == "shuffled":
        times = rng.permutation(times)
    if kind == "pin-all":
        return [RequestHints(pin_s=MAX_PIN_S)] * len(times)
    if kind.startswith("ttl"):
        lives = np.where(np.isfinite(times), times * (0.5 if kind == "ttl-short" else 1.0), 1.0)
        return [RequestHints(ttl_s=float(life)) if life > 0 else None for life in lives]
    return [
        None if time <= 0
        else RequestHints(ends=True) if math.isinf(time)
        else RequestHints(returns_in_s=float(time))
        for time in times
    ]  # fmt: skip


def num_reusable(paths: Sequence[Ids]) -> int:
    """Leading pages that an unbounded store would have."""
    return sum(replay_order(RequestOrder(paths, paths, ()), 1 << 60, "lru"))


def order_share(paths: Sequence[Ids], capacity: int, order: str, num_waiting: int = 0) -> float:
    """Share of the reusable pages that an order has of a capacity, in pages."""
    requests = RequestOrder(paths, paths, known_ahead(len(paths), num_waiting))
    return sum(replay_order(requests, capacity, order)) / max(num_reusable(paths), 1)


def rows(
    paths: Sequence[Ids], prefill_s: Sequence[float], share: float, known: Sequence[int],
    page_bytes: int, write_policy: str = DEFAULT_POLICY, hints: Sequence[str] = (), seed: int = 7,
    *, queue_only: bool = False, prefetch_policy: str = DEFAULT_PREFETCH_POLICY,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Names and figures of one capacity, a share of the footprint."""
    footprint = len(np.unique(np.concatenate(paths)))
    host = max(int(footprint * share * DRAM_SHARE), 2)
    disk = int(footprint * share) - host
    sizes = StoreSizes(page_bytes, host, disk)
    yield f"{share:g} of {footprint:,} pages", f"DRAM {host:,}, disk {disk:,}"
    for name, capacity in (("DRAM + disk", host + disk), ("disk alone", disk)):
        yield f"  LRU, {name}", f"{order_share(paths, capacity, 'lru'):.3f}"
        yield f"  Belady, {name}", f"{order_share(paths, capacity, 'belady'):.3f}"
        for num in known:
            if num:
                rate = order_share(paths, capacity, "waiting", num)
                yield f"  {num} known, then LRU, {name}", f"{rate:.3f}"
    for num in known:
        runs: list[tuple[str, PolicyConfig | None, list[RequestHints | None] | None]]
        runs = [("on", PolicyConfig(), None), ("off", None, None)]
        if queue_only:
            runs.append(("on, queue only", PolicyConfig(return_times=False), None))
        times = return_times(paths, prefill_s, num or len(paths))
        for kind in hints:
            config = PolicyConfig(pin_share=PIN_SHARE)
            runs.append((f"on, {kind} hints", config, request_hints(times, kind, seed)))
        for label, placement, said in runs:
            with virtual_store(sizes, placement, write_policy, prefetch_policy) as server:
                replay = Replay(paths, num or len(paths), prefill_s, _tell, said, chunk_tokens)
                done = replay.run(server)
            written = done.writes.all / max(done.new, 1)
            figures = f"hits {done.hit_share:.3f}, in DRAM {done.early_share:.3f}"
            figures += f", written {written:.3f}, a hit {done.written_per_hit:.2f}"
            figures += f", amplification {done.writes.amplification:.3f}"
            figures += f" ({done.writes.steady_amplification(host):.3f} at steady state)"
            figures += f", lost {done.counters.get('lost_wanted_pages', 0):,}"
            figures += f", no room in DRAM {done.counters.get('save_dropped_pages', 0):,}"
            if placement is not None:
                rule = order_share(paths, done.mean_held, "waiting" if num else "belady", num)
                figures += f", held {done.mean_held:,} (rule {rule:.3f})"
            yield f"  server, look-ahead {label}, {num or 'all'} known", figures


def coded_rows(
    paths: Sequence[Ids], prefill_s: Sequence[float], share: float, known: Sequence[int],
    page_bytes: int, coded_shares: Sequence[float], write_policy: str = DEFAULT_POLICY,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Names and figures of coded DRAM beside one capacity: need, or plain LRU, decides in it."""
    footprint = len(np.unique(np.concatenate(paths)))
    host = max(int(footprint * share * DRAM_SHARE), 2)
    disk = int(footprint * share) - host
    for part in coded_shares:
        coded = max(int(disk * part), 1)
        yield f"{share:g} of {footprint:,} pages", f"DRAM {host:,}, coded {coded:,}, disk {disk:,}"
        for num in known:
            figures = []
            for by_need in (True, False):
                sizes = StoreSizes(page_bytes, host, disk, coded_pages=coded)
                with virtual_store(sizes, PolicyConfig(), write_policy) as server:
                    if not by_need and isinstance(server.disk, CachedDiskTier):
                        server.disk.copy_keeper = None
                    done = Replay(paths, num or len(paths), prefill_s, _tell).run(server)
                name = "coded DRAM by need" if by_need else "plain LRU"
                figures.append(f"{name} {done.coded_share:.3f} of {done.num_read:,}")
            yield f"  server, {num or 'all'} known", ", ".join(figures)


def workload_lines(name: str, limit: int | None) -> list[Line]:
    """The first requests of `agents` (120 tasks) or `documents` (400 sessions of questions)."""
    make, count = {"agents": (agent_tasks, 120), "documents": (document_questions, 400)}[name]
    return session_lines(make(_SEED, count, _SESSIONS_PER_S), limit=limit)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str]) -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.policies.replay")
    requests = parser.add_mutually_exclusive_group()
    requests.add_argument("--trace", type=Path, default=BUNDLED)
    requests.add_argument(
        "--workload", choices=("agents", "documents"),
        help="requests of our own making (workloads/agents.py) instead of a trace",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="the first 1,500 requests")
    parser.add_argument("--shares", type=float, nargs="+", default=SHARES)
    parser.add_argument("--known", type=int, nargs="+", default=KNOWN, help="0: all of them")
    parser.add_argument("--kv-bytes-per-token", type=int, default=KV_BYTES_PER_TOKEN)
    parser.add_argument("--write-policy", default=DEFAULT_POLICY, help="the server's flag")
    parser.add_argument(
        "--prefetch-policy", default=DEFAULT_PREFETCH_POLICY, choices=PREFETCH_POLICIES,
        help="the server's flag",
    )  # fmt: skip
    add_chunk_flag(parser)
    parser.add_argument(
        "--hints", nargs="+", default=(), choices=HINTS, help="clients say when chats come back"
    )
    parser.add_argument(
        "--queue-only", action="store_true", help="look-ahead without learned return times, too"
    )
    parser.add_argument(
        "--coded-shares", type=float, nargs="+", default=(),
        help="coded DRAM beside the disk, as shares of its pages: only what that is worth is shown",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=7, help="of noisy and of shuffled hints")
    flags = parser.parse_args(arguments)
    limit = _QUICK_REQUESTS if flags.quick else None
    if flags.workload is None:
        lines = read_trace(flags.trace, limit=limit)
    else:
        lines = workload_lines(flags.workload, limit)
    paths = [line.hash_ids for line in lines]
    prefill_s = [line.input_tokens / LLAMA_70B.prefill_tokens_per_s for line in lines]
    page_bytes = BLOCK_TOKENS * flags.kv_bytes_per_token
    for share in flags.shares if flags.coded_shares else ():
        for name, figures in coded_rows(
            paths, prefill_s, share, flags.known, page_bytes, flags.coded_shares,
            flags.write_policy,
        ):  # fmt: skip
            print(f"{name:42} {figures}", flush=True)
    for share in () if flags.coded_shares else flags.shares:
        for name, figures in rows(
            paths,
            prefill_s,
            share,
            flags.known,
            page_bytes,
            flags.write_policy,
            flags.hints,
            flags.seed,
            queue_only=flags.queue_only,
            prefetch_policy=flags.prefetch_policy,
            chunk_tokens=flags.chunked_prefill_size,
        ):
            print(f"{name:42} {figures}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
