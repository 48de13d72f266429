"""Servers with a deployment's key: pages outlive a restart and move, and nobody else has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest

from sglang_ext.cli import main
from testkit.server import Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    connected,
    events,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TOKENS = 700
Stop = Literal["terminate", "kill"]
NUM_PAGES = NUM_TOKENS // PAGE


def make_key(path: Path) -> Path:
    assert main(["keygen", str(path)]) == 0
    return path


@contextmanager
def server(
    folder: Path, key: Path, store: Path, disk_gb: float = 0.0, *, stop: Stop = "kill"
) -> Iterator[Server]:
    folder.mkdir(exist_ok=True)
    args = hier_args(folder, disk_gb=disk_gb)
    if not disk_gb:
        args += ["--hier-kv-prefetch-policy", "timeout"]
    args += ["--hier-kv-remote-url", f"file://{store}?size=1GB"]
    args += ["--hier-kv-prefetch-timeout-ms", "60000"]
    args += ["--hier-kv-key-file", str(key), "--hier-kv-protect", "encrypt"]
    with Server(args, log_path=folder / "log", start_timeout_s=300.0, stop=stop) as made:
        yield connected(made)


def stored_bytes(*folders: Path) -> bytes:
    """Names and contents of all files."""
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    assert files
    return b"".join(str(path).encode() + path.read_bytes() for path in files)


def test_pages_are_the_deployments_and_nobody_elses(tmp_path: Path) -> None:
    key, other = make_key(tmp_path / "key"), make_key(tmp_path / "other-key")
    store = tmp_path / "store"
    store.mkdir()
    prompt = next(real_prompts([NUM_TOKENS], seed=4))
    found: dict[str, Any] = {}
    with server(tmp_path / "one", key, store, disk_gb=1.0, stop="terminate") as one:
        computed = ask(one, prompt)
        found["first"] = ask(one, prompt)  # behind a prefix, as those below
        counted = settled(one)
        assert counted["host"]["remote_written_pages"] >= NUM_PAGES
        assert str(key) not in str(counted)
    with server(tmp_path / "one", key, store, disk_gb=1.0) as again:
        found["restarted"] = ask(again, prompt)
        assert by_tier(found["restarted"]).get("disk", 0) >= 0.9 * NUM_PAGES * PAGE
        assert state(again)["disk"]["errors"] == {}
    with server(tmp_path / "two", key, store) as two:
        found["moved"] = ask(two, prompt)
        assert by_tier(found["moved"]).get("remote", 0) >= 0.9 * NUM_PAGES * PAGE
    with server(tmp_path / "three", other, store) as three:
        stranger = ask(three, prompt)
        assert by_tier(stranger) == {}
        assert tokens_and_logprobs(stranger) == tokens_and_logprobs(computed)
    expected = tokens_and_logprobs(found["first"])
    assert {name: tokens_and_logprobs(answer) == expected for name, answer in found.items()} == (
        dict.fromkeys(found, True)
    )
    data = stored_bytes(tmp_path / "one" / "disk", store)
    hashes = {page for event in events(tmp_path / "one") for page in event.get("pages", ())}
    assert len(hashes) >= NUM_PAGES
    for page in hashes:
        assert page.encode() not in data  # in names
        assert bytes.fromhex(page) not in data
