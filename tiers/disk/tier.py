"""The disk tier: records in segment files under one folder. Start here."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sglang_ext.tiers.base import (
    BLOCK_BYTES,
    MAX_RECORD_BLOCKS,
    Enter,
    Location,
    OwnerCallbacks,
    ReadRequest,
    RecoveredPages,
    Tier,
    check_namespace,
)
from sglang_ext.tiers.disk.config import DiskConfig
from sglang_ext.tiers.disk.counters import Counters, DiskStats
from sglang_ext.tiers.disk.disk_context import DiskContext, failures, tell_of_other_names
from sglang_ext.tiers.disk.folder import (
    FolderLock,
    NamespaceFile,
    SegmentIds,
    namespace_folders,
    read_namespace_file,
    refuse_foreign,
    remove_empty_folder,
    remove_temp_files,
    segment_files,
    write_namespace_file,
)
from sglang_ext.tiers.disk.segments import recovery
from sglang_ext.tiers.disk.segments.catalog import Catalog, Namespace, Segment
from sglang_ext.tiers.disk.segments.fds import FdCache
from sglang_ext.tiers.disk.segments.fileio import FileIO, direct_io_works, sync_folder
from sglang_ext.tiers.disk.segments.reading import read_records
from sglang_ext.tiers.disk.segments.recovery import Recovered, SegmentState
from sglang_ext.tiers.disk.segments.writing import Writer
from sglang_ext.tiers.disk.workers import Workers
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import ByteArray, VerifyResult
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals

_READABLE = (SegmentState.SEALED, SegmentState.RESEALED, SegmentState.DAMAGED_FOOTER)
_QUIET = (SegmentState.SEALED, SegmentState.RESEALED, SegmentState.EMPTY)


class DiskTier(Tier, OwnerCallbacks):
    """Keeps records of many namespaces in one folder, within a bound on size.

    Threads: any number may `read`; `write`, `clear`, `open_namespace` and `close` take the write
    lock, so they run one at a time and never make a read wait. The callbacks are called by the
    thread in `write` or `clear`, under the write lock: they may take the owner's own lock, so the
    owner must not hold that lock when it calls those methods. Reads may be made from callbacks.
    """

    def __init__(
        self,
        config: DiskConfig,
        *,
        seals: RecordSeals = CHECKSUMS,
        io: FileIO | None = None,
        failpoints: Callable[[str], None] | None = None,
    ) -> None:
        """Opens the folder, makes it if absent, and locks it.

        Args:
            config: the settings.
            seals: what proves that records are whole, or whose they are.
            io: system calls; tests put a failing disk here.
            failpoints: called with the name of each critical step; for tests only.

        Raises:
            TierConfigError: the folder or a setting cannot work; one sentence.
        """
        config.check()
        super().__init__()
        self._config = config
        self._io = io or FileIO()
        self._lock = FolderLock(self._io, config.path)
        try:
            direct = self._choose_mode()
            self._catalog = Catalog()
            seen = self._find_segments()
            ids = SegmentIds(self._io, config.path, seen, sync=config.fsync != "none")
        except BaseException:
            self._lock.release()
            raise
        flags = os.O_RDONLY | (os.O_DIRECT if direct else 0)
        self._context = DiskContext(
            config=config,
            io=self._io,
            direct=direct,
            # Through the page cache threads compute while they move; see `DiskContext.work`.
            workers=Workers(
                config.num_helpers,
                1 + (config.helper_threads if direct else config.num_helpers),
                "hier-kv-disk",
            ),
            counters=Counters(),
            catalog=self._catalog,
            fds=FdCache(self._io, flags),
            seals=seals,
            failpoint=failpoints,
        )
        self._writer = Writer(self._context, self, ids)
        self._closing = threading.Condition()
        self._is_closed = False  # changed under _closing and the write lock; read under either
        self._num_reading = 0  # guarded by _closing

    @property
    def max_bytes(self) -> int:
        """See `Tier.max_bytes`; of the segment files, whose footers it counts too."""
        return self._config.max_bytes

    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = False,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        """See `Tier.open_namespace`. Reads the footers of the namespace's segments."""
        check_namespace(digest, slot_bytes)
        if slot_bytes > MAX_RECORD_BLOCKS * BLOCK_BYTES:
            raise TierConfigError(
                f"a page takes {slot_bytes} bytes and the disk tier's longest record is"
                f" {MAX_RECORD_BLOCKS * BLOCK_BYTES}; use a smaller page size"
            )
        num_slots = self._config.slots_per_segment(slot_bytes)
        with self._writer.lock:
            if self._is_closed:
                raise TierConfigError("the disk tier is closed; open a new one")
            folder = self._config.path / digest.hex()[:16]
            self._claim_folder(folder, NamespaceFile(digest, slot_bytes, label))
            # Also of others: they are of weights of before, and hardly written to any more.
            self._writer.seal_others(digest)
            self._writer.seal(digest)
            namespace = self._catalog.namespace(digest)
            if namespace is None:
                namespace = Namespace(digest, folder)
                self._catalog.add_namespace(namespace)
            namespace.slot_bytes, namespace.num_slots = slot_bytes, num_slots
            namespace.packed = packed
            undeleted = self._writer.reclaimer.undeleted
            undeleted.try_again()
            try:
                parts = [
                    self._recover(namespace, segment_id, path)
                    for segment_id, path in segment_files(folder)
                    if path not in undeleted
                ]
                pages = RecoveredPages.concatenate(parts)
                if enter is not None:
                    enter(pages)
            except BaseException:
                # Nobody knows what is live in its segments: it takes nothing until it is open.
                namespace.slot_bytes = 0
                raise
        self._context.counters.add("records_recovered", len(pages))
        return pages

    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """See `Tier.write`. Slots must not change until it returns."""
        with self._writer.lock:
            namespace = self._catalog.namespace(digest)
            if self._is_closed or namespace is None or not namespace.is_open:
                reason = "closed" if self._is_closed else "namespace"
                self._context.counters.drop(reason, len(slots))
                return [None] * len(slots)
            self._writer.reclaimer.undeleted.try_again()
            return self._writer.write(namespace, slots)

    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """See `Tier.read`."""
        with self._closing:
            if self._is_closed:
                return [VerifyResult.MISSING] * len(requests)
            self._num_reading += 1
        try:
            return read_records(self._context, digest, requests)
        finally:
            with self._closing:
                self._num_reading -= 1
                self._closing.notify_all()

    def clear(self, digest: bytes | None) -> None:
        """See `Tier.clear`. Calls `on_drop` for every segment."""
        with self._writer.lock:
            if self._is_closed:
                return
            for namespace in self._catalog.namespaces():
                if digest is None or namespace.digest == digest:
                    self._writer.clear(namespace.digest)
                    with contextlib.suppress(OSError):
                        sync_folder(self._io, namespace.folder)

    @property
    def num_undeleted(self) -> int:
        """See `Tier.num_undeleted`."""
        return self._writer.reclaimer.undeleted.num_cleared

    def may_hold(self, digest: bytes) -> bool:
        """See `Tier.may_hold`; none of a namespace of which there was none at the start."""
        return self._catalog.namespace(digest) is not None

    def end_namespace(self, digest: bytes) -> None:
        """See `Tier.end_namespace`. Its folder goes, too."""
        with self._writer.lock:
            namespace = self._catalog.namespace(digest)
            if self._is_closed or namespace is None:
                return
            self._writer.clear(digest)
            namespace.slot_bytes = 0
            self._writer.reclaimer.drop_namespace(digest)

    def close(self) -> None:
        """Seals the active segments, ends the threads and gives the folder back."""
        with self._writer.lock:
            with self._closing:
                if self._is_closed:
                    return
                self._is_closed = True
                self._closing.wait_for(lambda: self._num_reading == 0)
            self._writer.reclaimer.undeleted.try_again()
            for digest in list(self._writer.actives):
                self._writer.seal(digest)
            self._context.workers.stop()
            self._context.fds.close()
            self._keep_ages()
            self._lock.release()

    def stats(self) -> DiskStats:
        """Returns what was counted since the tier was opened."""
        return self._context.counters.stats(
            mode="direct" if self._context.direct else "buffered",
            segments=len(self._catalog.segments()),
            used_bytes=self._catalog.used_bytes,
            max_bytes=self._config.max_bytes,
            open_fds=self._context.fds.num_open,
        )

    def _choose_mode(self) -> bool:
        if self._config.direct_io == "off":
            return False
        works = direct_io_works(self._io, self._config.path)
        if not works and self._config.direct_io == "on":
            raise TierConfigError(
                f"direct_io is 'on' but {self._config.path} does not support O_DIRECT; use 'auto'"
            )
        return works

    def _find_segments(self) -> list[int]:
        """Adds the segments of every namespace to the catalog; returns the ids of all files."""
        seen: list[int] = []
        root = self._config.path
        try:
            remove_temp_files(self._io, root)
            for folder in namespace_folders(root):
                remove_temp_files(self._io, folder)
                if remove_empty_folder(self._io, folder):
                    continue
                for segment_id, path in segment_files(folder):
                    seen.append(segment_id)
                    self._add_found(folder, segment_id, path)
        except OSError as error:
            raise TierConfigError(f"the disk folder {root} cannot be read: {error}") from error
        return seen

    def _add_found(self, folder: Path, segment_id: int, path: Path) -> None:
        digest = recovery.identify(self._io, path, segment_id)
        if digest is None or digest.hex()[:16] != folder.name:
            return
        if self._catalog.namespace(digest) is None:
            self._catalog.add_namespace(Namespace(digest, folder))
        self._add_segment(digest, segment_id, path, slot_bytes=0)

    def _add_segment(self, digest: bytes, segment_id: int, path: Path, slot_bytes: int) -> Segment:
        status = path.stat()
        segment = Segment(
            segment_id=segment_id,
            namespace=digest,
            path=path,
            slot_bytes=slot_bytes,
            end_block=1,
            file_bytes=status.st_size,
            last_used=status.st_mtime_ns,
            sealed=True,
            has_other_names=status.st_nlink > 1,
        )
        if segment.has_other_names:
            tell_of_other_names(self._config.path, path)
        self._catalog.add(segment)
        return segment

    def _claim_folder(self, folder: Path, wanted: NamespaceFile) -> None:
        """Writes `ns.msgpack` unless it says the same.

        Raises:
            TierConfigError: a later release, another namespace or another user owns the folder.
        """
        refuse_foreign(folder)
        found = read_namespace_file(self._io, folder)
        if found is not None and found.digest != wanted.digest:
            raise TierConfigError(
                f"{folder} belongs to namespace {found.digest.hex()}, not {wanted.digest.hex()};"
                " use another disk folder"
            )
        if found != wanted:
            sync = self._config.fsync != "none"
            write_namespace_file(self._io, folder, wanted, sync=sync)

    def _recover(self, namespace: Namespace, segment_id: int, path: Path) -> RecoveredPages:
        """Recovers one segment and brings the catalog up to date with what was found."""
        result = recovery.recover_segment(
            self._io,
            path,
            segment_id,
            namespace.digest,
            namespace.slot_bytes,
            sync=self._config.fsync != "none",
            seals=self._context.seals,
        )
        counters = self._context.counters
        counters.add("bytes_written", result.bytes_written)
        if result.state not in _QUIET:
            counters.error(result.state.value)
        if result.is_partly_unread:
            unread = OSError(errno.EIO, "blocks of it could not be read", path.name)
            self._context.failed("io_read", unread)
        if result.state is SegmentState.LOCKED:
            what = f"segments of the disk folder {self._config.path} are of another key, or of none"
            told = "are not read (disk_errors_locked_segment; docs/security.md, Keys)"
            failures.tell(f"hier-kv: {what}, and {told}", path.name)
        segment = namespace.segments.get(segment_id)
        if segment is None:
            if result.state not in _READABLE:
                return result.pages
            segment = self._add_segment(namespace.digest, segment_id, path, namespace.slot_bytes)
        if result.state is SegmentState.EMPTY:
            self._writer.reclaimer.drop(segment)
            return result.pages
        self._note_recovered(namespace, segment, result)
        return result.pages

    def _note_recovered(self, namespace: Namespace, segment: Segment, result: Recovered) -> None:
        if result.state in _READABLE:
            self._catalog.set_format(segment, namespace.slot_bytes, result.packed)
            self._catalog.mark_sealed(segment, result.file_bytes)
            segment.end_block = result.end_block

    def _keep_ages(self) -> None:
        """Stores the time of each segment's last read as its file's time, for the next process."""
        for segment in self._catalog.segments():
            if segment.read_since_open:
                with contextlib.suppress(OSError):
                    os.utime(segment.path, ns=(segment.last_used, segment.last_used))
