"""DRAM for less than one prompt: its beginning is reused, and a warning at start says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from tests.e2e.hier_server import GIB, ask, by_tier, real_prompts, settled, tokens_and_logprobs

pytestmark = pytest.mark.e2e

PAGE = 16
SLOT_BYTES = 69_632  # of a page of 16 tokens of tinylm, with its header
HOST_PAGES, PROMPT_PAGES, CHUNK_PAGES = 32, 60, 4
LOADED_PAGES = HOST_PAGES * 7 // 8  # by one request at a time; a whole number of chunks


@pytest.mark.parametrize("disk", [False, True])
def test_the_beginning_of_a_prompt_that_is_larger_than_dram_is_reused(
    tmp_path: Path, *, disk: bool
) -> None:
    host_bytes = (HOST_PAGES + 0.5) * SLOT_BYTES
    args = ["--enable-hier-kv", "--hier-kv-host-size", f"{host_bytes / GIB:.9f}"]
    args += ["--hier-kv-prefetch-policy", "wait_complete", "--page-size", str(PAGE)]
    args += ["--chunked-prefill-size", str(CHUNK_PAGES * PAGE), "--max-total-tokens", "2048"]
    if disk:
        args += ["--hier-kv-disk-dir", str(tmp_path / "disk"), "--hier-kv-disk-size", "0.5"]
    (prompt,) = real_prompts([PROMPT_PAGES * PAGE + 4])
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        first = ask(server, prompt, 3)
        settled(server)
        flush_device(server)
        second = ask(server, prompt, 3)
        reused = sum(by_tier(second).get(tier, 0) for tier in ("host", "disk"))
        host = settled(server)["host"]
    assert tokens_and_logprobs(second) == tokens_and_logprobs(first)
    # Without a disk all of DRAM is the prompt's beginning, which is there without a plan.
    assert LOADED_PAGES * PAGE <= reused <= HOST_PAGES * PAGE, host
    assert f"more than {LOADED_PAGES * PAGE} tokens" in (tmp_path / "server.log").read_text()
