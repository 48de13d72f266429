"""A record on disk that is not of the image whose name it lies under: see `media_world`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.provenance.request_state import state_of
from sglang_ext.seam.media.page_digests import naming
from sglang_ext.tiers.records.checks import seal
from sglang_ext.tiers.records.record import FORMAT_VERSION, HEADER_BYTES
from tests.property.media.media_world import MediaRequest, MediaWorld, image_item
from tests.property.worlds.taint_world import PAGE
from tests.tiers.protection_cases import seals
from tests.unit.seam.media.conftest import Make

TEXT = [100 + at for at in range(6 * PAGE + 1)]
SPAN = (5, 16)
FORGED = 2  # a page of the image alone
_VERSION_AT, _PROOF_AT = 4, 432  # in a header; see docs/formats.md


class Segment:
    """Records of two images by one number, which lie in one file.

    Args:
        folder: of a world's disk.
        slot_bytes: of a record.
    """

    def __init__(self, folder: Path, slot_bytes: int) -> None:
        (self._path,) = folder.glob("*/disk/*/seg-*.hkv")
        self._size = slot_bytes

    def _start(self, name: bytes) -> int:
        at = self._path.read_bytes().find(name)
        assert at >= 0
        return at // 4096 * 4096

    def read(self, name: bytes) -> bytes:
        """The record of a page."""
        start = self._start(name)
        return self._path.read_bytes()[start : start + self._size]

    def write(self, name: bytes, record: bytes) -> None:
        """Puts a record in the place of that of a page."""
        assert len(record) == self._size
        start = self._start(name)
        with self._path.open("r+b") as file:
            file.seek(start)
            file.write(record)


def name_of(world: MediaWorld, image: int) -> bytes:
    """Of the page that is to be forged."""
    req = world.make(TEXT, [image_item(image, SPAN)])
    with naming.pages_of(req):
        return bytes.fromhex(world.keys(req.tokens)[FORGED])


def another_record(own: bytes, other: bytes) -> bytes:
    """The other image's own, as it is."""
    return other


def with_right_checksum(own: bytes, other: bytes) -> bytes:
    """The other image's rows in this one's record, as who has no key makes it: without a tag."""
    record = np.frombuffer(own[:HEADER_BYTES] + other[HEADER_BYTES:], np.uint8).copy()
    record[_VERSION_AT], record[_PROOF_AT:HEADER_BYTES] = FORMAT_VERSION, 0
    seal(record)
    return record.tobytes()


def with_the_tag_of_before(own: bytes, other: bytes) -> bytes:
    """The other image's rows behind this one's header, which is proved."""
    return own[:HEADER_BYTES] + other[HEADER_BYTES:]


@pytest.mark.parametrize(
    ("mode", "forge", "counter"),
    [
        ("", another_record, "rejected_foreign"),
        ("", with_the_tag_of_before, "rejected_bad_checksum"),
        ("tag", another_record, "rejected_foreign"),
        ("tag", with_the_tag_of_before, "rejected_unauthentic"),
        ("tag", with_right_checksum, "rejected_unprotected"),
    ],
)
def test_a_forged_page_of_an_image_is_a_miss(
    make: Make, tmp_path: Path, mode: str, forge: Callable[[bytes, bytes], bytes], counter: str
) -> None:
    """The pages before it come, the rest is computed, and the world looks into every row."""
    world = make(**({"seals": seals(mode)} if mode else {}))
    for image in (0, 2):
        world.run_to_end(world.make(TEXT, [image_item(image, SPAN)]))
        world.only_on_disk()
    segment = Segment(tmp_path, world.layout.slot_bytes)
    mine, other = name_of(world, 0), name_of(world, 2)
    segment.write(mine, forge(segment.read(mine), segment.read(other)))
    req = world.make(TEXT, [image_item(0, SPAN)])
    world.run_to_end(req)
    assert loaded(req) == FORGED * PAGE
    assert world.store.stats()[counter] == 1
    world.only_on_disk()
    assert loaded(world.run_to_end(world.make(TEXT, [image_item(2, SPAN)]))) == 6 * PAGE


def loaded(req: MediaRequest) -> int:
    """Tokens that a request had from the disk."""
    return state_of(req).by_tier(req.num_reused).get("disk", 0)
