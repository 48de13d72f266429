"""Chats that come back in an order that the queue knows, and a disk for a third of them.

200 of them in the long form, 100 otherwise.

What the look-ahead is for, counted in tokens that were not computed again: it keeps what the queue
will come to, while a server without it lets each chat go shortly before its turn. And the same on a
disk that is written when pages leave DRAM.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.faults.store.audit import Auditor, Log
from sglang_ext.tiers.disk.segments.layout import segment_file_bytes
from testkit.requests import flush_device
from testkit.server import Server
from testkit.workload import reply_of
from tests.e2e.hier_server import GIB, real_prompts, settled
from tests.long_form import either

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 16
SLOT_BYTES = 69_632  # of a page of 16 tokens of tinylm, with its header
NUM_CHATS, CHAT_PAGES = either(100, 200), 3
HOST_CHATS, DISK_CHATS = 12, NUM_CHATS // 3
SEGMENT_PAGES, AT_ONCE = 16, 4


def test_twice_the_hits_of_a_server_that_does_not_look_ahead(tmp_path: Path) -> None:
    prompts = list(real_prompts([CHAT_PAGES * PAGE + 4] * NUM_CHATS))
    on, off = (_hit_tokens(tmp_path / mode, prompts, mode) for mode in ("on", "off"))
    chat_tokens = CHAT_PAGES * PAGE
    print(f"hits, tokens: look-ahead {on}, off {off}")
    assert on >= 2 * off, (on, off)
    # Not only more than little: three quarters of what the disk holds.
    assert 0.75 * DISK_CHATS * chat_tokens <= on <= NUM_CHATS * chat_tokens, (on, off)


def _hit_tokens(folder: Path, prompts: list[list[int]], mode: str) -> int:
    """Tokens of the second turns that came out of DRAM or off the disk."""
    folder.mkdir()
    with Server(_args(folder, mode), log_path=folder / "server.log", stop="kill") as server:
        tokens = _second_turns(server, prompts)
        waited = settled(server)["host"]
    assert waited.get("prefetch_timeouts", 0) == 0, waited
    return tokens


def test_auto_writes_what_leaves_a_full_disk_keeps_what_it_acknowledged(tmp_path: Path) -> None:
    """DRAM's pages and the disk's differ under `auto`; kill -9 loses what is in DRAM only."""
    prompts = list(real_prompts([CHAT_PAGES * PAGE + 4] * (NUM_CHATS // 2)))
    args = [*_args(tmp_path, "on"), "--hier-kv-write-policy", "auto"]
    args += ["--hier-kv-event-log", str(tmp_path / "events.jsonl")]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        tokens = _second_turns(server, prompts)
        host = settled(server)["host"]
        _all(server, prompts)  # some are being written when it is killed
    assert tokens >= DISK_CHATS * CHAT_PAGES * PAGE // 2, host
    assert host["disk_reclaimed_pages"] > 0, "the disk was never full"
    log = Log()
    log.follow(tmp_path / "events.jsonl")
    assert log.acknowledged
    missing, changed = Auditor().audit(tmp_path / "disk", log, tmp_path / "scratch")
    assert not missing
    assert not changed


def test_what_the_tiers_lost_is_saved_again_with_what_follows_it(tmp_path: Path) -> None:
    """The device still has a chat that DRAM let go: with its next turn all of it is saved."""
    num_pages = 8
    chat, *others = real_prompts([num_pages * PAGE] * 4)
    args = ["--enable-hier-kv", "--hier-kv-host-size"]
    args += [f"{(2 * num_pages + 0.5) * SLOT_BYTES / GIB:.9f}"]
    args += ["--page-size", str(PAGE), "--max-total-tokens", "2048"]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        reply = reply_of(_all(server, [chat])[0])
        for other in others:
            _all(server, [other])
            before = settled(server)["host"]
        assert before["evicted_pages"] >= num_pages
        turn = [*chat, *reply.output_ids, *others[0][: 3 * PAGE]]
        second = reply_of(_all(server, [turn])[0])
        assert second.by_tier["device"] >= num_pages * PAGE
        after = settled(server)["host"]
        assert after["saved_again_pages"] == num_pages
        expected = reply_of(_all(server, [turn])[0])  # behind as much as below
        flush_device(server)
        third = reply_of(_all(server, [turn])[0])
        assert third.by_tier["host"] == expected.by_tier["device"] == (num_pages + 3) * PAGE
        assert third.output_ids == expected.output_ids


def _second_turns(server: Server, prompts: list[list[int]]) -> int:
    """Has all chats take two turns; tokens of the second ones that came from DRAM or disk.

    The first ones come as many at a time as run at once: a save for which DRAM has no room, as the
    disk was not that fast, is none.
    """
    first = []
    for begin in range(0, len(prompts), AT_ONCE):
        first += _all(server, prompts[begin : begin + AT_ONCE])
        settled(server)
    flush_device(server)
    turns = [
        [*prompt, *reply_of(answer).output_ids, *prompt[:4]]
        for prompt, answer in zip(prompts, first, strict=True)
    ]
    second = [reply_of(answer) for answer in _all(server, turns)]
    return sum(reply.by_tier.get(tier, 0) for reply in second for tier in ("host", "disk"))


def _args(folder: Path, mode: str) -> list[str]:
    host_bytes = (HOST_CHATS * CHAT_PAGES + 0.5) * SLOT_BYTES
    segment_bytes = segment_file_bytes(SEGMENT_PAGES, SLOT_BYTES)
    disk_bytes = DISK_CHATS * CHAT_PAGES / SEGMENT_PAGES * segment_bytes
    args = ["--enable-hier-kv", "--hier-kv-host-size", f"{host_bytes / GIB:.9f}"]
    args += ["--hier-kv-disk-dir", str(folder / "disk")]
    args += ["--hier-kv-disk-size", f"{disk_bytes / GIB:.9f}"]
    args += ["--hier-kv-disk-segment-size", f"{(segment_bytes + 1) / GIB:.9f}"]
    args += ["--hier-kv-prefetch-policy", "wait_complete", "--hier-kv-lookahead", mode]
    args += ["--page-size", str(PAGE), "--max-total-tokens", "1024"]
    return [*args, "--max-running-requests", str(AT_ONCE)]


def _all(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers to requests that come together, in this order."""
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True},
    }
    answers = server.post("/generate", body)
    assert isinstance(answers, list)
    assert len(answers) == len(prompts)
    return answers
