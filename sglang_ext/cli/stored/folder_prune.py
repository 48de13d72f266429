"""`hier-kv prune` of a disk tier's folder that no server holds; beside one a dry run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from sglang_ext.cli.progress import Progress
from sglang_ext.cli.server_stats import amount, number_of
from sglang_ext.cli.stored.choice import Choice, Removed
from sglang_ext.tiers.access import shown
from sglang_ext.tiers.base import BLOCK_BYTES
from sglang_ext.tiers.disk.folder import FolderLock, refuse_later_release
from sglang_ext.tiers.disk.offline.checking import Fault, SegmentCheck, check_segment
from sglang_ext.tiers.disk.offline.removal import cut_out, remove_empty_namespace, remove_segment
from sglang_ext.tiers.disk.offline.survey import (
    NamespaceFolder,
    SegmentFile,
    examine,
    find_segments,
    holders,
    tier_folders,
)
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.recovery import SegmentState
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.seals import RecordSeals
from sglang_ext.tiers.records.soundness import is_damage

_NOT_OURS = "its ends are no segment's of this namespace and of this release"
_NOT_READ = "this user may not read it, or the disk fails"


def prune_folder(root: Path, choice: Choice, seals: RecordSeals, *, is_dry: bool) -> Removed:
    """Removes what was chosen.

    Args:
        root: the folder.
        choice: what goes.
        seals: what proves records, and protects the tables that are written.
        is_dry: whether to say only what would go.

    Raises:
        TierConfigError: it is no folder of a disk tier, a later release's, or a server holds it
            and this is no dry run.
        OSError: it cannot be read.
    """
    io, folders = FileIO(), tier_folders(root)
    for folder in folders:
        refuse_later_release(io, folder)
    holder = holders(io, root, folders)
    if holder and not is_dry:
        raise TierConfigError(
            f"nothing is removed beside a running server, and {holder} holds {shown(root)}; stop"
            " it first, or give --dry-run to see what would be removed now"
        )
    removed = Removed(str(root), is_dry, held_by=holder)
    with contextlib.ExitStack() as stack:
        if not is_dry:
            for folder in dict.fromkeys([root, *folders]):
                stack.callback(FolderLock(io, folder).release)
        for folder in folders:
            _Pruner(io, root, choice, seals, removed).prune(folder)
    return removed


class _Pruner:
    """Removes from the folder of one rank."""

    def __init__(
        self, io: FileIO, root: Path, choice: Choice, seals: RecordSeals, removed: Removed
    ) -> None:
        self._io = io
        self._root = root
        self._choice = choice
        self._seals = seals
        self._removed = removed

    def prune(self, folder: Path) -> None:
        """Removes segments, then namespaces that are empty thereby; or damaged pages."""
        namespaces, segments = find_segments(self._io, folder)
        if self._choice.is_damaged:
            progress = Progress("read", sum(segment.num_bytes for segment in segments))
            for segment in segments:
                self._prune_damaged(segment, progress)
            progress.end()
            return
        for segment in segments:
            if self._choice.takes(segment.namespace.digest.hex(), segment.used_s):
                self._prune_whole(segment)
        for namespace in namespaces:
            # By age segments go, and the next server writes to their namespace again.
            if not self._choice.before_s and self._choice.takes(namespace.digest.hex(), 0.0):
                self._prune_namespace(namespace)

    def _prune_whole(self, segment: SegmentFile) -> None:
        found = examine(self._io, segment, self._seals)
        # Without its ends a file is ours if it holds a page of the namespace.
        if not segment.is_own and not len(found.pages):
            is_read = found.state is not SegmentState.UNREADABLE
            self._leave(segment, _NOT_OURS if is_read else _NOT_READ)
            return
        what = f"{self._name(segment)}: {self._pages(segment, len(found.pages))}"
        self._remove(segment, f"{what}, {amount(segment.num_bytes)}", len(found.pages))

    def _prune_damaged(self, segment: SegmentFile, progress: Progress) -> None:
        has_server = bool(self._removed.held_by)
        check = check_segment(
            self._io, segment, self._seals, has_server=has_server, progress=progress
        )
        if check.left_out:
            self._leave(segment, check.left_out)
            return
        if not check.faults:
            return
        reason = _why_left(check)
        if reason:
            self._leave(segment, reason)
            return
        faults = [fault for fault in check.faults if _is_damage(fault)]
        kept = check.sound + len(check.faults) - len(faults)
        if not kept:
            places = number_of(len(faults), "damaged place")
            what = f"{self._name(segment)}: {places} and no sound page"
            self._remove(segment, what, len(faults))
        elif faults:
            self._cut_out(segment, check, faults)
        if len(faults) < len(check.faults) and kept:
            unjudged = number_of(len(check.faults) - len(faults), "page")
            self._leave(segment, f"{unjudged} cannot be judged")

    def _cut_out(self, segment: SegmentFile, check: SegmentCheck, faults: list[Fault]) -> None:
        assert check.found is not None
        blocks = {fault.block for fault in faults if fault.block}
        table = ", and seals it anew" if len(blocks) < len(faults) else ""
        damaged = number_of(len(blocks), "damaged page")
        stay = f"{check.sound:,} {'stays' if check.sound == 1 else 'stay'}"
        what = f"{damaged} from {self._name(segment)}, {stay}{table}"
        try:
            if not self._removed.is_dry:
                cut_out(self._io, segment, check.found, blocks, self._seals)
            lengths = dict(
                zip(
                    check.found.pages.block.tolist(),
                    check.found.pages.num_blocks.tolist(),
                    strict=True,
                )
            )
            num_bytes = sum(BLOCK_BYTES * lengths.get(block, 1) for block in blocks)
            self._removed.add(what, len(blocks), num_bytes)
        except OSError as error:
            self._removed.fail(self._name(segment), error)

    def _remove(self, segment: SegmentFile, what: str, pages: int) -> None:
        try:
            if not self._removed.is_dry:
                remove_segment(segment)
            self._removed.add(what, pages, segment.num_bytes)
        except OSError as error:
            self._removed.fail(self._name(segment), error)

    def _prune_namespace(self, namespace: NamespaceFolder) -> None:
        if self._removed.is_dry:
            return
        name = str(namespace.path.relative_to(self._root))
        try:
            if not remove_empty_namespace(self._io, namespace):
                self._removed.left.append(f"{name}: other files lie in it")
        except OSError as error:
            self._removed.fail(name, error)

    def _pages(self, segment: SegmentFile, num_pages: int) -> str:
        is_locked = segment.heading is not None and segment.heading.protected and not num_pages
        return "pages of another key" if is_locked else number_of(num_pages, "page")

    def _leave(self, segment: SegmentFile, reason: str) -> None:
        self._removed.left.append(f"{self._name(segment)}: {reason}")

    def _name(self, segment: SegmentFile) -> str:
        return str(segment.path.relative_to(self._root))


def _is_damage(fault: Fault) -> bool:
    return is_damage(fault.soundness, fault.reason)


def _why_left(check: SegmentCheck) -> str:
    """Why a segment stays as it is although something in it is not sound; "" if it need not."""
    state = check.found.state if check.found else SegmentState.UNREADABLE
    if state is SegmentState.LOCKED:
        return "it is of another key, or of none; give its --key-file"
    if state is SegmentState.UNREADABLE:
        return _NOT_READ
    if state in (SegmentState.FOREIGN, SegmentState.FUTURE):
        return f"it cannot be judged ({state.value}); remove it by hand if nobody needs it"
    if state is not SegmentState.SEALED and not all(map(_is_damage, check.faults)):
        return "it was never sealed, or lost its table, and some of its pages cannot be judged"
    return ""
