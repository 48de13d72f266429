"""A prefill server and a decode server of one rank.

The prefill server finds in the store what the decode server wrote: the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest

from testkit.requests import flush_device, let_go
from testkit.server import TINYLM, Server, ServerError
from tests.e2e.hier_server import PAGE, ask, by_tier, real_prompts, state, tokens_and_logprobs
from tests.e2e.remote.prefill_decode import (
    ANSWER_TOKENS,
    FIRST_TOKENS,
    PATIENCE_S,
    SAME,
    TURN_TOKENS,
    Pair,
    Turn,
    converse,
    counted,
    plain_turns,
    running_pair,
)
from tests.e2e.remote.test_remote import eventually
from tests.e2e.updates.weight_models import strange, variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS = 6
FAKE_HOST = "2.2.2.2"  # SGLang's: a prefill server sends such a request's KV to nobody


@pytest.fixture(scope="module")
def turns(tmp_path_factory: pytest.TempPathFactory) -> list[Turn]:
    """A plain server's conversation."""
    folder = tmp_path_factory.mktemp("plain")
    parts = list(real_prompts([FIRST_TOKENS, *[TURN_TOKENS] * (NUM_TURNS - 1)], seed=3))
    with Server([*SAME], log_path=folder / "log", stop="kill", start_timeout_s=PATIENCE_S) as plain:
        return plain_turns(plain, parts)


@pytest.fixture(scope="module")
def pair(turns: list[Turn], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with running_pair(tmp_path_factory.mktemp("pair")) as made:
        yield made


def test_a_conversation_reuses_what_the_decode_server_wrote(pair: Pair, turns: list[Turn]) -> None:
    converse(pair, turns)


def test_kv_of_other_weights_is_used_and_not_stored(pair: Pair, tmp_path: Path) -> None:
    """The prefill server's weights change; whose KV comes is told by its mark alone."""
    other = variant(tmp_path / "other", strange(1))
    first, second, third = real_prompts([310, 310, 310], seed=4)
    update(pair.prefill, other)
    before = stored(pair)
    pair.ask(first)
    assert counted(pair.decode, "received_foreign_requests") == [1]
    assert stored(pair) == before
    update(pair.decode, other)
    pair.ask(second)
    assert counted(pair.decode, "received_foreign_requests") == [1]
    assert stored(pair)["saved_pages"] == before["saved_pages"] + (310 + ANSWER_TOKENS - 1) // PAGE
    for server in pair.servers:
        update(server, TINYLM)
    pair.ask(third)
    assert counted(pair.decode, "received_foreign_requests") == [1]


def test_kv_of_other_tokens_is_used_and_not_stored(pair: Pair) -> None:
    """As where each server makes tokens of a text by a chat template of its own."""
    prompt, other = real_prompts([310, 310], seed=6)
    before, foreign = stored(pair), counted(pair.decode, "received_foreign_requests")[0]
    pair.ask(prompt, prefilled=other)
    assert counted(pair.decode, "received_foreign_requests") == [foreign + 1]
    assert stored(pair) == before


def stored(pair: Pair) -> dict[str, int]:
    """How much the decode server stored, or had already."""
    names = ("saved_pages", "duplicate_pages")
    return {name: counted(pair.decode, name)[0] for name in names}


def update(server: Server, model: Path) -> None:
    body = {"model_path": str(model), "flush_cache": True}
    let_go(server)
    assert server.post("/update_weights_from_disk", body)["success"]


def test_what_comes_for_the_room_of_an_aborted_request_is_used_and_not_stored(pair: Pair) -> None:
    """Parts that were to go to the first one's rows may come to those of the second."""
    (prompt,) = real_prompts([310], seed=7)
    room = 2_000_000
    before, foreign = stored(pair), counted(pair.decode, "received_foreign_requests")[0]
    with lone_request(pair, pair.decode, prompt, room) as abort:
        eventually(lambda: num_awaiting_kv(pair) == 1, PATIENCE_S)
        abort()
    flush_device(pair.decode)  # which it refuses until the prefill server has heard of the end
    with pytest.raises(ServerError):  # as SGLang does to the next one that it sees there
        ask(pair.prefill, prompt, **pair.fields(room))
    pair.ask(prompt, room=room)
    assert counted(pair.decode, "received_foreign_requests") == [foreign + 1]
    assert stored(pair) == before
    pair.ask(prompt)
    assert counted(pair.decode, "received_foreign_requests") == [foreign + 1]
    assert stored(pair) != before


def test_what_the_prefill_server_sends_of_two_requests_in_one_room_is_not_stored(
    pair: Pair,
) -> None:
    """It sends both to the same rows, and what its device has of either before both's last part.

    The decode server knows of one of them alone, and the mark of that one comes last.
    """
    prompt, other = real_prompts([340, 340], seed=11)
    _, right = pair.ask(prompt)
    for each in (prompt, other):  # on the prefill server's device
        ask(pair.prefill, each, bootstrap_host=FAKE_HOST, bootstrap_room=2_999_999)
    flush_device(pair.decode)
    before, foreign = stored(pair), counted(pair.decode, "received_foreign_requests")[0]
    room = 3_000_000
    with sent_in_vain(pair, [prompt, other], room):
        ask(pair.decode, prompt, ANSWER_TOKENS, **pair.fields(room))
    assert counted(pair.decode, "received_foreign_requests") == [foreign + 1]
    assert stored(pair) == before
    _, again = pair.ask(prompt)
    assert tokens_and_logprobs(again) == tokens_and_logprobs(right)


@contextmanager
def sent_in_vain(pair: Pair, prompts: Sequence[list[int]], room: int) -> Iterator[None]:
    """Requests that wait at the prefill server, in this order, whatever becomes of them."""

    def send(prompt: list[int]) -> None:
        with suppress(ServerError):
            ask(pair.prefill, prompt, **pair.fields(room))

    senders = [threading.Thread(target=send, args=(prompt,)) for prompt in prompts]
    for number, sender in enumerate(senders, start=1):
        sender.start()
        eventually(partial(_num_waiting_is, pair, number), PATIENCE_S)
    try:
        yield
    finally:
        for sender in senders:
            sender.join(PATIENCE_S)


def _num_waiting_is(pair: Pair, number: int) -> bool:
    return num_waiting(pair) == number


def num_awaiting_kv(pair: Pair) -> int:
    """Requests of the decode server that have rows, and wait for a prefill server to fill them."""
    (load,) = pair.decode.get("/v1/loads")["loads"]
    return int(load["disaggregation"]["decode_transfer_queue_reqs"])


def test_a_request_that_is_aborted_before_it_has_a_place_leaves_nothing(pair: Pair) -> None:
    """Only the prefill server hears of it, so no decode server ever takes its KV."""
    (prompt,) = real_prompts([310], seed=5)
    pair.ask(prompt)
    counted(pair.prefill, "saved_pages")
    flush_device(pair.prefill)
    with lone_request(pair, pair.prefill, prompt, 1_000_000) as abort:
        eventually(lambda: num_waiting(pair) == 1, PATIENCE_S)
        abort()
    eventually(lambda: num_waiting(pair) == 0, PATIENCE_S)
    prefilled, _ = pair.ask(prompt)
    assert by_tier(prefilled)["host"] == 310 // PAGE * PAGE


@contextmanager
def lone_request(
    pair: Pair, server: Server, prompt: Sequence[int], room: int
) -> Iterator[Callable[[], None]]:
    """A request that only one of the two servers hears of; it has to be aborted inside."""
    ends: list[Exception] = []

    def wait_in_vain() -> None:
        try:
            ask(server, prompt, rid="alone", **pair.fields(room))
        except Exception as error:
            ends.append(error)

    waits = threading.Thread(target=wait_in_vain)
    waits.start()
    try:
        yield lambda: server.post("/abort_request", {"rid": "alone"})
    finally:
        waits.join(PATIENCE_S)
    assert ends


def num_waiting(pair: Pair) -> int:
    return int(state(pair.prefill)["host"].get("waiting_requests", 0))


def test_requests_come_as_others_end(pair: Pair) -> None:
    """Each gets its rows while a forward runs that may still have the one that ended."""
    prompts = list(real_prompts([180] * 32, seed=12))
    before = counted(pair.decode, "received_requests")[0]
    with ThreadPoolExecutor(4) as threads:
        asked = [
            threads.submit(pair.ask, prompt, 3 + number % 5, room=4_000_000 + number)
            for number, prompt in enumerate(prompts)
        ]
    lengths = [len(each.result()[1]["output_ids"]) for each in asked]
    assert lengths == [3 + number % 5 for number in range(len(prompts))]
    assert counted(pair.decode, "received_requests") == [before + len(prompts)]
