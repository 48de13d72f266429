"""What lies in a disk tier's folder. Nothing is made, locked or changed.

Of several ranks each has a folder of its own in the server's; those are looked at one by one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_ext.tiers.access import is_trusted_folder, shown
from sglang_ext.tiers.base import BLOCK_BYTES, MAX_RECORD_BLOCKS, RecoveredPages
from sglang_ext.tiers.disk.folder import (
    holder_of,
    namespace_folders,
    rank_folders,
    read_namespace_file,
    segment_files,
)
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import FutureVersionError, SegmentHeader, Trailer
from sglang_ext.tiers.disk.segments.recovery import (
    Recovered,
    SegmentState,
    examine_segment,
    heading_of,
    read_footer,
)
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.seals import RecordSeals

_STATE_FILE = "folder.msgpack"


@dataclass(frozen=True, slots=True)
class NamespaceFolder:
    """One namespace of one rank.

    Attributes:
        path: the folder.
        digest: 32 bytes; empty where neither its file nor a segment says it.
        slot_bytes: of its slots, as its file says; 0 where it does not.
        label: what its server wrote about the model, for people.
    """

    path: Path
    digest: bytes
    slot_bytes: int
    label: dict[str, Any]

    @property
    def name(self) -> str:
        """The digest in hex; the folder's name where it is not known."""
        return self.digest.hex() or self.path.name


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A file that is named as a segment of a namespace.

    Attributes:
        segment_id: in its name.
        path: the file.
        namespace: the folder it lies in.
        heading: what its first block, or else its end, says; None where neither can be believed.
        num_bytes: its size.
        used_s: time of its last write, or read as far as that was noted; since the epoch.
        stamp: changes when somebody writes to it.
    """

    segment_id: int
    path: Path
    namespace: NamespaceFolder
    heading: SegmentHeader | Trailer | None
    num_bytes: int
    used_s: float
    stamp: tuple[int, int]

    @property
    def is_own(self) -> bool:
        """Whether it says itself that it belongs into this folder."""
        return self.heading is not None and self.heading.namespace == self.namespace.digest

    @property
    def slot_bytes(self) -> int:
        """Bytes of its slots; 0 where nothing says it."""
        return self.heading.slot_bytes if self.heading else self.namespace.slot_bytes

    @property
    def place(self) -> str:
        """Namespace's folder and file, for a report."""
        return f"{self.namespace.path.name}/{self.path.name}"

    def is_unchanged(self) -> bool:
        """Whether nobody wrote to it, or removed it, since it was found."""
        with contextlib.suppress(OSError):
            return _stamp(self.path.stat()) == self.stamp
        return False


def tier_folders(root: Path) -> list[Path]:
    """The folder of a server's only rank, or those of each of its ranks.

    Raises:
        TierConfigError: it is no folder of a disk tier.
        OSError: it cannot be read.
    """
    if not root.is_dir():
        raise TierConfigError(
            f"a folder of --hier-kv-disk-dir or a store's URL is expected, and {shown(root)} is no"
            " folder; correct it"
        )
    found = [path for path in (root, *rank_folders(root)) if _is_tier_folder(path)]
    if not found:
        raise TierConfigError(
            f"{shown(root)} is no folder of a disk tier (no {_STATE_FILE} and no namespace in it);"
            " give the folder of --hier-kv-disk-dir, or file://FOLDER for a shared store"
        )
    return found


def holders(io: FileIO, root: Path, folders: Sequence[Path]) -> str:
    """Who has the root, or the first of the folders that somebody has; "" for nobody.

    Raises:
        OSError: a lock cannot be looked at.
    """
    found = (holder_of(io, folder) for folder in dict.fromkeys([root, *folders]))
    return next((holder for holder in found if holder), "")


def find_segments(io: FileIO, folder: Path) -> tuple[list[NamespaceFolder], list[SegmentFile]]:
    """The namespaces of one rank, and the files in them that are named as segments.

    Raises:
        OSError: a folder cannot be read.
    """
    namespaces: list[NamespaceFolder] = []
    segments: list[SegmentFile] = []
    for path in namespace_folders(folder, is_trusted_folder):
        try:
            files = segment_files(path)
        except FileNotFoundError:  # beside a server it goes with its last segment
            continue
        headed = [(number, file, heading_of(io, file, number)) for number, file in files]
        namespace = _namespace(io, path, [heading for _, _, heading in headed])
        namespaces.append(namespace)
        for number, file, heading in headed:
            with contextlib.suppress(FileNotFoundError):  # beside a server they come and go
                status = file.stat()
                segments.append(
                    SegmentFile(
                        number,
                        file,
                        namespace,
                        heading,
                        status.st_size,
                        status.st_mtime,
                        _stamp(status),
                    )
                )
    return namespaces, segments


def examine(
    io: FileIO, segment: SegmentFile, seals: RecordSeals, *, past_holes: bool = False
) -> Recovered:
    """The segment's records, as a server that starts now would find them.

    Args:
        io: system calls.
        segment: the file.
        seals: what proves its records.
        past_holes: whether to find also those that a server would not; see `recover_segment`.
    """
    if not segment.namespace.digest or not _is_slot(segment.slot_bytes):
        # Nothing says what its records would be of, or how long.
        return Recovered(SegmentState.FOREIGN, RecoveredPages.empty(), 1, segment.num_bytes)
    return examine_segment(
        io,
        segment.path,
        segment.segment_id,
        segment.namespace.digest,
        segment.slot_bytes,
        seals=seals,
        past_holes=past_holes,
    )


def is_sealed(io: FileIO, segment: SegmentFile) -> bool:
    """Whether the file ends as a sealed one does. Beside a server others are being written."""
    try:
        return read_footer(io, segment.path, segment.num_bytes, None)[0] is not None
    except (OSError, FutureVersionError):
        return True


def _is_slot(num_bytes: int) -> bool:
    return 0 < num_bytes <= MAX_RECORD_BLOCKS * BLOCK_BYTES and num_bytes % BLOCK_BYTES == 0


def _is_tier_folder(path: Path) -> bool:
    return (path / _STATE_FILE).is_file() or bool(namespace_folders(path, is_trusted_folder))


def _namespace(
    io: FileIO, path: Path, headings: Sequence[SegmentHeader | Trailer | None]
) -> NamespaceFolder:
    found = None
    with contextlib.suppress(TierConfigError):  # of a later release: its segments say the digest
        found = read_namespace_file(io, path)
    if found is not None:
        return NamespaceFolder(path, found.digest, found.slot_bytes, found.label)
    digests = [each.namespace for each in headings if each is not None]
    own = [digest for digest in digests if digest.hex()[:16] == path.name]
    return NamespaceFolder(path, own[0] if own else b"", 0, {})


def _stamp(status: os.stat_result) -> tuple[int, int]:
    return status.st_size, status.st_mtime_ns
