"""Reading records: neighbours in one call, each verified before it counts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sglang_ext.tiers.base import BLOCK_BYTES, ReadRequest
from sglang_ext.tiers.disk.catalog import Segment
from sglang_ext.tiers.disk.context import DiskContext, usable_slot
from sglang_ext.tiers.record import VerifyResult, verify


def read_records(
    context: DiskContext, digest: bytes, requests: Sequence[ReadRequest]
) -> list[VerifyResult]:
    """Reads and verifies `requests`; the contract is `Tier.read`'s."""
    results = [VerifyResult.MISSING] * len(requests)
    segments = context.catalog.find(digest, {request.location[0] for request in requests})
    wanted = [index for index, request in enumerate(requests) if _in_segment(segments, request)]
    wanted.sort(key=lambda index: requests[index].location)
    tasks = [
        partial(_read_run, context, segments[requests[run[0]].location[0]], requests, run, results)
        for run in _runs(context, segments, requests, wanted)
    ]
    context.workers.run(tasks)
    num_right = 0
    for result in results:
        if result is VerifyResult.OK:
            num_right += 1
        else:
            context.counters.error(result.value)
    context.counters.add("records_read", num_right)
    return results


def _in_segment(segments: dict[int, Segment], request: ReadRequest) -> bool:
    """Says whether the location is that of a slot that was handed out, and `out` can take it."""
    segment = segments.get(request.location[0])
    if segment is None:
        return False
    index, rest = divmod((request.location[1] - 1) * BLOCK_BYTES, segment.slot_bytes)
    return (
        rest == 0
        and 0 <= index < segment.num_records
        and usable_slot(request.out, segment.slot_bytes, writable=True)
    )


def _runs(
    context: DiskContext,
    segments: dict[int, Segment],
    requests: Sequence[ReadRequest],
    wanted: Sequence[int],
) -> list[list[int]]:
    """Splits sorted request indices into runs of neighbours, none too long."""
    runs: list[list[int]] = []
    expected = (-1, -1)
    longest = 0
    for index in wanted:
        segment_id, block = requests[index].location
        slot_bytes = segments[segment_id].slot_bytes
        if (segment_id, block) != expected or len(runs[-1]) >= longest:
            longest = context.slots_per_run(len(wanted), slot_bytes)
            runs.append([])
        runs[-1].append(index)
        expected = (segment_id, block + slot_bytes // BLOCK_BYTES)
    return runs


def _read_run(
    context: DiskContext,
    segment: Segment,
    requests: Sequence[ReadRequest],
    run: Sequence[int],
    results: list[VerifyResult],
) -> None:
    """Reads one run and sets its results; they stay MISSING where no bytes arrived."""
    offset = requests[run[0]].location[1] * BLOCK_BYTES
    try:
        with context.fds.reading(segment.segment_id, segment.path) as fd:
            arrived = context.read_slots(fd, [requests[index].out for index in run], offset)
    except FileNotFoundError:
        return  # reclaimed between look-up and read
    except OSError:
        context.counters.error("io_read")
        return
    context.counters.add("bytes_read", arrived * segment.slot_bytes)
    for index in run[:arrived]:
        request = requests[index]
        results[index] = verify(request.out, request.page_hash, segment.namespace, request.lora)
