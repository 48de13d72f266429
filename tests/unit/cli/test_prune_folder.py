"""`hier-kv prune` of folders that a real tier wrote: what was not chosen is there for the next."""

from __future__ import annotations

import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest

from sglang_ext.tiers.disk.folder import FolderLock, SharedFolderLock
from sglang_ext.tiers.disk.offline import removal
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.disk.segments.layout import decode_header, encode_header
from sglang_ext.tiers.disk.segments.sealing import write_footer
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from tests.tiers.protection_cases import OTHER_KEY, seals
from tests.tiers.tier_pages import NAMESPACE, OTHER_NAMESPACE, SLOT_BYTES, store
from tests.unit.cli.disk_folder import (
    PER_SEGMENT,
    damage,
    fill,
    flip,
    killed_folder,
    listing,
    opened,
    readable,
    refusal,
    run,
    run_json,
    segment_of,
    with_key,
    write_folder,
    write_with_link,
)

Capture = pytest.CaptureFixture[str]
LAYOUTS = pytest.mark.parametrize("packed", [False, True], ids=["slots", "packed"])
LOCK = {"LOCK": b""}
OLD_S = 1_000_000_000


class Killed(BaseException):
    """Ends the command where it is."""


def test_without_a_choice_nothing_is_removed(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    before = listing(tmp_path)
    error = refusal(capsys, "prune", tmp_path, status=2)
    assert "--namespace PREFIX, --damaged, --older-than 7d and --all" in error
    assert "hex digits" in refusal(capsys, "prune", tmp_path, "--namespace", "", status=2)
    assert "such as 4s" in refusal(capsys, "prune", tmp_path, "--older-than", "long", status=2)
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "prune", tmp_path, "--all", "--damaged")
    assert listing(tmp_path) == before


def test_a_namespace_goes_and_the_other_stays(tmp_path: Path, capsys: Capture) -> None:
    places = write_folder(tmp_path)
    prefix = OTHER_NAMESPACE.hex()[:10]
    before = listing(tmp_path)
    status, facts = run_json(capsys, "prune", tmp_path, "--namespace", prefix, "--dry-run")
    assert (status, facts["pages"], facts["dry_run"]) == (0, 2, True)
    assert listing(tmp_path) == before
    status, out, _ = run(capsys, "prune", tmp_path, "--namespace", prefix)
    assert status == 0
    assert f"removed {OTHER_NAMESPACE.hex()[:16]}/seg-00000001.hkv: 2 pages, " in out
    kept = {name: data for name, data in before.items() if prefix not in name}
    assert listing(tmp_path) == kept | LOCK
    assert not (tmp_path / OTHER_NAMESPACE.hex()[:16]).exists()
    assert readable(tmp_path, places) == set(places)


def test_everything_goes_but_others_files(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "disk"
    own, outside = write_with_link(folder)
    target = next((outside / own.name).glob("*.hkv"))
    (own / "seg-00000098.hkv").symlink_to(target)
    shutil.copy(target, own / "seg-00000099.hkv")  # its ends say another number
    (own / "notes.txt").write_text("mine")
    (folder / "profiles").mkdir()
    (folder / "profiles" / "seg-00000001.hkv").write_text("mine")
    before = listing(outside)
    status, facts = run_json(capsys, "prune", folder, "--all")
    assert (status, facts["pages"]) == (0, 20)
    assert any("seg-00000099.hkv" in text for text in facts["left"])
    assert any("other files" in text for text in facts["left"])
    assert listing(outside) == before
    assert set(os.listdir(own)) == {
        "notes.txt", "ns.msgpack", "seg-00000098.hkv", "seg-00000099.hkv"
    }  # fmt: skip
    assert (folder / "profiles" / "seg-00000001.hkv").exists()
    with opened(folder) as tier:
        assert tier.stats().segments == 0
    assert (folder / "folder.msgpack").exists(), "no segment's number is given out again"


def test_old_segments_go_and_young_ones_stay(tmp_path: Path, capsys: Capture) -> None:
    places = write_folder(tmp_path)
    old = segment_of(tmp_path, places[0])
    os.utime(old, (OLD_S, OLD_S))
    status, facts = run_json(capsys, "prune", tmp_path, "--older-than", "7d")
    assert (status, facts["pages"]) == (0, PER_SEGMENT)
    assert not old.exists()
    assert readable(tmp_path, places) == set(range(PER_SEGMENT, 20))


@LAYOUTS
@pytest.mark.parametrize("mode", ["plain", "tag", "encrypt"])
def test_damaged_pages_go_and_their_neighbours_stay(
    tmp_path: Path, capsys: Capture, packed: bool, mode: str
) -> None:
    folder, sealing, key = tmp_path / "disk", _sealing(mode), _key_of(tmp_path, mode)
    places = write_folder(folder, sealing, packed=packed)
    bad = {0, 3, 11, 19}
    for number in bad:
        damage(folder, places[number], at=520 if number % 2 else 100)
    os.utime(segment_of(folder, places[0]), (OLD_S, OLD_S))
    before = listing(folder)
    status, facts = run_json(capsys, "prune", folder, "--damaged", "--dry-run", *key)
    assert (status, facts["pages"]) == (0, 4)
    assert listing(folder) == before
    status, facts = run_json(capsys, "prune", folder, "--damaged", *key)
    assert (status, facts["pages"], facts["left"]) == (0, 4, [])
    assert segment_of(folder, places[0]).stat().st_mtime == OLD_S, "it is as old as it was"
    status, facts = run_json(capsys, "verify", folder, *key)
    assert (status, facts["sound"], facts["bad"]) == (0, 18, [])
    assert run_json(capsys, "prune", folder, "--damaged", *key)[1]["pages"] == 0
    with opened(folder, sealing) as tier:
        assert tier.stats().errors == {}
    assert readable(folder, places, sealing, packed=packed) == set(places) - bad


def _sealing(mode: str) -> RecordSeals:
    return CHECKSUMS if mode == "plain" else seals(mode)


def _key_of(folder: Path, mode: str) -> list[object]:
    return [] if mode == "plain" else with_key(folder)


def test_a_header_of_an_impossible_length_keeps_no_page_in(tmp_path: Path, capsys: Capture) -> None:
    """A file is made as long as its header says while a page is taken out of it."""
    places = write_folder(tmp_path)
    path = segment_of(tmp_path, places[0])
    data = bytearray(path.read_bytes())
    header = decode_header(bytes(data[:4096]))
    assert header is not None
    data[:4096] = encode_header(replace(header, file_bytes=(1 << 64) - 1))
    path.write_bytes(data)
    damage(tmp_path, places[0])
    status, out, err = run(capsys, "prune", tmp_path, "--damaged")
    assert (status, out.count("removed 1 damaged page")) == (0, 1), err
    assert readable(tmp_path, places) == set(places) - {0}


def test_a_segment_of_damaged_pages_only_goes(tmp_path: Path, capsys: Capture) -> None:
    places = write_folder(tmp_path)
    for number in range(PER_SEGMENT):
        damage(tmp_path, places[number])
    run_json(capsys, "prune", tmp_path, "--damaged")
    assert not segment_of(tmp_path, places[0]).exists()
    assert readable(tmp_path, places) == set(range(PER_SEGMENT, 20))


@LAYOUTS
def test_a_damaged_table_is_made_anew(tmp_path: Path, capsys: Capture, packed: bool) -> None:
    places = write_folder(tmp_path, packed=packed)
    path = segment_of(tmp_path, places[0])
    flip(path, path.stat().st_size - 4000)
    damage(tmp_path, places[1])
    status, facts = run_json(capsys, "prune", tmp_path, "--damaged")
    assert (status, facts["pages"]) == (0, 1)
    assert run(capsys, "verify", tmp_path)[0] == 0
    assert readable(tmp_path, places, packed=packed) == set(places) - {1}


def test_pages_behind_damage_in_a_segment_that_was_never_sealed_are_kept(
    tmp_path: Path, capsys: Capture
) -> None:
    folder, lost = tmp_path / "killed", tmp_path / "lost"
    places = killed_folder(folder, tmp_path / "source", num_pages=6)
    damage(folder, places[2])
    shutil.copytree(folder, lost)
    assert readable(lost, places) == {0, 1}
    status, _ = run_json(capsys, "prune", folder, "--damaged")
    assert status == 0
    assert readable(folder, places) == {0, 1, 3, 4, 5}


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no key", "another"])
def test_what_cannot_be_judged_without_its_key_is_not_damaged(
    tmp_path: Path, capsys: Capture, key: bytes | None
) -> None:
    folder = tmp_path / "disk"
    places = write_folder(folder, seals("tag"))
    damage(folder, places[0])
    given = with_key(tmp_path, key) if key else []
    before = listing(folder)
    status, facts = run_json(capsys, "prune", folder, "--damaged", *given)
    assert (status, facts["pages"]) == (0, 0)
    assert "--key-file" in facts["left"][0]
    assert listing(folder) == before | LOCK
    status, facts = run_json(capsys, "prune", folder, "--all")
    assert len(facts["removed"]) == 4


@LAYOUTS
@pytest.mark.parametrize("mode", ["tag", "encrypt"])
def test_with_another_key_no_segment_is_without_sound_pages(
    tmp_path: Path, capsys: Capture, packed: bool, mode: str
) -> None:
    """Where its table and the beginning of its first page are damaged, nothing else names a key."""
    folder = tmp_path / "disk"
    places = write_folder(folder, seals(mode), packed=packed, num_pages=5)
    path = segment_of(folder, places[0])
    flip(path, path.stat().st_size - 100)
    damage(folder, places[0], at=0)
    before = listing(folder)
    status, facts = run_json(capsys, "prune", folder, "--damaged", *with_key(tmp_path, OTHER_KEY))
    assert (status, facts["removed"]) == (0, [])
    assert listing(folder) == before | LOCK
    assert readable(folder, places, seals(mode), packed=packed) == {1, 2, 3, 4}


def test_pages_of_a_later_release_are_not_damaged(tmp_path: Path, capsys: Capture) -> None:
    places = write_folder(tmp_path, packed=True, num_pages=PER_SEGMENT)
    path = segment_of(tmp_path, places[0])
    data = bytearray(path.read_bytes())
    for place in places.values():
        data[place.block * 4096 + 4] = 9  # the record's version
    data[-100] ^= 1  # of the table
    path.write_bytes(data)
    damage(tmp_path, places[0], at=0)
    before = listing(tmp_path)
    status, facts = run_json(capsys, "prune", tmp_path, "--damaged")
    assert (status, facts["removed"]) == (0, [])
    assert listing(tmp_path) == before | LOCK


def test_a_folder_of_a_later_release_is_left_to_it(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    (tmp_path / "folder.msgpack").write_bytes(msgpack.packb({"version": 2, "next_segment": 65}))
    before = listing(tmp_path)
    for choice in (["--all"], ["--damaged"], ["--damaged", "--dry-run"]):
        assert "use the newer release" in refusal(capsys, "prune", tmp_path, *choice)
    assert listing(tmp_path) == before


def test_beside_a_server_nothing_is_removed(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    with opened(tmp_path):
        before = listing(tmp_path)
        error = refusal(capsys, "prune", tmp_path, "--all")
        assert f"process {os.getpid()} on host" in error
        assert "stop it first, or give --dry-run" in error
        assert listing(tmp_path) == before


def test_beside_a_server_a_dry_run_says_what_would_go_now(tmp_path: Path, capsys: Capture) -> None:
    with opened(tmp_path) as tier:
        places = fill(tier)
        damage(tmp_path, places[3])
        before = listing(tmp_path)
        status, facts = run_json(capsys, "prune", tmp_path, "--all", "--dry-run")
        assert (status, facts["pages"], len(facts["removed"])) == (0, 22, 4)
        assert f"process {os.getpid()} on host" in facts["held_by"]
        status, out, _ = run(capsys, "prune", tmp_path, "--damaged", "--dry-run")
        assert status == 0
        assert "would remove 1 damaged page from " in out
        assert out.count("left: ") == 2
        assert "being written" in out, "what the server writes to is not judged"
        assert f"these are figures of this moment: process {os.getpid()} on host" in out
        assert listing(tmp_path) == before
        store(tier, range(100, 103))  # the server goes on
    status, out, _ = run(capsys, "prune", tmp_path, "--damaged", "--dry-run")
    assert "of this moment" not in out


def test_one_page_is_not_told_in_the_plural(tmp_path: Path, capsys: Capture) -> None:
    places = write_folder(tmp_path, num_pages=PER_SEGMENT + 2)
    damage(tmp_path, places[PER_SEGMENT])
    _, out, _ = run(capsys, "prune", tmp_path, "--damaged")
    assert "removed 1 damaged page from " in out
    assert "seg-00000003.hkv, 1 stays\n" in out
    assert "removed 1 page, 8 KiB in all\n" in out
    _, out, _ = run(capsys, "prune", tmp_path, "--all", "--dry-run")
    assert "seg-00000003.hkv: 1 page, " in out


def test_the_folder_of_several_ranks_is_pruned_when_all_have_ended(
    tmp_path: Path, capsys: Capture
) -> None:
    ranks = [tmp_path / "disk" / name for name in ("dp0-tp0-of-2", "dp0-tp1-of-2")]
    places = [write_folder(rank) for rank in ranks]
    prefix = NAMESPACE.hex()[:16]
    lock = FolderLock(FileIO(), ranks[1])
    assert "stop it first" in refusal(capsys, "prune", tmp_path / "disk", "--namespace", prefix)
    lock.release()
    status, facts = run_json(capsys, "prune", tmp_path / "disk", "--namespace", prefix)
    assert (status, facts["pages"]) == (0, 40)
    assert [readable(*each) for each in zip(ranks, places, strict=True)] == [set(), set()]
    SharedFolderLock(FileIO(), tmp_path / "disk", "one")
    assert "stop it first" in refusal(capsys, "prune", tmp_path / "disk", "--all")


@LAYOUTS
@pytest.mark.parametrize("step", ["before the table", "before the end", "after the table"])
def test_a_kill_while_a_page_is_taken_out_loses_no_other(
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
    packed: bool,
    step: str,
) -> None:
    places = write_folder(tmp_path, packed=packed)
    damage(tmp_path, places[3])
    names = {"before the end": "seal:before_truncate", "after the table": "seal:done"}

    def killed(*arguments: object, **options: object) -> int:
        def fail(name: str) -> None:
            if name == names.get(step, name):
                raise Killed

        return write_footer(*arguments, **options, failpoint=fail)  # type: ignore[arg-type]

    monkeypatch.setattr(removal, "write_footer", killed)
    with pytest.raises(Killed):
        run(capsys, "prune", tmp_path, "--damaged")
    assert readable(tmp_path, places, packed=packed) == set(places) - {3}


def test_what_cannot_be_removed_is_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "unlink", refuse)
    status, facts = run_json(capsys, "prune", tmp_path, "--namespace", NAMESPACE.hex())
    assert (status, facts["pages"]) == (1, 0)
    assert "could not be removed" in facts["left"][0]


@pytest.mark.parametrize("choice", ["--all", "--damaged"])
def test_what_cannot_be_read_is_said_to_be_so(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    """As a segment of root's: it is no later release's, and nobody else's to look at."""
    write_folder(tmp_path)
    closed = sorted(tmp_path.rglob("seg-*.hkv"))[0]
    open_file = FileIO.open

    def refuse(self: FileIO, path: Path, flags: int) -> int:
        if path == closed:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return open_file(self, path, flags)

    monkeypatch.setattr(FileIO, "open", refuse)
    _, facts = run_json(capsys, "verify", tmp_path)
    assert facts["unreadable"] == 1
    _, facts = run_json(capsys, "prune", tmp_path, choice)
    [left] = [each for each in facts["left"] if closed.name in each]
    assert "this user may not read it, or the disk fails" in left
    assert closed.is_file()


def test_a_full_disk_is_made_room_on(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(FileIO, "pwritev", refuse)
    status, facts = run_json(capsys, "prune", tmp_path, "--all")
    assert (status, facts["pages"], facts["left"]) == (0, 22, [])
    assert not list(tmp_path.rglob("*.hkv"))


def test_the_folders_of_several_servers_are_no_ranks_of_one(
    tmp_path: Path, capsys: Capture
) -> None:
    for name in ("kv-one", "kv-two"):
        (tmp_path / name).mkdir()
        write_folder(tmp_path / name)
    before = listing(tmp_path)
    assert "no folder of a disk tier" in refusal(capsys, "prune", tmp_path, "--all")
    assert listing(tmp_path) == before


def test_a_file_from_before_1970_is_of_its_namespace_all_the_same(
    tmp_path: Path, capsys: Capture
) -> None:
    places = write_folder(tmp_path)
    for path in tmp_path.rglob("seg-*.hkv"):
        os.utime(path, (-100, -100))
    status, facts = run_json(capsys, "prune", tmp_path, "--namespace", "ff" * 32)
    assert (status, facts["pages"]) == (0, 0)
    assert readable(tmp_path, places) == set(places)


def test_what_a_terminal_obeys_is_not_printed(tmp_path: Path, capsys: Capture) -> None:
    with opened(tmp_path) as tier:
        tier.open_namespace(NAMESPACE, SLOT_BYTES, {"model": "\x1b]0;gotcha\x07\x1b[2J"})
        store(tier, range(2))
    _, out, _ = run(capsys, "inspect", tmp_path)
    assert "gotcha" in out
    assert "\x1b" not in out
