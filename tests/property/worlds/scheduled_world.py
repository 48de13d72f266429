"""What worlds around the real cache have alike: SGLang's scheduler, and its requests.

A world makes cache, pools and store, says what a forward computes, and checks it.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import (  # noqa: E402
    CacheRequestHandle,
    EvictParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from sglang_ext.seam.cache import HierKVRadixCache  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.store import PageStore  # noqa: E402
from sglang_ext.tiers.store.types import READY  # noqa: E402

PAGE = 4


@dataclass
class Request:
    """What of SGLang's `Req` the cache looks at."""

    rid: str
    tokens: list[int]
    num_new: int
    exact: bool = False
    kv: ReqKvInfo = field(default_factory=ReqKvInfo)
    extra_key: str | None = None
    cache_salt: str | None = None
    lora_id: None = None
    priority: int = 0
    session: Any = None
    session_id: None = None
    kv_rotation_base: None = None
    swa_branching_seqlen: int | None = None
    skip_radix_cache_insert: bool = False
    lock: Any = None
    last_node: Any = None
    prefix_len: int = 0
    extend_end: int = 0
    host_hit_length: int = 0
    cached_tokens: int = 0
    num_loaded: int = 0
    num_decoded: int = 0
    done: bool = False
    discard_output_reason: Any = None

    def __post_init__(self) -> None:
        custom = {"hier_kv_exact": True} if self.exact else None
        self.sampling_params = SimpleNamespace(custom_params=custom)
        self.prompt_len = len(self.tokens)
        self.cache_request_handle = CacheRequestHandle(self.rid, 0)

    @property
    def full_untruncated_fill_ids(self) -> array[int]:
        return array("q", self.tokens)

    @property
    def origin_input_ids(self) -> array[int]:
        return array("q", self.tokens[: self.prompt_len])

    def get_fill_ids(self) -> array[int]:
        return array("q", self.tokens[: self.extend_end])

    def finished(self) -> bool:
        return self.done


class ReadyPages(NamedTuple):
    """Pages that are ready in DRAM.

    Attributes:
        keys: u8 `[N, 32]`.
        spaces: numbers of their key spaces.
        qualities: as the index has them.
        slots: u8 `[N, bytes]`, a copy of what lies in their slots.
    """

    keys: npt.NDArray[np.uint8]
    spaces: npt.NDArray[np.uint32]
    qualities: npt.NDArray[np.uint8]
    slots: npt.NDArray[np.uint8]


def ready_pages(store: PageStore) -> ReadyPages:
    """All that are ready in DRAM now."""
    table = store._books.table
    with table.lock:
        rows = table.index.rows()
        rows = rows[(table.index.flags[rows] & READY) != 0]
        keys, spaces = table.index.keys(rows)
        slots = store.arena.slots[table.index.host_slot[rows]]
        return ReadyPages(keys, spaces, table.index.quality[rows], slots)


class ScheduledWorld:
    """Steps of SGLang's scheduler, over a cache that a world has made.

    It has many methods because each is one thing that may happen, or what a world adds to one.

    Attributes:
        rng: what happens follows from it.
        cache: the plugin's.
        store: its pages.
        arena: their DRAM.
        allocator: SGLang's, of rows.
        req_pool: SGLang's, of requests.
        waiting: requests in the queue.
        running: requests that were admitted.
        counts: how often each thing has happened.
        has_states: whether some layers have states.
    """

    has_states: ClassVar[bool] = False
    rng: random.Random
    cache: HierKVRadixCache
    store: PageStore
    arena: HostArena
    allocator: Any
    req_pool: Any
    waiting: list[Request]
    running: list[Request]
    counts: dict[str, int]

    # ---- what a world is ----

    def forward(self, req: Request, start: int, end: int) -> None:
        """Computes tokens [start, end) on what is in the rows before them."""
        raise NotImplementedError

    def checkpoint(self, req: Request, up_to: int) -> None:
        """Rows up to there are written; whole pages of them enter the tree."""
        raise NotImplementedError

    def check_store(self) -> None:
        """Every page in DRAM is what is said of it."""
        raise NotImplementedError

    def finish(self, req: Request) -> None:
        """As `release_kv_cache` does."""
        raise NotImplementedError

    def retract(self, req: Request) -> None:
        """Its KV is dropped, and it waits again."""
        raise NotImplementedError

    # ---- requests ----

    def enqueue(self, req: Request) -> None:
        """As `_add_request_to_queue` does."""
        self.match(req)
        matched = req.prefix_len + req.host_hit_length
        limit = len(req.tokens) - 1
        self.cache.prefetch_from_storage(
            req.cache_request_handle,
            req.last_node,
            array("q", req.tokens[matched:limit]),
            matched_prefix_tokens=array("q", req.tokens[:matched]),
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
        )
        self.waiting.append(req)

    def match(self, req: Request, *, is_admitted: bool = False) -> Any:
        """As `match_kv_cache` does; what the tree says.

        Args:
            req: the request.
            is_admitted: whether it is about to run; where there are states, it takes one then.
        """
        key = RadixKey(
            req.full_untruncated_fill_ids, req.extra_key, limit=len(req.tokens) - 1,
            cache_salt=req.cache_salt,
        )  # fmt: skip
        takes_state = is_admitted and self.has_states
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req, cow_mamba=takes_state))
        req.prefix_len, protected = result.device_prefix_len, result.cache_protected_len
        req.kv.cache_protected_len = req.prefix_len if protected is None else protected
        req.last_node, req.host_hit_length = result.last_device_node, result.host_hit_length
        return result

    def admit(self, req: Request, chunk: int | None = None) -> bool:
        """As the scheduler does: match, lock, load, allocate, compute, insert."""
        self.cache.check_hicache_events()  # as SGLang does before every admission
        if self.is_full() or not self.cache.check_prefetch_progress(req.cache_request_handle):
            return False
        self.match(req, is_admitted=True)
        req.lock = self.cache.lock(req.last_node)
        if self.cache.linker.has_hit(req.rid):
            req.num_loaded, req.last_node = self.cache.linker.load_back(req)
            req.prefix_len += req.num_loaded
        target = len(req.tokens)
        if chunk is not None:
            target = min(target, (req.prefix_len + chunk) // PAGE * PAGE)
        # A turn of a session goes on in the session's rows, of which the last page is begun.
        held = -(-req.kv.kv_allocated_len // PAGE) * PAGE if req.kv.holds_kv else req.prefix_len
        rows = self.allocate(max(0, -(-target // PAGE) * PAGE - held))
        if rows is None:
            self.give_up(req)
            return False
        self.waiting.remove(req)
        has_prefix = req.prefix_len and not req.kv.holds_kv
        prefix = self.cache.prefix_device_indices(req) if has_prefix else None
        self.make_room_for_states(req)
        self.req_pool.alloc([req])
        if prefix is not None:
            self.write(req, 0, prefix)
        self.write(req, held, rows)
        req.kv.kv_allocated_len = held + len(rows)
        self.cache.maybe_hand_to_session(req)
        index = self.cache.ready_to_load_host_cache()
        self.cache.hier_linker.layer_done_counter.set_consumer(index)
        failed = self.cache.finish_external_linker_loads([req])
        self.cache.hier_linker.layer_done_counter.set_consumer(-1)
        if failed or self.load_failed(req):
            self.abort(req)
            return True
        self.check_report(req)
        self.runs(req)
        self.forward(req, req.prefix_len, target)
        self.checkpoint(req, target)
        self.running.append(req)
        return True

    def is_full(self) -> bool:
        """Whether no more requests may run."""
        return False

    def make_room_for_states(self, req: Request) -> None:
        """Where there are states, as `alloc_req_slots` does."""

    def load_failed(self, req: Request) -> bool:
        """Whether a load failed of which `finish_external_linker_loads` could not tell yet."""
        return False

    def abort(self, req: Request) -> None:
        """Its load failed, which it cannot here."""
        raise AssertionError(f"{req.rid}: its load failed")

    def check_report(self, req: Request) -> None:
        """What is said of the reused tokens is what they are."""

    def runs(self, req: Request) -> None:
        """A request is about to be computed, its loads are queued."""

    def give_up(self, req: Request) -> None:
        """No room: what was prepared is taken back, as SGLang does when it aborts a request."""
        loaded = self.cache.linker.private_load_indices.get(req.rid)
        self.cache.release_aborted_request(req.cache_request_handle)
        if loaded is not None:
            self.free(loaded)
        self.cache.unlock(req.lock)
        self.waiting.remove(req)

    def allocate(self, num: int) -> torch.Tensor | None:
        """Rows for so many tokens; None where there is no room."""
        if num == 0:
            return torch.empty(0, dtype=torch.int64)
        lacks = num - self.allocator.available_size()
        if lacks > 0:
            self.cache.evict(EvictParams(num_tokens=lacks))
        rows: torch.Tensor | None = self.allocator.alloc(num)
        return rows

    def free(self, rows: torch.Tensor) -> None:
        """Gives rows back that were taken for a load."""
        self.allocator.free(rows)

    def write(self, req: Request, start: int, rows: torch.Tensor) -> None:
        """Notes which rows its tokens from `start` on are in."""
        span = slice(start, start + len(rows))
        self.req_pool.write((req.kv.req_pool_idx, span), rows.to(torch.int32))

    def rows_of(self, req: Request, start: int, end: int) -> torch.Tensor:
        """The rows of its tokens [start, end)."""
        rows: torch.Tensor = self.req_pool.req_to_token[req.kv.req_pool_idx, start:end]
        return rows.to(torch.int64)

    def go_on(self, req: Request) -> bool:
        """Computes the rest of the prompt, or new tokens one by one, and ends."""
        start = req.prefix_len
        if start < req.prompt_len:
            end = min(req.prompt_len, (start + 8) // PAGE * PAGE or 8)
            end = max(end, start + 1)
        elif req.num_new:
            req.num_new -= 1
            req.tokens.append(self.rng.randrange(3))
            end = len(req.tokens)
            self.slide(req)
        else:
            self.finish(req)
            return True
        if end > req.kv.kv_allocated_len:
            need = -(-end // PAGE) * PAGE - req.kv.kv_allocated_len
            rows = self.allocate(need)
            if rows is None:
                self.retract(req)
                return True
            self.write(req, req.kv.kv_allocated_len, rows)
            req.kv.kv_allocated_len += need
        self.forward(req, start, end)
        if end <= req.prompt_len:
            self.checkpoint(req, end)
        else:
            req.prefix_len = end
        return True

    def slide(self, req: Request) -> None:
        """Before a decode, where there are windows: rows that they leave behind are freed."""

    def release(self, req: Request) -> None:
        """Gives back what a request had."""
        span = (req.kv.cache_protected_len, req.kv.kv_allocated_len)
        if span[0] < span[1]:
            self.cache.free_kv_row(req.kv, [span])
        self.cache.unlock(req.lock)
        req.lock = None
        self.req_pool.free(req)

    # ---- random steps ----

    def do(self, kind: str) -> None:
        """Does one thing, if it can be done now."""
        if getattr(self, f"_do_{kind}")() is not False:
            self.counts[kind] = self.counts.get(kind, 0) + 1

    def _do_go_on(self) -> bool | None:
        return self.go_on(self.rng.choice(self.running)) if self.running else False

    def _do_events(self) -> None:
        self.cache.check_hicache_events()
        self.check_store()

    def _do_retract(self) -> bool | None:
        if not self.running:
            return False
        self.retract(self.rng.choice(self.running))
        return None

    def _do_breathe(self) -> None:
        time.sleep(self.rng.choice((0.0, 0.001)))

    # ---- the end ----

    def flush(self) -> None:
        """Drops the device tier."""
        self.cache.reset()
        self.allocator.clear()

    def only_on_disk(self) -> None:
        """Drops the device tier and DRAM."""
        self.flush()
        books = self.store._books
        with books.table.lock:
            books.room.evict(self.arena.num_slots)

    def settle(self) -> None:
        """Saves, reads and writes in flight land."""
        assert self.cache.hier_linker.quiesce()
        self.wait_for(lambda: not self.cache.hier_linker.numbers_of_saves()[0])  # nor what follows
        self.cache.check_hicache_events()
        assert self.store.wait_idle(300)
        self.wait_for(
            lambda: not self.store.stats()["spill_queue_pages"] and not self.arena._pins.any()
        )
        self.check_store()
        self.store.check()

    def wait_for(self, state: Callable[[], bool]) -> None:
        """Waits until the store's threads have brought about what `state` asks."""
        deadline_s = time.monotonic() + 300
        while not state():
            assert time.monotonic() < deadline_s, self.store.stats()
            time.sleep(0.002)

    def close(self) -> None:
        """Ends the cache's threads."""
        self.cache.release_host_resources()
