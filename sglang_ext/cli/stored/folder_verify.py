"""`hier-kv verify` of a disk tier's folder."""

from __future__ import annotations

from pathlib import Path

from sglang_ext.cli.progress import Progress
from sglang_ext.cli.server_stats import number_of
from sglang_ext.cli.stored.verdict import BadPlace, Verdict
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.offline.checking import SegmentCheck, check_segment
from sglang_ext.tiers.disk.offline.survey import find_segments, holders, tier_folders
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.records.seals import RecordSeals


def verify_folder(root: Path, seals: RecordSeals) -> Verdict:
    """Reads every page in a folder.

    Raises:
        TierConfigError: it is no folder of a disk tier.
        OSError: it cannot be read.
    """
    io, folders = FileIO(), tier_folders(root)
    has_server = bool(holders(io, root, folders))
    segments = [segment for folder in folders for segment in find_segments(io, folder)[1]]
    progress = Progress("read", sum(segment.num_bytes for segment in segments))
    verdict = Verdict(str(root))
    for segment in segments:
        check = check_segment(io, segment, seals, has_server=has_server, progress=progress)
        add_check(verdict, check, root)
    progress.end()
    return verdict


def add_check(verdict: Verdict, check: SegmentCheck, root: Path) -> None:
    """Counts what checking a segment found."""
    file = str(check.segment.path.relative_to(root))
    verdict.sound += check.sound
    if check.left_out:
        verdict.left_out.append(f"{file}: {check.left_out}")
    for fault in check.faults:
        where = f"{file} at {fault.block * BLOCK_BYTES:,}" if fault.block else file
        verdict.bad.append(BadPlace(fault.soundness, where, fault.reason))
    if check.behind:
        sound = number_of(check.behind, "sound page")
        verdict.notes.append(
            f"{file}: a server that starts would lose {sound} behind damage, as"
            " the segment was never sealed; hier-kv prune --damaged keeps them"
        )
