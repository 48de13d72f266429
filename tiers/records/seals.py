"""What proves that a record is whole, and perhaps whose it is: an interface, and checksums.

In DRAM a record is plain. Its seal is put on when it is written to disk or sent to a store and
proved when it is read there. `ChecksumSeals` find damage; `tiers/protection` has seals that nobody
without a key can make.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from sglang_ext.tiers.records.checks import (
    RecordKey,
    checksum_matches,
    seal_records,
    sealed_header,
    verify_records,
)
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    parse_header,
)


class SealedRecord(NamedTuple):
    """A record that can be written.

    Attributes:
        meta: what its header says.
        payload_bytes: length of its payload.
        pieces: u8 [n] each; the bytes to write, one after another, as long as the slot. Empty when
            `fill` makes them.
        fill: writes the bytes into memory as long as the slot, for bytes that cannot be made in
            place. Called just before they are moved, so that little memory is held; the slot must
            not change until then.
    """

    meta: RecordMeta
    payload_bytes: int
    pieces: tuple[ByteArray, ...]
    fill: Callable[[ByteArray], None] | None = None


class StageOpener(Protocol):
    """Proves stages of one staged record, and makes them plain."""

    def __call__(self, stage: int, data: ByteArray) -> bool:
        """Whether `data` are a stage's bytes, all of them; then they are plain, in place."""


class FooterSeal(abc.ABC):
    """Protects the tables of segments."""

    @abc.abstractmethod
    def seal(self, namespace: bytes, known: bytes, table: bytes) -> bytes:
        """What to store for a table: `overhead` bytes more.

        Args:
            namespace: the segment's.
            known: is covered as well, and stays as it is.
            table: the bytes.
        """

    @abc.abstractmethod
    def open(self, namespace: bytes, known: bytes, data: bytes) -> bytes | None:
        """What `seal` was given; None where this is nothing that it made."""


class RecordSeals(abc.ABC):
    """Puts seals on records and proves them. Thread-safe.

    Attributes:
        footers: what protects the tables of segments; None for checksums alone. Segments whose
            tables are protected have a format version of their own.
    """

    footers: FooterSeal | None = None

    @abc.abstractmethod
    def seal(
        self, slots: Sequence[ByteArray], namespace: bytes
    ) -> list[SealedRecord | RecordError]:
        """Makes records of one namespace ready to be written to disk.

        Args:
            slots: u8 [n * 4096] with a plain record each. Only a checksum is written into them.
            namespace: the 32 bytes of their namespace.

        Returns:
            For each what to write; or what `read_meta` would raise, or an error whose `kind` is
            FOREIGN. The pieces are good for O_DIRECT if the slot is.
        """

    @abc.abstractmethod
    def open(self, slots: Sequence[ByteArray], keys: Sequence[RecordKey]) -> list[VerifyResult]:
        """Proves that each slot holds a record of exactly its key. Never raises.

        Where the result is OK the slot holds the plain record then; where it is another, what it
        holds means nothing any more.
        """

    @abc.abstractmethod
    def open_any(self, slot: ByteArray, namespace: bytes) -> tuple[RecordMeta, int] | None:
        """What the intact record at a slot's start says, if of this namespace, and payload_bytes.

        None where there is none. The slot stays as it is.
        """

    @abc.abstractmethod
    def seal_to_send(self, record: ByteArray) -> tuple[ByteArray, ByteArray]:
        """A plain record as it goes to a store: its header, u8 [512], and its payload.

        Raises:
            RecordError: it is no record.
        """

    @abc.abstractmethod
    def plain_header(self, start: ByteArray, namespace: bytes) -> ByteArray:
        """The plain header of a record whose first 512 bytes are there; `start` stays as it is.

        Raises:
            RecordError: it has none, or one that is proved to be wrong.
        """

    @abc.abstractmethod
    def open_start(
        self, start: ByteArray, namespace: bytes
    ) -> tuple[ByteArray, StageOpener | None]:
        """The plain start of a staged record (`remote.staged`), and what proves its stages.

        None where their checksums, which the start holds, do. `start` stays as it is.

        Args:
            start: u8 [at least `staged.START_BYTES`].
            namespace: the 32 bytes of its namespace.

        Raises:
            RecordError: it is proved to be wrong.
        """

    def is_hidden(self, start: ByteArray) -> bool:
        """Whether a record is encrypted, so that its header opens for who knows its namespace only.

        Args:
            start: u8 [at least 512] of a record.
        """
        return False


class ChecksumSeals(RecordSeals):
    """Checksums: they find damage, and stop nobody who can write."""

    def seal(
        self, slots: Sequence[ByteArray], namespace: bytes
    ) -> list[SealedRecord | RecordError]:
        """See `RecordSeals.seal`. The checksum is stored in the slot, which is what is written."""
        return [
            result
            if isinstance(result, RecordError)
            else SealedRecord(result.meta, result.payload_bytes, (slot,))
            for slot, result in zip(slots, seal_records(slots, namespace), strict=True)
        ]

    def open(self, slots: Sequence[ByteArray], keys: Sequence[RecordKey]) -> list[VerifyResult]:
        """See `RecordSeals.open`."""
        return verify_records(slots, keys)

    def open_any(self, slot: ByteArray, namespace: bytes) -> tuple[RecordMeta, int] | None:
        """See `RecordSeals.open_any`."""
        try:
            meta, payload_bytes = parse_header(slot)
        except RecordError:
            return None
        if meta.namespace != namespace or not checksum_matches(slot, payload_bytes):
            return None
        return meta, payload_bytes

    def seal_to_send(self, record: ByteArray) -> tuple[ByteArray, ByteArray]:
        """See `RecordSeals.seal_to_send`."""
        header = sealed_header(record)
        _, payload_bytes = parse_header(header, record.size)
        return header, record[HEADER_BYTES : HEADER_BYTES + payload_bytes]

    def plain_header(self, start: ByteArray, namespace: bytes) -> ByteArray:
        """See `RecordSeals.plain_header`. Its checksum is of the whole record and not looked at."""
        return start[:HEADER_BYTES]

    def open_start(
        self, start: ByteArray, namespace: bytes
    ) -> tuple[ByteArray, StageOpener | None]:
        """See `RecordSeals.open_start`. Who reads the start compares its checksum."""
        return start, None


CHECKSUMS = ChecksumSeals()
