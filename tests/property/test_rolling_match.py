"""The matcher against every place compared with every page, while pages come and go."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.truncation.rolling import MatchIndex, TextMatch
from sglang_ext.truncation.rolling_kernels import MAX_SAME
from sglang_ext.truncation.rolling_naive import StoredPage, longest_run

_GROUPS = (3, 4)


def _check(
    index: MatchIndex, pages: dict[int, StoredPage], prompt: list[int], run: TextMatch
) -> None:
    """The run is what it says it is, token by token."""
    text = [token for row in run.rows for token in pages[int(row)].tokens]
    stored = text[run.offset : run.offset + run.length]
    assert prompt[run.start : run.start + run.length] == stored
    assert len(stored) == run.length
    assert 0 <= run.offset < index.page_size
    for row, following in zip(run.rows[:-1], run.rows[1:], strict=True):
        assert pages[int(following)].parent == int(row)
    assert (run.offset + run.length - 1) // index.page_size == len(run.rows) - 1


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_it_finds_what_brute_force_finds(data: st.DataObject) -> None:
    page_size = data.draw(st.integers(1, 4))
    window = data.draw(st.integers(1, page_size))
    index = MatchIndex(page_size, 24, window=window, seed=data.draw(st.integers(0, 9)))
    alphabet = data.draw(st.sampled_from([1, 2, 5]))
    token = st.integers(0, alphabet)
    pages: dict[int, StoredPage] = {}
    for _ in range(data.draw(st.integers(1, 12))):
        if pages and data.draw(st.integers(0, 3)) == 0:
            gone = data.draw(st.sampled_from(sorted(pages)))
            index.remove(gone)
            del pages[gone]
            for row, page in pages.items():
                if page.parent == gone:
                    pages[row] = StoredPage(page.group, page.tokens, None)
        else:
            parent = data.draw(st.sampled_from([None, *sorted(pages)]))
            group = (
                pages[parent].group if parent is not None else data.draw(st.sampled_from(_GROUPS))
            )
            size = page_size * data.draw(st.integers(1, 3))
            text = data.draw(st.lists(token, min_size=size, max_size=size))
            rows = index.insert_chain(group, text, -1 if parent is None else parent)
            for at, row in enumerate(rows):
                own = tuple(text[at * page_size : (at + 1) * page_size])
                pages[int(row)] = StoredPage(group, own, parent)
                parent = int(row)
        assert len(index) == len(pages)
    prompt = data.draw(st.lists(token, max_size=24))
    pieces = st.sampled_from([page.tokens for page in pages.values()] or [(0,)])
    for piece in data.draw(st.lists(pieces, max_size=5)):
        prompt += piece
    start = data.draw(st.integers(0, len(prompt)))
    for group in _GROUPS:
        run = index.find(prompt, group, start=start)
        wanted = longest_run(prompt[start:], group, pages)
        if run is not None:
            _check(index, pages, prompt, run)
            assert run.start >= start
            assert {pages[int(row)].group for row in run.rows} == {group}
        found = run.length if run else 0
        starts = Counter(page.tokens[:window] for page in pages.values() if page.group == group)
        if max(starts.values(), default=0) <= MAX_SAME:
            assert found == wanted
        else:
            assert found <= wanted
        assert index.find(prompt, group, start=start, min_run=wanted + 1) is None


@pytest.mark.parametrize("seed", range(6))
def test_an_edited_conversation_is_found_up_to_its_edits(seed: int) -> None:
    rng = np.random.default_rng(seed)
    index = MatchIndex(16, 400)
    chats = [rng.integers(0, 5000, 16 * 30, dtype=np.int32) for _ in range(12)]
    for chat in chats:
        index.insert_chain(9, chat)
    for chat in chats:
        cut, end = int(rng.integers(0, 200)), int(rng.integers(300, 480))
        head, new = rng.integers(0, 5000, 33), rng.integers(0, 5000, 50)
        prompt = np.concatenate([head, chat[cut:end], new]).astype(np.int32)
        run = index.find(prompt, 9, start=33, min_run=32)
        assert run is not None
        assert (run.start, run.length, run.offset) == (33, end - cut, cut % 16)
        edit = int(rng.integers(33 + 40, 33 + end - cut - 40))
        prompt[edit] = 6000
        run = index.find(prompt, 9, start=33)
        assert run is not None
        assert run.length == max(edit - 33, 33 + end - cut - edit - 1)


@pytest.mark.parametrize("period", [1, 2, 3, 16, 17])
def test_repeats_are_found_and_stay_bounded(period: int) -> None:
    index = MatchIndex(16, 2000)
    text = np.resize(np.arange(period, dtype=np.int32), 16 * 100)
    for _ in range(10):
        index.insert_chain(1, text)
    run = index.find(np.resize(np.arange(period, dtype=np.int32), 5000), 1)
    assert run is not None
    assert run.length >= 16 * 90
