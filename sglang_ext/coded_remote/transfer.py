"""Reading bytes of pages from a remote store, and proving that they are what was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sglang_ext.coded_remote.lookup import FoundPage
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import Outcome
from sglang_ext.tiers.remote.items import GetRequest, GetResult
from sglang_ext.tiers.remote.ranges import RangeRequest
from sglang_ext.tiers.remote.remote_store import RemoteStore


class Part(NamedTuple):
    """Bytes [start, end) of a page's record."""

    page: FoundPage
    start: int
    end: int


def read_parts(
    remote: RemoteStore, parts: Sequence[Part], on_bytes: Callable[[int], None]
) -> list[ByteArray]:
    """Reads parts of one kind of pages; blocks.

    Args:
        remote: the store.
        parts: what to read, each from the start of a stage to the end of one, or a whole record.
        on_bytes: told how many bytes came, as they come.

    Returns:
        The bytes of the leading parts that could be had, verified.
    """
    outs = [np.empty(part.end - part.start, np.uint8) for part in parts]
    pairs = list(zip(parts, outs, strict=True))
    timeout_s = remote.transfer_timeout_s(sum(out.size for out in outs))

    def on_result(_: int, result: GetResult) -> None:
        on_bytes(result.num_bytes)

    if parts[0].page.stages is None:
        whole = [GetRequest(part.page.key, out) for part, out in pairs]
        results = remote.get(whole, on_result, timeout_s)
    else:
        ranges = [RangeRequest(part.page.key, out, part.start) for part, out in pairs]
        results = remote.read_ranges(ranges, on_result, timeout_s)
    good: list[ByteArray] = []
    for (part, out), result in zip(pairs, results, strict=True):
        if result.outcome is not Outcome.OK or not _is_sound(remote, part, out, result.num_bytes):
            break
        good.append(out)
    return good


def _is_sound(remote: RemoteStore, part: Part, out: ByteArray, num_bytes: int) -> bool:
    """Whether bytes are those of the record whose header was found."""
    stages = part.page.stages
    if stages is None:  # `get` has verified it; another length is another record
        return num_bytes == out.size
    if num_bytes != out.size:
        remote.reject(part.page.key, "incomplete")
        return False
    for stage, stage_end in enumerate(stages.ends):
        at = stages.start_of(stage)
        inside = part.start <= at and stage_end <= part.end
        if inside and not stages.is_sound(stage, out[at - part.start : stage_end - part.start]):
            remote.reject(part.page.key, stages.failure.value)
            return False
    return True
