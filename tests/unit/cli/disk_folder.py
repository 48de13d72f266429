"""Folders that a real disk tier wrote, and the command run on them."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.cli import main
from sglang_ext.tiers.base import Location
from sglang_ext.tiers.disk import DiskConfig, DiskTier
from sglang_ext.tiers.records.record import VerifyResult
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from tests.tiers import tier_pages
from tests.tiers.protection_cases import KEY
from tests.tiers.tier_pages import NAMESPACE, OTHER_NAMESPACE, PACKED_SLOT_BYTES, SLOT_BYTES

LABEL = {"model": "tiny", "rope": "pre"}
PER_SEGMENT = 8
"""Pages in a sealed segment of the folders that `write_folder` makes."""


@contextlib.contextmanager
def opened(folder: Path, seals: RecordSeals = CHECKSUMS) -> Iterator[DiskTier]:
    """A tier on a folder, until the block ends."""
    config = DiskConfig(folder, 64 << 20, 0, segment_bytes=72 << 10, direct_io="off")
    tier = DiskTier(config, seals=seals)
    try:
        yield tier
    finally:
        tier.close()


def fill(tier: DiskTier, *, packed: bool = False, num_pages: int = 20) -> dict[int, Location]:
    """Writes pages to one namespace, and two of another; returns where those of the first lie."""
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    tier.open_namespace(NAMESPACE, slot_bytes, LABEL, packed=packed)
    tier.open_namespace(OTHER_NAMESPACE, SLOT_BYTES, {})
    tier_pages.store(tier, range(2), OTHER_NAMESPACE)
    numbers = range(num_pages)
    made = tier_pages.store_packed if packed else tier_pages.store
    return dict(zip(numbers, made(tier, numbers), strict=True))


def write_folder(
    folder: Path, seals: RecordSeals = CHECKSUMS, *, packed: bool = False, num_pages: int = 20
) -> dict[int, Location]:
    """Writes a folder as `fill` does; its server ended in order."""
    with opened(folder, seals) as tier:
        return fill(tier, packed=packed, num_pages=num_pages)


def killed_folder(folder: Path, source: Path, num_pages: int = 3) -> dict[int, Location]:
    """Writes a folder as it is where its server was killed: no segment is sealed."""
    with opened(source) as tier:
        places = fill(tier, num_pages=num_pages)
        shutil.copytree(source, folder)
    return places


def readable(
    folder: Path,
    places: dict[int, Location],
    seals: RecordSeals = CHECKSUMS,
    *,
    packed: bool = False,
) -> set[int]:
    """Pages that the next server finds in its tables, at their places, and reads right."""
    slot_bytes = PACKED_SLOT_BYTES if packed else SLOT_BYTES
    with opened(folder, seals) as tier:
        pages = tier.open_namespace(NAMESPACE, slot_bytes, LABEL, packed=packed)
        rows = zip(pages.hashes, pages.segment.tolist(), pages.block.tolist(), strict=True)
        found = {(row.tobytes(), segment, block) for row, segment, block in rows}
        read = tier_pages.read_packed if packed else tier_pages.read_page
        return {
            number
            for number, place in places.items()
            if (tier_pages.key(number), *place) in found
            if read(tier, place, number) is VerifyResult.OK
        }


def segment_of(folder: Path, place: Location, namespace: bytes = NAMESPACE) -> Path:
    """The file that a page lies in."""
    return folder / namespace.hex()[:16] / f"seg-{place.segment:08d}.hkv"


def damage(folder: Path, place: Location, at: int = 600) -> None:
    """Flips a bit of the record at a place, in its payload by default."""
    flip(segment_of(folder, place), place.block * 4096 + at)


def flip(path: Path, at: int) -> None:
    """Flips a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def write_with_link(folder: Path) -> tuple[Path, Path]:
    """Writes a folder in which one of the namespaces is a link to another folder's.

    Returns:
        The namespace that lies there, and the other folder.
    """
    outside = folder.with_name("outside")
    write_folder(outside)
    write_folder(folder)
    other = folder / OTHER_NAMESPACE.hex()[:16]
    shutil.rmtree(other)
    other.symlink_to(outside / other.name)
    return folder / NAMESPACE.hex()[:16], outside


def with_key(folder: Path, key: bytes = KEY) -> list[object]:
    """Arguments that give a key, which is written to the folder."""
    path = folder / "key"
    path.touch(0o600)
    path.write_text(key.hex())
    return ["--key-file", path]


def listing(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, and its bytes."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit status, output and errors of a command."""
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def run_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, Any]:
    """Exit status and what `--json` prints."""
    status, out, _ = run(capsys, *arguments, "--json")
    return status, json.loads(out)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 1) -> str:
    """The one sentence with which a command ends; its status is 2 where it was asked wrongly."""
    found, out, err = run(capsys, *arguments)
    assert (found, out) == (status, "")
    assert err.startswith("hier-kv: ")
    assert err.count("\n") == 1
    return err
