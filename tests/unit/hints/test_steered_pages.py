"""What the admin endpoint does in a scheduler, over a real store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime_cpu import inprocess
from sglang_ext.admission.waiting import WaitingRoom
from sglang_ext.admission.waiting_request import ReusablePrefix
from sglang_ext.hints.steering_request import parse_body, to_text
from sglang_ext.tiers.records.quality import ANY
from tests.unit.store.store_rig import Make, Rig, pages, rigs

PAGE = 4
TOKENS = list(range(10 * PAGE))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    yield from rigs(tmp_path)


def _cache(rig: Rig, room: WaitingRoom) -> Any:
    """What `steer` asks of a cache, around a store and a waiting room."""
    return SimpleNamespace(
        store=rig.store, waiting_room=room, page_size=PAGE,
        identity=SimpleNamespace(space_now=lambda store: rig.space),
        of_tenant=lambda space, tenant: space, hint_owner=lambda tenant: 0,
        tree_core=SimpleNamespace(is_eagle=False),
        resumable=lambda space, hashes: hashes,
    )  # fmt: skip


def test_what_is_said_with_a_prefetch_holds_when_the_pages_are_there(make: Make) -> None:
    inprocess.prepare()
    from sglang_ext.seam.hooks.admin.steering_scheduler import steer
    from sglang_ext.seam.page_hash import hashes_of, whole_pages_key

    rig = make(slots=30, lookahead=True, pin_share=0.5)
    lookahead = rig.store.lookahead
    assert lookahead is not None
    chat = hashes_of(whole_pages_key(TOKENS, None, None, PAGE), PAGE)
    rig.save(chat)
    lookahead.used(rig.space, chat, None)
    room = WaitingRoom(rig.store, prefetch_policy="best_effort", prefetch_timeout_ms=0)
    body = {"input_ids": TOKENS, "prefetch": True, "returns_in_s": 60, "ttl_s": 600, "pin_s": 60}
    done = steer(_cache(rig, room), to_text(parse_body(body)[0], TOKENS))
    assert done == {"pages": 10, "host": 10, "disk": 0, "prefetching": True}
    assert (rig.count("pinned_pages"), rig.count("hinted_return_pages")) == (10, 0)
    deadline_s = time.monotonic() + 300
    while room._prefetches:
        room.step([])
        assert time.monotonic() < deadline_s
    assert (rig.count("pinned_pages"), rig.count("hinted_return_pages")) == (10, 10)
    assert rig.count("ttl_pages") == 10
    rig.settle()


@pytest.mark.parametrize("runs", [False, True])
def test_pages_of_a_request_that_never_ran_take_hints_again(make: Make, runs: bool) -> None:
    rig = make(slots=30, disk=False, lookahead=True)
    lookahead, chat = rig.store.lookahead, pages("chat", 10)
    assert lookahead is not None
    rig.save(chat)
    lookahead.used(rig.space, chat, None)
    room = WaitingRoom(rig.store, prefetch_policy="best_effort", prefetch_timeout_ms=0)
    room.enter("request", ReusablePrefix(rig.space, chat, 0, max_quality=ANY))
    room.leave("request", admitted=runs)
    lookahead.hint(rig.space, chat, owner=0, returns_in_s=None)
    assert rig.count("hinted_ends_pages") == (0 if runs else 10)  # one that runs is using them
    rig.settle()


def test_hints_that_are_none_are_counted_where_nobody_refused_them(make: Make) -> None:
    """Behind SGLang's gateway a request comes to the scheduler as it is."""
    inprocess.prepare()
    from sglang_ext.seam.cache import HierKVRadixCache

    rig = make(slots=30, lookahead=True)
    cache: Any = SimpleNamespace(store=rig.store)
    for hints, count in (({"returns_in_s": "soon"}, 1), (None, 1), ({"ends": 3}, 2)):
        params = SimpleNamespace(custom_params={"hier_kv_hints": hints})
        req = SimpleNamespace(sampling_params=params)
        HierKVRadixCache._note_hints(cache, req, rig.space, pages("chat", 2))
        assert rig.count("unusable_hints_requests") == count
