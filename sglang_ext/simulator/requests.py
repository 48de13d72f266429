"""The simulator's view of the server's store: what a request asks of it, from arrival to answer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.simulator.prefill import Chunk, ChunkedPrefill
from sglang_ext.simulator.types import Ids, Request, System
from sglang_ext.simulator.virtual_store import ServerStore, StoreSizes, page_hashes, virtual_store
from sglang_ext.tiers.policy import PolicyConfig
from sglang_ext.tiers.records.quality import ANY
from sglang_ext.tiers.store.types import Hashes, LoadTicket

_LEAST_PAGES = 2  # of DRAM; a server refuses less


class Store:
    """Calls the page store and the waiting room as the server's cache does; decides nothing.

    Args:
        system: the machine; without DRAM nothing is stored.
        placement: the policy's settings; None for `--hier-kv-lookahead off`.
        num_pages: page ids are below this.

    Attributes:
        server: the product's store; None where nothing is stored.
    """

    def __init__(self, system: System, placement: PolicyConfig | None, num_pages: int) -> None:
        self.server: ServerStore | None = None
        if system.host_pages >= _LEAST_PAGES:
            sizes = StoreSizes(
                int(system.page_bytes), system.host_pages, system.disk_pages,
                read_bytes_per_s=system.disk_gb_s * 1e9,
                write_bytes_per_s=system.disk_write_gb_s * 1e9,
                page_tokens=system.page_tokens,
            )  # fmt: skip
            self.server = virtual_store(
                sizes, placement, system.write_policy, system.prefetch_policy
            )
        self._page_tokens = system.page_tokens
        self._step_s = 1 / system.decode_tokens_per_s
        self._seen = np.zeros(num_pages, np.bool_)
        self._prompts: dict[int, Hashes] = {}  # of what waits
        self._loads: dict[int, LoadTicket] = {}  # of what is about to be prefilled

    # ---- time ----

    def set_time(self, now_s: float) -> None:
        """It is that time now."""
        if self.server is not None:
            self.server.clock.now_s = now_s

    def next_s(self) -> float:
        """When the disk has next done something."""
        return self.server.executor.next_s() if self.server is not None else math.inf

    def run_due(self) -> None:
        """What the disk has done by now."""
        if self.server is not None:
            self.server.executor.run_due()

    # ---- a request's way ----

    def arrive(self, request: Request) -> None:
        """A request enters the queue."""
        if self.server is None:
            return
        server, prompt, at = self.server, request.prompt_ids, request.left_at
        if len(request.left_ids) and server.store.lookahead is not None:
            path = page_hashes(np.concatenate([prompt[:at], request.left_ids, prompt[at:]]))
            server.store.lookahead.leave_behind(server.space, path, at, at + len(request.left_ids))
        self._prompts[request.number] = page_hashes(prompt)
        hashes = self._whole_pages(request)
        if len(hashes):
            prefix = ReusablePrefix(
                server.space, hashes, 0, ANY, prompt_tokens=request.prompt_tokens
            )
            server.room.enter(request.number, prefix)

    def step(self, order: Sequence[int]) -> None:
        """A step of the scheduler."""
        if self.server is not None:
            self.server.room.step(order)

    def num_in_dram(self, request: Request) -> int:
        """Leading pages of a waiting request that lie in DRAM."""
        if self.server is None:
            return 0
        hashes = self._prompts[request.number]
        return self.server.store.ready_prefix(self.server.space, hashes)

    def may_admit(self, request: Request) -> bool:
        """False while a request should wait for its pages."""
        if self.server is None:
            return True
        may_run = self.server.room.may_admit(request.number)
        if may_run:
            self.server.room.let_go(request.number)
        return may_run

    def admit(self, request: Request) -> int:
        """A request runs; returns the leading pages that it need not compute."""
        if self.server is None:
            return 0
        server, hashes = self.server, self._prompts.pop(request.number)
        ticket = server.pin_worth(request.number, hashes)
        server.room.leave(request.number, admitted=True)
        self._loads[request.number] = ticket
        return len(ticket.rows)

    def prefill(
        self, request: Request, chunks: Sequence[Chunk], load_s: float, chunk_s: Sequence[float]
    ) -> Iterator[float]:
        """The prefill of an admitted request, by its steps; see `ChunkedPrefill.run`.

        Args:
            request: the request.
            chunks: that it is computed in.
            load_s: that its loads from DRAM take, of the first chunk's time.
            chunk_s: that each chunk takes.
        """
        if self.server is None:
            return iter([sum(chunk_s)])
        hashes, loads = self._whole_pages(request), self._loads.pop(request.number)
        return ChunkedPrefill(self.server, hashes, loads, chunks).run(load_s, chunk_s)

    def prefilled(self, request: Request) -> None:
        """The pages of its prompt are complete, and saved."""
        self._seen[request.stored_ids] = True

    def decoded(self) -> None:
        """Others have decoded up to now."""
        if self.server is not None:
            self.server.forwards.decoded(self._step_s)

    def save_answer(self, request: Request) -> None:
        """The pages of its answer are, too."""
        if self.server is None:
            return
        server, hashes = self.server, page_hashes(request.stored_ids)
        num_offered = len(self._whole_pages(request))
        if num_offered < len(hashes):
            server.save(hashes, num_offered)
        if server.store.lookahead is not None and len(hashes):
            server.store.lookahead.used(server.space, hashes, request.arrival_s)

    def _whole_pages(self, request: Request) -> Hashes:
        """The pages of its prompt, also those that nobody can have stored."""
        num_pages = max(len(request.prompt_ids), request.prompt_tokens // self._page_tokens)
        return page_hashes(request.stored_ids[:num_pages])

    # ---- figures ----

    def seen_prefix(self, path: Ids) -> int:
        """Leading pages that were ever stored."""
        seen = self._seen[path]
        return len(path) if seen.all() else int(np.argmin(seen))

    def counters(self) -> dict[str, float]:
        """What the store counted, and what went to disk."""
        if self.server is None:
            return {}
        self.server.room.leave_all()  # nobody waits any more, but a probe may be left
        values: dict[str, float] = dict(self.server.store.stats())
        if self.server.disk is not None:
            stats = self.server.disk.stats()
            values["disk_records_written"] = stats.records_written
            values["disk_records_moved"] = stats.records_salvaged
        return values

    def close(self) -> None:
        """Gives everything back."""
        if self.server is not None:
            self.server.close()
