"""Digests of images, what of a prompt they say, and which of them tokens stand for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.identity.media import (
    CARRIER,
    FIRST_PAD,
    Item,
    Media,
    Naming,
    UnknownContentError,
    are_told_apart,
    bindings,
    content_digest,
    images_of,
    images_of_tokens,
    keyed_identity,
    note_images,
    page_digest,
)

PADS = tuple(FIRST_PAD + 10 * n for n in range(1, 5))
OTHER = tuple(FIRST_PAD + 10 * n for n in range(5, 9))


def item(content: str, *spans: tuple[int, int], pads: tuple[int, ...] = PADS) -> Item:
    return Item(content.encode().ljust(32), spans, pads)


def prompt(length: int, *items: Item) -> Any:
    tokens = np.arange(length, dtype=np.int64)
    for each in items:
        for first, last in each.spans:
            tokens[first : last + 1] = np.resize(np.array(each.pads), last - first + 1)
    return tokens


def axes(length: int, *grids: tuple[int, int, int]) -> Any:
    """Positions as Qwen's: of images (first token, height, width)."""
    found, position, at = np.zeros((3, length), np.int64), 0, 0
    for first, height, width in grids:
        found[:, at:first] = np.arange(position, position + first - at)
        position += first - at
        end = first + height * width
        found[0, first:end] = position
        found[1, first:end] = position + np.repeat(np.arange(height), width)
        found[2, first:end] = position + np.tile(np.arange(width), height)
        position, at = position + max(height, width), end
    found[:, at:] = np.arange(position, position + length - at)
    return found


# ---- content ----


def test_every_byte_and_every_detail_of_an_image_is_in_its_digest() -> None:
    feature = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    grid = {"image_grid_thw": torch.tensor([[1, 2, 2]])}
    last = feature.clone()
    last[3, 5] += 1e-5
    digests = {
        content_digest("IMAGE", feature, grid),
        content_digest("VIDEO", feature, grid),
        content_digest("IMAGE", last, grid),
        content_digest("IMAGE", feature.reshape(6, 4), grid),
        content_digest("IMAGE", feature.view(torch.int32), grid),
        content_digest("IMAGE", [feature], grid),
        content_digest("IMAGE", [feature[:2], feature[2:]], grid),
        content_digest("IMAGE", feature.numpy(), grid),
        content_digest("IMAGE", feature, {"image_grid_thw": torch.tensor([[1, 4, 1]])}),
        content_digest("IMAGE", feature, {**grid, "second_per_grid_ts": 0.5}),
        content_digest("IMAGE", feature, {**grid, "second_per_grid_ts": 1.0}),
        content_digest("IMAGE", feature, {**grid, "second_per_grid_ts": 1}),
        content_digest("IMAGE", feature, {}),
        content_digest("IMAGE", None, grid),
    }
    assert len(digests) == 14
    assert {len(digest) for digest in digests} == {32}


def test_how_an_image_lies_in_memory_and_what_it_carried_is_not_in_its_digest() -> None:
    feature = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    digest = content_digest("IMAGE", feature, {"a": 1, "b": 2})
    across = feature.t().contiguous().t()
    assert not across.is_contiguous()
    assert content_digest("IMAGE", across, {"b": 2, "a": 1}) == digest
    assert content_digest("IMAGE", feature, {"a": 1, "b": 2, CARRIER: b"forged"}) == digest


@pytest.mark.parametrize(
    "value",
    [object(), torch.zeros(2, device="meta"), {1: 2}, np.array([object()]), [{"a": object()}]],
)
def test_no_digest_is_taken_of_what_is_not_understood(value: Any) -> None:
    with pytest.raises(UnknownContentError):
        content_digest("IMAGE", value, {})
    with pytest.raises(UnknownContentError):
        content_digest("IMAGE", None, {"detail": value})


@pytest.mark.gpu
def test_where_an_image_lies_is_not_in_its_digest() -> None:
    feature = torch.arange(4096, dtype=torch.float32).reshape(64, 64)
    on_device = feature.cuda().T
    assert content_digest("IMAGE", on_device, {}) == content_digest("IMAGE", feature.T, {})


def test_a_name_inside_a_server_needs_its_secret() -> None:
    assert keyed_identity("a", b"1" * 32) == keyed_identity("a", b"1" * 32)
    assert keyed_identity("a", b"1" * 32) != keyed_identity("b", b"1" * 32)
    assert keyed_identity("a", b"1" * 32) != keyed_identity("a", b"2" * 32)


# ---- where images lie ----


def test_a_binding_says_content_extent_and_layout() -> None:
    tall, wide = axes(40, (10, 4, 2)), axes(40, (10, 2, 4))
    one = item("a", (10, 17))

    def of(each: Item, where: Any, facts: str = "m") -> list[bytes] | None:
        return bindings([each], prompt(40, each), where, facts)

    found = [
        of(one, tall),
        of(one, wide),
        of(one, None),
        of(one, tall, "another model"),
        of(item("b", (10, 17)), tall),
        of(item("a", (10, 17), (20, 20)), None),
        of(item("a", (10, 16)), None),
    ]
    assert None not in found
    assert len({each[0] for each in found if each is not None}) == len(found)


def test_a_binding_does_not_say_where_in_the_prompt_an_image_lies() -> None:
    """The page's place in the chain says that."""
    first, later = item("a", (10, 17)), item("a", (31, 38))
    assert bindings([first], prompt(40, first), axes(40, (10, 4, 2)), "m") == bindings(
        [later], prompt(50, later), axes(50, (31, 4, 2)), "m"
    )


def test_images_of_a_later_turn_leave_those_before_as_they_were() -> None:
    first, second = item("a", (10, 17)), item("b", (20, 25), pads=OTHER)
    alone = bindings([first], prompt(18, first), axes(18, (10, 4, 2)), "m")
    both = bindings(
        [first, second], prompt(40, first, second), axes(40, (10, 4, 2), (20, 2, 3)), "m"
    )
    assert alone is not None
    assert both is not None
    assert both[0] == alone[0] != both[1]


@pytest.mark.parametrize(
    "spans",
    [(), ((10, 9),), ((12, 17), (10, 11)), ((10, 17), (17, 18)), ((35, 40),), ((-1, 3),)],
    ids=["none", "empty", "out of order", "overlapping", "behind the end", "before the start"],
)
def test_spans_that_cannot_be_are_not_named(spans: tuple[tuple[int, int], ...]) -> None:
    each = item("a", *spans)
    tokens = prompt(40, item("a", (10, 17)))
    assert bindings([each], tokens, None, "m") is None


def test_images_must_lie_one_behind_the_other() -> None:
    """Of two equal ones whose rows alternate, nothing says which row is whose."""
    in_turn = [item("a", (2, 3), (5, 6)), item("a", (8, 9), (11, 12))]
    assert bindings(in_turn, prompt(20, *in_turn), None, "m") is not None
    mixed = [item("a", (2, 3), (8, 9)), item("a", (5, 6), (11, 12))]
    assert bindings(mixed, prompt(20, *mixed), None, "m") is None


def test_items_must_stand_for_exactly_the_tokens_that_are_no_text() -> None:
    one = item("a", (10, 17))
    assert bindings([one], prompt(40, one), None, "m") is not None
    for at, token in ((17, 5), (18, PADS[0]), (30, FIRST_PAD), (12, PADS[0])):
        tokens = prompt(40, one)
        tokens[at] = token
        assert bindings([one], tokens, None, "m") is None, at
    other = replace(one, pads=OTHER)
    assert bindings([one, other], prompt(40, one), None, "m") is None


@pytest.mark.parametrize("at", [0, 9, 18, 39])
def test_positions_of_text_must_follow_from_what_is_before(at: int) -> None:
    one, where = item("a", (10, 17)), axes(40, (10, 4, 2))
    assert bindings([one], prompt(40, one), where, "m") is not None
    where[1, at] += 1
    assert bindings([one], prompt(40, one), where, "m") is None
    assert bindings([one], prompt(40, one), axes(39, (10, 4, 2)), "m") is None
    assert bindings([one], prompt(40, one), where[0], "m") is None


def test_text_behind_an_image_must_begin_behind_its_furthest_position() -> None:
    one, where = item("a", (10, 17)), axes(40, (10, 4, 2))
    where[:, 18:] += 1
    assert bindings([one], prompt(40, one), where, "m") is None


# ---- the images of a request ----


def test_a_number_stands_for_one_image_of_a_request() -> None:
    first = Media(PADS, b"a" * 32)
    assert are_told_apart([])
    assert are_told_apart([first, first, Media(OTHER, b"b" * 32)])
    assert not are_told_apart([first, Media(PADS, b"b" * 32)])
    assert not are_told_apart([first, Media((*OTHER[:3], PADS[0]), b"b" * 32)]), "one is enough"


def test_tokens_are_told_apart_by_the_images_that_they_stand_for() -> None:
    both = [Media(PADS, b"a" * 32), Media(OTHER, b"b" * 32)]
    tokens = np.array([5, *PADS, *PADS[:2], 7, *OTHER, *PADS, FIRST_PAD, 3])
    which, images = images_of_tokens(tokens, both)
    assert [images[index] if index >= 0 else None for index in which] == [
        None, *[b"a" * 32] * 6, None, *[b"b" * 32] * 4, *[b"a" * 32] * 4, None, None,
    ]  # fmt: skip
    which, images = images_of_tokens(np.arange(5), both)
    assert not images
    assert (which == -1).all()


def test_images_in_another_order_than_the_prompts_are_not_named() -> None:
    """SGLang would lay the second one's rows over the tokens of the first."""
    first, second = item("a", (3, 8)), item("b", (12, 15))
    tokens = prompt(40, first, second)
    assert bindings([first, second], tokens, None, "m") is not None
    assert bindings([second, first], tokens, None, "m") is None


def test_a_pages_digest_depends_on_its_images_their_order_and_their_extent() -> None:
    plain, a, b = b"p" * 32, b"a" * 32, b"b" * 32
    runs = [[(a, 1)], [(b, 1)], [(a, 1), (b, 1)], [(b, 1), (a, 1)], [(a, 2)], [(a, 1), (a, 1)]]
    names = {page_digest(text, each) for text in (plain, b"q" * 32) for each in runs}
    assert len(names) == 12
    assert plain not in names


def test_pages_are_named_by_the_images_of_one_request_on_each_thread() -> None:
    """Ranks of one process, as in the tests' worlds, hash at once, and end in any order."""
    naming = Naming()
    with_images, text = SimpleNamespace(), SimpleNamespace()
    note_images(with_images, (Media(PADS, b"a" * 32),))
    began, end = threading.Event(), threading.Event()

    def insert() -> tuple[Media, ...]:
        with naming.pages_of(text):
            began.set()
            assert end.wait(300)
            return naming.images

    assert naming.images == ()
    with naming.pages_of(with_images), ThreadPoolExecutor(1) as pool:
        hidden = pool.submit(insert)
        assert began.wait(300)
        assert naming.images == images_of(with_images)
        with naming.pages_of(text):
            assert naming.images == ()
        end.set()
        assert hidden.result() == ()
        assert naming.images == images_of(with_images)
        note_images(with_images, ())
        assert naming.images == (), "it turned out that nothing of it may be named"
    assert naming.images == ()
