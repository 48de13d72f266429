"""What goes into the calls of `RemoteStore`, and what comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.tiers.records.record import ByteArray, RecordMeta, VerifyResult
from sglang_ext.tiers.remote.base import Outcome, RemoteKey


class GetRequest(NamedTuple):
    """One record to read.

    Attributes:
        key: what is asked for; what is not exactly this is no hit.
        out: u8 [n], writable and contiguous, with room for the record. Its content means nothing
            unless the outcome is OK, and then only up to the record's length.
    """

    key: RemoteKey
    out: ByteArray


class GetResult(NamedTuple):
    """How one read ended.

    Attributes:
        outcome: OK only for an intact record of exactly the key asked for.
        num_bytes: the record's, with OK.
    """

    outcome: Outcome
    num_bytes: int = 0


class HeadResult(NamedTuple):
    """What a store has under a key, by its header alone: not a promise that it is intact.

    Attributes:
        outcome: OK, or why there is no header.
        meta: what the header says; None without one.
        num_bytes: length of the record; 0 without one.
        rejected: what is wrong with what is there; None where nothing is. It is not counted yet.
    """

    outcome: Outcome
    meta: RecordMeta | None = None
    num_bytes: int = 0
    rejected: VerifyResult | None = None


class PutItem(NamedTuple):
    """One record to store.

    Attributes:
        key: must be what the record's header says.
        record: u8 [n], header and payload, sealed or not; not changed, and not to change until the
            call returns.
        tenant: whose it is, by the number in the store's `Division`.
    """

    key: RemoteKey
    record: ByteArray
    tenant: int = 0


OnResult = Callable[[int, GetResult], None]
"""Called with a request's position and its result, in order, on the thread that called `get`."""

OnKnown = Callable[[Sequence[RemoteKey], Sequence[Outcome]], None]
"""Called at the end of a call, on its thread, with what was asked and one outcome each."""
