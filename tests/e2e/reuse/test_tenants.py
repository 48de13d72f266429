"""A and B on one server: B's answers are those of a server that never saw A.

On one server A sends first, in every way in which KV can be shared; B sends the same there and to a
server of its own, with the same flags. B's log-probabilities are compared bit for bit, one request
running at a time. The long form has more rounds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from testkit.requests import flush_device
from testkit.server import Server
from testkit.workload import load_texts, load_tokenizer
from tests.e2e.hier_server import connected, hier_args, settled, state, tokens_and_logprobs
from tests.long_form import count, either

pytestmark = pytest.mark.e2e

PAGE, CONTEXT, NEW_TOKENS = 16, 512, 4
# A default run plays some of the first ones: each way, all near ones, unnamed ones, each tier.
ROUNDS, PLAYED = count(20, 200), either((9, 11, 12, 13, 14, 15, 17, 19), ())
HOST_PAGES = either(32, 64)  # of 64 tokens
CODECS = "host=lossless,disk=lossless,remote=lossless"
# Prompts of somebody else, who pushes all that was sent before out of DRAM.
NUM_FILLERS = either(7, 14)
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


# To who forgets a key or a salt two of them are one; who joins both takes two others for one.
NEAR = (
    (Keys("a", "bc"), Keys("ab", "c")), (Keys("a", "b"), Keys("a", "bc")),
    (Keys("abc"), Keys("", "abc")), (Keys("a"), Keys("ab")), (Keys("ab", "c"), Keys("ab")),
)  # fmt: skip


class Item(NamedTuple):
    """A prompt that somebody sends; the items of a step are sent in one request.

    Those of a session go on with what was said in it: `kept`, or `streaming` with its KV.
    """

    who: str
    prompt: list[int]
    mode: str = ""
    session: str = ""
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
    return [[Item(who, turn, session="kept")] for who in "AB" for turn in turns]


def streaming(seed: int) -> Steps:
    """The same with sessions that keep their KV on the device; they take turns."""
    turns = [text(80, seed + num) for num in range(3)]
    return [[Item(who, turn, session="streaming")] for turn in turns for who in "AB"]


def batch(seed: int) -> Steps:
    """Both in one request, again and again."""
    (a,), (b,) = quote(seed)
    common = text(150, seed + 5)
    return [[a], [a, b], [Item("A", common), b, Item("B", [*common, *b.prompt], "off")]]


ANY_TENANTS: Sequence[Callable[[int], Steps]] = (quote, twin)
OTHER_TENANTS = (*ANY_TENANTS, cut_alike, fork, session, streaming, batch)


TIERS = ("", "", "remote", "disk")


class Round(NamedTuple):
    """What both send, and who they are.

    Attributes:
        number: of the round.
        way: what it plays.
        keys: of A and B.
        steps: in order.
        only_in: tier in which all lies before B's first prompt; none: where it happens to.
    """

    number: int
    way: str
    keys: dict[str, Keys]
    steps: Steps
    only_in: str


def rounds(seed: int = 0) -> list[Round]:
    """Random tenants, and near ones in turn; in every fourth round both are unnamed."""
    rng, out = random.Random(seed), []
    for number in range(ROUNDS):
        a, b = rng.sample(TENANTS, 2) if number % 4 else (UNNAMED, UNNAMED)
        if number % 2:
            a, b = NEAR[number // 2 % len(NEAR)]
        ways = ANY_TENANTS if a == b else OTHER_TENANTS
        way = ways[(number if number % 4 else number // 4) % len(ways)]
        keys = {"A": a.of_round(number), "B": b.of_round(number)}
        steps = way(1000 * seed + 10 * number)
        out.append(Round(number, way.__name__, keys, steps, rng.choice(TIERS)))
    return [out[number] for number in PLAYED] or out


# ---- servers ----


def start(folder: Path) -> Server:
    """One with little DRAM, part of it coded, a disk and a remote store."""
    (folder / "store").mkdir()
    args = [*hier_args(folder, host_pages=HOST_PAGES, disk_gb=0.5), "--page-size", str(PAGE)]
    args += ["--context-length", str(CONTEXT), "--max-total-tokens", "32768"]
    # Streaming sessions hold a row each; no two requests run together.
    args += ["--max-running-requests", "4", "--pp-max-micro-batch-size", "1"]
    args += ["--hier-kv-prefetch-policy", "wait_complete"]
    args += ["--enable-streaming-session"]
    args += ["--hier-kv-truncation", "all", "--hier-kv-codec", CODECS]
    args += ["--hier-kv-remote-url", f"file://{folder}/store?size=1GB"]
    return Server(args, log_path=folder / "server.log", stop="kill", start_timeout_s=400)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> list[list[Any]]:
    """What B is told in each round by a server that never meets A."""
    with start(tmp_path_factory.mktemp("alone")) as server:
        connected(server)
        return [answers_of_b(server, each, with_a=False) for each in rounds()]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, honest: list[list[Any]]) -> Iterator[Server]:
    """The one that both use; after the other, as an idle server takes a whole core."""
    with start(tmp_path_factory.mktemp("both")) as running:
        yield connected(running)


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
        if not first.session:
            answers: list[Answer] = self.server.post("/generate", fields)
            return answers
        assert not others
        one = {name: all_[0] if isinstance(all_, list) else all_ for name, all_ in fields.items()}
        if first.who not in self.sessions:
            wish = {"capacity_of_str_len": 9999, "streaming": first.session == "streaming"}
            name = self.server.post("/open_session", wish)
            self.sessions[first.who] = name, None
        name, rid = self.sessions[first.who]
        answer = self.server.post("/generate", {**one, "session_params": {"id": name, "rid": rid}})
        self.sessions[first.who] = name, answer["meta_info"]["id"]
        return [answer]

    def leave_in(self, tier: str, seed: int) -> None:
        """What was sent so far is in one tier only, but for sessions that keep their KV."""
        settled(self.server)
        if tier == "disk":
            for number in range(NUM_FILLERS):
                prompt = text(500, 7 * seed + number)
                self.server.generate(input_ids=prompt, sampling_params={"max_new_tokens": 1})
            settled(self.server)
        flush_device(self.server)
        if tier == "remote":
            self.server.post("/hicache/storage-backend/clear")

    def close(self) -> None:
        """Ends the sessions."""
        for name, _ in self.sessions.values():
            self.server.post("/close_session", {"session_id": name})


def answers_of_b(server: Server, played: Round, *, with_a: bool) -> list[Any]:
    """What B is told: tokens, log-probabilities and how much of its prompts was reused."""
    sender = Sender(server, played.keys)
    told: list[Any] = []
    for step in played.steps:
        items = [item for item in step if with_a or item.who == "B"]
        if not items:
            continue
        if played.only_in and items[0].who == "B" and not told:
            sender.leave_in(played.only_in, played.number)
        for item, answer in zip(items, sender.send(items), strict=True):
            if item.who == "B":
                meta = answer["meta_info"]
                told.append((*tokens_and_logprobs(answer), meta["cached_tokens"]))
        if told and step is not played.steps[-1]:
            settled(server)  # what B's next prompt can be made of does not hang on time
    sender.close()
    return told


# ---- tests ----


def test_b_is_answered_as_if_a_had_never_been_there(
    server: Server, honest: list[list[Any]]
) -> None:
    for number, (played, expected) in enumerate(zip(rounds(), honest, strict=True)):
        found = answers_of_b(server, played, with_a=True)
        assert found == expected, (number, played.way, played.keys, played.only_in)
    found_state = state(server)
    counts = found_state["host"]
    assert found_state["disk"]["records_read"] > 0
    for name in (
        "promoted_pages",
        "quote_searches",
        "quote_unnamed_requests",
        "truncated_requests",
    ):
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


def test_clearing_the_storage_forgets_its_text(server: Server) -> None:
    """Not only its pages: nothing is found that is not there."""
    tenant = Tenant(server, Keys("", "clears"), text(360, 5))
    tenant.store()
    assert tenant.num_moved() > 150
    for first in range(200, 220):
        flush_device(server)
        server.post("/hicache/storage-backend/clear")
        before = tenant.counts()
        tenant.sender.send([Item("A", [*tenant.stored[:4], *tenant.stored[first:], first])])
        after = tenant.counts()
        assert after["quote_searches"] > before["quote_searches"]
        if after.get("quote_search_timeouts", 0) == before.get("quote_search_timeouts", 0):
            assert after["quoting_requests"] == before["quoting_requests"]
            return
    raise AssertionError("no search ends in time")
