"""A prefill server and a decode server on one store, against one plain server that does both.

The KV goes from one to the other over TCP (Mooncake), and each request to both, as a router sends
it. The prefill server finds in the store what the decode server wrote: the answers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from testkit.remote.mooncake_server import mooncake_missing
from testkit.requests import flush_device
from testkit.server import TINYLM, Server, free_port
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.e2e.remote.test_remote import eventually, is_connected
from tests.e2e.updates.weight_models import strange, variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_TURNS, ANSWER_TOKENS = (
    6,
    90,
)  # no answer ends with a page: whether its last token is computed is chance
SAME = ["--page-size", str(PAGE), "--chunked-prefill-size", "256", "--max-total-tokens", "8192"]
DECODE = ["--disaggregation-decode-enable-radix-cache"]


class Half(Server):
    """A server that answers nothing without the other one."""

    def _first_request(self) -> None:
        pass


class Pair:
    """A prefill server and a decode server."""

    def __init__(self, folder: Path) -> None:
        self._port = free_port()
        self._rooms = count(1)
        shared = folder / "shared"
        shared.mkdir()
        self._store = f"file://{shared}?size=1GB"
        self.prefill = self._server(folder / "prefill", [])
        self.decode = self._server(folder / "decode", DECODE)
        self.servers = [self.prefill, self.decode]

    def _server(self, folder: Path, own: Sequence[str]) -> Server:
        folder.mkdir()
        args = [*SAME, *hier_args(folder, disk_gb=0), "--hier-kv-remote-url", self._store]
        args += ["--hier-kv-prefetch-policy", "timeout", "--hier-kv-prefetch-timeout-ms", "60000"]
        args += ["--disaggregation-mode", folder.name, *own]
        args += ["--disaggregation-transfer-backend", "mooncake_tcp"]
        args += ["--disaggregation-bootstrap-port", str(self._port)]
        return Half(args, log_path=folder / "log", stop="kill", start_timeout_s=300.0)

    def ask(
        self,
        prompt: Sequence[int],
        num_tokens: int = ANSWER_TOKENS,
        *,
        prefilled: Sequence[int] | None = None,
    ) -> tuple[Any, Any]:
        """One greedy request; what the prefill server and the decode server answer.

        Args:
            prompt: tokens.
            num_tokens: of the answer.
            prefilled: what the prefill server is given in place of the prompt.
        """
        fields = {
            "bootstrap_host": "127.0.0.1",
            "bootstrap_port": self._port,
            "bootstrap_room": next(self._rooms),
        }
        answers: list[Any] = []
        other = threading.Thread(
            target=lambda: answers.append(
                ask(self.prefill, prompt if prefilled is None else prefilled, num_tokens, **fields)
            )
        )
        other.start()
        decoded = ask(self.decode, prompt, num_tokens, **fields)
        other.join()
        return answers[0], decoded


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if mooncake_missing():
        pytest.skip(mooncake_missing())
    made = Pair(tmp_path_factory.mktemp("pair"))
    try:
        for server in made.servers:
            server.start()
        for server in made.servers:
            server.wait_ready()
            eventually(partial(is_connected, server))
        yield made
    finally:
        for server in made.servers:
            server.kill()


def counted(server: Server, name: str) -> int:
    return int(state(server)["host"].get(name, 0))


def test_a_conversation_reuses_what_the_decode_server_wrote(pair: Pair, tmp_path: Path) -> None:
    parts = real_prompts([600, *[120] * (NUM_TURNS - 1)], seed=3)
    prompt: list[int] = []
    num_prompt_pages = num_known = 0  # of the last prompt, and of it with its answer
    with Server([*SAME], log_path=tmp_path / "plain.log", stop="kill") as plain:
        for turn, part in enumerate(parts):
            prompt = [*prompt, *part]
            flush_device(pair.prefill)
            if turn % 2:  # in the other turns it is sent only what its device lacks
                flush_device(pair.decode)
            prefilled, decoded = pair.ask(prompt)
            expected = ask(plain, prompt, ANSWER_TOKENS)
            assert expected["meta_info"]["cached_tokens"] == num_known * PAGE
            reused = {"host": 0, "remote": 0, **by_tier(prefilled)}
            # By itself the prefill server knows the last prompt; the rest are pages of answers.
            assert reused["host"] + reused["remote"] == num_known * PAGE, (turn, reused)
            assert reused["remote"] == (num_known - num_prompt_pages) * PAGE, (turn, reused)
            assert reused["remote"] or not turn
            assert tokens_and_logprobs(decoded) == tokens_and_logprobs(expected), turn
            num_prompt_pages = len(prompt) // PAGE
            prompt = [*prompt, *decoded["output_ids"]]
            num_known = (len(prompt) - 1) // PAGE
            found = settled(pair.decode)["host"]
    assert found["received_requests"] == NUM_TURNS
    assert found.get("received_foreign_requests", 0) == 0
    assert counted(pair.prefill, "load_failures") == found.get("loaded_pages", 0) == 0


def test_kv_of_other_weights_is_used_and_not_stored(pair: Pair, tmp_path: Path) -> None:
    """The prefill server's weights change; whose KV comes is told by its mark alone."""
    other = variant(tmp_path / "other", strange(1))
    first, second, third = real_prompts([300, 300, 300], seed=4)
    update(pair.prefill, other)
    before = settled(pair.decode)["host"]
    pair.ask(first)
    after = settled(pair.decode)["host"]
    assert after["received_foreign_requests"] == 1
    assert after.get("saved_pages", 0) == before.get("saved_pages", 0)
    assert after.get("duplicate_pages", 0) == before.get("duplicate_pages", 0)
    update(pair.decode, other)
    pair.ask(second)
    after = settled(pair.decode)["host"]
    assert after["received_foreign_requests"] == 1
    assert after["saved_pages"] == before.get("saved_pages", 0) + (300 + ANSWER_TOKENS - 1) // PAGE
    for server in pair.servers:
        update(server, TINYLM)
    pair.ask(third)
    assert settled(pair.decode)["host"]["received_foreign_requests"] == 1


def test_kv_of_other_tokens_is_used_and_not_stored(pair: Pair) -> None:
    """As where each server makes tokens of a text by a chat template of its own."""
    prompt, other = real_prompts([300, 300], seed=6)
    before = settled(pair.decode)["host"]
    pair.ask(prompt, prefilled=other)
    after = settled(pair.decode)["host"]
    foreign = after.get("received_foreign_requests", 0)
    assert foreign == before.get("received_foreign_requests", 0) + 1
    for name in ("saved_pages", "duplicate_pages"):
        assert after.get(name, 0) == before.get(name, 0), name


def update(server: Server, model: Path) -> None:
    body = {"model_path": str(model), "flush_cache": True}
    assert server.post("/update_weights_from_disk", body)["success"]


def test_a_request_that_is_aborted_before_it_has_a_place_leaves_nothing(pair: Pair) -> None:
    """Only the prefill server hears of it, so no decode server ever takes its KV."""
    (prompt,) = real_prompts([300], seed=5)
    pair.ask(prompt)
    settled(pair.prefill)
    flush_device(pair.prefill)
    ends: list[Exception] = []

    def wait_in_vain() -> None:
        try:
            ask(
                pair.prefill,
                prompt,
                rid="alone",
                bootstrap_host="127.0.0.1",
                bootstrap_port=pair._port,
                bootstrap_room=1_000_000,
            )
        except Exception as error:
            ends.append(error)

    waits = threading.Thread(target=wait_in_vain)
    waits.start()
    eventually(lambda: counted(pair.prefill, "waiting_requests") == 1)
    pair.prefill.post("/abort_request", {"rid": "alone"})
    waits.join()
    assert ends
    eventually(lambda: counted(pair.prefill, "waiting_requests") == 0)
    prefilled, _ = pair.ask(prompt)
    assert by_tier(prefilled)["host"] == 300 // PAGE * PAGE
