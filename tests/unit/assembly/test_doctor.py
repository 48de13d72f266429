"""`hier-kv doctor`: what it says is what a start would say."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runtime_cpu import inprocess
from sglang_ext.assembly.doctor import checks as looks
from sglang_ext.assembly.doctor import machine_speed, memory_nodes, store_answer
from sglang_ext.assembly.preflight import (
    check_free,
    check_machine,
    others_problem,
    room_bytes,
    room_problem,
)
from sglang_ext.cli import main
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.symbols import SYMBOLS, Use
from sglang_ext.settings.config import GIB, HierKVConfig
from sglang_ext.settings.model_kinds import MODEL_KINDS
from sglang_ext.tiers.disk.folder import FolderLock
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.remote import Outcome
from testkit.hybrids.window_model import write_window_model
from testkit.ports import free_port
from testkit.remote.redis_server import RedisServer, redis_binary
from testkit.server import TINYLM
from testkit.sglang_copy import SglangCopy
from tests.other_user import ANOTHER_USER, as_another_user
from tests.tiers.remote.remote_cases import WAIT_S, make_items, open_store

SMALL = ["--hier-kv-host-size", "0.01"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit status, and the checks by name."""
    status = main(["doctor", "--json", *arguments])
    told = json.loads(capsys.readouterr().out)
    return status, {check["name"]: check for check in told["checks"]}


def test_a_good_set_up_is_good(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    arguments = ["--hier-kv-disk-dir", str(disk), "--hier-kv-disk-size", "0.1"]
    status, checks = run(
        capsys, *SMALL, *arguments, "--hier-kv-disk-free-floor", "0", "--hier-kv-disk-io", "auto"
    )
    assert status == 0
    assert checks["sglang"]["text"] == f"SGLang 0.5.23, tested; {len(SYMBOLS)} names agree."
    assert {name: one["state"] for name, one in checks.items()} == {
        "sglang": "ok", "settings": "ok", "memlock": "ok", "numa": "ok",
        "disk": checks["disk"]["state"],
    }  # fmt: skip
    assert checks["disk"]["state"] in ("ok", "warning")  # O_DIRECT is the file system's to have
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_flags_that_no_server_takes_are_a_check_too(capsys: pytest.CaptureFixture[str]) -> None:
    status, checks = run(capsys, "--hier-kv-codec", "lossless")
    assert status == 1
    assert {name: one["state"] for name, one in checks.items()} == {
        "sglang": "ok", "settings": "refused",
    }  # fmt: skip
    assert "add --hier-kv-disk-dir" in checks["settings"]["text"]
    assert main(["doctor", "--hier-kv-codec", "lossless"]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""
    assert f"settings: refused. {checks['settings']['text']}\n" in captured.out
    assert captured.out.endswith("# mend what is refused above (settings), and look again\n")


def test_folders_that_it_made_to_try_are_gone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    disk = ["--hier-kv-disk-dir", str(kept / "new" / "deep")]
    assert run(capsys, *SMALL, *disk)[0] == 0
    assert list(tmp_path.iterdir()) == [kept]
    assert list(kept.iterdir()) == [], "what was absent is absent again"
    assert run(capsys, *SMALL, *disk, "--hier-kv-disk-free-floor", "1000000")[0] == 1
    assert list(kept.iterdir()) == [], "also where the folder was refused"
    assert run(capsys, *SMALL, "--hier-kv-disk-dir", str(kept))[0] == 0
    assert kept.is_dir(), "what was there stays"


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", free_port()))
        server.listen()
        port = server.getsockname()[1]
        for host in ("127.0.0.1", "localhost", "0.0.0.0"):
            status, checks = run(capsys, *SMALL, "--port", str(port), "--host", host)
            assert (status, checks["port"]["state"]) == (1, "refused")
            assert f"--port {port} of {host} is taken by another" in checks["port"]["text"]
    status, checks = run(capsys, *SMALL, "--port", str(port))
    assert (status, checks["port"]["state"]) == (0, "ok")
    status, checks = run(capsys, *SMALL, "--port", str(port), "--host", "no.such.host.invalid")
    assert (status, checks["port"]["state"]) == (1, "refused")
    assert "port" not in run(capsys, *SMALL)[1]
    assert main(["doctor", *SMALL, "--port", "70000"]) == 2
    assert "--port must be from 1 to 65535, got 70000" in capsys.readouterr().err


def test_all_sizes_are_in_one_unit(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    disk = ["--hier-kv-disk-dir", str(tmp_path / "disk")]
    status, checks = run(capsys, *SMALL, *disk, "--hier-kv-disk-size", "100000")
    assert (status, checks["disk"]["state"]) == (0, "warning")
    floor = [*disk, "--hier-kv-disk-free-floor", "100000"]
    told = [checks, *(run(capsys, *each)[1] for each in (["--hier-kv-host-size", "99999"], floor))]
    texts = [check["text"] for each in told for check in each.values()]
    assert sum(text.count(" GiB") for text in texts) >= 5
    assert [text for text in texts if re.search(r"\bGB\b", text)] == []


def test_the_folder_of_a_server_that_starts_meanwhile_stays(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "deep"
    config = replace(HierKVConfig(), host_size=0.01, disk_dir=str(folder), disk_free_floor=0.0)
    found = []
    for check in looks.look(config):
        found.append(check)
        folder.mkdir(parents=True, exist_ok=True)  # as a server does, before anything is in it
    assert folder.is_dir()
    assert list(tmp_path.iterdir()) == [tmp_path / "new"]
    assert [check.name for check in found] == ["sglang", "settings", "memlock", "numa", "disk"]


def test_what_was_tried_elsewhere_is_said_of_the_folder_that_was_named(tmp_path: Path) -> None:
    folder = tmp_path / "absent"
    config = replace(HierKVConfig(), host_size=0.01, disk_dir=str(folder), disk_free_floor=1e6)
    disk = next(check for check in looks.look(config) if check.name == "disk")
    assert str(folder) in disk.text
    assert ".hier-kv-doctor" not in disk.text


def test_a_name_that_nobody_looks_up_in_time_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, ended = threading.Event(), threading.Event()

    def look_up(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        ended.wait()
        raise socket.gaierror("at last")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(store_answer, "_MOST_S", 0.2)
    monkeypatch.setattr(store_answer, "_LOOKUP_S", 0.1)
    try:
        status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", "redis://cache:6379")
        assert asked.wait(60.0)
    finally:
        ended.set()
    assert (status, checks["remote"]["state"]) == (0, "warning")
    assert (
        "redis://cache:6379 does not answer (nothing came within 0.3 s" in checks["remote"]["text"]
    )


def test_a_store_is_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"redis://127.0.0.1:{free_port()}"
    status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", url)
    assert (status, checks["remote"]["state"]) == (0, "warning")
    assert f"{url} does not answer" in checks["remote"]["text"]
    assert "refused" in checks["remote"]["text"]
    assert "start the store" in checks["remote"]["text"]
    status, checks = run(
        capsys, "--hier-kv-host-size", "1000000", "--hier-kv-remote-url", "redis://127.0.0.1:1"
    )
    assert (status, checks["remote"]["state"]) == (1, "warning"), "whatever else is refused"
    status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", "redis://127.0.0.1:1?no=1")
    assert (status, "remote" in checks) == (1, False)
    if redis_binary() is None:
        pytest.skip("no redis-server is installed")
    with RedisServer(tmp_path / "redis", password="secret", max_memory="512mb") as redis:
        url = f"redis://127.0.0.1:{redis.port}"
        status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", url)
        assert (status, checks["remote"]["state"]) == (0, "warning")
        assert "SGLANG_HIER_KV_REMOTE_PASSWORD" in checks["remote"]["text"]
        monkeypatch.setenv("SGLANG_HIER_KV_REMOTE_PASSWORD", "secret")
        status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", url)
        assert (status, checks["remote"]["state"]) == (0, "ok")
        text = checks["remote"]["text"]
        found = re.search(r"([\d.]+) ms to connect, ([\d.]+) ms a round trip", text)
        assert found is not None, text
        assert all(float(number) > 0 for number in found.groups())
        assert "MiB of 0.5 GiB" in text
        assert "secret" not in text


def test_a_store_that_is_a_folder_keeps_what_lies_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with contextlib.closing(open_store(f"file://{tmp_path}?size=1GB&free=1")) as store:
        assert store.wait_usable(WAIT_S)
        assert set(store.put(make_items(range(40)))) == {Outcome.OK}
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    url = f"file://{tmp_path}?size=64KB"  # a server with this would remove the most of it
    for _ in range(10):
        status, checks = run(capsys, *SMALL, "--hier-kv-remote-url", url)
        assert (status, checks["remote"]["state"]) == (0, "ok")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before


def test_what_a_start_refuses_is_refused_in_the_same_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    status, checks = run(capsys, *SMALL, "--hier-kv-disk-dir", str(tmp_path / "file"))
    assert status == 1
    assert checks["settings"]["state"] == "refused"
    assert "--hier-kv-disk-dir must be a folder" in checks["settings"]["text"]
    status, checks = run(capsys, "--hier-kv-host-size", "1000000")
    assert status == 1
    assert "give a smaller size" in checks["settings"]["text"]


def test_another_release_is_looked_at_and_every_difference_is_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    copy = SglangCopy(tmp_path, "0.6.0")
    gone = [
        symbol
        for symbol in SYMBOLS
        if symbol.name.startswith("SchedulerWeightUpdaterManager.") and symbol.use is Use.HOOKED
    ]
    for symbol in gone:
        copy.rename(symbol)
    status, checks = run(capsys, "--contract", str(copy.folder))
    assert status == 1
    assert checks["sglang"]["details"] == [f"{symbol} is missing" for symbol in gone]
    assert main(["doctor", "--contract", str(copy.folder)]) == 1
    first, *others = capsys.readouterr().out.splitlines()
    assert f"{len(gone) - 3} more (below); install" in first
    assert [line.strip() for line in others] == [f"{symbol} is missing" for symbol in gone]
    status, checks = run(capsys, "--contract", str(tmp_path / "nothing"))
    assert status == 1
    assert "a folder or wheel of SGLang was expected" in checks["sglang"]["text"]


def test_a_limit_of_locked_memory_is_told_where_there_is_a_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(looks, "_GPU", tmp_path)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (65_536, 65_536))
    status, checks = run(capsys, *SMALL)
    assert status == 0
    assert checks["memlock"]["state"] == "warning"
    assert "ulimit -l" in checks["memlock"]["text"]


def test_a_disk_that_is_smaller_than_its_size_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, checks = run(
        capsys, *SMALL, "--hier-kv-disk-dir", str(tmp_path), "--hier-kv-disk-size", "10000000"
    )
    assert status == 0
    assert checks["disk"]["state"] == "warning"
    assert "will stay smaller" in checks["disk"]["text"]


def test_a_folder_that_a_server_has_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    disk = ["--hier-kv-disk-dir", str(tmp_path), "--hier-kv-disk-size", "0.1"]
    held = FolderLock(FileIO(), tmp_path)
    status, checks = run(capsys, *SMALL, *disk)
    assert (status, checks["disk"]["state"]) == (1, "refused")
    assert f"in use by process {os.getpid()}" in checks["disk"]["text"]
    with pytest.raises(HierKVConfigError, match=r"in use by process .* stop that one first"):
        check_free(str(tmp_path), 0.2)
    held.release()
    assert run(capsys, *SMALL, *disk)[0] == 0
    check_free(str(tmp_path), 0.0)


def test_room_for_not_one_segment_is_told(tmp_path: Path) -> None:
    free_gb = room_bytes(tmp_path) / GIB
    floor = max(free_gb - 0.1, 0.0)
    config = HierKVConfig(disk_dir=str(tmp_path), disk_size=4.0, disk_free_floor=floor)
    assert "not one segment fits" in room_problem(config)
    config = replace(config, disk_size=2 * free_gb, disk_free_floor=0.0)
    assert room_problem(config).endswith("the disk tier will stay smaller")
    assert room_problem(replace(config, disk_size=0.01)) == ""


def test_what_a_link_in_the_disk_folder_leads_to_is_no_room(tmp_path: Path) -> None:
    """Nor is a pipe, or what was removed while it was looked at."""
    folder = tmp_path / "kv"
    names = folder / "0123456789abcdef"
    names.mkdir(mode=0o700, parents=True)
    away = tmp_path / "seg-away"
    with away.open("wb") as file:
        file.truncate(1 << 42)
    before = room_bytes(folder)
    (names / "seg-00000001.hkv").symlink_to(away)
    (names / "seg-00000002.hkv").symlink_to(folder / "absent")
    os.mkfifo(names / "seg-00000003.hkv")
    assert abs(room_bytes(folder) - before) < 1 << 40


@pytest.mark.parametrize("of", [".", "dp0-tp1-of-2", "dp0-tp1-of-2-pp0-of-2"])
def test_its_own_segments_are_room_and_nothing_else_is_looked_into(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str
) -> None:
    """The folder may be a file system's root, with millions of files and what cannot be listed."""
    names, others = tmp_path / of / "0123456789abcdef", tmp_path / "models" / "deep"
    for folder in (names, others):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    looked: list[str] = []
    list_folder = os.listdir

    def noted(path: str) -> list[str]:
        looked.append(os.fspath(path))
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", noted)
    for folder in (names, others):
        with (folder / "seg-00000001.hkv").open("wb") as file:
            file.truncate(1 << 42)
    found = room_bytes(tmp_path)
    assert 1 << 42 <= found < 2 << 42
    assert str(names) in looked
    assert not [path for path in looked if "models" in path]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_files_that_a_server_of_root_left_are_told_of(tmp_path: Path) -> None:
    """To the server's own user they are closed, as to the tier: it would find and count nothing."""
    here = Path(".")

    def refusal() -> str:
        try:
            check_machine(HierKVConfig(host_size=0.1, disk_dir=str(here), disk_size=0.1))
        except HierKVConfigError as error:
            return str(error)
        return ""

    names = tmp_path / "0123456789abcdef"
    names.mkdir(mode=0o700)
    os.chown(names, ANOTHER_USER, ANOTHER_USER)
    assert as_another_user(tmp_path, lambda: others_problem(here)) == ""
    for name in ("seg-00000001.hkv", "not-the-tiers"):
        (names / name).touch(mode=0o600)
    said = as_another_user(tmp_path, lambda: others_problem(here))
    assert "may not read and write 1 of the disk tier's" in said
    assert "0123456789abcdef/seg-00000001.hkv of user 0" in said
    os.chown(names, 0, 0)
    said = as_another_user(tmp_path, lambda: others_problem(here))
    assert "may not read and write 1 of the disk tier's" in said
    assert "0123456789abcdef of user 0" in said
    assert as_another_user(tmp_path, refusal) == ""
    FolderLock(FileIO(), tmp_path).release()
    said = as_another_user(tmp_path, refusal)
    assert said.startswith("--hier-kv-disk-dir: LOCK belongs to user 0 and user")
    assert said.endswith("give all of the folder to this server's user (chown -R).")


@pytest.mark.parametrize("variable", ["HOME", "SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"])
def test_a_user_without_a_home_is_told_what_to_set(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:  # fmt: skip
    """SGLang ends at its import there, which is nothing that the model has to do with."""
    file = tmp_path / "file"
    file.touch()
    for name in ("SGLANG_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(file))  # where root may make no folder either
    model = ["--model-path", str(TINYLM)]
    status, checks = run(capsys, *SMALL, *model)
    assert (status, checks["home"]["state"]) == (1, "refused")
    assert f"in {file}/.cache/sglang/inductor, which this user" in checks["home"]["text"]
    assert "set HOME, or SGLANG_CACHE_DIR, to a folder" in checks["home"]["text"]
    assert "model" not in checks
    monkeypatch.setenv(variable, str(tmp_path / "new"))
    assert "home" not in run(capsys, *SMALL)[1]
    assert list(tmp_path.iterdir()) == [file], "it makes nothing"


def test_a_key_of_cut_prompts_that_is_none_is_told_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "truncation.key").touch(mode=0o600)
    disk = ["--hier-kv-disk-dir", str(tmp_path), "--hier-kv-disk-size", "0.1"]
    arguments = [*SMALL, *disk, "--hier-kv-disk-free-floor", "0"]
    status, checks = run(capsys, *arguments, "--hier-kv-truncation", "overflow")
    assert (status, checks["disk"]["state"]) == (0, "warning")
    assert "truncation.key holds no key" in checks["disk"]["text"]
    assert "truncation.key" not in run(capsys, *arguments)[1]["disk"]["text"], "nothing is cut"


@pytest.mark.parametrize("closed", ["dp0-tp0-of-2", "dp0-tp0-of-2/0123456789abcdef"])
def test_a_folder_that_may_not_be_listed_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, closed: str
) -> None:
    """As of a server that root ran here; the others count."""
    for rank in ("dp0-tp0-of-2", "dp0-tp1-of-2"):
        names = tmp_path / rank / "0123456789abcdef"
        names.mkdir(mode=0o700, parents=True)
        with (names / "seg-00000001.hkv").open("wb") as file:
            file.truncate(1 << 42)
    list_folder = os.listdir

    def refusing(path: str) -> list[str]:
        if Path(path) == tmp_path / closed:
            raise PermissionError(errno.EACCES, "not for this user", path)
        return list_folder(path)

    monkeypatch.setattr(os, "listdir", refusing)
    assert 1 << 42 <= room_bytes(tmp_path) < 2 << 42


def test_speeds_are_measured_where_asked_for(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_speed, "_MOST_BYTES", 64 << 20)
    disk = ["--hier-kv-disk-dir", str(tmp_path), "--hier-kv-disk-size", "0.1"]
    status, checks = run(capsys, *SMALL, *disk, "--hier-kv-disk-free-floor", "0", "--speeds")
    assert status == 0
    text = checks["speeds"]["text"]
    found = re.search(r"copies ([\d.]+) GB/s .* writes ([\d,]+) MB/s and reads ([\d,]+) MB/s", text)
    assert found is not None, text
    assert all(float(number.replace(",", "")) > 0 for number in found.groups())
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"
    assert "speeds" not in run(capsys, *SMALL, *disk, "--hier-kv-disk-free-floor", "0")[1]


@pytest.mark.parametrize(
    ("free_gb", "gpu_on", "state"),
    [
        ((4,), None, "ok"),
        ((1, 4), None, "ok"),
        ((1, 1), None, "warning"),
        ((1, 4), 1, "ok"),
        ((1, 4), 0, "warning"),
    ],
)
def test_a_host_tier_that_no_numa_node_holds_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    free_gb: tuple[int, ...], gpu_on: int | None, state: str,
) -> None:  # fmt: skip
    for number, free in enumerate(free_gb):
        node = tmp_path / "nodes" / f"node{number}"
        node.mkdir(parents=True)
        half_kb = free << 19
        lines = [f"Node {number} {name}: {half_kb} kB" for name in ("MemFree", "FilePages")]
        (node / "meminfo").write_text("\n".join(lines))
    devices = {"0000:00:02.0": ("0x8086", "0x030000", 0), "0000:00:03.0": ("0x10de", "0x020700", 0)}
    if gpu_on is not None:
        devices["0000:3b:00.0"] = ("0x10de", "0x030200", gpu_on)
    for name, facts in devices.items():
        (tmp_path / "devices" / name).mkdir(parents=True)
        for file, fact in zip(("vendor", "class", "numa_node"), facts, strict=True):
            (tmp_path / "devices" / name / file).write_text(f"{fact}\n")
    monkeypatch.setattr(memory_nodes, "NODES", tmp_path / "nodes")
    monkeypatch.setattr(memory_nodes, "PCI_DEVICES", tmp_path / "devices")
    numa = run(capsys, "--hier-kv-host-size", "2")[1]["numa"]
    assert numa["state"] == state
    assert len(free_gb) == 1 or f"node 1 {free_gb[1]}.0 GiB" in numa["text"]
    assert (gpu_on is not None) == (f"GPU 0000:3b:00.0 is nearest to node {gpu_on}" in numa["text"])
    assert "0000:00:0" not in numa["text"], "another vendor's, and no GPU"


def test_a_model_is_told_by_what_sglang_keeps_of_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    inprocess.prepare()
    window = write_window_model(tmp_path / "window")
    status, checks = run(capsys, *SMALL, "--model-path", str(TINYLM))
    assert status == 0
    assert checks["model"]["state"] == "ok"
    assert "K and V of every head" in checks["model"]["text"]
    status, checks = run(capsys, *SMALL, "--model-path", str(window))
    assert (status, checks["model"]["state"]) == (0, "ok")
    assert "a second pool for layers that see a window" in checks["model"]["text"]
    coded = ["--hier-kv-codec", "host=hier", "--model-path", str(window)]
    status, checks = run(capsys, *SMALL, *coded)
    assert (status, checks["model"]["state"]) == (1, "refused")
    assert "needs a --hier-kv-codec that loses nothing" in checks["model"]["text"]


def test_what_is_no_model_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inprocess.prepare()
    (tmp_path / "config.json").write_text('{"model_type": "nothing"}')
    for place in (tmp_path, tmp_path / "missing"):
        status, checks = run(capsys, *SMALL, "--model-path", str(place))
        assert (status, checks["model"]["state"]) == (1, "refused")
        assert f"must be a model that SGLang knows, got {place}" in checks["model"]["text"]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"model_type": "llama"}', ""),
        ('{"hidden_size": 8}', "names no model_type"),
        ("[1]", "names no model_type"),
        ("{", "cannot be read"),
        (None, "its config.json cannot be read (No such file or directory)"),
    ],
)
def test_what_is_no_model_is_refused_where_sglang_cannot_be_imported(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    content: str | None, problem: str,
) -> None:  # fmt: skip
    monkeypatch.setitem(sys.modules, "sglang.srt.configs.model_config", None)
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    status, checks = run(capsys, *SMALL, "--model-path", str(tmp_path))
    text = checks["model"]["text"]
    if problem:
        assert (status, checks["model"]["state"]) == (1, "refused")
        assert problem in text
        (tmp_path / "params.json").write_text("{}")  # as Mistral's own have it
        if content is None:
            assert run(capsys, *SMALL, "--model-path", str(tmp_path))[0] == 0
    else:
        assert (status, checks["model"]["state"]) == (0, "warning")
        assert "SGLang cannot be imported here" in text
    status, checks = run(capsys, *SMALL, "--model-path", str(tmp_path / "missing"))
    assert (status, checks["model"]["state"]) == (1, "refused")
    assert "there is no such folder" in checks["model"]["text"]
    status, checks = run(capsys, *SMALL, "--model-path", "meta-llama/Llama-3.1-8B")
    assert (status, checks["model"]["state"]) == (0, "warning")


def test_what_is_said_of_a_kind_stands_alone() -> None:
    """The command shows one kind, and no table around it."""
    said = [kind.reused for kind in MODEL_KINDS.values() if kind.is_served]
    assert [text for text in said if re.search(r"\b(above|below)\b|those of one shape", text)] == []


def test_code_of_a_model_is_not_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    inprocess.prepare()
    names = {"AutoConfig": "configuration_own.OwnConfig"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (tmp_path / "configuration_own.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n"
        "from transformers import PretrainedConfig\n"
        "class OwnConfig(PretrainedConfig): model_type = 'own'\n"
    )
    status, checks = run(capsys, *SMALL, "--model-path", str(tmp_path))
    assert not (tmp_path / "ran").exists()
    assert (status, checks["model"]["state"]) == (1, "refused")
