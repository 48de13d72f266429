"""Requests with images, through the real tree, linker and store: see `media_world`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.identity.media import CARRIER, images_of
from sglang_ext.provenance.request_state import state_of
from sglang_ext.settings.images import PLAIN
from tests.property.media.media_world import (
    MediaRequest,
    MediaWorld,
    image_item,
    pads_of,
    scheduler,
)
from tests.property.worlds.taint_world import PAGE
from tests.unit.seam.media.conftest import Make

TEXT = [100 + at for at in range(6 * PAGE + 1)]
SPAN = (5, 16)  # begins and ends within pages
NUM_BEFORE = SPAN[0] // PAGE * PAGE
WHOLE = 6 * PAGE


def ask(world: MediaWorld, *items: Any, text: list[int] = TEXT, **options: Any) -> MediaRequest:
    """One request from its arrival to its end; nobody has it then."""
    req = world.run_to_end(world.make(text, list(items), **options))
    world.cache.matching_request = None
    return req


def flush(world: MediaWorld) -> None:
    world.cache.reset()
    world.allocator.clear()


def count(world: MediaWorld, name: str) -> int:
    return world.store.counters.snapshot().get(name, 0)


def tiers(req: MediaRequest) -> dict[str, int]:
    return {name: num for name, num in state_of(req).by_tier(req.num_reused).items() if num}


def test_an_image_comes_back_from_the_device_from_dram_and_from_disk(make: Make) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    assert tiers(ask(world, image_item(0, SPAN))) == {"device": WHOLE}
    flush(world)
    assert tiers(ask(world, image_item(0, SPAN))) == {"host": WHOLE}
    world.only_on_disk()
    assert tiers(ask(world, image_item(0, SPAN))) == {"disk": WHOLE}
    assert count(world, "image_requests") == 4


@pytest.mark.parametrize("where", ["host", "disk"])
def test_another_image_of_the_same_number_reuses_the_text_before_it(make: Make, where: str) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    flush(world) if where == "host" else world.only_on_disk()
    assert tiers(ask(world, image_item(2, SPAN))) == {where: NUM_BEFORE}
    world.only_on_disk()
    for image in (0, 2):  # each has its own by now
        flush(world)
        assert sum(tiers(ask(world, image_item(image, SPAN))).values()) == WHOLE


def test_the_device_has_another_image_of_the_same_number(make: Make) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    req = ask(world, image_item(2, SPAN))  # the world checks the rows that it attends to
    assert not tiers(req)
    assert images_of(req) == ()
    assert count(world, "image_name_conflicts") == 1
    flush(world)
    assert tiers(ask(world, image_item(2, SPAN))) == {"host": NUM_BEFORE}, "nothing was kept of it"


def test_two_requests_at_once_with_images_of_the_same_number(make: Make) -> None:
    """The later one shares nothing, whichever was made first, and whatever lies in the store."""
    world = make()
    first = world.make(TEXT, [image_item(0, SPAN)])
    second = world.make(TEXT, [image_item(2, SPAN)])
    for req in (second, first):
        assert images_of(req)
        world.run_to_end(req)  # the world checks the rows that it attends to
    assert count(world, "image_name_conflicts") == 1
    assert images_of(second)
    assert images_of(first) == ()
    assert not tiers(first)
    assert tiers(ask(world, image_item(2, SPAN))) == {"device": WHOLE}
    world.only_on_disk()
    assert tiers(ask(world, image_item(2, SPAN))) == {"disk": WHOLE}


def test_a_number_that_stands_for_two_images_of_one_request(make: Make) -> None:
    world, places = make(), set()
    for _ in range(2):
        req = ask(world, image_item(0, (5, 9)), image_item(2, (12, 14)))  # its rows are checked
        assert images_of(req) == ()
        assert not tiers(req)
        places.add(str(req.extra_key).removesuffix(f":{req.rid}"))
    assert len(places) == 2, "an id may be sent again, while the earlier one's pages are there"
    assert count(world, "image_name_conflicts") == 2
    assert images_of(world.make(TEXT, [image_item(0, (5, 9)), image_item(0, (12, 16))]))
    assert images_of(world.make(TEXT, [image_item(0, (5, 9)), image_item(0, (12, 14))])) == ()


@pytest.mark.parametrize("proved", [True, False])
def test_the_device_has_another_image_on_the_last_page_of_a_prompt(
    make: Make, proved: bool
) -> None:
    """A match ends before a prompt's last token, so only the insert meets the page of that."""
    world = make()
    text, span = TEXT[:12], (9, 10)
    first, second = image_item(0, span), image_item(2, span)
    ask(world, first, text=text)
    if not proved:
        second.identity = None
    req = ask(world, second, text=text)  # the world checks the rows
    assert images_of(req) == ()
    assert count(world, "image_name_conflicts") == 1
    assert tiers(ask(world, first, text=text)) == {"device": 8}
    world.only_on_disk()
    assert tiers(ask(world, first, text=text)) == {"disk": 8}


def test_another_image_comes_to_the_device_while_a_prompt_is_computed(make: Make) -> None:
    """A request of which nothing is proved has the numbers of an image that somebody has."""
    world = make()
    text = [*TEXT[:12], *range(1, 9)]
    somebody = world.make(text, [image_item(0, (9, 14))], num_new=4)
    world.enqueue(somebody)
    world.wait_for(partial(world.admit, somebody, 8))
    unproved = image_item(2, (9, 14))
    unproved.identity = None
    ask(world, unproved, text=text)
    while somebody in world.running:
        world.go_on(somebody)  # the world checks the rows that it attends to
    world.settle()
    assert images_of(somebody) == ()
    world.only_on_disk()
    del somebody
    again = ask(world, image_item(0, (9, 14)), text=text)
    assert tiers(again) == {"disk": 8}, "the pages before the image"


def test_what_an_unproved_request_leaves_on_the_device_goes_by_no_images_name(make: Make) -> None:
    """Its tokens are numbers of an image that somebody else has just now, its KV is another's."""
    world = make()
    somebody = world.make(TEXT, [image_item(0, SPAN)])
    unproved = image_item(2, SPAN)
    unproved.identity = None
    world.run_to_end(world.make(TEXT, [unproved]))
    world.run_to_end(somebody)  # the world checks the rows that it attends to
    assert count(world, "image_name_conflicts") == 1
    assert not tiers(somebody)
    world.only_on_disk()
    assert not tiers(ask(world, image_item(0, SPAN))), "nothing was stored under its name"


def test_an_image_at_another_place_or_of_another_length_is_another_prompt(make: Make) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    for span in ((6, 17), (5, 15), (5, 17), (4, 16)):
        flush(world)
        assert sum(tiers(ask(world, image_item(0, span))).values()) <= NUM_BEFORE, span


def test_an_image_added_in_a_later_turn_leaves_what_is_before_reusable(make: Make) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    flush(world)
    req = ask(world, image_item(0, SPAN), image_item(1, (18, 20)))
    assert tiers(req) == {"host": 4 * PAGE}


def without_carrier(item: Any) -> None:
    item.model_specific_data.clear()


def of_another_content(item: Any) -> None:
    item.model_specific_data[CARRIER] = bytes(32)


def without_identity(item: Any) -> None:
    item.identity = None


def with_other_numbers(item: Any) -> None:
    item.padding_values = lambda: pads_of(7)


def without_place(item: Any) -> None:
    item.offsets = None


@pytest.mark.parametrize(
    "forge",
    [without_carrier, of_another_content, without_identity, with_other_numbers, without_place],
)
def test_an_image_that_is_not_proved_is_neither_saved_nor_loaded(
    make: Make, forge: Callable[[Any], None]
) -> None:
    world = make()
    ask(world, image_item(0, SPAN))
    flush(world)
    saved = count(world, "saved_pages")
    item = image_item(1, SPAN)
    req = world.make(TEXT, [item], named=False)
    forge(item)
    world.cache.media.arrived(req)
    item.offsets = [SPAN]
    world.run_to_end(req)
    assert not tiers(req)
    assert count(world, "saved_pages") == saved
    assert count(world, "unnamed_image_requests") == 1


def test_the_name_of_an_image_needs_the_servers_secret(make: Make) -> None:
    world = make()
    req = ask(world, image_item(0, SPAN, secret="another"))
    flush(world)
    again = ask(world, image_item(0, SPAN, secret="another"))
    assert images_of(req) == images_of(again) == ()
    assert not tiers(again)


def test_positions_that_do_not_follow_from_the_images_are_not_stored(make: Make) -> None:
    world = make()
    req = world.make(TEXT, [image_item(0, SPAN)], named=False)
    req.multimodal_inputs.mrope_positions = req.multimodal_inputs.mrope_positions + 1
    world.cache.media.arrived(req)
    assert images_of(req) == ()
    req.multimodal_inputs.mrope_positions = None
    other = world.make(TEXT, [image_item(0, SPAN)], named=False)
    other.multimodal_inputs.mrope_positions = None
    world.cache.media.arrived(other)
    assert images_of(other) == ()


def test_models_whose_tokens_lie_where_the_prompt_has_them(make: Make) -> None:
    """Positions on axes are then of another model, and a prompt may end with an image."""
    world = make()
    world.cache.media.begin(scheduler("InternVLChatModel"), keeps=PLAIN)
    assert images_of(world.make(TEXT, [image_item(0, SPAN)])) == ()
    world.has_axes = False
    rows = image_item(0, (5, 8), (10, 13), (15, 16))
    ask(world, rows)
    world.only_on_disk()
    assert tiers(ask(world, rows)) == {"disk": WHOLE}
    flush(world)
    assert sum(tiers(ask(world, image_item(0, (5, 8), (10, 16)))).values()) == NUM_BEFORE
    assert images_of(world.make(TEXT, [image_item(1, (5, len(TEXT) - 1))]))


@pytest.mark.parametrize("delta", [None, torch.ones(1, 1), torch.zeros(1, 2)])
def test_positions_behind_the_prompt_must_follow_from_it(make: Make, delta: Any) -> None:
    """What is generated is stored, too, and is to lie where it would in a longer prompt."""
    world = make()
    req = world.make(TEXT, [image_item(0, SPAN)], named=False)
    req.multimodal_inputs.mrope_position_delta = delta
    world.cache.media.arrived(req)
    assert images_of(req) == ()


def test_a_prompt_that_ends_with_an_image_is_not_named(make: Make) -> None:
    """SGLang puts what a retracted one generated behind the first axis of its last token."""
    world = make()
    assert images_of(world.make(TEXT, [image_item(0, (5, len(TEXT) - 2))]))
    assert images_of(world.make(TEXT, [image_item(1, (5, len(TEXT) - 1))])) == ()


def test_tokens_that_stand_for_images_without_any_are_not_stored(make: Make) -> None:
    """A client's own numbers, or a session's turn of text behind one with an image."""
    world = make()
    ask(world, image_item(0, SPAN))
    flush(world)
    req = world.make(TEXT, [image_item(0, SPAN)], named=False)
    req.items, req.multimodal_inputs = (), None
    world.cache.media.made(req)
    assert images_of(req) == ()
    assert world.cache.space_of(req) is None
    text = world.make(TEXT, [])
    assert images_of(text) is None
    assert world.cache.space_of(text) is not None


def test_a_number_of_an_image_where_none_lies_is_seen(make: Make) -> None:
    """One of them shifts the images of all requests that are computed with it."""
    world = make()
    media = world.cache.media
    assert media.placeholders_match(world.make(TEXT, []))
    for spans in ((SPAN,), ((5, 9), (12, 14))):
        item = image_item(0, *spans)
        assert media.placeholders_match(world.make(TEXT, [item]))
        more, less, others = (world.make(TEXT, [item]) for _ in range(3))
        more.tokens[2] = pads_of(0)[0]
        less.tokens[spans[-1][1]] = 7
        others.tokens[spans[0][0]] = pads_of(1)[0]
        for req in (more, less, others):
            assert not media.placeholders_match(req)
            media.arrived(req)
            assert not images_of(req)
    cut = world.make(TEXT, [image_item(0, SPAN), image_item(1, (18, 20))])
    del cut.tokens[10:]
    assert media.placeholders_match(cut), "as SGLang cuts a prompt that is too long"
    media.end("weights changed")
    assert media.placeholders_match(more), "nothing of images is stored any more"


def test_each_kind_of_item_has_numbers_of_its_own_in_place(make: Make) -> None:
    world = make()
    picture, film = image_item(0, (5, 9)), image_item(1, (12, 16))
    picture.modality, film.modality = "image", "video"
    req = world.make(TEXT, [picture, film])
    assert world.cache.media.placeholders_match(req)
    picture.offsets, film.offsets = film.offsets, picture.offsets
    assert not world.cache.media.placeholders_match(req)


def test_images_of_which_nobody_says_where_they_lie_are_served(make: Make) -> None:
    world = make()
    item = image_item(0, SPAN)
    req = world.make(TEXT, [item])
    item.offsets = None
    assert world.cache.media.placeholders_match(req)


def test_a_request_that_lost_its_images_stays_what_it_was(make: Make) -> None:
    world = make()
    named, unnamed = (world.make(TEXT, [image_item(0, SPAN)]) for _ in range(2))
    unknown = world.make(TEXT, [image_item(0, SPAN)], named=False)
    assert world.cache.space_of(unknown) is None
    unnamed.items[0].identity = None
    unnamed._hier_kv_images = None  # type: ignore[attr-defined]
    world.cache.media.arrived(unnamed)
    for req in (named, unnamed):
        req.multimodal_inputs = None  # as SGLang does when it ended
    assert world.cache.space_of(named) is not None
    assert world.cache.space_of(unnamed) is None


def test_a_turn_of_a_session_with_images_is_not_named(make: Make) -> None:
    world = make()
    req = world.make(TEXT, [image_item(0, SPAN)], named=False)
    req.session = SimpleNamespace(session_id="s", streaming=False)  # type: ignore[assignment]
    world.cache.media.arrived(req)
    assert images_of(req) == ()


def test_nobody_goes_on_from_a_turn_behind_what_was_cut_of_its_session(make: Make) -> None:
    """SGLang puts its text where the images lay that were cut away."""
    world = make()
    session = SimpleNamespace(session_id="s", streaming=False)
    for offset in (4, None):  # the next turn has the positions, too
        turn = world.make(TEXT, [], named=False)
        turn.session = session  # type: ignore[assignment]
        world.cache.media.made(turn, SimpleNamespace(offset=offset))
        turn.multimodal_inputs = SimpleNamespace(mm_items=[image_item(0, SPAN)])
        world.run_to_end(turn)
        assert not tiers(turn)
    assert not tiers(ask(world))
    assert tiers(ask(world)) == {"device": WHOLE}


def test_after_a_change_of_weights_images_are_not_named(make: Make) -> None:
    """SGLang's cache of what its encoder made of images outlives the encoder's weights."""
    world = make()
    ask(world, image_item(0, SPAN))
    waiting = world.make(TEXT, [image_item(1, SPAN)])
    assert world.cache.space_of(waiting) is not None
    world.cache.weights_change()
    assert world.cache.space_of(waiting) is None, "it came before"
    flush(world)
    assert not tiers(ask(world, image_item(0, SPAN)))
    assert sum(tiers(world.run_to_end(world.make(TEXT, []))).values()) == NUM_BEFORE


@pytest.mark.parametrize(
    "options",
    [
        {"enable_lora": True}, {"lora_paths": ["x"]}, {"speculative_algorithm": "EAGLE"},
        {"disaggregation_mode": "prefill"}, {"pp_size": 2},
        {"tp_size": 2, "attn_dp_size": 2},
        {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        {"nnodes": 2}, {"enable_mm_global_cache": True}, {"tokenizer_worker_num": 2},
        {"rl_on_policy_target": "fsdp"},
    ],
    ids=str,
)  # fmt: skip
def test_servers_on_which_images_are_not_named(make: Make, options: dict[str, Any]) -> None:
    world = make()
    world.cache.media.begin(scheduler(**options), keeps=PLAIN)
    assert images_of(world.make(TEXT, [image_item(0, SPAN)])) == ()


@pytest.mark.parametrize("options", [{"dp_size": 2}, {"tp_size": 2}], ids=str)
def test_servers_of_several_ranks_on_which_images_are_named(
    make: Make, options: dict[str, Any]
) -> None:
    world = make()
    world.cache.media.begin(scheduler(**options), keeps=PLAIN)
    assert images_of(world.make(TEXT, [image_item(0, SPAN)]))


def test_models_of_which_images_are_not_named(make: Make) -> None:
    world = make()
    world.cache.media.begin(scheduler(), keeps="windows")
    assert images_of(world.make(TEXT, [image_item(0, SPAN)])) == ()
    other = scheduler()
    other.model_config.hf_config.architectures = ["Gemma3ForConditionalGeneration"]
    world.cache.media.begin(other, keeps=PLAIN)
    assert images_of(world.make(TEXT, [image_item(0, SPAN)])) == ()


def test_a_tree_in_rust_does_not_know_images(make: Make) -> None:
    world = make(core="rust")
    req = ask(world, image_item(0, SPAN))
    assert images_of(req) == ()
    flush(world)
    assert not tiers(ask(world, image_item(0, SPAN)))
