"""A prefill as a server runs it: chunk by chunk, each saved as soon as it is computed.

What SGLang does at `--chunked-prefill-size`, and `seam/cache.py` and `device/save_thread.py` with
it: a chunk is inserted in the tree when its forward has begun, and the saving thread, which is done
with the chunk before by then, takes slots for its pages. They are published when the forward has
ended and they are copied. The last chunk, which is the only one of a short prompt, is inserted when
its forward has ended. What is loaded from DRAM is loaded beside the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.simulator.virtual_store import ServerStore
from sglang_ext.tiers.store.types import Hashes, LoadTicket, SaveTicket


@dataclass(frozen=True)
class Chunk:
    """Tokens of a prompt that one forward computes.

    Attributes:
        start: tokens before them.
        end: the same with them.
    """

    start: int
    end: int

    @property
    def num_tokens(self) -> int:
        """How many these are."""
        return self.end - self.start


def chunks_of(
    prompt_tokens: int, reused_tokens: int, chunk_tokens: int, page_tokens: int
) -> list[Chunk]:
    """The chunks in which a prompt is computed behind what is reused; at least one.

    Args:
        prompt_tokens: of the prompt.
        reused_tokens: leading ones that are not computed; the last token always is.
        chunk_tokens: most tokens of a chunk; all but the last end with a page.
        page_tokens: P.
    """
    start, chunks = min(reused_tokens, prompt_tokens - 1), []
    while prompt_tokens - start > chunk_tokens:
        end = max((start + chunk_tokens) // page_tokens, start // page_tokens + 1) * page_tokens
        if end >= prompt_tokens:  # of pages that are longer than a chunk
            break
        chunks.append(Chunk(start, end))
        start = end
    return [*chunks, Chunk(start, prompt_tokens)]


class ChunkedPrefill:
    """One prefill: what it saves, and what the forward timer is told.

    Args:
        server: the store.
        hashes: u8 `[N, 32]`, pages of the prompt, all of which are saved.
        loads: what it reuses of them; given back once it is loaded.
        chunks: from `chunks_of`.
    """

    def __init__(
        self, server: ServerStore, hashes: Hashes, loads: LoadTicket, chunks: Sequence[Chunk]
    ) -> None:
        self._server, self._hashes, self._loads = server, hashes, loads
        self._chunks = chunks
        self._num_offered = len(loads.rows)

    def run(self, load_s: float, chunk_s: Sequence[float]) -> Iterator[float]:
        """Does one step after another; what it yields is how long the clock runs to the next.

        Whoever drives it has the scheduler take a step each time.

        Args:
            load_s: that the copies from DRAM take, of the first chunk's time.
            chunk_s: that each chunk takes.
        """
        server = self._server
        for number, (chunk, seconds) in enumerate(zip(self._chunks, chunk_s, strict=True)):
            num_loaded = 0 if number else len(self._loads.rows)
            server.forwards.begin_prefill(chunk.num_tokens, chunk.start, num_loaded, load_s)
            if not number:
                if load_s:
                    yield load_s
                server.store.release(self._loads.slots)
            ticket = None
            if chunk is not self._chunks[-1]:
                ticket = self._begin_save(chunk)
            yield seconds if number else max(seconds - load_s, 0.0)
            server.forwards.end_prefill()
            server.end_save(ticket or self._begin_save(chunk))
            if ticket is not None:
                yield 0.0  # a step of the scheduler, before the next chunk is inserted

    def _begin_save(self, chunk: Chunk) -> SaveTicket:
        num_pages = len(self._hashes)
        if chunk is not self._chunks[-1]:
            num_pages = min(chunk.end // self._server.page_tokens, num_pages)
        ticket = self._server.begin_save(self._hashes[:num_pages], self._num_offered)
        self._num_offered = max(self._num_offered, num_pages)
        return ticket
