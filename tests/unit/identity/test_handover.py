"""Marks of KV that goes from a prefill server to a decode server."""

from __future__ import annotations

from array import array

import pytest

from sglang_ext.identity.handover import (
    FOREIGN,
    NUM_WORDS,
    GivenUpRooms,
    Handover,
    SendingRooms,
    no_mark,
)
from sglang_ext.tiers.records.quality import Quality

TOKENS = array("q", range(100))
DIGEST = b"a" * 32
RECEIVER = "10.0.0.1:1234"


def test_a_mark_is_of_one_namespace_room_receiver_some_tokens_and_a_quality() -> None:
    marks = {
        Handover(digest, room, tokens, receiver).mark(quality).tobytes()
        for digest in (DIGEST, b"b" * 32)
        for room in (0, 1, -1, 1 << 63, (1 << 64) - 1)
        for tokens in (array("q"), TOKENS, TOKENS[:-1], TOKENS[:-1] + array("q", [5]))
        for receiver in (RECEIVER, "10.0.0.2:1234")
        for quality in Quality
    }
    assert len(marks) == 80 * len(Quality)


@pytest.mark.parametrize("quality", list(Quality))
def test_the_other_server_finds_the_quality_of_which_it_is_the_mark(quality: Quality) -> None:
    sent = Handover(DIGEST, 7, TOKENS, RECEIVER).mark(quality).tolist()
    assert Handover(DIGEST, 7, TOKENS[:], RECEIVER).quality_of(sent) == quality
    assert Handover(DIGEST, 8, TOKENS, RECEIVER).quality_of(sent) == FOREIGN > max(Quality)
    assert Handover(b"b" * 32, 7, TOKENS, RECEIVER).quality_of(sent) == FOREIGN
    assert Handover(DIGEST, 7, TOKENS[:-1], RECEIVER).quality_of(sent) == FOREIGN
    assert Handover(DIGEST, 7, TOKENS, "another").quality_of(sent) == FOREIGN


def test_a_quality_that_is_not_known_is_the_worst_known() -> None:
    handover = Handover(DIGEST, 7, TOKENS, RECEIVER)
    assert handover.quality_of(handover.mark(200).tolist()) == max(Quality)


def test_no_mark_is_none_of_them() -> None:
    handover = Handover(DIGEST, 7, TOKENS, RECEIVER)
    assert len(no_mark()) == len(handover.mark(0)) == NUM_WORDS
    assert not no_mark().any()
    assert handover.mark(0).any()
    assert handover.quality_of(no_mark().tolist()) == FOREIGN


def test_the_rooms_given_up_last_are_remembered() -> None:
    rooms = GivenUpRooms(most=3)
    for room in (1, 2, 3, 1, 4):
        rooms.add(room)
    assert [room in rooms for room in range(6)] == [False, True, False, True, True, False]


class Sender:
    """What a room is had by."""


def test_a_room_belongs_to_none_from_the_second_sender_on() -> None:
    rooms, one, other = SendingRooms(most=2), Sender(), Sender()
    rooms.begin(1, one)
    assert rooms.has_alone(1, one)
    assert not rooms.has_alone(1, other)
    rooms.end(1, other)  # it has nothing to end
    rooms.end(1, one)
    rooms.begin(1, other)
    assert rooms.has_alone(1, other)
    rooms.begin(1, one)
    for sender in (one, other):
        rooms.end(1, sender)
        assert not rooms.has_alone(1, sender)
    rooms.begin(1, one)
    assert not rooms.has_alone(1, one)
    for room in (2, 3):  # and the last ones are remembered
        rooms.begin(room, one)
        assert rooms.has_alone(room, one)
    rooms.begin(1, one)
    assert rooms.has_alone(1, one)
    assert not rooms.has_alone(2, one)


def test_a_room_of_a_sender_that_is_gone_belongs_to_nobody() -> None:
    rooms, later = SendingRooms(), Sender()
    rooms.begin(1, Sender())
    rooms.begin(1, later)
    assert not rooms.has_alone(1, later)
