"""Turns of a streaming session that come while another one runs, on a real server.

The session's KV lies in rows that the running turn writes: a second turn there would mix two texts,
and SGLang's own refusal lets a third one in.

The long form has first turns, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from testkit.requests import flush_device
from testkit.server import Server, ServerError
from tests.e2e.hier_server import hier_args, real_prompts, settled, state, tokens_and_logprobs

pytestmark = pytest.mark.e2e

PAGE, NEW_TOKENS = 16, 8
# Steps of the turn that the others come into; each of those is two requests on the same machine.
LONG_TURN = 300


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sessions")
    args = [*hier_args(folder, host_pages=200, disk_gb=0.5), "--page-size", str(PAGE)]
    args += ["--enable-streaming-session", "--abort-on-priority-when-disabled"]
    with Server(args, log_path=folder / "server.log", stop="kill") as running:
        yield running


class Session:
    """A streaming session and its last turn."""

    def __init__(self, server: Server) -> None:
        self._server = server
        wish = {"capacity_of_str_len": 9999, "streaming": True}
        self._name = server.post("/open_session", wish)
        self._last: str | None = None

    def turn(self, ids: list[int], **fields: Any) -> dict[str, Any]:
        """One that is waited for."""
        answer = self._server.generate(**self._fields(ids, NEW_TOKENS), **fields)
        self._last = answer["meta_info"]["id"]
        return answer

    def long_turn(self, ids: list[int]) -> Iterator[dict[str, Any]]:
        """One whose tokens come one after another."""
        for event in self._server.stream(**self._fields(ids, LONG_TURN)):
            yield event
        self._last = event["meta_info"]["id"]

    def _fields(self, ids: list[int], num_new: int) -> dict[str, Any]:
        return {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": num_new, "ignore_eos": True},
            "return_logprob": True,
            "session_params": {"id": self._name, "rid": self._last},
        }

    def close(self) -> None:
        self._server.post("/close_session", {"session_id": self._name})


def conversation(
    server: Server, num_before: int, intruders: list[list[int]], *, closes: bool = False
) -> list[Any]:
    """Turns before, a long one, and one behind it; what the long one and the last were told.

    Args:
        server: the server.
        num_before: turns before the long one.
        intruders: prompts of turns that come while the long one runs. The second is one that SGLang
            refuses for another reason, before it looks at the session.
        closes: the session is closed while the long turn runs, and there is no last one.
    """
    prompts = list(real_prompts([96] * (num_before + 2), seed=num_before))
    session, told = Session(server), []
    for prompt in prompts[:num_before]:
        session.turn(prompt)
    long_turn = session.long_turn(prompts[num_before])
    next(long_turn)
    for index, ids in enumerate(intruders):
        priority = {"priority": 1} if index == 1 else {}
        why = "priority is disabled" if priority else "already has an active request"
        with pytest.raises(ServerError, match=why) as refused:
            session.turn(ids, **priority)
        assert refused.value.status == (503 if priority else 400)
    if closes:
        session.close()
    *_, event = long_turn
    told.append(tokens_and_logprobs(event))
    if not closes:
        told.append(tokens_and_logprobs(session.turn(prompts[-1])))
        session.close()
    settled(server)
    flush_device(server)
    server.post("/hicache/storage-backend/clear")
    return told


@pytest.mark.sampled("later-turn")
@pytest.mark.parametrize("num_before", [0, 1], ids=["first-turn", "later-turn"])
def test_turns_beside_a_running_one_are_refused_and_harm_nobody(
    server: Server, num_before: int
) -> None:
    alone = conversation(server, num_before, [])
    refused = state(server)["host"].get("refused_session_turns", 0)
    intruders = list(real_prompts([64, 64, 64], seed=77))
    assert conversation(server, num_before, intruders) == alone
    assert state(server)["host"]["refused_session_turns"] == refused + len(intruders)


def test_a_session_closed_beside_a_running_turn_keeps_its_rows_until_it_ends(
    server: Server,
) -> None:
    """A refused turn once cleared the mark of the running one, whose rows were freed under it."""
    alone = conversation(server, 1, [])
    intruders = list(real_prompts([64, 64], seed=78))
    assert conversation(server, 1, intruders, closes=True) == alone[:1]
    assert conversation(server, 1, []) == alone
