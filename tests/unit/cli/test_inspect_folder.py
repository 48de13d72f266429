"""`hier-kv inspect` of folders that a real tier wrote."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from sglang_ext.ranks.rank import RankPlace
from sglang_ext.tiers.disk.folder import FolderLock, SharedFolderLock, holder_of
from sglang_ext.tiers.disk.offline.survey import find_segments
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.protection import write_key_file
from tests.tiers.protection_cases import KEY, seals
from tests.tiers.tier_pages import ADAPTER, NAMESPACE, OTHER_NAMESPACE, SLOT_BYTES, make_slot
from tests.unit.cli.disk_folder import (
    LABEL,
    PER_SEGMENT,
    fill,
    killed_folder,
    listing,
    opened,
    refusal,
    run,
    run_json,
    write_folder,
    write_with_link,
)

Capture = pytest.CaptureFixture[str]


def test_what_lies_there_is_counted_by_namespace(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    before = listing(tmp_path)
    status, facts = run_json(capsys, "inspect", tmp_path)
    assert (status, facts["held_by"]) == (0, "")
    [rank] = facts["ranks"]
    found = {each["namespace"]: each for each in rank["namespaces"]}
    own = found[NAMESPACE.hex()]
    assert own["label"] == LABEL
    assert (own["pages"], own["segments"]) == (20, -(-20 // PER_SEGMENT))
    assert (own["codecs"], own["qualities"], own["adapters"]) == (
        {"raw": 20}, {"exact": 20}, {"": 20}
    )  # fmt: skip
    assert own["page_bytes"] == 20 * SLOT_BYTES
    assert own["bytes"] == sum(len(each) for name, each in before.items() if _is_segment(name))
    assert own["oldest_s"] <= own["newest_s"]
    assert found[OTHER_NAMESPACE.hex()]["pages"] == 2
    assert listing(tmp_path) == before, "it changes nothing"


def _is_segment(name: str) -> bool:
    return name.startswith(NAMESPACE.hex()[:16]) and name.endswith(".hkv")


def test_people_read_the_same(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    status, out, _ = run(capsys, "inspect", tmp_path)
    assert status == 0
    assert "22 pages in 4 segments, " in out
    assert f"\n  pages    20, {20 * SLOT_BYTES >> 10} KiB in all\n" in out
    assert "namespaces: 2; no server holds it" in out
    assert f"namespace {NAMESPACE.hex()}\n  label    model tiny, rope pre\n" in out
    assert "quality  20 exact\n" in out


def test_adapters_qualities_and_codecs_are_told_apart(tmp_path: Path, capsys: Capture) -> None:
    with opened(tmp_path) as tier:
        fill(tier, packed=True, num_pages=5)
        tier.write(OTHER_NAMESPACE, [make_slot(9, OTHER_NAMESPACE, ADAPTER, quality=1)])
    _, facts = run_json(capsys, "inspect", tmp_path)
    found = {each["namespace"]: each for each in facts["ranks"][0]["namespaces"]}
    assert found[NAMESPACE.hex()]["codecs"] == {"x.1": 5}
    other = found[OTHER_NAMESPACE.hex()]
    assert other["adapters"] == {"": 2, ADAPTER.hex(): 1}
    assert other["qualities"] == {"exact": 2, "lossy": 1}


def test_a_killed_servers_folder_is_read_as_the_next_server_would(
    tmp_path: Path, capsys: Capture
) -> None:
    killed_folder(tmp_path / "killed", tmp_path / "source")
    _, facts = run_json(capsys, "inspect", tmp_path / "killed")
    own = next(n for n in facts["ranks"][0]["namespaces"] if n["namespace"] == NAMESPACE.hex())
    assert (own["pages"], own["states"]) == (3, {"resealed": 1})
    assert own["free_slots"] > 0


def test_beside_a_server_what_it_writes_to_is_counted_apart(
    tmp_path: Path, capsys: Capture
) -> None:
    with opened(tmp_path) as tier:
        fill(tier)
        _, facts = run_json(capsys, "inspect", tmp_path)
        assert facts["held_by"].startswith(f"process {os.getpid()} on host ")
        own = next(n for n in facts["ranks"][0]["namespaces"] if n["namespace"] == NAMESPACE.hex())
        assert own["states"] == {"sealed": 2, "being_written": 1}
        assert (own["pages"], own["pages_being_written"]) == (2 * PER_SEGMENT, 4)
        would_go = run_json(capsys, "prune", tmp_path, "--all", "--dry-run")[1]
        _, out, _ = run(capsys, "inspect", tmp_path)
    assert would_go["pages"] == 22
    assert "22 pages in 4 segments" in out, "as prune says"
    assert "in all; 4 in what is being written, at this moment\n" in out
    assert "  pages    2 in what is being written, at this moment\n" in out
    assert out.count("free ") == 1, "of what is being written that is not known"


def test_a_look_keeps_no_server_from_starting(tmp_path: Path) -> None:
    lock = FolderLock(FileIO(), tmp_path)
    assert holder_of(FileIO(), tmp_path).startswith(f"process {os.getpid()}")
    lock.release()
    assert holder_of(FileIO(), tmp_path) == ""
    FolderLock(FileIO(), tmp_path).release()


@pytest.mark.parametrize("stages", [1, 2])
def test_ranks_have_folders_of_their_own(tmp_path: Path, capsys: Capture, stages: int) -> None:
    places = [RankPlace(rank, 2, pp_rank=stages - 1, pp_size=stages) for rank in range(2)]
    for place in places:
        write_folder(tmp_path / place.name, num_pages=4)
    SharedFolderLock(FileIO(), tmp_path, "one")
    status, out, _ = run(capsys, "inspect", tmp_path)
    assert status == 0
    assert "namespaces: 4" in out
    assert f"process {os.getpid()} on host" in out
    assert f"{tmp_path / places[1].name}:\n" in out


def test_with_a_key_protected_pages_are_counted(tmp_path: Path, capsys: Capture) -> None:
    folder, key_file = tmp_path / "disk", tmp_path / "key"
    write_folder(folder, seals("encrypt"), packed=True)
    write_key_file(key_file)
    _, facts = run_json(capsys, "inspect", folder)
    assert {"locked_segment"} == {
        state for each in facts["ranks"][0]["namespaces"] for state in each["states"]
    }
    key_file.write_text(KEY.hex())
    _, facts = run_json(capsys, "inspect", folder, "--key-file", key_file)
    own = next(n for n in facts["ranks"][0]["namespaces"] if n["namespace"] == NAMESPACE.hex())
    assert (own["pages"], own["codecs"]) == (20, {"x.1": 20})


def test_links_and_others_files_are_not_looked_at(tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "disk"
    own, outside = write_with_link(folder)
    (own / "seg-00000099.hkv").symlink_to(next((outside / own.name).glob("*.hkv")))
    (own / "notes.txt").write_text("mine")
    _, facts = run_json(capsys, "inspect", folder)
    [found] = facts["ranks"][0]["namespaces"]
    assert (found["namespace"], found["pages"]) == (NAMESPACE.hex(), 20)


def test_what_is_no_folder_of_a_tier_is_refused(tmp_path: Path, capsys: Capture) -> None:
    assert "no folder of a disk tier" in refusal(capsys, "inspect", tmp_path)
    assert "is no folder" in refusal(capsys, "inspect", tmp_path / "absent")
    write_folder(tmp_path / "disk")
    error = refusal(capsys, "inspect", tmp_path / "disk", "--key-file", tmp_path / "absent")
    assert error.startswith("hier-kv: --key-file: ")
    with pytest.raises(SystemExit, match="2"):
        run(capsys, "inspect")


def test_a_file_that_says_nothing_true_is_told(tmp_path: Path, capsys: Capture) -> None:
    write_folder(tmp_path)
    own = tmp_path / NAMESPACE.hex()[:16]
    (own / "seg-00000099.hkv").write_bytes(b"x" * 9000)
    (own / "ns.msgpack").write_bytes(b"x")
    _, facts = run_json(capsys, "inspect", tmp_path)
    found = next(n for n in facts["ranks"][0]["namespaces"] if n["namespace"] == NAMESPACE.hex())
    assert (found["pages"], found["states"]) == (20, {"sealed": 3, "foreign_file": 1})


def test_another_users_folder_is_a_sentence(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path)

    def refuse(io: FileIO, path: Path, flags: int) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(FileIO, "open", refuse)
    error = refusal(capsys, "inspect", tmp_path)
    assert f"{tmp_path / 'LOCK'} must be this user's to read" in error


def test_a_namespace_that_goes_while_others_are_read_is_left_out(tmp_path: Path) -> None:
    """Its server deletes it with its last segment."""
    write_folder(tmp_path)
    first, last = sorted(digest.hex()[:16] for digest in (NAMESPACE, OTHER_NAMESPACE))

    class Server(FileIO):
        def open(self, path: Path, flags: int) -> int:
            shutil.rmtree(tmp_path / last, ignore_errors=True)
            return super().open(path, flags)

    namespaces, segments = find_segments(Server(), tmp_path)
    assert [each.path.name for each in namespaces] == [first]
    assert segments
    assert {each.namespace.path.name for each in segments} == {first}
