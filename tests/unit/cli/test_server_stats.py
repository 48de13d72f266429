"""`hier-kv stats` in front of servers that say other things than it expects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from sglang_ext.cli.server_stats import (
    ServerStatsError,
    amount,
    describe,
    fetch,
    number_of,
    trouble,
)
from sglang_ext.cli.usage import UsageError
from tests.unit.cli.stub_server import QuietHandler, serving

Serve = Callable[[bytes], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Makes a server that says the same to everybody; its URL."""
    with ExitStack() as servers:

        def make(said: bytes) -> str:
            class Handler(QuietHandler):
                def do_GET(self) -> None:
                    self.wfile.write(said.replace(b"PATH", self.path.encode()))

            return servers.enter_context(serving(Handler))

        yield make


def state(**host: int) -> dict[str, Any]:
    counts = {"host_pages": 1, "host_capacity_pages": 2, "spill_queue_pages": 0, "save_queue": 0}
    sizes = {"page_size": 64, "slot_bytes": 4096, "kv_bytes_per_page": 4096}
    names = {"rope": "pre", "codec": "none", "tp_rank": 0, "dp_rank": 0}
    return {"host": counts | host, "disk": {}, "cost": {}, "remote": None, **sizes, **names}


@pytest.mark.parametrize(
    "said",
    [
        b"-ERR unknown command\r\n",  # a Redis
        b'HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{"a":',
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 200_000,
        b"HTTP/1.1 200 OK\r\n\r\n[]",
        b"HTTP/1.1 302 Found\r\nLocation: PATH\r\n\r\n",  # the key is not for whoever is there
    ],
)
def test_what_is_no_server_of_ours_is_one_sentence(serve: Serve, said: bytes) -> None:
    with pytest.raises(ServerStatsError, match="gives no state of an SGLang server"):
        fetch(serve(said))


@pytest.mark.parametrize("url", ["http://127.0.0.1:abc", "http://127.0.0.1:1/a b"])
def test_a_url_that_is_none_is_one_sentence(url: str) -> None:
    with pytest.raises(UsageError, match=r"a URL such as .* is expected, got 'http"):
        fetch(url)


def test_another_releases_state_is_one_sentence() -> None:
    with pytest.raises(ServerStatsError, match="lacks what this release shows"):
        describe({"host": {}, "disk": {}})
    with pytest.raises(ServerStatsError, match="lacks what this release shows"):
        describe(state() | {"slot_bytes": 10**400})  # more than a float holds


def test_a_server_that_does_not_look_ahead_is_shown() -> None:
    text = "\n".join(describe(state()))
    assert "requests wait" not in text
    assert "0 nodes to DRAM" in text
    assert "3 requests wait" in "\n".join(describe(state(waiting_requests=3, window_requests=1)))


def test_forged_records_are_trouble() -> None:
    shown = state(stale_load_pages=7, save_unplaced_pages=3)
    shown["remote"] = {"error_rejected_unauthentic": 5, "get_records": 6}
    assert trouble(shown) == {
        "remote_error_rejected_unauthentic": 5,
        "save_unplaced_pages": 3,
        "stale_load_pages": 7,
    }
    assert describe(shown)[-1].endswith(": docs/metrics.md, Counters, says what to do")
    assert describe(state())[-1] == "  trouble none"
    text = "\n".join(describe(shown))
    assert text.count("unauthentic") == 1
    assert "get_records 6" in text


def test_whether_a_store_is_used_is_in_words() -> None:
    for breaker_state, use in enumerate(("in use", "tried again", "left alone as it fails")):
        shown = state()
        shown["remote"] = {"breaker_state": breaker_state, "probes": 3}
        assert f"  remote  {use}, probes 3" in describe(shown)


def test_what_hits_cost_the_disk_is_one_line() -> None:
    disk = {
        "used_bytes": 0, "max_bytes": 1, "records_written": 150, "records_read": 0,
        "records_salvaged": 15, "mode": "direct",
    }  # fmt: skip
    none = "  writes  none yet; 0 pages left the disk while waited for, 0 left all tiers"
    assert none in describe(state() | {"disk": disk | {"records_salvaged": 0}})
    counts = {
        "written_pages": 150, "written_again_pages": 50, "loaded_pages": 600,
        "disk_evicted_wanted_pages": 1, "lost_wanted_pages": 7,
    }  # fmt: skip
    expected = (
        "  writes  0.25 pages for each that came back, 1.65 for each new one; "
        "1 page left the disk while waited for, 7 left all tiers"
    )
    assert expected in describe(state(**counts) | {"disk": disk})
    assert not any("writes" in line for line in describe(state(**counts)))  # there is no disk


def test_what_became_of_prompt_tokens_is_one_line() -> None:
    counts = {
        "requested_tokens": 1000, "reused_device_tokens": 100, "reused_disk_tokens": 400,
        "missed_never_stored_tokens": 192, "missed_evicted_disk_tokens": 256,
        "missed_failed_tokens": 0, "missed_evicted_disk_requests": 3,
    }  # fmt: skip
    before, now = state(), state(**counts)
    line = (
        "1,000 asked for, 50.0% reused (disk 40.0%, device 10.0%); "
        "missed: evicted_disk 25.6%, never_stored 19.2%; ends of prompts 5.2%"
    )
    for shown in (describe(now), describe(now, before, 2.0)):
        assert sum(line in row for row in shown) == 1
    assert any("none asked for since then" in row for row in describe(now, now, 2.0))
    assert trouble(state(missed_failed_tokens=64)) == {}


def test_sizes_are_as_the_flags_have_them() -> None:
    assert amount(1 << 30) == "1 GiB"
    sizes = (0, 999, 1000, 1536, 3 << 20, 5 << 40)
    assert [amount(size) for size in sizes] == [
        "0 B", "999 B", "0.977 KiB", "1.5 KiB", "3 MiB", "5 TiB"
    ]  # fmt: skip


def test_one_page_is_not_told_in_the_plural() -> None:
    counts = {"loaded_pages": 1, "save_queue": 1, "waiting_requests": 1, "window_requests": 0}
    text = "\n".join(describe(state(**counts, admitted_ready_requests=1)))
    for line in ("1 page came back; of 1 request that", "1 request waits, ", "1 node to DRAM"):
        assert line in text


def test_one_thing_is_not_told_in_the_plural() -> None:
    assert number_of(1, "segment") == "1 segment"
    assert [number_of(count, "page") for count in (0, 1234)] == ["0 pages", "1,234 pages"]
