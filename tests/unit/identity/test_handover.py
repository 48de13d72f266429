"""Marks of KV that goes from a prefill server to a decode server."""

from __future__ import annotations

from array import array

from sglang_ext.identity.handover import NUM_WORDS, mark_of, no_mark

TOKENS = array("q", range(100))


def test_a_mark_is_of_one_namespace_one_room_and_some_tokens() -> None:
    marks = {
        mark_of(digest, room, tokens).tobytes()
        for digest in (b"a" * 32, b"b" * 32)
        for room in (0, 1, -1, 1 << 63, (1 << 64) - 1)
        for tokens in (array("q"), TOKENS, TOKENS[:-1], TOKENS[:-1] + array("q", [5]))
    }
    assert len(marks) == 40
    assert mark_of(b"a" * 32, 7, TOKENS).tolist() == mark_of(b"a" * 32, 7, TOKENS[:]).tolist()


def test_no_mark_is_none_of_them() -> None:
    assert len(no_mark()) == len(mark_of(b"a" * 32, 7, TOKENS)) == NUM_WORDS
    assert not no_mark().any()
    assert mark_of(b"a" * 32, 7, TOKENS).any()
