"""What a tier that keeps records is: its interface and the types that pass through it.

A tier moves bytes. It sees slots (one record each, `sglang_ext.tiers.record`), never tensors. The
index from page to location is its owner's.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.record import ByteArray, VerifyResult

BLOCK_BYTES = 4096
"""Unit of `Location.block`, and the alignment of slots in memory and in segments."""

NO_SEGMENT = 0xFFFFFFFF
"""Never a segment id; free for callers to mean "not on disk"."""


class Location(NamedTuple):
    """Where a record lies: a segment id (u32) and an offset in blocks of 4096 bytes (u32)."""

    segment: int
    block: int


@dataclass(slots=True)
class ReadRequest:
    """One record to read.

    Attributes:
        location: as returned by `write` or by `open_namespace`.
        page_hash: 32 bytes, compared in full with the record's.
        lora: 32 bytes or empty, compared too.
        out: u8 [slot_bytes], C-contiguous and writable; aligned to 4096 bytes for zero copy. Its
            content means nothing unless the result is `VerifyResult.OK`.
    """

    location: Location
    page_hash: bytes
    lora: bytes
    out: ByteArray


@dataclass(frozen=True, slots=True)
class RecoveredPages:
    """Pages with their locations, as columns.

    Attributes:
        hashes: u8 [N, 32], page hashes; one page may appear more than once.
        lora: u8 [N, 32], adapter digests; all zero where there is none.
        segment: u32 [N].
        block: u32 [N].
        quality: u8 [N], 0 = exact.
    """

    hashes: ByteArray
    lora: ByteArray
    segment: npt.NDArray[np.uint32]
    block: npt.NDArray[np.uint32]
    quality: ByteArray

    def __len__(self) -> int:
        return len(self.segment)

    @classmethod
    def empty(cls) -> RecoveredPages:
        """Returns a table of no pages."""
        return cls(
            hashes=np.zeros((0, 32), np.uint8),
            lora=np.zeros((0, 32), np.uint8),
            segment=np.zeros(0, np.uint32),
            block=np.zeros(0, np.uint32),
            quality=np.zeros(0, np.uint8),
        )

    @classmethod
    def concatenate(cls, parts: Sequence[RecoveredPages]) -> RecoveredPages:
        """Returns the pages of `parts` in order."""
        if not parts:
            return cls.empty()
        return cls(
            hashes=np.concatenate([part.hashes for part in parts]),
            lora=np.concatenate([part.lora for part in parts]),
            segment=np.concatenate([part.segment for part in parts]),
            block=np.concatenate([part.block for part in parts]),
            quality=np.concatenate([part.quality for part in parts]),
        )


class Tier(abc.ABC):
    """A place where records live. Reads may come from many threads, writes from one at a time."""

    @abc.abstractmethod
    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any]
    ) -> RecoveredPages:
        """Makes a namespace usable and returns the pages that already lie in it.

        Args:
            digest: 32 bytes.
            slot_bytes: size of every record of the namespace, a multiple of 4096.
            label: what the namespace is, for people; plain msgpack types.

        Raises:
            TierConfigError: the namespace cannot be served as asked.
        """

    @abc.abstractmethod
    def write(self, digest: bytes, slots: Sequence[ByteArray]) -> list[Location | None]:
        """Stores one record per slot; `None` where one was not stored (counted, never raised).

        The checksum is computed here and stored in the slot. A location is handed out only after
        the record's bytes were written.
        """

    @abc.abstractmethod
    def read(self, digest: bytes, requests: Sequence[ReadRequest]) -> list[VerifyResult]:
        """Reads and verifies records; one result per request, never raises on bad data."""

    @abc.abstractmethod
    def clear(self, digest: bytes | None) -> None:
        """Removes every record of one namespace, or of all with `None`, for good."""

    @abc.abstractmethod
    def close(self) -> None:
        """Publishes what was written and frees threads, files and locks. Safe to call twice."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
