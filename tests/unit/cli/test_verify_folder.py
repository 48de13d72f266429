"""`hier-kv verify` of folders that a real tier wrote and somebody damaged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from sglang_ext.cli import main
from sglang_ext.tiers.disk.segments.fileio import FileIO
from tests.tiers.protection_cases import KEY, OTHER_KEY, seals
from tests.tiers.tier_pages import NAMESPACE, SLOT_BYTES, store
from tests.unit.cli.disk_folder import (
    damage,
    fill,
    flip,
    killed_folder,
    listing,
    opened,
    refusal,
    run,
    run_json,
    segment_of,
    with_key,
    write_folder,
)

Capture = pytest.CaptureFixture[str]
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
MODES = pytest.mark.parametrize("mode", ["tag", "encrypt"])


@LAYOUTS
def test_sound_pages_are_sound(tmp_path: Path, capsys: Capture, packed: bool) -> None:
    write_folder(tmp_path, packed=packed)
    before = listing(tmp_path)
    status, facts = run_json(capsys, "verify", tmp_path)
    assert (status, facts["sound"], facts["bad"]) == (0, 22, [])
    assert listing(tmp_path) == before


@LAYOUTS
def test_damage_is_found_where_it_is(tmp_path: Path, capsys: Capture, packed: bool) -> None:
    places = write_folder(tmp_path, packed=packed)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.hkv")}
    damage(tmp_path, places[3], at=520)
    damage(tmp_path, places[11], at=0)
    status, facts = run_json(capsys, "verify", tmp_path)
    assert (status, facts["sound"], facts["corrupt"]) == (1, 20, 2)
    wanted = {
        f"{segment_of(tmp_path, place).relative_to(tmp_path)} at {place.block * 4096:,}": reason
        for place, reason in ((places[3], "bad_checksum"), (places[11], "bad_magic"))
    }
    assert {bad["where"]: bad["reason"] for bad in facts["bad"]} == wanted
    status, out, err = run(capsys, "verify", tmp_path)
    assert f"{tmp_path}: 20 sound, 2 corrupt, 0 unauthentic, 0 unreadable\n" in out
    assert "(100%)" in err, "without a terminal the progress is lines"
    for path, data in before.items():
        path.write_bytes(data)
    assert run(capsys, "verify", tmp_path)[0] == 0


def test_on_a_terminal_the_progress_is_a_bar(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    _, out, err = run(capsys, "verify", tmp_path)
    assert err.startswith("\r[")
    assert f"[{'#' * 30}]" in err
    assert err.endswith("\r\x1b[K"), "and goes away"
    assert "\x1b" not in out


@LAYOUTS
@MODES
def test_tags_are_proved_with_the_key(
    tmp_path: Path, capsys: Capture, packed: bool, mode: str
) -> None:
    folder = tmp_path / "disk"
    places = write_folder(folder, seals(mode), packed=packed)
    key = with_key(tmp_path, KEY)
    status, facts = run_json(capsys, "verify", folder, *key)
    assert (status, facts["sound"]) == (0, 22)
    status, facts = run_json(capsys, "verify", folder)
    assert (status, facts["sound"], facts["unreadable"]) == (1, 0, 22)
    assert {bad["reason"] for bad in facts["bad"]} == {"protected"}
    damage(folder, places[5], at=520)
    status, facts = run_json(capsys, "verify", folder, *key)
    assert (status, facts["sound"], facts["unauthentic"]) == (1, 21, 1)
    key = with_key(tmp_path, OTHER_KEY)
    status, facts = run_json(capsys, "verify", folder, *key)
    assert (status, facts["sound"], facts["unauthentic"]) == (1, 0, 22)
    assert {bad["reason"] for bad in facts["bad"]} == {"unknown_key"}


def test_with_a_key_what_has_no_tag_is_not_authentic(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path / "disk")
    key = with_key(tmp_path, KEY)
    status, facts = run_json(capsys, "verify", tmp_path / "disk", *key)
    assert (status, facts["unauthentic"]) == (1, 22)
    assert {bad["reason"] for bad in facts["bad"]} == {"unprotected"}


def test_a_key_that_is_not_the_folders_is_explained(tmp_path: Path, capsys: Capture) -> None:
    """A hundred lines of `unauthentic` look like an attack, and the key was set yesterday."""
    write_folder(tmp_path / "disk")
    key = [str(word) for word in with_key(tmp_path, KEY)]
    assert main(["verify", str(tmp_path / "disk"), *key]) == 1
    assert "\nunprotected (22): written without a key" in capsys.readouterr().out


@LAYOUTS
def test_a_damaged_table_is_damage_and_hides_no_page(
    tmp_path: Path, capsys: Capture, packed: bool
) -> None:
    places = write_folder(tmp_path, packed=packed)
    path = segment_of(tmp_path, places[0])
    flip(path, path.stat().st_size - 4000)
    status, facts = run_json(capsys, "verify", tmp_path)
    assert (status, facts["sound"], facts["corrupt"]) == (1, 22, 1)
    assert facts["bad"][0]["reason"] == "damaged_footer"
    damage(tmp_path, places[1])
    _, facts = run_json(capsys, "verify", tmp_path)
    assert (facts["sound"], facts["corrupt"]) == (21, 2)


@LAYOUTS
def test_holes_are_not_looked_through(
    tmp_path: Path, capsys: Capture, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a gigabyte of which the disk holds nothing but the pages."""
    places = write_folder(tmp_path, packed=packed)
    path = segment_of(tmp_path, places[0])
    os.truncate(path, path.stat().st_size - 4096)
    os.truncate(path, 1 << 30)
    reads: list[int] = []
    read = FileIO.preadv

    def counted(self: FileIO, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        reads.append(offset)
        return read(self, fd, buffers, offset)

    monkeypatch.setattr(FileIO, "preadv", counted)
    status, facts = run_json(capsys, "verify", tmp_path)
    assert (status, facts["sound"], facts["corrupt"]) == (1, 22, 1)
    assert facts["bad"][0]["reason"] == "damaged_footer"
    assert len(reads) < 200


def test_a_killed_servers_folder_is_sound(tmp_path: Path, capsys: Capture) -> None:
    killed_folder(tmp_path / "killed", tmp_path / "source")
    before = listing(tmp_path / "killed")
    status, facts = run_json(capsys, "verify", tmp_path / "killed")
    assert (status, facts["sound"]) == (0, 5)
    assert listing(tmp_path / "killed") == before


def test_pages_that_a_start_would_lose_behind_damage_are_told(
    tmp_path: Path, capsys: Capture
) -> None:
    folder = tmp_path / "killed"
    places = killed_folder(folder, tmp_path / "source", num_pages=6)
    damage(folder, places[2])
    status, facts = run_json(capsys, "verify", folder)
    assert (status, facts["sound"], facts["corrupt"]) == (1, 7, 1)
    assert "would lose 3 sound pages" in facts["notes"][0]


def test_beside_a_server_what_it_writes_to_is_left_out(tmp_path: Path, capsys: Capture) -> None:
    with opened(tmp_path) as tier:
        fill(tier)
        status, facts = run_json(capsys, "verify", tmp_path)
        assert (status, facts["sound"], facts["bad"]) == (0, 16, [])
        assert len(facts["left_out"]) == 2
        assert "being written" in facts["left_out"][0]
        _, _, err = run(capsys, "verify", tmp_path)
        read = f"{16 * SLOT_BYTES / 1024:g} KiB"
        assert f"read {read} of {read} (100%)\n" in err, "what was left out was not read"
        store(tier, range(100, 103))  # the server goes on


def test_files_that_cannot_be_believed_are_unreadable(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    own = tmp_path / NAMESPACE.hex()[:16]
    (own / "seg-00000099.hkv").write_bytes(b"x" * 9000)
    (own / "notes.txt").write_text("mine")
    os.symlink("/etc/passwd", own / "seg-00000098.hkv")
    status, facts = run_json(capsys, "verify", tmp_path)
    assert (status, facts["sound"], facts["unreadable"]) == (1, 22, 1)
    assert facts["bad"][0]["where"].endswith("seg-00000099.hkv")


def test_what_cannot_be_verified_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "no folder of a disk tier" in refusal(capsys, "verify", tmp_path)
    write_folder(tmp_path / "disk")
    key = with_key(tmp_path, KEY[:4])
    assert "at least 32 bytes" in refusal(capsys, "verify", tmp_path / "disk", *key)
