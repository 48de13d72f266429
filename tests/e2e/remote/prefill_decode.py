"""A prefill server and a decode server on one store, and a conversation with both.

The KV goes from one to the other over TCP (Mooncake), and each request to both, as a router sends
it. What they answer and store is compared with what one server does that does both, which is asked
first and then ended: idle schedulers would take the cores from each other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.device.layout import HEADER_BYTES
from sglang_ext.tiers.records.record import parse_header
from testkit.ports import free_port
from testkit.rank_requests import ENVIRONMENT, WAYS
from testkit.remote.mooncake_server import mooncake_missing
from testkit.requests import flush_device
from testkit.server import TINYLM, Server
from tests.e2e.drafts.test_speculation import records
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    ranks_of,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.remote.test_remote import eventually

# Lengths of what is said in the turns, of which each answer begins in a page and ends in the next
# one, and none with a page: whether its last token is computed is chance.
FIRST_TOKENS, ANSWER_TOKENS = 6 * PAGE + 54, 20
TURN_TOKENS = 2 * PAGE - ANSWER_TOKENS
# The same of hybrids: each answer passes a place at which a Nemotron-H keeps a state, too.
FIRST_OF_HYBRIDS = FIRST_TOKENS + PAGE
PATIENCE_S = 300.0
SAME = ["--page-size", str(PAGE), "--chunked-prefill-size", "256", "--max-total-tokens", "8192"]
DECODE = ["--disaggregation-decode-enable-radix-cache"]
NUM_TURNS = 4
LONG_ANSWER = 150
ATTENTION = ["--attention-backend", "cpu_extend"]
DISK_GB = 0.5
RETRACTS = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"}


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


def share(turns: Iterable[Turn]) -> float:
    """The share of guesses that were right in some turns."""
    right, proposed = np.sum([turn.guesses for turn in turns if turn.guesses], axis=0)
    return float(right / proposed)


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


class SetUp(NamedTuple):
    """What all servers of a test have: the pair, and the one that it is compared with."""

    args: list[str]
    model: Path
    env: dict[str, str]

    def on_ranks(self, num_ranks: int) -> SetUp:
        """The same with so many tensor parallel ranks."""
        if num_ranks == 1:
            return self
        return self._replace(args=[*self.args, *WAYS["tp"]], env={**self.env, **ENVIRONMENT})


def one_server(made: SetUp, folder: Path) -> Server:
    """A server that does both."""
    folder.mkdir()
    return Server(
        [*SAME, *hier_args(folder, disk_gb=DISK_GB), *made.args],
        model=made.model,
        log_path=folder / "log",
        env=made.env,
        stop="kill",
        start_timeout_s=PATIENCE_S,
    )


Stored = dict[tuple[str, bytes], bytes]


def stored(folder: Path, *, are_alike: bool = False) -> Stored:
    """What each page has, of all layers and the draft's, by its rank's folder and its hash.

    Args:
        folder: of a disk.
        are_alike: all ranks have the same rows, and some of them, or one, keep a page.
    """
    found: Stored = {}
    for path, _, record in records(folder):
        rank = "" if are_alike else str(path.parent.relative_to(folder))
        content = record[HEADER_BYTES:].tobytes()
        assert found.setdefault((rank, parse_header(record)[0].page_hash), content) == content
    return found


def check_bytes(pair: Pair, folder: Path, one: Path, *, are_alike: bool) -> None:
    """The two servers' pages are those of the one: none differs, and the decode server has all."""
    for server in pair.servers:
        settled(server, PATIENCE_S)
    known = stored(one / "disk", are_alike=are_alike)
    assert known
    for name in ("prefill", "decode"):
        found = stored(folder / name / "disk", are_alike=are_alike)
        differ = [key for key, content in found.items() if known.get(key) != content]
        assert not differ, (name, len(differ), len(found), len(known))
        assert name == "prefill" or found.keys() == known.keys()


def check_common_bytes(pair: Pair, folder: Path) -> list[Stored]:
    """What either of the two servers stored is what the one did, where that stored it, too.

    Args:
        pair: both.
        folder: of the test; the one's is `one` in it, and theirs are in `pair`.

    Returns:
        That, of each of the two.
    """
    for server in pair.servers:
        settled(server, PATIENCE_S)
    known, all_common = stored(folder / "one" / "disk"), []
    for name in ("prefill", "decode"):
        found = stored(folder / "pair" / name / "disk")
        common = {key: content for key, content in found.items() if key in known}
        assert len(common) > 0.9 * len(found), (name, len(common), len(found))
        differ = [key for key in common if known[key] != found[key]]
        assert not differ, (name, len(differ), len(common))
        all_common.append(common)
    return all_common


def check_hybrid(
    made: SetUp,
    folder: Path,
    lone: Sequence[list[int]],
    num_tokens: int,
    check: Callable[[Pair, Path], Any],
) -> list[Turn]:
    """A conversation with a pair, and prompts beside it, are those of one server.

    Args:
        made: a hybrid model.
        folder: of the test.
        lone: prompts beside the conversation.
        num_tokens: of their answers.
        check: called with the pair and `folder` when all is stored, and again behind a restart.

    Returns:
        The conversation with the one server.
    """
    parts = list(real_prompts([FIRST_OF_HYBRIDS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    with one_server(made, folder / "one") as server:
        turns = plain_turns(server, parts)
        answers = [ask(server, prompt, num_tokens) for prompt in lone]
        settled(server, PATIENCE_S)
    how: dict[str, Any] = {"model": made.model, "env": made.env, "disk_gb": DISK_GB}
    with running_pair(folder / "pair", made.args, **how) as pair:
        converse(pair, turns[:-1], are_planned_again=True)
        for prompt, answer in zip(lone, answers, strict=True):
            found = pair.ask(prompt, num_tokens)[1]
            assert tokens_and_logprobs(found) == tokens_and_logprobs(answer)
            assert guesses_of(found) == guesses_of(answer)
        check(pair, folder)
    with running_pair(folder / "pair", made.args, **how) as pair:  # after a kill -9 of both
        check_last_turn_anywhere(pair, turns[-1])
        assert not any(counted(pair.decode, "received_foreign_requests"))
        check(pair, folder)
    return turns


def check_last_turn_anywhere(pair: Pair, last: Turn) -> None:
    """As `check_last_turn`, where pages are told from where they lie when a plan is made anew."""
    prefilled, decoded = pair.ask(last.prompt)
    # Among them the answer before, which the decode server alone wrote.
    assert sum(by_tier(prefilled).values()) == last.num_known * PAGE
    assert tokens_and_logprobs(decoded) == last.answer
    assert guesses_of(decoded) == last.guesses


def stored_beside_retractions(
    made: SetUp, folder: Path, *, num_unasked: int = 1
) -> tuple[Stored, Stored]:
    """What one server stores of some texts, and a decode server that retracts while it writes them.

    Args:
        made: a model, whose rows the decode server does not all have behind a retraction.
        folder: of the test.
        num_unasked: last tokens of a text that the one server is not asked about; the last token
            has no row.
    """
    texts: list[list[int]] = []
    how: dict[str, Any] = {"model": made.model, "disk_gb": DISK_GB}
    how |= {"env": made.env, "decode_env": RETRACTS}
    with running_pair(folder / "pair", made.args, **how) as pair:
        for seed in range(10, 15):
            texts += both_answered(pair, list(real_prompts([310, 330], seed=seed)))
            if counted(pair.decode, "unsaved_retracted_requests")[0]:
                break
        assert counted(pair.decode, "unsaved_retracted_requests")[0] > 0
        settled(pair.decode, PATIENCE_S)
    with one_server(made, folder / "one") as server:
        for text in texts:
            ask(server, text[: len(text) - num_unasked], 1)
        settled(server, PATIENCE_S)
    return stored(folder / "one" / "disk"), stored(folder / "pair" / "decode" / "disk")


def check_close(known: Stored, found: Stored, keys: Collection[tuple[str, bytes]]) -> None:
    """Values of these pages, in float32, are the same but for rounding; there are some."""
    assert keys
    for key in keys:
        values, wanted = (np.frombuffer(each[key], np.float32) for each in (found, known))
        np.testing.assert_allclose(values, wanted, atol=2e-3, rtol=0)


def both_answered(pair: Pair, prompts: list[list[int]]) -> list[list[int]]:
    """Two requests at a time, with their answers behind them."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(lambda prompt: pair.ask(prompt, LONG_ANSWER)[1], prompts))
    return [[*p, *a["output_ids"]] for p, a in zip(prompts, answers, strict=True)]
