"""Pages whose bytes follow from their key, so that any process can say whether one is right."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from sglang_ext.tiers.base import Location, ReadRequest, Tier
from sglang_ext.tiers.disk.fileio import aligned_array
from sglang_ext.tiers.record import HEADER_BYTES, ByteArray, RecordMeta, VerifyResult, write_meta

SLOT_BYTES = 8192
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


def is_right(slot: ByteArray, page_hash: bytes, namespace: bytes) -> bool:
    """Says whether the slot's payload is that of the page."""
    num_bytes = slot.size - HEADER_BYTES - 100
    found = slot[HEADER_BYTES : HEADER_BYTES + num_bytes]
    return bool((found == payload(page_hash, namespace, num_bytes)).all())


def read_page(
    tier: Tier,
    location: Location,
    number: int,
    namespace: bytes = NAMESPACE,
    lora: bytes = b"",
    slot_bytes: int = SLOT_BYTES,
) -> VerifyResult:
    """Reads one page; fails the test if bytes reported OK are wrong."""
    out = aligned_array(slot_bytes)
    out[:] = 0xEE
    (result,) = tier.read(namespace, [ReadRequest(location, key(number), lora, out)])
    if result is VerifyResult.OK:
        assert is_right(out, key(number), namespace), f"page {number} is wrong and reported OK"
    return result


def store(tier: Tier, numbers: Sequence[int], namespace: bytes = NAMESPACE) -> list[Location]:
    """Writes pages, all of which must be stored."""
    locations = tier.write(namespace, [make_slot(number, namespace) for number in numbers])
    stored = [location for location in locations if location is not None]
    assert len(stored) == len(numbers)
    return stored
