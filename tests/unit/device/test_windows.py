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


@pytest.mark.parametrize(
    ("full", "window", "heads", "dim", "width", "most"),
    [(12, 12, 8, 64, 128, 1.02), (7, 21, 4, 128, 1024, 1.02), (4, 22, 1, 256, 512, 1.06)],
    ids=["gpt-oss-20b", "mellum2-12b", "four and twenty-two"],
)
def test_a_prompt_takes_the_bytes_that_its_layers_need(
    full: int, window: int, heads: int, dim: int, width: int, most: float
) -> None:
    """A prompt of 4,096 tokens in bfloat16 that is resumed at its end, with headers and all."""
    page, num_tokens, row = 64, 4096, heads * dim * 2
    groups = LayerGroups(tuple(range(full)), tuple(range(full, full + window)))
    layout = PageLayout(page, (row,) * full, (row,) * full, 2)
    num_window = -(-width // page)
    num_pages = num_tokens // page + len(groups.groups) * num_window
    needed = 2 * row * (num_tokens * full + num_window * page * window)
    assert num_pages * layout.slot_bytes <= most * needed
