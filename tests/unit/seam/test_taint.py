"""Lossy KV and what is computed on it, through the real tree, linker and store.

What is compared is the KV itself: see `tests/property/worlds/taint_world.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.mem_cache import unified_radix_cache  # noqa: E402
from sglang.srt.mem_cache.base_prefix_cache import EvictParams  # noqa: E402
from sglang.srt.session.streaming_session import is_virtual_node  # noqa: E402

from sglang_ext.device.transfers import hashes_from_hex  # noqa: E402
from sglang_ext.provenance.request_state import (  # noqa: E402
    HitTier,
    RequestState,
    max_quality_of,
    state_of,
    wants_exact,
)
from sglang_ext.provenance.tree_quality import DeviceProvenance  # noqa: E402
from sglang_ext.seam.reuse_report import DETAILS_KEY  # noqa: E402
from sglang_ext.seam.session_turns import SessionTurns, part_from_another_turn  # noqa: E402
from sglang_ext.tiers.records.quality import ANY, Quality, name_of, worst  # noqa: E402
from testkit.simulated.device import SimulatedDevice, plain  # noqa: E402
from tests.property.worlds.taint_world import PAGE, Request, World, Wrong  # noqa: E402

PAGES = 6
DOCUMENT = [1 + at % 90 for at in range(PAGES * PAGE)]
QUESTION = [200 + at for at in range(2 * PAGE)]
PROMPT = [*DOCUMENT, *QUESTION, 7]

Make = Callable[..., World]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    worlds: list[World] = []

    def build(**options: Any) -> World:
        # What is on disk is waited for, on any machine.
        options = {"raw_share": 0.0, "timeout_ms": 300_000.0, **options}
        worlds.append(World(tmp_path / str(len(worlds)), monkeypatch, 1, **options))
        return worlds[-1]

    yield build
    for world in worlds:
        world.close()


def stored(world: World, tokens: list[int]) -> list[int]:
    """Quality of the stored pages of a prompt."""
    index = world.store._books.table.index
    rows = index.lookup(hashes_from_hex(world.keys(tokens)), world.space.number)
    return [int(quality) for quality in index.quality[rows]]


def on_device(world: World, tokens: list[int]) -> list[int]:
    """Quality of a prompt's pages in the tree."""
    return [int(quality) for quality in world.cache.taint.pages.of(world.keys(tokens))]


def lossy_on_disk(world: World) -> None:
    world.run([*DOCUMENT, 7])
    world.only_on_disk()
    assert stored(world, DOCUMENT) == [Quality.LOSSY] * PAGES


def test_what_is_computed_on_lossy_kv_is_lossy(make: Make) -> None:
    world = make()
    lossy_on_disk(world)
    req = world.run(PROMPT)
    assert req.prefix_len == len(PROMPT)
    assert state_of(req).reused == Quality.LOSSY
    assert on_device(world, PROMPT) == [Quality.LOSSY] * (PAGES + 2)
    assert stored(world, PROMPT) == [Quality.LOSSY] * (PAGES + 2)
    assert world.store.stats()["saved_lossy_pages"] == 2


def test_a_device_hit_on_lossy_kv_hands_it_on(make: Make) -> None:
    world = make()
    lossy_on_disk(world)
    world.run([*DOCUMENT, 7])
    req = world.run(PROMPT)
    assert state_of(req).by_tier(len(DOCUMENT))["device"] == len(DOCUMENT)
    assert state_of(req).reused == Quality.LOSSY
    assert on_device(world, PROMPT)[-2:] == [Quality.LOSSY] * 2


def test_splits_keep_provenance(make: Make) -> None:
    """Exact head, lossy middle, and requests that fork off inside of it."""
    world = make()
    lossy_on_disk(world)
    world.run(PROMPT)
    for pages in (1, 3, 5):
        fork = [*DOCUMENT[: pages * PAGE], *(300 + at for at in range(PAGE)), 7]
        world.run(fork)
        assert on_device(world, fork[:-1]) == [Quality.LOSSY] * (pages + 1)


@pytest.mark.parametrize("core", ["python", "rust"])
def test_a_request_for_exact_kv_gets_it_and_leaves_it_behind(make: Make, core: str) -> None:
    world = make(core=core)
    lossy_on_disk(world)
    world.run(PROMPT)
    req = world.run(PROMPT, exact=True)  # the world checks every row that it attends to
    assert state_of(req).reused == state_of(req).taint == Quality.EXACT
    assert sum(state_of(req).by_tier(0).values()) == 0
    assert on_device(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)
    assert stored(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)
    stats = world.store.stats()
    assert stats["device_replaced_pages"] == stats["replaced_pages"] == PAGES + 2
    assert not world.cache.taint.pages
    again = world.run(PROMPT)
    assert state_of(again).reused == Quality.EXACT
    world.cache.reset()
    world.allocator.clear()
    from_dram = world.run(PROMPT, exact=True)
    assert state_of(from_dram).by_tier((PAGES + 2) * PAGE)["host"] == (PAGES + 2) * PAGE


def test_keys_of_pairs_tell_lossy_kv_apart_too(make: Make) -> None:
    """With an EAGLE draft pages have other names, and their last token is another page's first."""
    world = make(of_pairs=True)
    world.run([*DOCUMENT, QUESTION[0], 7])
    world.only_on_disk()
    assert stored(world, [*DOCUMENT, QUESTION[0]]) == [Quality.LOSSY] * PAGES
    req = world.run(PROMPT)
    assert state_of(req).reused == Quality.LOSSY
    assert on_device(world, PROMPT) == [Quality.LOSSY] * (PAGES + 2)
    assert stored(world, PROMPT) == [Quality.LOSSY] * (PAGES + 2)
    req = world.run(PROMPT, exact=True)  # the world checks every row that it attends to
    assert state_of(req).reused == state_of(req).taint == Quality.EXACT
    assert sum(state_of(req).by_tier(0).values()) == 0
    assert on_device(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)
    assert stored(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)
    assert not world.cache.taint.pages


def test_pages_are_replaced_without_a_wait_for_the_device(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows lie on the device: no thread looks into them, and no indices are uploaded."""
    device = SimulatedDevice(1)  # this thread is its scheduler's
    world = make()
    lossy_on_disk(world)
    world.run(PROMPT)
    taint, pool, calls = world.cache.taint, world.cache.req_to_token_pool, []
    overwrite, rows = taint._overwrite, taint._tree.rows

    def guarded(req: Any, node_id: Any, pages: Any) -> Any:
        calls.append(len(pages))
        with monkeypatch.context() as patch:
            patch.setattr(pool, "req_to_token", device.tensor(pool.req_to_token))
            patch.setattr(taint._tree, "rows", lambda node: device.tensor(rows(node)))
            found = overwrite(req, node_id, pages)
        return None if found is None else plain(found)

    monkeypatch.setattr(taint, "_overwrite", guarded)
    world.run(PROMPT, exact=True)  # the world checks every row that it attends to
    assert sum(calls) == PAGES + 2
    device.require_order()
    assert "device_replace_failures" not in world.store.stats()
    assert on_device(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)


def exact_request_beside_lossy_pages(world: World, patch: pytest.MonkeyPatch) -> Request:
    """A request that waits, on whose pages the device has, and fails to replace them."""
    lossy_on_disk(world)
    world.run(PROMPT)

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError

    patch.setattr(world.cache.linker.cache_linker, "overwrite_rows", fail)
    return world.arrive(list(PROMPT), exact=True, num_new=0)


def serve(world: World, req: Request) -> None:
    assert world.admit(req)
    while req in world.running:
        world.go_on(req)


def test_where_the_device_fails_to_replace_pages_an_exact_request_ends(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make()
    req = exact_request_beside_lossy_pages(world, monkeypatch)
    with pytest.raises(
        Wrong, match="asked for exact KV"
    ):  # the tree's rows are in place of its own
        serve(world, req)
    assert "could not keep the exact KV" in req.to_finish.message  # type: ignore[attr-defined]
    assert on_device(world, PROMPT[:-1]) == [Quality.LOSSY] * (PAGES + 2)
    assert world.store.stats()["device_replace_failures"] == 1


def test_ranks_end_where_one_of_them_fails_to_replace_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would hold pages of another quality, and decide differently."""
    world = make()
    req = exact_request_beside_lossy_pages(world, monkeypatch)
    monkeypatch.setattr(world.cache.taint, "_is_alone", False)
    with pytest.raises(torch.OutOfMemoryError):
        serve(world, req)


def test_an_exact_request_uses_the_exact_leading_part(make: Make) -> None:
    world = make()
    world.run([*DOCUMENT[: 2 * PAGE], 7], exact=True)
    index = world.store._books.table.index
    lossy = np.array([0, 0, 1, 1, 1, 1], np.uint8)
    hashes = hashes_from_hex(world.keys(DOCUMENT))
    world.cache.taint.pages.note(world.keys(DOCUMENT)[2:], lossy[2:])
    world.cache.taint.insert = lambda req, up_to, insert: insert()  # type: ignore[method-assign]
    world.run([*DOCUMENT, 7])
    rows = index.lookup(hashes, world.space.number)
    assert index.quality[rows].tolist() == lossy.tolist()
    exact = world.arrive([*DOCUMENT, 7], exact=True)
    assert exact.prefix_len == 2 * PAGE
    assert exact.host_hit_length == 0
    other = world.arrive([*DOCUMENT, 7], exact=False)
    assert other.prefix_len == PAGES * PAGE
    world.cache.reset()
    world.allocator.clear()
    world.match(exact)
    assert (exact.prefix_len, exact.host_hit_length) == (0, 2 * PAGE)


def test_a_decode_server_gives_who_asks_for_exact_kv_none_of_its_other_pages(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There SGLang does not ask the linker for what a request may use."""
    world = make()
    lossy_on_disk(world)
    world.run(PROMPT)
    decode = SimpleNamespace(disaggregation_mode="decode")
    monkeypatch.setattr(unified_radix_cache, "get_disagg", lambda: decode)
    world.cache.only_saves = True
    prefixes = {}
    for exact in (False, True):
        req = Request(f"decoded-{exact}", PROMPT, 1, exact)
        world.match(req)
        prefixes[exact] = req.prefix_len
    assert prefixes == {False: (PAGES + 2) * PAGE, True: 0}


def test_what_was_begun_on_lossy_kv_stays_lossy(make: Make) -> None:
    """A request decodes on pages that another replaces by exact ones meanwhile."""
    world = make()
    lossy_on_disk(world)
    slow = world.arrive([*DOCUMENT, 7], exact=False)
    slow.num_new = 2 * PAGE
    while not world.admit(slow):
        pass
    world.run([*DOCUMENT, 7], exact=True)
    assert on_device(world, DOCUMENT) == [Quality.EXACT] * PAGES
    while slow in world.running:
        world.go_on(slow)
    world.settle()
    whole = slow.tokens[: len(slow.tokens) // PAGE * PAGE]
    assert on_device(world, whole) == [Quality.EXACT] * PAGES + [Quality.LOSSY] * 2
    assert stored(world, whole) == [Quality.EXACT] * PAGES + [Quality.LOSSY] * 2


def test_a_lossy_save_leaves_what_is_exact(make: Make) -> None:
    world = make()
    world.run(PROMPT, exact=True)
    world.cache.reset()
    world.allocator.clear()
    world.cache.taint.pages.note(world.keys(PROMPT), np.ones(PAGES + 2, np.uint8))
    world.cache.taint.insert = lambda req, up_to, insert: insert()  # type: ignore[method-assign]
    world.run(PROMPT)
    assert stored(world, PROMPT) == [Quality.EXACT] * (PAGES + 2)
    assert "replaced_pages" not in world.store.stats()


def test_without_a_lossy_codec_nothing_is_kept_or_computed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make(lossy=False)
    world.run(PROMPT)
    world.only_on_disk()

    def never(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("provenance was looked at")

    monkeypatch.setattr(world, "check_tree", lambda: None)
    monkeypatch.setattr(world.cache.taint._tree, "path_hashes", never)
    monkeypatch.setattr(world.cache.taint.pages, "of", never)
    monkeypatch.setattr(world.cache.taint.pages, "note", never)
    req = world.run(PROMPT, exact=True)
    assert state_of(req).by_tier((PAGES + 2) * PAGE)["disk"] == (PAGES + 2) * PAGE
    assert state_of(req).reused == Quality.EXACT
    assert world.run(PROMPT).prefix_len == len(PROMPT)


def test_a_split_under_a_second_save_moves_only_the_first(make: Make) -> None:
    """SGLang looks for the save to update by its node, which a second save may share."""
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import _PendingOffload

    wrapper = make().cache.linker
    again, first = _PendingOffload(5, None, []), _PendingOffload(5, None, [5])
    wrapper.pending_offloads = [again, first, again]
    wrapper.replace_pending_offload_node(5, 5, [9, 5])
    assert wrapper.pending_offloads == [again, first._replace(publish_node_ids=[9, 5]), again]
    wrapper.pending_offloads = []


# ---- sessions ----


class Sessions:
    """SGLang's streaming sessions, as far as the keeper looks at them."""

    def __init__(self) -> None:
        self.slots = {"s": SimpleNamespace(kv=SimpleNamespace(holds_kv=True))}
        self.released: list[str] = []

    def borrowed_slot(self, req: Any) -> Any:
        return self.slots.get(req.session.session_id) if req.session is not None else None

    def release_session(self, session_id: str) -> None:
        self.released.append(session_id)
        del self.slots[session_id]


def turn(*, exact: bool = False) -> Request:
    req = Request("turn", [1], 0, exact)
    req.session = SimpleNamespace(session_id="s", streaming=True)  # type: ignore[assignment]
    req.to_finish = None  # type: ignore[attr-defined]
    return req


def test_a_session_hands_its_kv_to_the_next_turn_with_what_it_is_worth(make: Make) -> None:
    sessions = Sessions()
    turns = SessionTurns(sessions, make().store.counters)
    first, second, third = turn(), turn(), turn(exact=True)
    turns.meet(first)
    assert state_of(first).taint == Quality.EXACT
    state_of(first).taint = int(Quality.LOSSY)
    turns.end(first)
    turns.meet(second)
    assert state_of(second).taint == state_of(second).reused == Quality.LOSSY
    turns.end(second)
    turns.meet(third)
    assert sessions.released == ["s"]
    assert state_of(third).taint == Quality.EXACT


@pytest.mark.parametrize("name", ["extra_key", "cache_salt", "lora_id"])
def test_a_turn_of_other_keys_or_adapter_computes_its_prompt(make: Make, name: str) -> None:
    sessions = Sessions()
    turns = SessionTurns(sessions, make().store.counters)
    for expected, value in (([], "one"), ([], "one"), (["s"], "other")):
        req = turn()
        setattr(req, name, value)
        turns.meet(req)
        assert sessions.released == expected
        turns.end(req)


class Session:
    """What SGLang's streaming sessions ask of a session."""

    session_id, streaming = "s", True
    _inflight = False

    def finish_req(self, req: Any) -> None:
        self._inflight = False

    def abort_req(self) -> None:
        self._inflight = False


def take_turn(world: World, tokens: list[int], *, exact: bool = False) -> Request:
    """One turn on SGLang's own sessions, from its arrival to its end."""
    return end_turn(world, begin_turn(world, tokens, exact=exact))


def begin_turn(
    world: World, tokens: list[int], *, exact: bool = False, chunk: int | None = None
) -> Request:
    """Its arrival, and its prompt's first chunk."""
    req = Request(f"turn-{len(tokens)}", list(tokens), 0, exact)
    req.session = Session()  # type: ignore[assignment]
    for name in ("to_finish", "finished_reason", "finished_len"):
        setattr(req, name, None)
    req.output_ids = []  # type: ignore[attr-defined]
    req.detach_kv = lambda: setattr(req, "kv", ReqKvInfo())  # type: ignore[attr-defined]
    world.waiting.append(req)
    assert world.admit(req, chunk)
    return req


def end_turn(world: World, req: Request) -> Request:
    """The rest of it."""
    node = req.last_node
    assert is_virtual_node(node)
    assert not world.cache.is_backuped(node), "it is not offered for prefetching"
    assert not world.cache.is_root(node)
    world.cache.taint.admit(req)
    while req.prefix_len < len(req.tokens):
        world.go_on(req)
    req.done = True
    world.running.remove(req)
    assert world.cache.claim_kv_row(req)  # the session keeps it
    return req


@pytest.mark.parametrize("ends", [False, True], ids=["retracted", "done"])
def test_a_session_is_busy_until_its_turn_ends(make: Make, ends: bool) -> None:
    """SGLang takes the mark off a session whose turn is retracted, and will run again."""
    world = make(device_pages=64)
    req = begin_turn(world, list(range(3 * PAGE + 1)))
    session: Any = req.session
    session._inflight = True
    while req.prefix_len < len(req.tokens):
        world.go_on(req)
    req.done = ends
    world.running.remove(req)
    assert world.cache.claim_kv_row(req)
    assert session._inflight is not ends


def test_a_session_keeps_nothing_of_a_turn_whose_load_failed(make: Make) -> None:
    """Retracted before the result of its forward is used, and aborted by its client while it waits.

    Its rows are what others left there, and the next turn would go on from them.
    """
    world = make(device_pages=64, lossy=False)
    world.run([*DOCUMENT, 7])
    world.run([*QUESTION, 7])
    world.settle()
    world._do_flush()
    world.run([*QUESTION, 7])  # whose rows the turn will have
    world.settle()
    world._do_flush()

    def fail(*args: Any) -> None:
        raise RuntimeError("the device failed")

    retracted: list[Request] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(world.cache.hier_linker.copier, "load_layer", fail)
        patch.setattr(world, "abort", retracted.append)
        first = begin_turn(world, [*DOCUMENT, 7])
    assert retracted == [first]
    assert first.discard_output_reason is not None
    assert world.cache.claim_kv_row(first)
    first.session.abort_req()  # type: ignore[attr-defined]
    take_turn(world, [*DOCUMENT, 8])  # the world looks at the rows that it attends to
    world.cache.release_session("s")
    world.settle()
    world.cache.evict(EvictParams(num_tokens=world.allocator.size))
    assert world.allocator.available_size() == world.allocator.size, "rows are lost"


def test_real_sessions(make: Make) -> None:
    """A turn attends to the KV of the turns before; one for exact KV starts anew (the world looks).

    Turn by turn: on the lossy pages of a document; on the session's KV; for exact KV; on that.
    """
    world = make(device_pages=64)
    lossy_on_disk(world)
    tokens = [*DOCUMENT, 7]
    plan = world.store.plan(world.space, hashes_from_hex(world.keys(DOCUMENT)))
    assert plan is not None
    assert world.store.wait_idle(300)
    said, reused = [], []
    for exact in (False, False, True, False):
        tokens += [len(tokens) + at for at in range(PAGE + 1)]
        req = take_turn(world, tokens, exact=exact)
        said.append(state_of(req).reused)
        reused.append(state_of(req).taint)
    assert said == reused == [Quality.LOSSY, Quality.LOSSY, Quality.EXACT, Quality.EXACT]
    world.store.cancel_plan(plan)
    world.cache.release_session("s")
    world.settle()


@pytest.mark.parametrize("refused", [False, True], ids=["let in", "refused by SGLang"])
def test_a_running_turns_rows_stay_its_own(make: Make, refused: bool) -> None:
    """Another turn of the session, of another tenant: it gets none of them and frees none."""
    world = make(device_pages=64)
    first = begin_turn(world, [*DOCUMENT, *QUESTION, 7], chunk=PAGE)
    session = first.session
    session._inflight = not refused  # type: ignore[attr-defined]
    other = Request("other", [*DOCUMENT, 9], 0, False, extra_key="another")
    other.session = session
    other.release_mm_inputs_on_abort = lambda: None  # type: ignore[attr-defined]
    abort = SimpleNamespace(message="Streaming session already has an active request.")
    other.to_finish = abort if refused else None  # type: ignore[attr-defined]
    world.match(other)
    assert other.session is None
    assert "active request" in other.to_finish.message  # type: ignore[attr-defined]
    assert session._inflight, "the first still runs"  # type: ignore[attr-defined]
    assert not other.kv.holds_kv
    assert world.store.stats()["refused_session_turns"] == 1
    end_turn(world, first)  # the world looks at the rows that it attends to
    world.cache.release_session("s")
    world.settle()


@pytest.mark.parametrize("num_turns", [0, 1], ids=["first turns", "later turns"])
def test_a_refused_turn_lets_no_third_one_in(make: Make, num_turns: int) -> None:
    """The turn that it was refused for waits, and has no rows yet; the session stays that one's."""
    world = make(device_pages=64)
    tokens = [*DOCUMENT, *QUESTION, 7]
    for _ in range(num_turns):
        take_turn(world, tokens)
        tokens.append(8)
    session = Session()
    session._inflight = True
    refused = Request("refused", [*DOCUMENT, 9], 0, False, extra_key="another")
    refused.session = session  # type: ignore[assignment]
    part_from_another_turn(SimpleNamespace(tree_cache=world.cache), refused)  # as it is made
    assert refused.session is None
    refused.to_finish = SimpleNamespace(message="of any reason")  # type: ignore[attr-defined]
    world.match(refused)
    assert world.store.counters.snapshot()["refused_session_turns"] == 1
    assert session._inflight, "the other one's"
    assert len(world.cache.session.slots) == num_turns, "nothing of the session was freed"
    take_turn(world, tokens)
    world.cache.release_session("s")
    world.settle()


# ---- parts ----


def keys(*numbers: int) -> list[str]:
    return [f"{number:064x}" for number in numbers]


def test_marks_are_swept_when_their_pages_left() -> None:
    live = set(keys(*range(90, 110)))
    pages = DeviceProvenance(100, lambda: live)
    for number in range(100):
        pages.note(keys(number), np.ones(1, np.uint8))
    assert len(pages) == 100
    pages.note(keys(100, 101), np.array([1, 0], np.uint8))
    assert len(pages) == 11
    assert pages.of(keys(5, 95, 100, 101)).tolist() == [0, 1, 1, 0]


def test_a_tree_that_cannot_be_asked_is_taken_for_lossy() -> None:
    pages = DeviceProvenance(4, None)
    for number in range(4):
        pages.note(keys(number), np.ones(1, np.uint8))
    pages.note(keys(7), np.zeros(1, np.uint8))
    assert pages.of(keys(0, 3, 7, 99)).tolist() == [1, 1, 0, 1]
    assert pages
    assert pages.num_exact(keys(7, 0)) == 1
    pages.clear()
    assert not pages
    assert pages.worst(keys(0)) == Quality.EXACT


def test_a_pages_quality_is_what_was_loaded_or_the_worst_it_was_computed_on() -> None:
    state = RequestState()
    state.note_loaded_quality(2, np.array([0, 1, 0], np.uint8))
    state.note_reused(int(Quality.EXACT))
    assert state.taint == state.reused == Quality.LOSSY
    assert state.page_quality(7)[2:].tolist() == [0, 1, 0, 1, 1]
    assert state.page_quality(3)[2:].tolist() == [0]
    assert len(state.page_quality(1)) == 1
    state.begin_admission()
    assert state.page_quality(7).tolist() == [0] * 7
    assert state.reused == Quality.LOSSY  # tokens that were sent already came of it


@pytest.mark.parametrize(
    ("custom", "wanted"),
    [
        (None, False),
        ({}, False),
        ({"hier_kv_exact": True}, True),
        ({"hier_kv_exact": False}, False),
    ],
)
def test_how_a_request_asks_for_exact_kv(custom: Any, wanted: bool) -> None:
    req = SimpleNamespace(sampling_params=SimpleNamespace(custom_params=custom))
    assert wants_exact(req) is wanted
    assert max_quality_of(req) == (Quality.EXACT if wanted else ANY)
    assert not wants_exact(SimpleNamespace())


@pytest.mark.parametrize(
    ("reused", "exact", "said"),
    [(0, False, None), (1, False, "lossy"), (0, True, "exact"), (2, False, "approximated")],
)
def test_the_report_says_so_when_it_matters(
    make: Make, reused: int, exact: bool, said: str | None
) -> None:
    from sglang_ext.seam.hooks.scheduler import _after_details

    req = Request("r", [1], 0, exact)
    req.cached_tokens = 2 * PAGE
    state_of(req).note_enqueued(PAGE, [(HitTier.HOST, 2)])
    state_of(req).reused = reused
    scheduler = SimpleNamespace(tree_cache=make().cache)
    details = json.loads(_after_details(None, scheduler, req)[DETAILS_KEY])
    assert details["host"] == 2 * PAGE
    assert details.get("quality") == said


def test_the_worst_of_no_pages_is_exact() -> None:
    assert worst(np.empty(0, np.uint8)) == Quality.EXACT
    assert [name_of(quality) for quality in (0, 1, 2, 9)] == [
        "exact",
        "lossy",
        "approximated",
        "approximated",
    ]
