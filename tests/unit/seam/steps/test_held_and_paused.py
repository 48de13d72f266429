"""What the scheduler's steps do not see to: pauses, and who is held, through the real cache."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.seam.hooks.scheduler import _in_pause  # noqa: E402
from tests.property.worlds.taint_world import PAGE, World  # noqa: E402

PROMPT = [1 + at % 90 for at in range(3 * PAGE)]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path, monkeypatch, 1, lossy=False)
    yield world
    world.close()


def test_saves_that_end_in_a_pause_are_taken(world: World) -> None:
    """SGLang makes no steps then, and does not flush while one is pending."""
    req = world.arrive([*PROMPT, 91], exact=False, num_new=0)
    assert world.admit(req)
    world.finish(req)
    assert world.cache.hier_linker.quiesce()
    assert world.cache.has_pending_cache_operations()
    assert world.cache.protected_size() > 0
    _in_pause(SimpleNamespace(tree_cache=world.cache))
    assert not world.cache.has_pending_cache_operations()
    assert world.cache.protected_size() == 0


def test_who_is_held_is_held_in_all_of_a_step(world: World) -> None:
    """SGLang asks twice: before others give way to a request, and behind that."""
    world.run([*PROMPT, 91])
    world.only_on_disk()
    req = world.arrive([*PROMPT, 92], exact=False, num_new=0)
    handle = req.cache_request_handle
    assert world.cache.is_held(handle)
    world.cache.release_plan(handle)  # whatever becomes of its plan meanwhile
    assert not world.cache.check_prefetch_progress(handle)
    world.cache.check_hicache_events()
    assert not world.cache.is_held(handle)
    assert world.cache.check_prefetch_progress(handle)


@pytest.mark.parametrize("first_logprob", [PAGE - 1, 2 * PAGE - 1])
def test_no_page_is_looked_for_of_which_a_token_is_computed(
    world: World, first_logprob: int
) -> None:
    """As of a request for the log-probabilities of its prompt from some token on."""
    world.run([*PROMPT, 91])
    world.only_on_disk()
    req = world.arrive([*PROMPT, 92], exact=False, num_new=0)
    world.cache.prefetch_from_storage(
        req.cache_request_handle,
        req.last_node,
        array("q", req.tokens[:first_logprob]),
        matched_prefix_tokens=array("q"),
        extra_key=None,
        cache_salt=None,
    )
    waiting = world.cache.waiting_room.find(req.cache_request_handle)
    num_found = 0 if waiting is None else len(waiting.prefix.hashes)
    assert num_found == first_logprob // PAGE
