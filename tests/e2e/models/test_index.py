"""Models whose tokens attend to what an index chose for them, on the real server.

A page's index rows are restored with its latent ones. The index chooses fewer tokens than a prompt
has, so rows that are not a page's own change the answers, which is tried, too.

By default one rank; the long form has two, on one node and on two. `test_latent_attention_dp.py`
has two nodes by default.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.device.layout import PageLayout
from sglang_ext.tiers.records.checks import seal
from testkit.hybrids.index_model import (
    INDEX_DIM,
    LATENT,
    LAYERS,
    ROTARY,
    TOP_K,
    index_layers,
    token_bytes,
    write_index_model,
)
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, check_agreed, real_prompts, settled, state
from tests.e2e.models import hybrid_answers
from tests.e2e.models.hybrid_answers import cached, check_hits, drop_device, talk, two_chats, values
from tests.e2e.nodes import Nodes
from tests.e2e.remote.test_remote import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
answers = partial(hybrid_answers.answers, num=4)

PAGE = 64
LENGTHS = [40, 130, 5 * PAGE, 700]  # of one the last page is restored behind its prefill
REUSABLE = sum(length // PAGE for length in LENGTHS)
FEWEST = (REUSABLE - len(LENGTHS)) * PAGE  # tokens of them that are reused
ANSWER = 10
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--max-total-tokens", "8192", "--enable-hier-kv"]
BASE += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
BASE += ["--hier-kv-disk-size", "0.5", "--hier-kv-disk-segment-size", "0.01"]


def layout_of(name: str) -> PageLayout:
    """Where a page's parts lie."""
    with_index = index_layers(name)
    rows = tuple(INDEX_DIM + 4 if layer in with_index else 0 for layer in range(LAYERS))
    latent = (2 * (LATENT + ROTARY),) * LAYERS
    return PageLayout(PAGE, latent, rows, 2, is_bound=True, has_index=True)


def make_server(
    name: str, folder: Path, *args: str, host_pages: int = 600, ranks: int = 1
) -> Server:
    """A server of a model, with DRAM for that many pages of all ranks and a disk."""
    host_gib = (host_pages + 0.5) * layout_of(name).slot_bytes / GIB
    every = [*BASE, "--hier-kv-host-size", f"{host_gib:.9f}"]
    every += ["--hier-kv-disk-dir", str(folder / "disk"), "--tp-size", str(ranks), *args]
    log, env = folder / "server.log", ENVIRONMENT if ranks > 1 else {}
    return Server(
        every, model=folder / "model", log_path=log, env=env, stop="kill", start_timeout_s=300
    )


def clear_index_rows(store: Path, layout: PageLayout) -> int:
    """Zeros in the place of index rows, in all records of a store, which stay sound; how many."""
    num = 0
    for path in store.rglob("*"):
        if not path.is_file() or path.stat().st_size < layout.tail_offset:
            continue
        assert path.stat().st_size <= layout.slot_bytes
        record = np.frombuffer(path.read_bytes(), np.uint8).copy()
        for at, row_bytes in zip(layout.v_offsets, layout.v_row_bytes, strict=True):
            record[at : at + row_bytes * PAGE] = 0
        seal(record)
        path.write_bytes(record.tobytes())
        num += 1
    return num


def test_hits_from_every_tier_are_those_of_the_device_and_need_their_index_rows(
    tmp_path: Path,
) -> None:
    write_index_model(tmp_path / "model", "glm")
    layout, shared = layout_of("glm"), tmp_path / "shared"
    shared.mkdir()
    remote = ["--hier-kv-remote-url", f"file://{shared}?size=1GB"]
    prompts = list(real_prompts(LENGTHS, seed=3))
    assert min(LENGTHS[1:]) > TOP_K
    with make_server("glm", tmp_path, *remote, "--hier-kv-codec", "lossless") as server:
        eventually(partial(is_connected, server))
        assert "self-check" not in server.log()  # of what is bound to its position anyway
        first, repeat = answers(server, prompts), answers(server, prompts)
        assert cached(first) == [0] * len(LENGTHS)
        drop_device(server)
        check_hits(answers(server, prompts), repeat, "host", above=FEWEST)
        # A first turn's answer ends its last page.
        chats = two_chats(3 * PAGE + 20, 164, 2)
        on_device = talk(server, chats, lambda: None, ANSWER, cache_salt="device")
        restored = talk(server, chats, lambda: drop_device(server), ANSWER, cache_salt="tiers")
        assert sum(cached(restored)) >= 0.95 * sum(cached(on_device))
        for ours, theirs in zip(restored, on_device, strict=True):
            assert ours["output_ids"] == theirs["output_ids"]
            assert cached([ours]) != cached([theirs]) or values([ours]) == values([theirs])
        eventually(partial(has_sent_all, server))
        settled(server)
        check_bytes(server, "glm")
    # After a kill -9, with little room; its disk was coded, and this server codes nothing.
    with make_server("glm", tmp_path, *remote, host_pages=100) as server:
        eventually(partial(is_connected, server))
        check_hits(answers(server, prompts), repeat, "disk", above=FEWEST)
        check_remote_hits(server, prompts, repeat)
        assert clear_index_rows(shared, layout) >= REUSABLE
        wrong = from_remote(server, prompts)
        assert cached(wrong) == cached(repeat)
        same = [a == b for a, b in zip(values(wrong), values(repeat), strict=True)]
        assert same == [True, *[False] * (len(LENGTHS) - 1)]


def from_remote(server: Server, prompts: list[list[int]]) -> list[dict[str, object]]:
    """Answers of a server that has nothing of its own."""
    settled(server)
    server.post("/hicache/storage-backend/clear")
    flush_device(server)
    return answers(server, prompts)


def check_remote_hits(
    server: Server, prompts: list[list[int]], wanted: list[dict[str, object]]
) -> None:
    check_hits(from_remote(server, prompts), wanted, "remote", above=FEWEST)


def is_connected(server: Server) -> bool:
    return bool(state(server)["remote"]["breaker_state"] == 0)


def has_sent_all(server: Server) -> bool:
    host = state(server)["host"]
    return bool(host["remote_written_pages"] >= host["saved_pages"] > 0)


def check_bytes(server: Server, name: str) -> None:
    """What a page takes in DRAM, and raw elsewhere: a twentieth more than it needs at most."""
    needed, found = PAGE * token_bytes(name), state(server)
    assert found["kv_bytes_per_page"] == needed
    assert found["slot_bytes"] == layout_of(name).slot_bytes <= 1.05 * needed


def check_coded(store: Path, layout: PageLayout) -> None:
    """A store's records are smaller than pages, and hold their index rows as they are."""
    sizes = [path.stat().st_size for path in store.rglob("*") if path.is_file()]
    records = [size for size in sizes if size > sum(layout.v_row_bytes) * PAGE]
    assert len(records) >= REUSABLE
    assert sum(records) < 0.95 * layout.kv_bytes * len(records)


@pytest.mark.long
def test_two_ranks_load_index_rows_of_which_one_keeps_all(tmp_path: Path) -> None:
    write_index_model(tmp_path / "model", "deepseek")
    shared = tmp_path / "shared"
    shared.mkdir()
    remote = ["--hier-kv-remote-url", f"file://{shared}?size=1GB"]
    remote += ["--hier-kv-codec", "remote=lossless"]
    prompts, others = (list(real_prompts(LENGTHS, seed=seed)) for seed in (4, 5))
    # Room for the longest prompt, but not for all.
    host_pages = 5 * REUSABLE // 4
    with make_server("deepseek", tmp_path, *remote, host_pages=host_pages, ranks=2) as server:
        eventually(partial(is_connected, server))
        answers(server, prompts)
        repeat = answers(server, prompts)
        settled(server)  # or what leaves DRAM may not be on disk yet
        answers(server, others)
        drop_device(server)
        found = answers(server, prompts)
        assert cached(found) == cached(repeat)
        assert values(found) == values(repeat)
        first, second = (rank["host"] for rank in state(server)["tp_ranks"])
        assert first["loaded_pages"] == second["loaded_pages"] >= REUSABLE - len(LENGTHS)
        assert first["promoted_pages"] > 0 == second.get("promoted_pages", 0)
        assert first["saved_pages"] > 0 == second.get("saved_pages", 0)
        assert re.search("all kept by tensor parallel rank 0", server.log())
        eventually(partial(has_sent_all, server))
        check_coded(shared, layout_of("deepseek"))
        check_remote_hits(server, prompts, repeat)


@pytest.mark.long
def test_ranks_on_two_nodes_keep_index_rows_each_for_itself(tmp_path: Path) -> None:
    model = write_index_model(tmp_path / "model", "glm")
    prompts = list(real_prompts(LENGTHS, seed=4))
    host_gib = (5 * REUSABLE // 4 + 0.5) * layout_of("glm").slot_bytes / GIB
    late = {ENV_JITTER: str(JITTER_MS)}

    def start() -> Nodes:
        args = [*BASE, "--hier-kv-host-size", f"{host_gib:.9f}"]
        return Nodes(args, tmp_path, env=ENVIRONMENT, late=late, model=model)

    with start() as nodes:
        answers(nodes.head, prompts)
        repeat = answers(nodes.head, prompts)
        drop_device(nodes.head)
        check_hits(answers(nodes.head, prompts), repeat, "host", above=FEWEST)
        saved = [rank["host"]["saved_pages"] for rank in settled(nodes.head)["tp_ranks"]]
        assert saved[0] == saved[1] >= REUSABLE
        check_agreed(nodes.log(), 2)
    with start() as nodes:  # after a kill -9
        check_hits(answers(nodes.head, prompts), repeat, "disk", above=FEWEST)
        check_agreed(nodes.log(), 2)
