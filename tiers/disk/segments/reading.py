"""Reading records: neighbours in one call, each verified before it counts.

That is one of two checks: a record must be whole and of its full key (`records/checks.py`, behind
`DiskContext.seals`). What it holds must then be a page of the model that is loaded: `PageDecoder`
(`store/disk_coding.py`) asks `PageRules` (`records/page_rules.py`) before the page is ready.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_ext.tiers.base import BLOCK_BYTES, ReadRequest
from sglang_ext.tiers.disk.disk_context import DiskContext, usable_slot
from sglang_ext.tiers.disk.segments.catalog import Segment
from sglang_ext.tiers.disk.segments.fileio import IOV_MAX
from sglang_ext.tiers.disk.workers import IoRun
from sglang_ext.tiers.records.checks import RecordKey
from sglang_ext.tiers.records.record import ByteArray, VerifyResult


def read_records(
    context: DiskContext, digest: bytes, requests: Sequence[ReadRequest]
) -> list[VerifyResult]:
    """Reads and verifies `requests`; the contract is `Tier.read`'s."""
    results = [VerifyResult.MISSING] * len(requests)
    segments = context.catalog.find(digest, {request.location[0] for request in requests})
    lengths = [_num_blocks(segments.get(request.location[0]), request) for request in requests]
    wanted = [index for index, num_blocks in enumerate(lengths) if num_blocks]
    wanted.sort(key=lambda index: requests[index].location)
    context.work(
        [
            IoRun(move=read.move, finish=read.finish)
            for read in (
                _Read(
                    context,
                    segments[requests[run[0]].location[0]],
                    [requests[index] for index in run],
                    [lengths[index] for index in run],
                    run,
                    results,
                )
                for run in _runs(context, requests, lengths, wanted)
            )
        ]
    )
    num_right = 0
    for result in results:
        if result is VerifyResult.OK:
            num_right += 1
        else:
            context.counters.error(result.value)
    context.counters.add("records_read", num_right)
    return results


def _num_blocks(segment: Segment | None, request: ReadRequest) -> int:
    """Returns how many blocks to read; 0 where no record may lie or `out` cannot take it.

    A segment is divided into slots of one size, or has packed records one behind the other. In the
    first, a record begins at the first block of a slot; in the second, at any block before the end
    of the last record. Where no record begins, the bytes that are read fail their checks.
    """
    if segment is None or not usable_slot(request.out, segment.slot_bytes):
        return 0
    block, slot_blocks = request.location[1], segment.slot_bytes // BLOCK_BYTES
    if not 1 <= block < segment.end_block:
        return 0
    if not segment.packed:
        return slot_blocks if (block - 1) % slot_blocks == 0 else 0
    most = min(slot_blocks, segment.end_block - block)
    return (request.num_blocks or most) if 0 <= request.num_blocks <= most else 0


def _runs(
    context: DiskContext,
    requests: Sequence[ReadRequest],
    lengths: Sequence[int],
    wanted: Sequence[int],
) -> list[list[int]]:
    """Splits sorted request indices into runs of neighbours, none too long."""
    total = sum(lengths[index] for index in wanted)
    largest = max((lengths[index] for index in wanted), default=0)
    longest = context.run_bytes(total * BLOCK_BYTES, largest * BLOCK_BYTES) // BLOCK_BYTES
    runs: list[list[int]] = []
    expected = (-1, -1)
    run_blocks = 0
    for index in wanted:
        segment_id, block = requests[index].location
        num_blocks = lengths[index]
        is_next = (segment_id, block) == expected and len(runs[-1]) < IOV_MAX
        if not is_next or run_blocks + num_blocks > longest:
            runs.append([])
            run_blocks = 0
        runs[-1].append(index)
        run_blocks += num_blocks
        expected = (segment_id, block + num_blocks)
    return runs


@dataclass(slots=True)
class _Read:
    """Neighbours that are read in one call; their `results` stay MISSING where no bytes arrive."""

    context: DiskContext
    segment: Segment
    requests: Sequence[ReadRequest]
    lengths: Sequence[int]
    indices: Sequence[int]
    results: list[VerifyResult]
    arrived: Sequence[ByteArray] = ()

    def move(self) -> None:
        """Reads."""
        context, segment = self.context, self.segment
        outs = [
            request.out[: num_blocks * BLOCK_BYTES]
            for request, num_blocks in zip(self.requests, self.lengths, strict=True)
        ]
        try:
            with context.fds.reading(segment.segment_id, segment.path) as fd:
                offset = self.requests[0].location[1] * BLOCK_BYTES
                self.arrived = outs[: context.read_records(fd, outs, offset)]
        except FileNotFoundError:
            return  # reclaimed between look-up and read
        except OSError as error:
            context.failed("io_read", error)
            return

    def finish(self) -> None:
        """Verifies what was read."""
        self.context.counters.add("bytes_read", sum(out.size for out in self.arrived))
        keys = [
            RecordKey(request.page_hash, self.segment.namespace, request.lora)
            for request in self.requests[: len(self.arrived)]
        ]
        found = self.context.seals.open(self.arrived, keys)
        for index, result in zip(self.indices, found, strict=False):
            self.results[index] = result
