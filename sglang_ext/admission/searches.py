"""Searches for more than a waiting request's own prefix, as several ranks agree on what they find.

Each rank searches what it knows itself, on a thread of its own, so searches end at other times and
may find other things. A rank tells in a step whether a search has ended, and a digest of what it
found; only what all have found alike counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from sglang_ext.admission.waiting_request import Readiness

# Bits of `SearchReport.digest`.
DIGEST_BITS = 62


class SearchReport(NamedTuple):
    """What a rank tells of one search.

    Attributes:
        readiness: READY: it has ended; LATE: this rank waits for it no longer.
        is_needless: the rank has no use for what is found.
        digest: of what was found, of so many bits; 0 where that is nothing, or not known yet.
    """

    readiness: Readiness
    is_needless: bool
    digest: int


class AgreedSearch(NamedTuple):
    """What all ranks know of one search.

    Attributes:
        readiness: the least of all ranks.
        is_needless: no rank has a use for it.
        digest: of what all have found, or told of before they had; None where they differ.
    """

    readiness: Readiness
    is_needless: bool
    digest: int | None


class Searches(Protocol):
    """The searches of one rank, begun and given up in the same order on all. Scheduler thread."""

    def report(self, most: int) -> list[SearchReport]:
        """What this rank tells of its oldest searches, at most so many."""

    def settle(self, agreed: Sequence[AgreedSearch]) -> None:
        """Takes what was agreed on the searches of the last report, in the same step."""
