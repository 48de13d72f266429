"""A waiting request whose pages come from a remote store, and what is to be done for it next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.coded_remote.run import FetchedSpan
from sglang_ext.streaming import ChunkFetch
from sglang_ext.tiers.store.remote.coded_remote import Lookup


@dataclass(eq=False)
class Context:
    """A request whose pages are on their way. Guarded by the streams' lock.

    Attributes:
        lookup: what it asked for.
        done: called at the end.
        runs: stretches that were not begun.
        run: the present one.
        deadline_s: when its first token is due.
        is_decoding: the decoder has a chunk of it in hand.
        begins: nothing more is fetched for the present run.
        num_loaded: chunks of it that are used then.
        waited: for another context that brings some of its pages.
        keys: names of its pages that are not there yet.
    """

    lookup: Lookup
    done: Callable[[], None]
    runs: deque[list[FoundPage]] = field(default_factory=deque)
    run: FetchedSpan | None = None
    deadline_s: float | None = None
    is_decoding: bool = False
    begins: bool = False
    num_loaded: int = 0
    waited: bool = False
    keys: frozenset[tuple[int, bytes]] = field(init=False)

    def __post_init__(self) -> None:
        """Names the pages: another request may want the same, though not from the same one on."""
        self.keys = self.keys_of(self.lookup.num_known, len(self.lookup.hashes))

    def keys_of(self, first: int, end: int) -> frozenset[tuple[int, bytes]]:
        """Names of pages [first, end) of the prefix."""
        number = self.lookup.space.number
        return frozenset((number, row.tobytes()) for row in self.lookup.hashes[first:end])


class Job(NamedTuple):
    """Bytes to fetch for a context."""

    context: Context
    run: FetchedSpan
    fetch: ChunkFetch


class Decode(NamedTuple):
    """Pages of a context to decode, at a level: a position in `FoundPage.sizes`."""

    context: Context
    run: FetchedSpan
    pages: Sequence[FoundPage]
    step: int
