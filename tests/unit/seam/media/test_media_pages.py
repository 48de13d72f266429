"""SGLang's page hashes with images in them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache import utils  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from sglang_ext.identity.media import FIRST_PAD, Media, note_images, page_digest  # noqa: E402
from sglang_ext.seam.media.page_digests import (  # noqa: E402
    HashMemo,
    install_page_digests,
    naming,
)

PAGE = 4
PADS = tuple(FIRST_PAD + (1 << 40) + n for n in range(4))
OTHER = tuple(FIRST_PAD + (1 << 50) + n for n in range(4))
A, B = b"a" * 32, b"b" * 32


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(utils, "get_native_hash", utils.get_native_hash)  # put back behind the test
    install_page_digests()


def image(length: int, pads: tuple[int, ...] = PADS) -> list[int]:
    return [pads[at % len(pads)] for at in range(length)]


def hashes(
    tokens: list[int],
    prior: str | None = None,
    extra_key: str | None = None,
    of_pairs: bool = False,
) -> list[str]:
    key = RadixKey(array("q", tokens), extra_key, is_bigram=of_pairs)
    return list(utils.get_storage_hash_str(key, prior, page_size=PAGE))


@contextmanager
def images(*known: Media) -> Iterator[None]:
    """Pages are those of a request with these images."""
    req = SimpleNamespace()
    note_images(req, known)
    with naming.pages_of(req):
        yield


def of(binding: bytes, tokens: list[int], pads: tuple[int, ...] = PADS) -> list[str]:
    """Hashes for a request with that image."""
    with images(Media(pads, binding)):
        return hashes(tokens)


def test_images_with_equal_numbers_share_the_pages_before_them_and_none_else() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, *image(6), 8, 9, 10, 11, 12, 13, 14]
    a, b = of(A, tokens), of(B, tokens)
    assert a[0] == b[0]
    assert not set(a[1:]) & set(b[1:]), "one token of the image lies in the page"
    assert a == of(A, tokens)


def test_text_is_hashed_as_ever_with_images_around_and_without() -> None:
    tokens = list(range(1, 20))
    before = hashes(tokens, extra_key="who")
    with images(Media(PADS, A)):
        assert hashes(tokens, extra_key="who") == before
        assert hashes([*tokens[:8], *image(4)])[:2] == hashes(tokens)[:2]


@pytest.mark.parametrize("start", range(9))
@pytest.mark.parametrize("length", [1, 2, 4, 5, 11])
def test_an_image_changes_every_page_that_it_lies_in_or_before(start: int, length: int) -> None:
    tokens = [*range(1, start + 1), *image(length), *range(30, 40)]
    num_pages = len(tokens) // PAGE
    plain, a = hashes(tokens[: num_pages * PAGE]), of(A, tokens[: num_pages * PAGE])
    first = start // PAGE
    assert a[:first] == plain[:first]
    assert not set(a[first:]) & set(plain[first:])
    expected, prior = [], None
    for page in range(num_pages):
        part = tokens[page * PAGE : (page + 1) * PAGE]
        count = sum(token >= FIRST_PAD for token in part)
        found = bytes.fromhex(hashes([min(token, FIRST_PAD) for token in part], prior)[0])
        if count:
            found = page_digest(found, [(A, count)])
        expected.append(found.hex())
        prior = found.hex()
    assert a == expected


def test_the_order_of_images_counts_and_where_they_lie() -> None:
    with images(Media(PADS, A), Media(OTHER, B)):
        names = [
            hashes([1, *image(2), 2, *image(2, OTHER), 3, 4]),
            hashes([1, *image(2, OTHER), 2, *image(2), 3, 4]),
            hashes([1, 2, *image(2), *image(2, OTHER), 3, 4]),
            hashes([1, *image(3), *image(2, OTHER), 3, 4]),
        ]
    assert len({name for found in names for name in found}) == 8


def test_a_chain_goes_on_from_where_a_node_ends() -> None:
    tokens = [1, 2, *image(9), 3, 4, 5, 6, 7]
    with images(Media(PADS, A)):
        whole = hashes(tokens)
        for page in range(1, len(whole)):
            rest = hashes(tokens[page * PAGE :], whole[page - 1])
            assert rest == whole[page:]
        assert utils.get_hash_str(array("q", tokens[:PAGE]), None) == whole[0], "one page, no list"


def test_which_numbers_stand_for_an_image_is_not_in_a_page() -> None:
    """Another server's are others."""
    ours = of(A, [1, *image(6), 2, 3, 4])
    assert of(A, [1, *image(6, OTHER), 2, 3, 4], OTHER)[: len(ours)] == ours


@pytest.mark.parametrize("start", range(1, 9))
def test_a_page_of_pairs_is_named_by_the_image_behind_it_too(start: int) -> None:
    """As its draft's last row may have seen that."""
    tokens = [*range(1, start + 1), *image(6), *range(30, 40)]
    plain = hashes(tokens, of_pairs=True)
    found = []
    for binding in (A, B):
        with images(Media(PADS, binding)):
            found.append(hashes(tokens, of_pairs=True))
            for page in range(1, len(plain)):
                assert (
                    hashes(tokens[page * PAGE :], found[-1][page - 1], of_pairs=True)
                    == (found[-1][page:])
                )
            assert hashes(tokens)[0] != found[-1][0], "names of tokens are others"
    first = (start - 1) // PAGE  # of which the image is the last pair's second half
    assert found[0][:first] == found[1][:first] == plain[:first]
    assert not set(found[0][first:]) & {*found[1][first:], *plain[first:]}


def test_which_numbers_stand_for_an_image_is_not_in_a_page_of_pairs() -> None:
    tokens = [[1, 2, 3, *image(6, pads), 2, 3, 4] for pads in (PADS, OTHER)]
    with images(Media(PADS, A)):
        ours = hashes(tokens[0], of_pairs=True)
    with images(Media(OTHER, A)):
        assert hashes(tokens[1], of_pairs=True)[:2] == ours[:2]


def test_numbers_of_no_known_image_are_hashed_as_tokens() -> None:
    tokens = [1, *image(3, OTHER), 2, 3, 4, 5]
    assert of(A, tokens) == hashes(tokens)


def test_images_of_other_requests_are_known_to_nobody_else() -> None:
    tokens = [1, *image(3), 2, 3, 4, 5]
    plain = hashes(tokens)
    text = SimpleNamespace()
    with images(Media(PADS, A)):
        own = hashes(tokens)
        with naming.pages_of(text):
            assert hashes(tokens) == plain
        with images(Media(PADS, B)):
            assert hashes(tokens) == of(B, tokens) != own
        assert hashes(tokens) == own
    assert hashes(tokens) == plain


def test_hashes_are_remembered_of_so_many_pages_and_no_more() -> None:
    """However long the prompts are."""
    memo = HashMemo(most_pages=20)
    for name in range(50):
        memo.put(bytes([name]), ["h"] * (name % 13))
        memo.get(bytes([max(0, name - 2)]))
        assert memo.num_pages <= 20
    memo.put(b"long", ["h"] * 100)
    assert memo.num_pages == 0
    memo.put(b"a", ["h"])
    memo.put(b"b", ["h"])
    assert memo.get(b"a") == ["h"]
    memo.put(b"c", ["h"] * 16)
    assert memo.get(b"b") is None, "it was not asked for since"
    assert memo.get(b"a") == ["h"]


@settings(max_examples=60)
@given(
    tokens=st.lists(st.sampled_from([1, 2, *PADS[:2], *OTHER[:2]]), max_size=40),
    cut=st.integers(0, 9),
    of_pairs=st.booleans(),
)
def test_hashes_name_tokens_and_images_and_nothing_else(
    tokens: list[int], cut: int, of_pairs: bool
) -> None:
    """What a page is named by can be told from its tokens and the images that they stand for."""
    names: dict[str, Any] = {}
    for first, second in ((A, B), (B, A), (A, b"c" * 32)):
        both = Media(PADS[:2], first), Media(OTHER[:2], second)
        with images(*both):
            found = hashes(tokens, of_pairs=of_pairs)
        said = [first if t in PADS else second if t in OTHER else None for t in tokens]
        for page, name in enumerate(found):
            end = (page + 1) * PAGE + of_pairs
            meaning = [
                token if image is None else image
                for token, image in zip(tokens[:end], said[:end], strict=True)
            ]
            assert names.setdefault(name, meaning) == meaning
        at = min(cut, len(found))
        if at:
            with images(*both):
                rest = hashes(tokens[at * PAGE :], found[at - 1], of_pairs=of_pairs)
                assert found[at:] == rest
    assert hashlib.sha256().digest() not in map(bytes.fromhex, names)
