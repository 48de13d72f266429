"""When a key space is handed out while weights and adapters change, and when none is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.identity.model_identity import ModelIdentity
from sglang_ext.identity.namespace import digest_model
from sglang_ext.identity.tenancy import tree_key
from sglang_ext.tiers.host import HostArena
from sglang_ext.tiers.index import PageIndex
from sglang_ext.tiers.store import KeySpace, PageStore, PageStoreConfig
from tests.unit.store.store_rig import Rig, check_content, pages


def adapter(value: float) -> SimpleNamespace:
    layer = SimpleNamespace(weights={"k.lora_A": torch.full((2, 2), value)})
    return SimpleNamespace(
        layers=[layer], embedding_layers={}, added_tokens_embeddings={}, scaling=1.0
    )


class Fixture:
    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 3)
        self.adapters: dict[str, Any] = {}
        self.store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
        self.identity = ModelIdentity(self.model, {"page_size": 64}, {}, lambda: self.adapters)

    def space(self, lora_id: str | None = None, extra_key: str | None = None) -> KeySpace | None:
        request = SimpleNamespace(lora_id=lora_id, extra_key=extra_key)
        return self.identity.space_of(request, self.store)

    def set_weights(self, value: float) -> None:
        with torch.no_grad():
            self.model.weight.fill_(value)

    def update(
        self, value: float, *, empty: bool, flushed: bool = False, incomplete: bool = False
    ) -> None:
        self.identity.begin_update(device_is_empty=empty)
        self.set_weights(value)
        if flushed:
            self.identity.device_was_reset()
        self.identity.end_update(device_is_empty=empty or flushed, incomplete=incomplete)


@pytest.fixture
def world() -> Fixture:
    made = Fixture()
    made.set_weights(1.0)
    return made


def test_a_flushed_update_opens_another_namespace_and_back_the_first(world: Fixture) -> None:
    first = world.space()
    assert first is not None
    world.update(2.0, empty=False, flushed=True)
    second = world.space()
    assert second is not None
    assert second.digest != first.digest
    world.update(1.0, empty=False, flushed=True)
    assert world.space() == first


def test_without_a_flush_nothing_is_handed_out_until_one(world: Fixture) -> None:
    world.space()
    world.update(2.0, empty=False)
    assert world.space() is None
    assert world.space() is None
    world.identity.device_was_reset()
    assert world.space() is not None


def test_the_same_weights_again_keep_going(world: Fixture) -> None:
    first = world.space()
    world.update(1.0, empty=False)
    assert world.space() == first


def test_back_to_the_first_weights_over_mixed_kv(world: Fixture) -> None:
    """Between the updates requests ran: the device holds KV of the other weights too."""
    world.space()
    world.update(2.0, empty=False)
    world.space()
    world.update(1.0, empty=False)
    assert world.space() is None


def test_back_to_the_first_weights_with_requests_that_never_asked(world: Fixture) -> None:
    """A prompt shorter than a page is not matched, but its output may fill pages."""
    world.space()
    world.update(2.0, empty=False)  # and now such a request runs
    world.update(1.0, empty=False)
    assert world.space() is None


def test_kv_that_was_there_before_anyone_asked(world: Fixture) -> None:
    world.update(2.0, empty=False)
    assert world.space() is None
    world.identity.device_was_reset()
    assert world.space() is not None


def test_an_empty_device_needs_no_flush(world: Fixture) -> None:
    first = world.space()
    world.identity.device_was_reset()
    world.update(2.0, empty=True)
    second = world.space()
    assert second is not None
    assert second != first


def test_an_open_session_hands_nothing_out(world: Fixture) -> None:
    first = world.space()
    world.update(1.0, empty=True, incomplete=True)
    assert world.space() is None
    world.set_weights(2.0)  # a peer writes; nobody says so
    world.update(2.0, empty=True, incomplete=False)
    second = world.space()
    assert second is not None
    assert second != first


def test_requests_inside_a_session_make_the_device_mixed(world: Fixture) -> None:
    world.space()
    world.update(1.0, empty=True, incomplete=True)
    assert world.space() is None
    world.update(1.0, empty=False)
    assert world.space() is None
    world.identity.device_was_reset()
    assert world.space() is not None


def test_weights_that_cannot_be_digested_turn_the_tiers_off(
    world: Fixture, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(model: Any) -> bytes:
        raise RuntimeError("no such dtype")

    with monkeypatch.context() as patch:
        patch.setattr("sglang_ext.identity.model_identity.digest_model", broken)
        assert world.space() is None
        assert world.space() is None
    assert caplog.text.count("could not be opened") == 1
    world.update(2.0, empty=True)
    assert world.space() is not None


class Clock:
    """Seconds, as the test says."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def steps(world: Fixture, num: int = 64) -> None:
    for _ in range(num):
        world.identity.step(world.store)


@pytest.fixture
def failing(world: Fixture, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A world whose weights cannot be digested for as long as `fails`; its clock; tries so far."""
    state = SimpleNamespace(world=world, clock=Clock(), fails=False, tries=0)

    def digest(model: Any) -> bytes:
        state.tries += 1
        if state.fails:
            raise MemoryError("no room for a digest")
        return digest_model(model)

    monkeypatch.setattr("sglang_ext.identity.model_identity.digest_model", digest)
    world.identity = ModelIdentity(
        world.model, {}, {}, lambda: world.adapters, clock=state.clock
    )  # fmt: skip
    assert world.space() is not None
    world.identity.device_was_reset()
    state.fails = True
    return state


def test_a_digest_that_failed_once_is_taken_later(failing: SimpleNamespace) -> None:
    """What the device computed meanwhile is of the same weights, and may be saved."""
    world = failing.world
    world.update(2.0, empty=True)
    assert world.space() is None
    failing.fails = False
    steps(world)
    assert world.space() is None, "it is too early"
    failing.clock.now_s = 1000.0
    steps(world)
    space = world.space()
    assert space is not None
    world.update(1.0, empty=True)
    assert world.space() != space
    world.update(2.0, empty=True)
    assert world.space() == space


def test_tries_become_rare(failing: SimpleNamespace) -> None:
    world = failing.world
    world.update(2.0, empty=True)
    before = failing.tries
    assert world.space() is None
    for _ in range(3600):
        failing.clock.now_s += 1.0
        steps(world, 32)
        assert world.space() is None
    assert 8 <= failing.tries - before <= 14
    assert world.store.stats()["weight_digest_failures"] == failing.tries - before


def test_kv_of_weights_without_a_digest_is_nobodys_after_another_change(
    failing: SimpleNamespace,
) -> None:
    world = failing.world
    world.update(2.0, empty=True)
    assert world.space() is None  # and computes on the device
    world.update(3.0, empty=False)
    failing.fails = False
    assert world.space() is None
    world.identity.device_was_reset()
    assert world.space() is not None


def test_a_later_digest_is_not_believed_of_what_lay_there_before(failing: SimpleNamespace) -> None:
    world = failing.world
    failing.fails = False
    assert world.space() is not None  # of the weights of before
    failing.fails = True
    world.update(2.0, empty=False)
    assert world.space() is None
    failing.fails = False
    failing.clock.now_s = 1000.0
    steps(world)
    assert world.space() is None
    world.identity.device_was_reset()
    assert world.space() is not None


def test_an_adapter_that_ran_without_a_digest_is_off_until_a_flush(
    failing: SimpleNamespace,
) -> None:
    """It may have been another one under the same id, which nobody looked at."""
    world = failing.world
    world.adapters["a"] = adapter(1.0)
    world.update(2.0, empty=True)
    assert world.space("a") is None
    world.adapters["a"] = adapter(2.0)
    world.identity.adapters_changed(world.store)
    failing.fails = False
    failing.clock.now_s = 1000.0
    steps(world)
    assert world.space() is not None
    assert world.space("a") is None
    world.identity.device_was_reset()
    assert world.space("a") is not None


def test_nothing_is_tried_while_weights_change(failing: SimpleNamespace) -> None:
    world = failing.world
    world.update(2.0, empty=True)
    assert world.space() is None
    failing.clock.now_s = 1000.0
    tries = failing.tries
    world.identity.begin_update(device_is_empty=True)
    steps(world)
    world.identity.end_update(device_is_empty=True, incomplete=True)
    steps(world)
    assert failing.tries == tries


def test_ranks_try_again_by_the_clock_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same step: one that tried alone would wait for the others for ever."""
    ranks = threading.Barrier(2, timeout=300)
    sent: list[bytes] = [b"", b""]
    fails = [False, False]

    def digest(model: Any) -> bytes:
        if fails[model.rank]:
            raise MemoryError("no room for a digest")
        return digest_model(model)

    monkeypatch.setattr("sglang_ext.identity.model_identity.digest_model", digest)

    def exchange(rank: int, content: bytes) -> list[bytes]:
        sent[rank] = content
        ranks.wait()
        got = list(sent)
        ranks.wait()
        return got

    def serve(rank: int) -> list[bool]:
        model: Any = torch.nn.Linear(2, 2)
        torch.nn.init.ones_(model.weight)
        model.rank = rank
        clock = Clock()
        clock.now_s = -500.0 * rank  # nobody's clock is another's
        store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
        identity = ModelIdentity(model, {}, {}, dict, partial(exchange, rank), clock=clock)
        request = SimpleNamespace(lora_id=None)
        usable = [identity.space_of(request, store) is not None]
        for fail in (True, False):
            fails[1] = fail
            identity.begin_update(device_is_empty=True)
            identity.end_update(device_is_empty=True)
            usable.append(identity.space_of(request, store) is not None)
            fails[1] = False
            clock.now_s += 1000.0 if rank == 0 else 0.0
            for _ in range(64):
                identity.step(store)
            usable.append(identity.space_of(request, store) is not None)
        store.close()
        return usable

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(serve, range(2)))
    assert results == [[True, False, True, True, True]] * 2


def test_an_adapter_that_one_rank_lacks_is_off_on_all() -> None:
    """A rank that could not load it enters no exchange about it: the others would wait for ever."""
    changed = threading.Condition()
    sent: list[list[bytes]] = [[], []]
    ended = [False, False]

    def exchange(rank: int, content: bytes) -> list[bytes]:
        with changed:
            sent[rank].append(content)
            changed.notify_all()
            at, others = len(sent[rank]) - 1, sent[1 - rank]
            assert changed.wait_for(lambda: len(others) > at or ended[1 - rank], 300)
            assert len(others) > at, "the other rank never comes"
            return [each[at] for each in sent]

    def serve(rank: int) -> list[KeySpace | None]:
        world = Fixture()
        world.set_weights(1.0)
        world.identity = ModelIdentity(
            world.model, {}, {}, lambda: world.adapters, partial(exchange, rank)
        )

        def load(**adapters: Any) -> None:
            world.adapters.clear()
            world.adapters.update(adapters)
            world.identity.adapters_changed(world.store)

        try:
            load(a=adapter(1.0))
            found = [world.space("a")]
            if rank == 0:  # under the same id, with other weights
                load(a=adapter(2.0), b=adapter(3.0))
            else:
                load()
            found += [world.space("a"), world.space("b"), world.space()]
            kept = dict(world.adapters)
            load(**{"a": adapter(2.0), "b": adapter(3.0), **kept})
            found += [world.space("a"), world.space("b")]
            world.identity.device_was_reset()
            return [*found, world.space("a"), world.space("b")]
        finally:
            world.store.close()
            with changed:
                ended[rank] = True
                changed.notify_all()

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(serve, range(2)))
    given = [[space and (space.digest, space.lora) for space in found] for found in results]
    assert given[0] == given[1]
    assert [space is not None for space in results[0]] == [
        True, False, False, True, False, False, True, True,
    ]  # fmt: skip


def test_a_disk_that_fails_leaves_dram_on(tmp_path: Path) -> None:
    """And is tried again: its pages of before are found, and new ones are written."""
    rig = Rig(tmp_path)
    world = Fixture()
    world.store = rig.store
    world.identity = ModelIdentity(world.model, {}, {}, lambda: world.adapters)
    world.set_weights(1.0)
    world.identity.open(world.store)
    rig.io.fail_writes = True
    world.update(2.0, empty=True)
    space = world.space()
    assert space is not None
    rig.until(lambda: rig.count("namespace_open_failures") > 0)
    rig.space = space
    kept = pages("a", 3)
    rig.save(kept)
    rig.settle()
    check_content(rig, kept)
    rig.io.fail_writes = False
    rig.until(lambda: not rig.store.stats()["openings_pending"])
    more = pages("b", 3)
    rig.save(more)
    rig.settle()
    assert rig.on_disk(more) == 3
    rig.store.close(5)


def test_a_disk_that_hangs_holds_up_no_update(tmp_path: Path) -> None:
    """Nor do pages of the new weights reach it before it has opened their namespace."""
    rig = Rig(tmp_path)
    world = Fixture()
    world.store = rig.store
    world.identity = ModelIdentity(world.model, {}, {}, lambda: world.adapters)
    world.identity.open(world.store)
    rig.io.open_gate.clear()
    rig.save(pages("of before", 2))
    rig.until(lambda: rig.books.spills.num_spilling > 0)  # a write hangs
    world.update(2.0, empty=True)
    space = world.space()
    assert space is not None
    rig.space = space
    kept = pages("a", 3)
    rig.save(kept)
    check_content(rig, kept)
    assert rig.on_disk(kept) == 0
    rig.io.open_gate.set()
    rig.settle()
    assert rig.on_disk(kept) == 3
    rig.store.close(5)


def test_adapters_have_spaces_of_their_own(world: Fixture) -> None:
    world.adapters = {"a": adapter(1.0), "b": adapter(2.0), "same": adapter(1.0)}
    spaces = [world.space(name) for name in (None, "a", "b", "same")]
    assert None not in spaces
    assert spaces[1] == spaces[3]
    assert len(set(spaces)) == 3
    assert len({space.digest for space in spaces if space}) == 1


def test_an_adapter_reloaded_under_its_id_is_off_until_a_flush(world: Fixture) -> None:
    """SGLang's tree cannot tell the two apart, so what lies on the device may be either's."""
    world.adapters = {"a": adapter(1.0)}
    first = world.space("a")
    base = world.space()
    world.adapters = {"a": adapter(2.0)}
    world.identity.adapters_changed(world.store)
    assert world.space("a") is None
    assert world.space() == base
    world.identity.device_was_reset()
    second = world.space("a")
    assert second is not None
    assert second != first
    world.adapters = {"a": adapter(1.0)}
    world.identity.adapters_changed(world.store)
    assert world.space("a") is None
    world.identity.device_was_reset()
    assert world.space("a") == first


def test_unloaded_adapters_are_remembered_in_bounded_number(
    world: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each load has an id of its own, so servers of many adapters meet ids without end."""
    monkeypatch.setattr("sglang_ext.identity.model_identity._MOST_UNLOADED", 8)
    kept = adapter(1.0)
    for number in range(64):
        world.adapters = {"kept": kept, f"id-{number}": adapter(2.0)}
        world.identity.adapters_changed(world.store)
        assert None not in (world.space("kept"), world.space(f"id-{number}"))
    assert len(world.identity._lora_on_device) <= 8 + 3
    for lora_id in ("kept", "id-63", "id-60"):  # as before of those that were there lately
        world.adapters = {lora_id: adapter(9.0)}
        world.identity.adapters_changed(world.store)
        assert world.space(lora_id) is None


@pytest.mark.parametrize("is_asked_between", [True, False])
def test_an_adapter_that_comes_back_after_another_is_off_until_a_flush(
    world: Fixture, is_asked_between: bool
) -> None:
    """What ran between the two changes was computed by the other, asked for or not."""
    first = adapter(1.0)
    world.adapters = {"a": first, "b": adapter(3.0)}
    space, other = world.space("a"), world.space("b")
    world.adapters["a"] = adapter(2.0)
    world.identity.adapters_changed(world.store)
    if is_asked_between:
        assert world.space("a") is None
    world.adapters["a"] = first
    world.identity.adapters_changed(world.store)
    assert world.space("a") is None
    assert world.space("b") == other
    world.identity.device_was_reset()
    assert world.space("a") == space


def test_an_adapter_sglang_does_not_know(world: Fixture) -> None:
    assert world.space("gone") is None
    world.adapters = {"gone": adapter(1.0)}
    assert world.space("gone") is None  # what ran meanwhile is nobody's knowledge
    world.identity.device_was_reset()
    assert world.space("gone") is not None


def test_the_label_and_folder_are_the_disks_business(world: Fixture, tmp_path: Path) -> None:
    assert world.identity.open(world.store) == world.identity.open(world.store)


def test_how_k_is_stored_opens_another_namespace_and_is_known_before_any() -> None:
    spaces = []
    for digest in (b"a", b"b"):
        world = Fixture()
        world.set_weights(1.0)
        world.identity.add_rope(digest)
        spaces.append(world.space())
        with pytest.raises(RuntimeError, match="before a namespace"):
            world.identity.add_rope(digest)
    assert spaces[0] is not None
    assert spaces[1] is not None
    assert spaces[0].digest != spaces[1].digest


def test_an_extra_key_that_ends_in_an_adapters_id_keeps_both_going(world: Fixture) -> None:
    world.adapters["adapter-1"] = adapter(1.0)
    plain = world.space()
    for _ in range(2):
        adapted = world.space("adapter-1", tree_key("tenant", "adapter-1"))
        assert adapted is not None
        assert adapted != plain
        assert world.space(extra_key=tree_key("tenantadapter-1", None)) == plain
        assert world.space(extra_key=tree_key("adapter-1", None)) == plain


def test_an_adapter_that_cannot_be_digested_is_a_miss(world: Fixture) -> None:
    """Nothing is raised, it is counted once, and the base model goes on."""
    base = world.space()
    world.adapters["a"] = SimpleNamespace(layers=[SimpleNamespace(weights=None)], scaling=1.0)
    assert world.space("a") is None
    assert world.space("a") is None
    assert world.store.stats()["adapter_digest_failures"] == 1
    assert world.space() == base

    world.adapters["a"] = adapter(1.0)
    world.identity.adapters_changed(world.store)
    assert world.space("a") is None, "the device holds KV of nobody knows what"
    world.identity.device_was_reset()
    assert world.space("a") is not None


@pytest.mark.parametrize("peer", [b"", b"another's"])
def test_ranks_keep_an_adapters_kv_together_or_not_at_all(world: Fixture, peer: bytes) -> None:
    """A rank that reads its adapter's weights does as one that cannot read its own."""
    of_peer = iter([b"w" * 32, b"opened", peer])
    identity = ModelIdentity(
        world.model, {}, {}, lambda: world.adapters, lambda content: [content, next(of_peer)]
    )
    world.adapters["a"] = adapter(1.0)
    request = SimpleNamespace(lora_id="a", extra_key=None)
    space, alone = identity.space_of(request, world.store), world.space("a")
    assert alone is not None
    assert (space is None) == (not peer)
    assert space is None or space.lora != alone.lora


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("alike", [False, True])
def test_ranks_that_share_pages_say_when_they_cannot_find_each_others(
    caplog: pytest.LogCaptureFixture, share: bool, alike: bool
) -> None:
    sent: list[bytes] = []

    def exchange(content: bytes) -> list[bytes]:
        sent.append(content)
        is_digest = len(sent) == 2
        return [content, content if alike or not is_digest else b"other"]

    identity = ModelIdentity(
        torch.nn.Linear(3, 3), {"page_size": 64}, {}, dict, exchange, ranks_share=share
    )
    store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
    assert identity.open(store) == sent[1]
    assert ("keep KV in different ways" in caplog.text) == (share and not alike)


@pytest.mark.parametrize("share", [False, True])
def test_a_rank_with_a_kv_scale_of_its_own_shares_with_none(share: bool) -> None:
    """The weights of all ranks are the same parts of all their namespaces; only its own differs."""

    def digest_of(rank: int) -> bytes:
        model: Any = torch.nn.Linear(3, 3)
        torch.nn.init.ones_(model.weight)
        torch.nn.init.zeros_(model.bias)
        model.k_scale = 1.0 + rank

        def exchange(content: bytes) -> list[bytes]:
            return [b"of rank 0", b"of rank 1"]

        identity = ModelIdentity(model, {"tp": "all"}, {}, dict, exchange, ranks_share=share)
        return identity.open(PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig()))

    assert digest_of(0) == digest_of(0)
    assert (digest_of(0) == digest_of(1)) != share


def test_scales_that_cannot_be_read_fail_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange that other ranks enter is entered here, too: they would wait for ever."""
    sent: list[bytes] = []

    def breaks(_: Any) -> bytes:
        raise MemoryError("no room for a digest")

    def exchange(content: bytes) -> list[bytes]:
        sent.append(content)
        return [content, b"of rank 1"]

    monkeypatch.setattr("sglang_ext.identity.model_identity.digest_scales", breaks)
    identity = ModelIdentity(torch.nn.Linear(3, 3), {}, {}, dict, exchange, ranks_share=True)
    with pytest.raises(MemoryError):
        identity.open(PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig()))
    assert sent == [b""]


def test_who_scales_kv_is_named_where_it_is_scaled() -> None:
    """The same scales are on both, and one of them writes K and V as they are."""
    model: Any = torch.nn.Linear(3, 3)
    store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())

    def names() -> list[bytes]:
        """Of a server whose attention is known to use them, and of one whose is not."""
        known, other = (
            ModelIdentity(model, {}, {}, dict, scaled_by=backends)
            for backends in ((), ("torch_native",))
        )
        return [known.open(store), other.open(store)]

    assert len(set(names())) == 1
    model.k_scale = torch.nn.Parameter(torch.tensor(1.0), requires_grad=False)
    assert len(set(names())) == 1
    with torch.no_grad():
        model.k_scale.fill_(0.5)
    assert len(set(names())) == 2
