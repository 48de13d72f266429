"""What SGLang's scheduler does with requests, for worlds over the real cache, linker and store."""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

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


class SchedulerRequest:
    """What all worlds' requests have of SGLang's `Req`; a world's own is a dataclass of it."""

    rid: str
    tokens: list[int]
    exact: bool
    done: bool

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

    def finished(self) -> bool:
        return self.done


class Scheduler:
    """Requests in the queue and in the batch; what is computed for them is a world's.

    Attributes:
        cache: the plugin's.
        running: requests of the batch.
        waiting: requests of the queue.
    """

    rng: random.Random
    cache: HierKVRadixCache
    store: PageStore
    arena: HostArena
    allocator: Any
    req_pool: Any
    running: list[Any]
    waiting: list[Any]

    # ---- of the world ----

    def admit(self, req: Any, chunk: int | None = None) -> Any:
        """A request is to run; False where it does not."""
        raise NotImplementedError

    def forward(self, req: Any, start: int, end: int) -> None:
        """Computes rows of a request."""
        raise NotImplementedError

    def checkpoint(self, req: Any, up_to: int) -> None:
        """A part of a prompt was computed."""
        raise NotImplementedError

    def finish(self, req: Any) -> None:
        """A request ends."""
        raise NotImplementedError

    def retract(self, req: Any) -> None:
        """A request gives its rows up, and waits again."""
        raise NotImplementedError

    def check_store(self) -> None:
        """What the store has is right."""
        raise NotImplementedError

    # ---- requests ----

    def rows_of(self, req: Any, start: int, end: int) -> torch.Tensor:
        rows: torch.Tensor = self.req_pool.req_to_token[req.kv.req_pool_idx, start:end]
        return rows.to(torch.int64)

    def enqueue(self, req: Any) -> None:
        """As `_add_request_to_queue` does."""
        self.look_up(req)
        self.waiting.append(req)

    def look_up(self, req: Any) -> None:
        """As `_prefetch_kvcache` does."""
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

    def match(self, req: Any) -> None:
        """As `match_kv_cache` does."""
        self.matched(req)

    def matched(self, req: Any, **asked: Any) -> Any:
        """Matches a request; returns all that SGLang found."""
        key = RadixKey(
            req.full_untruncated_fill_ids, req.extra_key, limit=len(req.tokens) - 1,
            cache_salt=req.cache_salt,
        )  # fmt: skip
        result = self.cache.match_prefix(MatchPrefixParams(key=key, req=req, **asked))
        req.prefix_len, protected = result.device_prefix_len, result.cache_protected_len
        req.kv.cache_protected_len = req.prefix_len if protected is None else protected
        req.last_node, req.host_hit_length = result.last_device_node, result.host_hit_length
        return result

    def give_up(self, req: Any) -> None:
        """No room: what was prepared is taken back, as SGLang does when it aborts a request."""
        loaded = self.cache.linker.private_load_indices.get(req.rid)
        self.cache.release_aborted_request(req.cache_request_handle)
        if loaded is not None:
            self.free_loaded(loaded)
        self.cache.unlock(req.lock)
        self.waiting.remove(req)

    def free_loaded(self, rows: torch.Tensor) -> None:
        """Gives rows back that were to be loaded."""
        self.allocator.free(rows)

    def allocate(self, num: int) -> torch.Tensor | None:
        """Rows of the pool, if need be those of others; None where there are not so many."""
        if num == 0:
            return torch.empty(0, dtype=torch.int64)
        short = num - self.allocator.available_size()
        if short > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        rows: torch.Tensor | None = self.allocator.alloc(num)
        return rows

    def write(self, req: Any, start: int, rows: torch.Tensor) -> None:
        span = slice(start, start + len(rows))
        self.req_pool.write((req.kv.req_pool_idx, span), rows.to(torch.int32))

    def go_on(self, req: Any) -> bool:
        """Computes the rest of the prompt, or new tokens one by one, and ends."""
        start, page = req.prefix_len, self.cache.page_size
        if start < req.prompt_len:
            end = min(req.prompt_len, (start + 8) // page * page or 8)
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
            need = -(-end // page) * page - req.kv.kv_allocated_len
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

    def slide(self, req: Any) -> None:
        """Windows leave rows behind before a decode; here are none."""

    def drop_kv(self, req: Any) -> None:
        """A request that runs does so no more, and has no row."""
        self.running.remove(req)
        assert not self.cache.claim_kv_row(req)
        self.release(req)
        req.kv = ReqKvInfo()
        req.prompt_len = len(req.tokens)

    def release(self, req: Any) -> None:
        span = (req.kv.cache_protected_len, req.kv.kv_allocated_len)
        if span[0] < span[1]:
            self.cache.free_kv_row(req.kv, [span])
        self.cache.unlock(req.lock)
        req.lock = None
        self.req_pool.free(req)

    def flush(self) -> None:
        """The device forgets everything."""
        self.cache.reset()
        self.allocator.clear()

    # ---- random steps ----

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

    def only_on_disk(self) -> None:
        """Drops the device tier and DRAM."""
        self.flush()
        books = self.store._books
        with books.table.lock:
            books.room.evict(self.arena.num_slots)

    def close(self) -> None:
        self.cache.release_host_resources()
