"""Where a model with window layers can go on, against what its layers read, token by token."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from sglang_ext.device.layout import LayerGroups, PageLayout
from sglang_ext.device.windows.window_layers import group_hashes, resume_length
from tests.long_form import count

NUM_CASES = count(1000, 10000)
_RNG = random.Random(11)


def readable(full: list[bool], window: list[bool], page: int, width: int, end: int) -> bool:
    """Whether the first token behind `end` pages, and all after it, find every key they read.

    A token reads itself and `width` tokens before it in a window layer, all in a full one.
    """
    first = end * page
    read_by_full = range(first)
    read_by_window = range(max(0, first - width), first)
    return all(full[token // page] for token in read_by_full) and all(
        window[token // page] for token in read_by_window
    )


def test_the_longest_prefix_is_that_of_a_model_that_reads_token_by_token() -> None:
    for case in range(NUM_CASES):
        num, page, width = _RNG.randint(0, 24), _RNG.choice((2, 4)), _RNG.randint(1, 20)
        share = _RNG.choice((0.5, 0.8, 0.95, 1.0))
        full = [_RNG.random() < max(share, 0.9) for _ in range(num)]
        window = [_RNG.random() < share for _ in range(num)]
        ends = [end for end in range(num + 1) if readable(full, window, page, width, end)]
        found = resume_length(np.array(full, bool), np.array(window, bool), -(-width // page))
        assert found == max(ends), (case, full, window, page, width)


@pytest.mark.parametrize(
    ("num_full", "num_window"), [*itertools.product((1, 2, 3, 5), (1, 2, 5, 6))]
)
def test_every_layer_is_in_a_group_and_every_group_is_full(num_full: int, num_window: int) -> None:
    layers = list(range(num_full + num_window))
    _RNG.shuffle(layers)
    groups = LayerGroups(tuple(layers[:num_full]), tuple(layers[num_full:]))
    assert {len(part) for part in groups.model_layers} == {num_full}
    assert sorted({layer for part in groups.model_layers for layer in part}) == sorted(layers)
    assert len(groups.groups) == -(-num_window // num_full)


def test_keys_of_parts_are_those_of_no_other_page_or_part() -> None:
    hashes = np.frombuffer(_RNG.randbytes(32 * 50), np.uint8).reshape(-1, 32)
    keys = np.concatenate([hashes, *(group_hashes(hashes, group) for group in range(7))])
    assert len(np.unique(keys, axis=0)) == len(keys)
    assert (group_hashes(group_hashes(hashes, 3), 3) == hashes).all()


def test_keys_of_parts_are_what_they_were() -> None:
    """They are on disk: other keys would be another format."""
    hashes = np.arange(32, dtype=np.uint8)[None]
    found = [group_hashes(hashes, group)[0].tobytes().hex()[:16] for group in (0, 1, 10)]
    assert found == ["9be90b6fc9ff8970", "b7a79aa02b7c0c0c", "75f78c34d638abb2"]


# Full layers, window layers, heads of K and V, values of one, tokens of a window; and how many
# times the bytes that its layers need a prompt takes on one of 1, 2, 4 and 8 ranks, with pages of
# 64 tokens and with pages of 16.
PUBLISHED: dict[str, tuple[tuple[int, int, int, int, int], dict[int, list[float]]]] = {
    "gpt-oss-20b": (
        (12, 12, 8, 64, 128),
        {64: [1.010, 1.010, 1.010, 1.021], 16: [1.010, 1.021, 1.042, 1.083]},
    ),
    "gpt-oss-120b": (
        (18, 18, 8, 64, 128),
        {64: [1.009, 1.010, 1.014, 1.014], 16: [1.014, 1.014, 1.028, 1.056]},
    ),
    "mellum2-12b": (
        (7, 21, 4, 128, 1024),
        {64: [1.009, 1.018, 1.018, 1.018], 16: [1.018, 1.036, 1.071, 1.071]},
    ),
    "four and twenty-two": (
        (4, 22, 1, 256, 512),
        {64: [1.053] * 4, 16: [1.102] * 4},
    ),
}


@pytest.mark.parametrize("page", [64, 16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_prompt_takes_the_bytes_that_its_layers_need(name: str, page: int) -> None:
    """A prompt of 4,096 tokens in bfloat16 that is resumed at its end, with headers and all."""
    (full, window, heads, dim, width), printed = PUBLISHED[name]
    groups = LayerGroups(tuple(range(full)), tuple(range(full, full + window)))
    num_tokens, num_window, taken = 4096, -(-width // page), []
    for num_ranks in (1, 2, 4, 8):
        row = max(1, heads // num_ranks) * dim * 2
        layout = PageLayout(page, (row,) * full, (row,) * full, 2)
        num_pages = num_tokens // page + len(groups.groups) * num_window
        needed = 2 * row * (num_tokens * full + num_window * page * window)
        taken.append(num_pages * layout.slot_bytes / needed)
    assert taken == pytest.approx(printed[page], abs=6e-4)
