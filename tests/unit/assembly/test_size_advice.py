"""What a server says at start of sizes that cost something."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sglang_ext.assembly.size_advice import advise_on_sizes
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import (
    DEFAULT_POLICY,
    PageStore,
    PageStoreConfig,
    policy_for_sizes,
)

PAGE_TOKENS = 16


@pytest.fixture
def store() -> Iterator[PageStore]:
    """Of 64 pages, 56 of which one plan may have."""
    store = PageStore(HostArena(64, 8192), PageIndex(256), None, PageStoreConfig())
    yield store
    store.close(0.0)
    store.arena.close()


def _told(
    caplog: pytest.LogCaptureFixture, config: HierKVConfig, store: PageStore, context: int
) -> list[str]:
    caplog.clear()
    with caplog.at_level("INFO"):
        advise_on_sizes(config, store, PAGE_TOKENS, context)
    return [record.getMessage() for record in caplog.records]


def test_dram_that_holds_no_prompt_of_full_length_is_told(
    caplog: pytest.LogCaptureFixture, store: PageStore
) -> None:
    config = HierKVConfig(host_size=1.0)
    assert _told(caplog, config, store, 56 * PAGE_TOKENS) == []
    (said,) = _told(caplog, config, store, 112 * PAGE_TOKENS)
    assert "more than 896 tokens (the context has 1792)" in said
    assert "--hier-kv-host-size 2 times as large" in said
    assert caplog.records[0].levelname == "WARNING"


def test_what_is_held_twice_is_told_where_the_disk_is_small(
    caplog: pytest.LogCaptureFixture, store: PageStore
) -> None:
    def told(disk_size: float, write_policy: str = "write_through") -> list[str]:
        config = HierKVConfig(
            host_size=1.0, disk_dir="/kv", disk_size=disk_size, write_policy=write_policy
        )
        return _told(caplog, config, store, PAGE_TOKENS)

    (said,) = told(4.0)
    assert "--hier-kv-write-policy auto" in said
    assert "25 % more" in said
    assert told(17.0) == told(4.0, "auto") == told(4.0, "write_back") == []


def test_by_default_a_small_disk_adds_up_with_dram_and_a_large_one_has_all() -> None:
    assert HierKVConfig().write_policy == PageStoreConfig().write_policy == DEFAULT_POLICY
    assert policy_for_sizes(DEFAULT_POLICY, 10, 160) == "auto"
    assert policy_for_sizes(DEFAULT_POLICY, 10, 161) == "write_through"
    assert policy_for_sizes("write_back", 10, 161) == "write_back"
