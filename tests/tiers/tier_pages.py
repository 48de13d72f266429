"""Pages whose bytes follow from their key, so that any process can say whether one is right."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_ext.tiers.base import (
    Enter,
    Location,
    ReadRequest,
    RecoveredPages,
    Tier,
    record_blocks,
)
from sglang_ext.tiers.disk import DiskTier
from sglang_ext.tiers.disk.segments.fileio import aligned_array
from sglang_ext.tiers.errors import TierError
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordMeta,
    VerifyResult,
    parse_header,
    write_meta,
)

SLOT_BYTES = 8192
PACKED_SLOT_BYTES = 32768
PAYLOAD_BYTES = SLOT_BYTES - HEADER_BYTES - 100
NAMESPACE = hashlib.sha256(b"namespace").digest()
OTHER_NAMESPACE = hashlib.sha256(b"other namespace").digest()
ADAPTER = hashlib.sha256(b"adapter").digest()


def key(number: int) -> bytes:
    """Returns the page hash of page `number`."""
    return hashlib.sha256(number.to_bytes(8, "little")).digest()


def payload(page_hash: bytes, namespace: bytes, num_bytes: int = PAYLOAD_BYTES) -> ByteArray:
    """Returns the right payload of a page."""
    return np.frombuffer(hashlib.shake_128(page_hash + namespace).digest(num_bytes), np.uint8)


def make_slot(
    number: int,
    namespace: bytes = NAMESPACE,
    lora: bytes = b"",
    quality: int = 0,
    slot_bytes: int = SLOT_BYTES,
) -> ByteArray:
    """Returns an aligned slot with page `number`, not sealed."""
    slot = aligned_array(slot_bytes)
    num_bytes = slot_bytes - HEADER_BYTES - 100
    meta = RecordMeta(key(number), namespace, lora, number * 64, 64, "pre", quality=quality)
    write_meta(slot, meta, num_bytes)
    slot[HEADER_BYTES : HEADER_BYTES + num_bytes] = payload(key(number), namespace, num_bytes)
    return slot


def packed_payload_bytes(page_hash: bytes, slot_bytes: int = PACKED_SLOT_BYTES) -> int:
    """Returns the payload's length of a page in a packed namespace: anything that fits."""
    return int.from_bytes(page_hash[2:6], "little") % (slot_bytes - HEADER_BYTES + 1)


def packed_blocks(page_hash: bytes, slot_bytes: int = PACKED_SLOT_BYTES) -> int:
    """Returns the blocks that a page fills in a packed namespace."""
    return record_blocks(packed_payload_bytes(page_hash, slot_bytes))


def make_record(
    number: int,
    namespace: bytes = NAMESPACE,
    lora: bytes = b"",
    quality: int = 0,
    slot_bytes: int = PACKED_SLOT_BYTES,
) -> ByteArray:
    """Returns page `number` in as many aligned blocks as it fills, not sealed."""
    num_bytes = packed_payload_bytes(key(number), slot_bytes)
    record = aligned_array(record_blocks(num_bytes) * 4096)
    meta = RecordMeta(
        key(number), namespace, lora, number * 64, 64, "pre", "x", 1, quality, b"profile"
    )
    write_meta(record, meta, num_bytes)
    record[HEADER_BYTES : HEADER_BYTES + num_bytes] = payload(key(number), namespace, num_bytes)
    return record


def is_right(slot: ByteArray, page_hash: bytes, namespace: bytes) -> bool:
    """Says whether the slot's payload is that of the page."""
    try:
        meta, num_bytes = parse_header(slot)
    except TierError:
        return False
    packed = packed_payload_bytes(page_hash, slot.size)
    if num_bytes != (packed if meta.codec == "x" else slot.size - HEADER_BYTES - 100):
        return False
    found = slot[HEADER_BYTES : HEADER_BYTES + num_bytes]
    return bool((found == payload(page_hash, namespace, num_bytes)).all())


def read_page(
    tier: Tier,
    location: Location,
    number: int,
    namespace: bytes = NAMESPACE,
    lora: bytes = b"",
    slot_bytes: int = SLOT_BYTES,
    num_blocks: int = 0,
) -> VerifyResult:
    """Reads one page; fails the test if bytes reported OK are wrong."""
    out = aligned_array(slot_bytes)
    out[:] = 0xEE
    request = ReadRequest(location, key(number), lora, out, num_blocks)
    (result,) = tier.read(namespace, [request])
    if result is VerifyResult.OK:
        assert is_right(out, key(number), namespace), f"page {number} is wrong and reported OK"
    return result


def read_packed(tier: Tier, location: Location, number: int) -> VerifyResult:
    """Reads one page of a packed namespace with its length, as the page store does."""
    return read_page(
        tier, location, number, slot_bytes=PACKED_SLOT_BYTES, num_blocks=packed_blocks(key(number))
    )


def store_packed(tier: Tier, numbers: Sequence[int]) -> list[Location]:
    """Writes pages to a packed namespace; all must be stored."""
    locations = tier.write(NAMESPACE, [make_record(number) for number in numbers])
    stored = [location for location in locations if location is not None]
    assert len(stored) == len(numbers)
    return stored


class PackedDisk(DiskTier):
    """A disk tier all of whose namespaces are packed."""

    def open_namespace(
        self, digest: bytes, slot_bytes: int, label: dict[str, Any], *, packed: bool = True,
        enter: Enter | None = None,
    ) -> RecoveredPages:  # fmt: skip
        return super().open_namespace(digest, slot_bytes, label, packed=packed, enter=enter)


def store(tier: Tier, numbers: Sequence[int], namespace: bytes = NAMESPACE) -> list[Location]:
    """Writes pages, all of which must be stored."""
    locations = tier.write(namespace, [make_slot(number, namespace) for number in numbers])
    stored = [location for location in locations if location is not None]
    assert len(stored) == len(numbers)
    return stored
