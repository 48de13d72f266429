"""What a router makes of a real server's KV events: it knows what the next request reuses.

Without the tiers' events it knows what the device has, which is the last few prompts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime_cpu import inprocess
from testkit.ports import free_port
from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import by_tier, hier_args, real_prompts, settled

inprocess.prepare()

from testkit.kv_reader import KvReader, publishing  # noqa: E402

pytestmark = pytest.mark.e2e

PAGE, NUM_PROMPTS = 16, 40
PROMPT_TOKENS = 12 * PAGE + 3
DRAM, TIERS, EXTERNAL = {"CPU_PINNED"}, {"CPU_PINNED", "DISK"}, {"EXTERNAL"}


@pytest.fixture(scope="module")
def endpoint() -> str:
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, endpoint: str) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("events")
    # DRAM holds half of the prompts (60 pages of 64 tokens), the disk all, the device three.
    args = [*hier_args(folder, host_pages=60, disk_gb=0.5), "--page-size", str(PAGE)]
    args += ["--max-total-tokens", str(3 * 16 * PAGE), "--max-running-requests", "1"]
    shared = folder / "shared"
    shared.mkdir()
    args += ["--hier-kv-remote-url", f"file://{shared}?size=1GB", *publishing(endpoint)]
    with Server(args, log_path=folder / "server.log", stop="kill") as running:
        yield running


def test_a_router_knows_what_a_request_reuses(server: Server, endpoint: str) -> None:
    prompts = list(real_prompts([PROMPT_TOKENS] * NUM_PROMPTS))
    with KvReader(endpoint) as reader:
        _join(server, reader)
        for number, ids in enumerate(prompts):
            _ask(server, ids)
            if number % 10 == 9:  # half of what DRAM holds: more might find no room
                settled(server)
        whole = PROMPT_TOKENS // PAGE * PAGE
        reader.until(lambda index: all(index.prefix(ids, PAGE, TIERS) == whole for ids in prompts))
        settled(server)
        reader.until(
            lambda index: all(index.prefix(ids, PAGE, EXTERNAL) == whole for ids in prompts)
        )
        assert sum(reader.prefix(ids, PAGE, {"GPU"}) == whole for ids in prompts) <= 3
        assert any(reader.prefix(ids, PAGE, {"CPU_PINNED"}) < whole for ids in prompts)
        for ids in prompts[::5]:
            known = reader.prefix(ids, PAGE, TIERS | {"GPU"})
            reused = _ask(server, ids)
            assert sum(reused.values()) == known == whole, reused
        # On the device again: said to be in all three, or in those that have it.
        last = prompts[::5][-1]
        reader.until(lambda index: index.prefix(last, PAGE, {"GPU"}) == whole)
        flush_device(server)
        reader.until(lambda index: not any("GPU" in media for media in index.media.values()))
        reader.until(lambda index: index.prefix(last, PAGE, {"CPU_PINNED"}) == whole)
        server.post("/hicache/storage-backend/clear")
        reader.until(lambda index: not index.media)


def test_what_lies_on_disk_is_told_of_as_in_dram_where_that_is_asked_for(tmp_path: Path) -> None:
    """For routers that send nobody to where pages are on disk alone."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    args = [*hier_args(tmp_path, host_pages=15, disk_gb=0.5), "--page-size", str(PAGE)]
    args += ["--max-total-tokens", str(3 * 16 * PAGE), "--max-running-requests", "1"]
    args += ["--hier-kv-kv-events-disk", "host", *publishing(endpoint)]
    prompts = list(real_prompts([PROMPT_TOKENS] * 12))
    whole = PROMPT_TOKENS // PAGE * PAGE
    with (
        Server(args, log_path=tmp_path / "server.log", stop="kill") as server,
        KvReader(endpoint) as reader,
    ):
        _join(server, reader)
        for ids in prompts:
            _ask(server, ids)
            settled(server)
        reader.until(lambda index: all(index.prefix(ids, PAGE, DRAM) == whole for ids in prompts))
        with reader.lock:
            assert set().union(*reader.index.media.values()) == {"GPU", *DRAM}
        flush_device(server)
        reused = [_ask(server, ids) for ids in prompts]
        assert any(each.get("disk") for each in reused), reused
        assert all(sum(each.values()) == whole for each in reused), reused


def test_in_the_format_of_dynamos_router_tenants_have_names_of_their_own(tmp_path: Path) -> None:
    """In SGLang's own one the same tokens have one name, whoever's they are."""
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    args = [*hier_args(tmp_path, host_pages=60, disk_gb=0), "--page-size", str(PAGE)]
    args += ["--max-running-requests", "1", *publishing(endpoint, "dynamo")]
    whole = PROMPT_TOKENS // PAGE * PAGE
    [ids] = real_prompts([PROMPT_TOKENS], seed=5)
    with (
        Server(args, log_path=tmp_path / "server.log", stop="kill") as server,
        KvReader(endpoint) as reader,
    ):
        _join(server, reader)
        names: list[set[int]] = [set()]
        for tenant in "ab":
            assert sum(_ask(server, ids, extra_key=tenant).values()) == 0
            reader.until(
                lambda index, others=names[-1]: (
                    index.prefix(ids, PAGE, DRAM) == whole
                    and others.isdisjoint(index.blocks(ids, PAGE))
                )
            )
            with reader.lock:
                names.append(set(reader.index.blocks(ids, PAGE)))
        flush_device(server)
        reader.until(lambda index: not any("GPU" in media for media in index.media.values()))
        with reader.lock:
            assert all(reader.index.media[name] == DRAM for each in names for name in each)
        assert [sum(_ask(server, ids, extra_key=tenant).values()) for tenant in "abc"] == [
            *(whole, whole, 0)
        ]
        flush_device(server)
        server.post("/hicache/storage-backend/clear")
        reader.until(lambda index: not index.media)


def _join(server: Server, reader: KvReader) -> None:
    """Asks until the reader has joined."""
    for ids in real_prompts([2 * PAGE] * 500, seed=99):
        _ask(server, ids)
        if reader.has_heard:
            return


def _ask(server: Server, ids: list[int], **fields: str) -> dict[str, int]:
    """Reused tokens by tier."""
    return by_tier(server.generate(input_ids=ids, sampling_params={"max_new_tokens": 1}, **fields))
