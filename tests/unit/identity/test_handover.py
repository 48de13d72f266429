"""Marks of KV that goes from a prefill server to a decode server."""

from __future__ import annotations

from sglang_ext.identity.handover import NUM_WORDS, mark_of, no_mark


def test_a_mark_is_of_one_namespace_and_one_room() -> None:
    marks = {
        mark_of(digest, room).tobytes()
        for digest in (b"a" * 32, b"b" * 32)
        for room in (0, 1, -1, 1 << 63, (1 << 64) - 1)
    }
    assert len(marks) == 10
    assert mark_of(b"a" * 32, 7).tolist() == mark_of(b"a" * 32, 7).tolist()


def test_no_mark_is_none_of_them() -> None:
    assert len(no_mark()) == len(mark_of(b"a" * 32, 7)) == NUM_WORDS
    assert not no_mark().any()
    assert mark_of(b"a" * 32, 7).any()
