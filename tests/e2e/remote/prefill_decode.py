"""A prefill server and a decode server on one store, and a conversation with both.

The KV goes from one to the other over TCP (Mooncake), and each request to both, as a router sends
it. What they answer is compared with a plain server's, which is asked first and then ended: idle
schedulers would take the cores from each other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.remote.mooncake_server import mooncake_missing
from testkit.requests import flush_device
from testkit.server import TINYLM, Server, free_port
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.remote.test_remote import eventually

# Lengths of what is said in the turns, of which each answer begins in a page and ends in the next
# one, and none with a page: whether its last token is computed is chance.
FIRST_TOKENS, ANSWER_TOKENS = 6 * PAGE + 54, 20
TURN_TOKENS = 2 * PAGE - ANSWER_TOKENS
PATIENCE_S = 300.0
# All kinds of models and ranks of what runs in a sample else.
MATRIX = os.environ.get("HIER_KV_DISAGGREGATION_MATRIX") == "1"
SAME = ["--page-size", str(PAGE), "--chunked-prefill-size", "256", "--max-total-tokens", "8192"]
DECODE = ["--disaggregation-decode-enable-radix-cache"]


class Half(Server):
    """A server that answers nothing without the other one."""

    def _first_request(self) -> None:
        pass


class Pair:
    """A prefill server and a decode server.

    Args:
        folder: of both.
        args: of both, beside those of a plain server.
        model: of both.
        env: of both.
        disk_gb: of each; 0 for no disk.
        decode_env: of the decode server alone.
    """

    def __init__(
        self,
        folder: Path,
        args: Sequence[str] = (),
        *,
        model: Path = TINYLM,
        env: Mapping[str, str] | None = None,
        disk_gb: float = 0,
        decode_env: Mapping[str, str] | None = None,
    ) -> None:
        self.port = free_port()
        self._rooms = count(1)
        self._args, self._model, self._disk_gb = args, model, disk_gb
        shared = folder / "shared"
        shared.mkdir(parents=True, exist_ok=True)
        self._store = f"file://{shared}?size=1GB"
        self.prefill = self._server(folder / "prefill", [], env)
        decode_env = {**(env or {}), **(decode_env or {})}
        self.decode = self._server(folder / "decode", DECODE, decode_env or None)
        self.servers = [self.prefill, self.decode]

    def _server(self, folder: Path, own: Sequence[str], env: Mapping[str, str] | None) -> Server:
        folder.mkdir(exist_ok=True)
        tiers = hier_args(folder, disk_gb=self._disk_gb, policy="wait_complete")
        args = [*SAME, *tiers, "--hier-kv-remote-url", self._store]
        # What is stored is waited for: the machine may be busy with others.
        args += ["--hier-kv-prefetch-policy", "wait_complete", *self._args]
        args += ["--disaggregation-mode", folder.name, *own]
        args += ["--disaggregation-transfer-backend", "mooncake_tcp"]
        args += ["--disaggregation-bootstrap-port", str(self.port)]
        return Half(
            args,
            model=self._model,
            log_path=folder / "log",
            env=env,
            stop="kill",
            start_timeout_s=PATIENCE_S,
        )

    @contextmanager
    def running(self) -> Iterator[Pair]:
        """Both, with the store found."""
        try:
            for server in self.servers:
                server.start()
            for server in self.servers:
                server.wait_ready()
                eventually(partial(_is_connected, server), PATIENCE_S)
            yield self
        finally:
            for server in self.servers:
                server.kill()

    def fields(self, room: int) -> dict[str, Any]:
        """What both servers are told of a request beside its prompt, as by a router."""
        return {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self.port,
            "bootstrap_room": room,
        }

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int = ANSWER_TOKENS,
        *,
        prefilled: Sequence[int] | None = None,
        room: int = 0,
    ) -> tuple[Any, Any]:
        """One greedy request; what the prefill server and the decode server answer.

        Args:
            prompt: tokens.
            num_tokens: of the answer.
            prefilled: what the prefill server is given in place of the prompt.
            room: of the request; the next one if 0.
        """
        fields = self.fields(room or next(self._rooms))
        answers: list[Any] = []
        other = threading.Thread(
            target=lambda: answers.append(
                ask(self.prefill, prompt if prefilled is None else prefilled, num_tokens, **fields)
            )
        )
        other.start()
        try:
            decoded = ask(self.decode, prompt, num_tokens, **fields)
        finally:
            other.join()
        return answers[0], decoded


@contextmanager
def running_pair(folder: Path, args: Sequence[str] = (), **how: Any) -> Iterator[Pair]:
    """A pair that runs; the test is skipped where the transfer engine is missing."""
    if mooncake_missing():
        pytest.skip(mooncake_missing())
    with Pair(folder, args, **how).running() as pair:
        yield pair


def _is_connected(server: Server) -> bool:
    return all(rank["remote"]["breaker_state"] == 0 for rank in ranks_of(state(server)))


def ranks_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The state of each rank of a server."""
    return found.get("tp_ranks") or [found]


def counted(server: Server, name: str) -> list[int]:
    """A counter of each rank, once nothing is on its way."""
    found = settled(server, PATIENCE_S)
    return [int(rank["host"].get(name, 0)) for rank in ranks_of(found)]


class Turn(NamedTuple):
    """A turn of a conversation with a plain server.

    Attributes:
        prompt: with all that was said before.
        answer: tokens and log-probabilities.
        num_known: pages that were known before it.
        guesses: of a draft model, how many were right and how many there were; None without one.
    """

    prompt: list[int]
    answer: tuple[list[int], list[float]]
    num_known: int
    guesses: tuple[int, int] | None = None


def guesses_of(answer: Any) -> tuple[int, int] | None:
    """How many guesses of a draft were right in an answer, and how many there were."""
    facts = answer["meta_info"]
    if "spec_num_proposed_drafts" not in facts:
        return None
    return facts["spec_num_correct_drafts"], facts["spec_num_proposed_drafts"]


def plain_turns(plain: Server, parts: Sequence[list[int]]) -> list[Turn]:
    """A conversation with a server that keeps all of it on its device."""
    turns: list[Turn] = []
    prompt: list[int] = []
    for part in parts:
        num_known = max(0, len(prompt) - 1) // PAGE
        prompt = [*prompt, *part]
        answer = ask(plain, prompt, ANSWER_TOKENS)
        assert answer["meta_info"]["cached_tokens"] == num_known * PAGE
        turns.append(Turn(prompt, tokens_and_logprobs(answer), num_known, guesses_of(answer)))
        prompt = [*prompt, *answer["output_ids"]]
    return turns


def converse(pair: Pair, turns: Sequence[Turn], *, are_planned_again: bool = False) -> None:
    """The same conversation with both, of which all is reused that the plain server reused.

    The devices are flushed, so the prefill server takes what it computed from DRAM, and answers
    from the store. In the end both have stored all that they will.

    Args:
        pair: both.
        turns: what a plain server answered.
        are_planned_again: pages are told from where they lie when a request's plan is made anew, as
            of hybrids: in DRAM, to which they came while it waited.
    """
    num_prompt_pages = 0  # of the last prompt
    for number, turn in enumerate(turns):
        flush_device(pair.prefill)
        if number % 2:  # in the other turns it is sent only what its device lacks
            flush_device(pair.decode)
        prefilled, decoded = pair.ask(turn.prompt)
        reused = {"host": 0, "remote": 0, **by_tier(prefilled)}
        # By itself the prefill server knows the last prompt; the rest are pages of answers.
        assert reused["host"] + reused["remote"] == turn.num_known * PAGE, (number, reused)
        num_of_answers = turn.num_known - num_prompt_pages
        assert num_of_answers or not number
        if not are_planned_again:
            assert reused["remote"] == num_of_answers * PAGE, (number, reused)
        assert tokens_and_logprobs(decoded) == turn.answer, number
        assert guesses_of(decoded) == turn.guesses, number
        num_prompt_pages = len(turn.prompt) // PAGE
        received = counted(pair.decode, "received_requests")
        assert received == [number + 1] * len(received)
    assert not any(counted(pair.decode, "received_foreign_requests"))
    assert not any(counted(pair.decode, "received_inexact_requests"))
    assert not any(counted(pair.decode, "loaded_pages"))
    assert not any(counted(pair.prefill, "load_failures"))


def check_last_turn(pair: Pair, last: Turn) -> Any:
    """Of servers that just started: what is known comes from disk and store, some from the latter.

    Returns:
        What the decode server answered.
    """
    prefilled, decoded = pair.ask(last.prompt)
    reused = {"disk": 0, "remote": 0, **by_tier(prefilled)}
    assert reused["disk"] + reused["remote"] == last.num_known * PAGE, reused
    assert reused["remote"] > 0  # the answer before, which the decode server wrote
    assert tokens_and_logprobs(decoded) == last.answer
    return decoded
