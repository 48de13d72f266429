"""Two servers behind SGLang's gateway (SMG), which makes the tokens and speaks gRPC.

It follows their KV events, and sends a chat to the one that is said to have most of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.remote.gateway import Gateway
from testkit.workload import load_texts, load_tokenizer
from tests.e2e.hier_server import PAGE, events, hier_args

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

SERVERS = range(2)
# Of each server; DRAM holds less than the chats that are sent to it, the disk all of them.
DEVICE_TOKENS, HOST_PAGES = 1536, 20
NUM_CHATS, CHAT_TOKENS = 9, 700  # an odd number: taken in turn, each would go to the other server
# A prompt stays below half of the device: a server that is full to four fifths as a request runs
# is sent nothing for a moment, whatever it has.
FIRST_TOKENS, TURN_TOKENS = 500, 80
TURNS, LEAST_CHATS, MOST_CHATS = 3, 4, 40
PATIENCE_S = 120.0


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [tmp_path_factory.mktemp(f"server-{number}") for number in SERVERS]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, folders: list[Path]) -> Iterator[Gateway]:
    args = []
    for folder in folders:
        # In float32, twice as large, rounding does not decide between two tokens, computed and
        # behind a prefix.
        own = [*hier_args(folder, host_pages=2 * HOST_PAGES, disk_gb=0.5), "--dtype", "float32"]
        own += ["--max-total-tokens", str(DEVICE_TOKENS), "--hier-kv-kv-events-disk", "host"]
        args.append(own)
    with Gateway(args, "cache_aware", PAGE, tmp_path_factory.mktemp("gateway")) as running:
        yield running


class Chats:
    """Chats that grow by a turn at a time, each with a text of its own."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._tokenizer = load_tokenizer()
        self._texts = load_texts(self._tokenizer)
        self._said: list[list[dict[str, str]]] = []
        self._told = gateway.by_server("smg_kv_index_blocks")
        self.servers: list[int] = []
        self.whole: list[int] = []

    def start(self) -> None:
        """Another one; the gateway chooses its server."""
        self._said.append([])
        self.whole.append(0)
        server, _ = self.turn(len(self._said) - 1)
        self.servers.append(server)

    def turn(self, chat: int) -> tuple[int, int]:
        """A chat's next turn: the server that it was sent to, and tokens that were reused."""
        said = self._said[chat]
        at, number = FIRST_TOKENS * len(said), TURN_TOKENS if said else FIRST_TOKENS
        text = self._texts[chat % len(self._texts)][at : at + number]
        said.append({"role": "user", "content": f"chat {chat}: {self._tokenizer.decode(text)}"})
        before = self._gateway.by_server("smg_worker_requests_total")
        answer = self._gateway.chat(said, 4)
        after = self._gateway.by_server("smg_worker_requests_total")
        said.append({"role": "assistant", "content": content(answer) or "."})
        self.whole[chat] = answer["usage"]["prompt_tokens"] // PAGE * PAGE
        [server] = [number for number in SERVERS if after[number] > before[number]]
        return server, cached(answer)

    def await_told(self) -> None:
        """Waits until the gateway was told of all that was sent, by the server that has it."""
        least = list(self._told)
        for server, whole in zip(self.servers, self.whole, strict=True):
            least[server] += whole // PAGE
        eventually(lambda: at_least(self._gateway.by_server("smg_kv_index_blocks"), least))


def test_a_chat_that_left_the_device_is_sent_to_the_server_that_has_it(
    gateway: Gateway, folders: list[Path]
) -> None:
    chats = Chats(gateway)
    while len(chats.servers) < MOST_CHATS:
        chats.start()
        # An odd number: taken in turn, each would go to the other server when it comes back.
        enough = all(chats.servers.count(number) >= LEAST_CHATS for number in SERVERS)
        if enough and len(chats.servers) % 2:
            break
    returns = (TURNS - 1) * len(chats.servers)
    hits = gateway.routed().get("event_hit", 0)
    for _ in range(1, TURNS):
        for chat, server in enumerate(chats.servers):
            chats.await_told()
            known = chats.whole[chat]
            sent_to, reused = chats.turn(chat)
            assert sent_to == server, (chat, chats.servers)
            assert reused >= known > 0
    assert gateway.routed().get("event_hit", 0) == hits + returns
    for number, folder in enumerate(folders):
        own = (TURNS - 1) * chats.servers.count(number)
        eventually(partial(have_returned, folder, own))
        # None was on the device, and some pages were on disk alone.
        assert [line["device"] for line in returned(folder)] == [0] * own
        assert any(line["e"] == "promoted" for line in events(folder))


def test_what_left_the_device_is_reused_and_answers_are_the_same(gateway: Gateway) -> None:
    texts, tokenizer = load_texts(load_tokenizer()), load_tokenizer()
    chats = [
        [{"role": "user", "content": f"{number}: {tokenizer.decode(text[:CHAT_TOKENS])}"}]
        for number, text in zip(range(NUM_CHATS), texts * NUM_CHATS, strict=False)
    ]
    told = sum(gateway.by_server("smg_kv_index_blocks"))
    computed = [gateway.chat(messages, 8) for messages in chats]
    pages = sum(answer["usage"]["prompt_tokens"] // PAGE for answer in computed)
    eventually(lambda: sum(gateway.by_server("smg_kv_index_blocks")) >= told + pages)
    loaded = [gateway.chat(messages, 8) for messages in chats]
    for before, after in zip(computed, loaded, strict=True):
        prompt = after["usage"]["prompt_tokens"]
        assert prompt * NUM_CHATS > 1.5 * DEVICE_TOKENS * len(SERVERS)
        assert cached(after) >= (prompt - 1) // PAGE * PAGE > cached(before)
        assert content(after) == content(before)


def eventually(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s, "what is stored was not told of"
        time.sleep(0.02)


def returned(folder: Path) -> list[dict[str, Any]]:
    """A server's events of requests of which the tiers had something."""
    return [line for line in events(folder) if line["e"] == "enqueued" and line["pages"]]


def have_returned(folder: Path, number: int) -> bool:
    return len(returned(folder)) >= number


def at_least(found: Sequence[int], least: Sequence[int]) -> bool:
    return all(one >= other for one, other in zip(found, least, strict=True))


def cached(answer: dict[str, Any]) -> int:
    return (answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def content(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])
