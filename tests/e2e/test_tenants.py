"""A and B on one server: B's answers are those of a server that never saw A.

On one server A sends first, in every way in which KV can be shared; B sends the same there and to a
server of its own, with the same flags. B's log-probabilities are compared bit for bit, one request
running at a time. `HIER_KV_TENANT_ROUNDS` sets the number of rounds.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.server import Server
from bench.workload import load_texts, load_tokenizer
from tests.e2e.hier_server import hier_args, settled, state, tokens_and_logprobs

pytestmark = pytest.mark.e2e

PAGE, CONTEXT, NEW_TOKENS = 16, 512, 4
ROUNDS = int(os.environ.get("HIER_KV_TENANT_ROUNDS", "20"))
Answer = dict[str, Any]


class Keys(NamedTuple):
    """What a client sends of itself."""

    extra_key: str = ""
    cache_salt: str = ""

    def of_round(self, number: int) -> Keys:
        """The same, for one round; unnamed stays so."""
        if self.extra_key:
            return Keys(f"{number}{self.extra_key}", self.cache_salt)
        return Keys("", self.cache_salt and f"{number}{self.cache_salt}")


UNNAMED = Keys()
# Each two differ, and many are the same text cut at another place.
TENANTS = (
    UNNAMED, Keys("ab", "c"), Keys("a", "bc"), Keys("abc"), Keys("", "abc"), Keys("a"), Keys("ab"),
    Keys("a", "b"), Keys("('a', 'bc')"), Keys("a+b", "c"),
)  # fmt: skip


class Item(NamedTuple):
    """A prompt that somebody sends; the items of a step are sent in one request."""

    who: str
    prompt: list[int]
    mode: str = ""
    in_session: bool = False
    owner: str = ""

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Of the request."""
        custom = {"hier_kv_truncation": self.mode, "hier_kv_owner": self.owner}
        stated = {name: value for name, value in custom.items() if value}
        params = {"max_new_tokens": NEW_TOKENS, "ignore_eos": True, "temperature": 0}
        return {**params, "custom_params": stated or None}


Steps = list[list[Item]]


# ---- the ways to share ----


@cache
def texts() -> list[list[int]]:
    return load_texts(load_tokenizer())


def text(num_tokens: int, seed: int) -> list[int]:
    """An excerpt of the bundled texts."""
    rng = random.Random(seed)
    whole = rng.choice(texts())
    at = rng.randrange(len(whole) - num_tokens)
    return whole[at : at + num_tokens]


def quote(seed: int) -> Steps:
    """B quotes public text that A sent behind a secret."""
    head, secret, public = text(4, seed), text(70, seed + 1), text(180, seed + 2)
    return [
        [Item("A", [*head, *secret, *public, *text(20, seed + 3)])],
        [Item("B", [*head, *public, *text(20, seed + 4)], "match")],
    ]


def twin(seed: int) -> Steps:
    """B's prompt is too long, and A's but for a part that is dropped."""
    whole = text(760, seed)
    other = [*whole[:40], *text(60, seed + 1), *whole[100:]]
    return [[Item("A", whole[:500])], [Item("A", whole)], [Item("B", other)]]


def cut_alike(seed: int) -> Steps:
    """The very same prompts, which fit and then do not."""
    whole = text(700, seed)
    return [[Item(who, whole[:num])] for who in "AB" for num in (300, 700)]


def fork(seed: int) -> Steps:
    """A conversation that both begin alike and go on with otherwise."""
    common = text(200, seed)
    return [[Item("A", common)], *([Item(who, common + text(90, seed + ord(who)))] for who in "AB")]


def session(seed: int) -> Steps:
    """Each has a session, with the same words."""
    turns = [text(80, seed), text(90, seed + 1)]
    return [[Item(who, turn, in_session=True)] for who in "AB" for turn in turns]


def batch(seed: int) -> Steps:
    """Both in one request, again and again."""
    (a,), (b,) = quote(seed)
    common = text(150, seed + 5)
    return [[a], [a, b], [Item("A", common), b, Item("B", [*common, *b.prompt], "off")]]


ANY_TENANTS: Sequence[Callable[[int], Steps]] = (quote, twin)
OTHER_TENANTS = (*ANY_TENANTS, cut_alike, fork, session, batch)


class Round(NamedTuple):
    """What both send, and who they are.

    Attributes:
        way: what it plays.
        keys: of A and B.
        steps: in order.
        forget: whether the device and DRAM are emptied before B's first prompt.
    """

    way: str
    keys: dict[str, Keys]
    steps: Steps
    forget: bool


def rounds(seed: int = 0) -> list[Round]:
    """Random tenants; in every fourth round both are unnamed."""
    rng, out = random.Random(seed), []
    for number in range(ROUNDS):
        a, b = rng.sample(TENANTS, 2) if number % 4 else (UNNAMED, UNNAMED)
        ways = ANY_TENANTS if a == b else OTHER_TENANTS
        way = ways[(number if number % 4 else number // 4) % len(ways)]
        keys = {"A": a.of_round(number), "B": b.of_round(number)}
        steps = way(1000 * seed + 10 * number)
        out.append(Round(way.__name__, keys, steps, rng.random() < 0.4))
    return out


# ---- servers ----


def start(folder: Path) -> Server:
    """One with coded DRAM and a remote store."""
    (folder / "store").mkdir()
    args = [*hier_args(folder, host_pages=1500, disk_gb=0), "--page-size", str(PAGE)]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "32768"]
    args += ["--max-running-requests", "1", "--hier-kv-prefetch-policy", "wait_complete"]
    args += ["--hier-kv-truncation", "all", "--hier-kv-codec", "host=lossless,remote=lossless"]
    args += ["--hier-kv-remote-url", f"file://{folder}/store?size=1GB"]
    return Server(args, log_path=folder / "server.log", stop="kill", start_timeout_s=400)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What B is told in each round by a server that never meets A."""
    with start(tmp_path_factory.mktemp("alone")) as server:
        return [answers_of_b(server, each, with_a=False) for each in rounds()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, honest: list[list[Any]]) -> Iterator[Server]:
    """The one that both use; after the other, as an idle server takes a whole core."""
    with start(tmp_path_factory.mktemp("both")) as running:
        yield running


class Sender:
    """Who sends what on one server, in one round."""

    def __init__(self, server: Server, keys: dict[str, Keys]) -> None:
        self.server = server
        self.keys = keys
        self.sessions: dict[str, tuple[str, str | None]] = {}

    def send(self, items: list[Item]) -> list[Answer]:
        fields: dict[str, Any] = {"input_ids": [item.prompt for item in items]}
        fields["sampling_params"] = [item.sampling_params for item in items]
        fields["return_logprob"] = True
        for name in Keys._fields:
            fields[name] = [getattr(self.keys[item.who], name) for item in items]
        (first, *others) = items
        if not first.in_session:
            answers: list[Answer] = self.server.post("/generate", fields)
            return answers
        assert not others
        one = {name: all_[0] if isinstance(all_, list) else all_ for name, all_ in fields.items()}
        if first.who not in self.sessions:
            name = self.server.post("/open_session", {"capacity_of_str_len": 9999})
            self.sessions[first.who] = name, None
        name, rid = self.sessions[first.who]
        answer = self.server.post("/generate", {**one, "session_params": {"id": name, "rid": rid}})
        self.sessions[first.who] = name, answer["meta_info"]["id"]
        return [answer]

    def forget(self) -> None:
        """What was sent so far is in the remote store only."""
        settled(self.server)
        self.server.post("/flush_cache")
        self.server.post("/hicache/storage-backend/clear")


def answers_of_b(server: Server, played: Round, *, with_a: bool) -> list[Any]:
    """What B is told: tokens, log-probabilities and how much of its prompts was reused."""
    sender = Sender(server, played.keys)
    told: list[Any] = []
    for step in played.steps:
        items = [item for item in step if with_a or item.who == "B"]
        if not items:
            continue
        if played.forget and items[0].who == "B" and not told:
            sender.forget()
        for item, answer in zip(items, sender.send(items), strict=True):
            if item.who == "B":
                meta = answer["meta_info"]
                told.append((*tokens_and_logprobs(answer), meta["cached_tokens"]))
        if told and step is not played.steps[-1]:
            settled(server)  # what B's next prompt can be made of does not hang on time
    return told


# ---- tests ----


def test_b_is_answered_as_if_a_had_never_been_there(
    server: Server, honest: list[list[Any]]
) -> None:
    for number, (played, expected) in enumerate(zip(rounds(), honest, strict=True)):
        found = answers_of_b(server, played, with_a=True)
        assert found == expected, (number, played.way, played.keys, played.forget)
    counts = state(server)["host"]
    for name in ("quote_searches", "quote_unnamed_requests", "truncated_requests"):
        assert counts[name] > 0, name
    assert counts["remote_written_pages"] > 0
    assert counts.get("quoting_requests", 0) == 0


def moved(answer: Answer) -> int:
    details = answer["meta_info"]["cached_tokens_details"] or {}
    return int(details.get("hier_kv", {}).get("moved", 0))


class Tenant:
    """One client of the server, whose prompts quote a conversation, each from another place on."""

    def __init__(self, server: Server, keys: Keys, stored: list[int]) -> None:
        self.server = server
        self.sender = Sender(server, {"A": keys})
        self.stored = stored
        self.first = 100

    def store(self, mode: str = "", owner: str = "") -> None:
        self.sender.send([Item("A", self.stored, mode, owner=owner)])
        settled(self.server)

    def num_moved(self, mode: str = "", owner: str = "") -> int:
        """Tokens that a quoting prompt is given, at the first search that ended in time."""
        for _ in range(100):
            self.first += 1
            prompt = [*self.stored[:4], *self.stored[self.first :], self.first]
            before = self.counts().get("quote_search_timeouts", 0)
            (answer,) = self.sender.send([Item("A", prompt, mode, owner=owner)])
            if self.counts().get("quote_search_timeouts", 0) == before:
                return moved(answer)
        raise AssertionError("no search ends in time")

    def counts(self) -> dict[str, int]:
        counts: dict[str, int] = state(self.server)["host"]
        return counts


def test_stored_text_is_found_inside_a_tenant_by_its_owner(server: Server) -> None:
    tenant = Tenant(server, Keys("", "tenant"), text(360, 1))
    tenant.store()
    assert tenant.num_moved() > 150
    assert tenant.num_moved("match") > 150
    assert tenant.num_moved("overflow") == tenant.num_moved("off") == 0, "it declined"
    assert tenant.num_moved(owner="me") == 0, "nobody's is not mine"
    for keys in (UNNAMED, Keys("tenant"), Keys("tenant", "tenant"), Keys("", "tenan")):
        assert Tenant(server, keys, tenant.stored).num_moved() == 0

    owned = Tenant(server, Keys("key", ""), text(360, 2))
    owned.store(owner="me")
    assert owned.num_moved(owner="me") > 150
    assert owned.num_moved(owner="you") == owned.num_moved() == 0


@pytest.mark.parametrize("mode", ["off", "overflow"])
def test_a_conversation_that_declined_is_not_found(server: Server, mode: str) -> None:
    tenant = Tenant(server, Keys("", f"declines {mode}"), text(360, 3))
    tenant.store(mode)
    assert tenant.num_moved() == 0


def test_unnamed_text_is_not_found_at_all(server: Server) -> None:
    tenant = Tenant(server, UNNAMED, text(360, 4))
    tenant.store()
    assert tenant.num_moved() == 0
