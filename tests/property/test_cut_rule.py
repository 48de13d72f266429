"""The cut of a growing conversation stays where it is, and follows from the content alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.truncation.cut import NO_MESSAGES, Cut, CutRefusedError, CutRule, Messages

_CONTEXT = 512


@dataclass
class Conversation:
    """Messages of given lengths, user and assistant in turns, behind a system prompt."""

    system: int
    lengths: list[int]
    begins: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.begins = [int(at) for at in np.cumsum([self.system, *self.lengths[:-1]])]

    @property
    def num_tokens(self) -> int:
        return self.system + sum(self.lengths)

    def seen(self, num_tokens: int) -> Messages:
        """What shows in the first tokens."""
        begins = np.asarray([at for at in self.begins if at < num_tokens], np.int64)
        return Messages(begins, begins[::2])


conversations = st.builds(
    Conversation,
    st.integers(0, 200),
    st.lists(st.integers(1, 400), min_size=1, max_size=40),
)
rules = st.builds(
    CutRule,
    context_len=st.just(_CONTEXT),
    ratio=st.sampled_from([0.1, 0.25, 0.5, 0.7, 0.9]),
    head_tokens=st.sampled_from([0, 4, 33]),
    align=st.sampled_from([1, 16]),
)


def _cut(rule: CutRule, num_tokens: int, room: int, head: int, messages: Messages) -> Cut | None:
    try:
        return rule.cut(num_tokens, rule.context_len - room, head, messages)
    except CutRefusedError:
        return None


@settings(max_examples=400, deadline=None)
@given(conversations, rules, st.integers(1, 200), st.lists(st.integers(1, 700), max_size=30))
def test_each_turn_sees_the_cuts_of_the_whole_conversation(
    chat: Conversation, rule: CutRule, room: int, steps: list[int]
) -> None:
    # Turns end anywhere, inside messages too; each is cut by what it shows alone.
    for messages_of in (chat.seen, lambda _: NO_MESSAGES):
        whole = messages_of(chat.num_tokens)
        head = rule.head_len(chat.system if whole.all.size else None)
        last = _cut(rule, chat.num_tokens, room, head, whole)
        before: tuple[int, ...] = ()
        for num_tokens in np.cumsum(steps):
            if num_tokens > chat.num_tokens:
                break
            cut = _cut(rule, int(num_tokens), room, head, messages_of(int(num_tokens)))
            if cut is None or last is None:
                continue
            assert cut.starts == last.starts[: len(cut.starts)]
            assert cut.starts[: len(before)] == before
            before = cut.starts


@settings(max_examples=300, deadline=None)
@given(conversations, rules, st.integers(1, 200))
def test_the_next_cut_comes_only_when_the_window_is_full_again(
    chat: Conversation, rule: CutRule, room: int
) -> None:
    head = rule.head_len(chat.system)
    cut = _cut(rule, chat.num_tokens, room, head, chat.seen(chat.num_tokens))
    if cut is None or not cut.is_cut:
        return
    # Up to the last token that fits behind a place, the cut is there.
    full = rule.context_len - room + cut.num_dropped
    for num_tokens in (chat.num_tokens, full):
        again = _cut(rule, num_tokens, room, head, chat.seen(chat.num_tokens))
        assert again is not None
        assert again.starts == cut.starts
    more = _cut(rule, full + 1, room, head, chat.seen(chat.num_tokens))
    assert more is not None
    assert more.starts[:-1] == cut.starts


@settings(max_examples=300, deadline=None)
@given(conversations, rules, st.integers(1, 200), st.integers(1, 200))
def test_room_within_a_class_moves_no_place(
    chat: Conversation, rule: CutRule, room: int, other: int
) -> None:
    messages = chat.seen(chat.num_tokens)
    head = rule.head_len(chat.system)
    behind = rule.context_len - head
    smallest = int(behind * (3 + rule.ratio) / 4) + 1  # window of the first class
    cuts = [
        _cut(rule, chat.num_tokens, room, head, messages)
        for room in (room, other)
        if rule.context_len - room - head >= smallest
    ]
    if len(cuts) == 2 and None not in cuts:
        first, second = sorted((cut.starts for cut in cuts if cut), key=len)
        assert second[: len(first)] == first


@settings(max_examples=400, deadline=None)
@given(conversations, rules, st.integers(1, 300))
def test_what_is_kept_fits_and_holds_the_last_message(
    chat: Conversation, rule: CutRule, room: int
) -> None:
    limit = rule.context_len - room
    head = rule.head_len(chat.system)
    cut = _cut(rule, chat.num_tokens, room, head, chat.seen(chat.num_tokens))
    if cut is None:
        assert chat.num_tokens > limit
        return
    assert cut.num_kept <= limit
    assert cut.is_cut == (chat.num_tokens > limit)
    kept = cut.keep(range(chat.num_tokens))
    assert kept == [*range(head), *range(cut.tail_start, chat.num_tokens)] or not cut.is_cut
    assert not cut.is_cut or head < cut.tail_start < chat.num_tokens
    last = chat.begins[-1]
    if head <= last and head + chat.num_tokens - last <= limit:
        assert cut.tail_start <= last
    assert list(cut.starts) == sorted(set(cut.starts))
    assert cut.ancestors() == ([*cut.starts[:-1][::-1], head] if cut.starts else [])
