"""Prompts that quote stored text on two tensor parallel ranks, their page stores late by chance.

Answers are compared with those that one rank gives to the same prompts, moved alike. In float32 two
ranks and one differ by rounding alone, moved and recomputed KV by far more. SGLang's rank consensus
checker is on: it ends the server when ranks decide differently.

The long form has latent rows, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.server import Server
from tests.e2e.hier_server import real_prompts, settled, state
from tests.e2e.ranks.test_truncated_ranks import (
    PAGE,
    ROUNDING,
    differences,
    forgotten_by_the_device,
    report,
    server_of,
)
from tests.e2e.remote.latent_model import write_latent_model

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HEAD, STORED, FIRST = 4, 400, 150
NUM_CHATS, NUM_OTHERS = 3, 16
HOST_PAGES = 100  # of twice the bytes of this test's
MOST_TRIES = 30
Answer = dict[str, Any]


def ask(server: Server, prompt: list[int], salt: str, **custom: Any) -> Answer:
    params = {"max_new_tokens": 3, "ignore_eos": True, "custom_params": custom}
    return server.generate(
        input_ids=prompt, sampling_params=params, return_logprob=True, cache_salt=salt
    )


def quoting(text: list[int]) -> list[int]:
    """What a client sends that drops the beginning of a conversation, and goes on."""
    return [*text[:HEAD], *text[FIRST:]]


def late_searches(server: Server) -> int:
    return int(state(server)["host"].get("quote_search_timeouts", 0))


def push_out(server: Server, text: list[int], salt: str, others: list[list[int]]) -> None:
    """Other prompts take all of DRAM, that of a conversation first."""
    prompt = {"input_ids": text[:STORED], "cache_salt": salt}
    server.post("/hier_kv/steer", {**prompt, "demote": True})
    for other in others:
        ask(server, other, "others", hier_kv_truncation="off")
    settled(server)


def damage_records(folder: Path) -> None:
    """No record of the second rank is read as it was written."""
    for segment in sorted((folder / "disk" / "dp0-tp1-of-2").rglob("seg-*.hkv")):
        with segment.open("r+b") as file:
            size = segment.stat().st_size
            for at in range(2048, size, 4096):
                file.seek(at)
                (byte,) = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 0xFF]))


def ask_quoting(
    server: Server, text: list[int], name: str, others: list[list[int]], folder: Path | None = None
) -> Answer:
    """The answer to a prompt that quotes a conversation, at the first search that ends in time.

    Args:
        server: of it.
        text: of the conversation, and what the prompt goes on with.
        name: of the tenants, each of which sends the same.
        others: prompts that push the conversation out of DRAM; none: it stays there.
        folder: where the second rank's disk is damaged then; None: nowhere.
    """
    for number in range(MOST_TRIES):
        salt = f"{name} {number}"
        ask(server, text[:STORED], salt)
        forgotten_by_the_device(server)
        if others:
            push_out(server, text, salt, others)
        if folder is not None:
            damage_records(folder)
        forgotten_by_the_device(server)
        before = late_searches(server)
        answer = ask(server, quoting(text), salt)
        if late_searches(server) == before:
            return answer
    raise AssertionError("no search ends in time")


@dataclass(frozen=True)
class Quotes:
    """Answers to prompts that quote, and the scheduler's state behind them.

    Attributes:
        found: of conversations in DRAM, and of one that lies on disk.
        exact: what is computed for the same prompts, and for that of `lost`; of one rank.
        lost: of one that the second rank has lost on disk; of two ranks.
        state: before `lost` and `exact` were asked for.
        last_state: behind them.
        log: of the server.
    """

    found: list[Answer]
    exact: list[Answer]
    lost: list[Answer]
    state: dict[str, Any]
    last_state: dict[str, Any]
    log: str


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return list(real_prompts([STORED + 30] * (NUM_CHATS + 2), seed=47))


@pytest.fixture(scope="module")
def others() -> list[list[int]]:
    return list(real_prompts([480] * NUM_OTHERS, seed=48))


def serve(folder: Path, num_ranks: int, texts: list[list[int]], others: list[list[int]]) -> Quotes:
    *chats, on_disk, lost = texts
    with server_of(folder, num_ranks, mode="match", host_pages=HOST_PAGES) as server:
        found = [
            ask_quoting(server, chat, f"chat {number}", []) for number, chat in enumerate(chats)
        ]
        found.append(ask_quoting(server, on_disk, "on disk", others))
        before = settled(server)
        if num_ranks == 1:
            exact = [ask(server, quoting(text), "exact", hier_kv_exact=True) for text in texts]
            return Quotes(found, exact, [], before, settled(server), server.log())
        answer = ask_quoting(server, lost, "lost", others, folder)
        return Quotes(found, [], [answer], before, settled(server), server.log())


@pytest.fixture(scope="module")
def of_two(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], others: list[list[int]]
) -> Quotes:
    return serve(tmp_path_factory.mktemp("two"), 2, texts, others)


@pytest.fixture(scope="module")
def of_one(
    tmp_path_factory: pytest.TempPathFactory, texts: list[list[int]], others: list[list[int]]
) -> Quotes:
    return serve(tmp_path_factory.mktemp("one"), 1, texts, others)


def num_rejected(rank: dict[str, Any]) -> int:
    """Records of a rank's disk that were refused."""
    return sum(num for name, num in rank["host"].items() if name.startswith("rejected_"))


def moved(answer: Answer) -> int:
    return int(report(answer).get("moved", 0))


def test_two_ranks_move_what_one_moves_and_answer_as_it_does(
    of_two: Quotes, of_one: Quotes
) -> None:
    two, one = of_two.found, of_one.found
    assert [moved(answer) for answer in two] == [moved(answer) for answer in one]
    assert min(moved(answer) for answer in two) > STORED - FIRST - 2 * PAGE
    assert {report(answer)["quality"] for answer in two} == {"approximated"}
    assert max(differences(two, one)) < ROUNDING
    assert min(differences(two, of_one.exact[:-1])) > 10 * ROUNDING
    assert report(two[-1])["disk"] > 0


def test_both_ranks_find_and_move_the_same(of_two: Quotes) -> None:
    ranks = [rank["host"] for rank in of_two.state["tp_ranks"]]
    assert len(ranks) == 2
    told = sum(moved(answer) for answer in of_two.found)
    assert [rank["moved_tokens"] for rank in ranks] == [told, told]
    assert ranks[0]["quoting_requests"] == ranks[1]["quoting_requests"] == NUM_CHATS + 1
    assert [rank.get("quote_search_disagreements", 0) for rank in ranks] == [0, 0]


def test_what_one_rank_alone_has_lost_is_moved_on_none(of_two: Quotes, of_one: Quotes) -> None:
    """Its text is found on both, and its pages lie damaged on the second rank's disk."""
    before, after = (each["tp_ranks"] for each in (of_two.state, of_two.last_state))
    for rank, then in zip(before, after, strict=True):
        assert then["host"]["quoting_requests"] == rank["host"]["quoting_requests"] + 1
        assert then["host"]["moved_tokens"] == rank["host"]["moved_tokens"]
    assert num_rejected(before[1]) == num_rejected(after[0]) == 0 < num_rejected(after[1])
    assert [moved(answer) for answer in of_two.lost] == [0]
    assert max(differences(of_two.lost, of_one.exact[-1:])) < ROUNDING
    assert "Found rank divergence" not in of_two.log


@pytest.mark.long
def test_of_a_model_with_mla_all_move_the_keepers_pages(
    tmp_path: Path, texts: list[list[int]]
) -> None:
    model = write_latent_model(tmp_path / "model")
    chats, found = texts[:NUM_CHATS], []
    for num_ranks in (1, 2):
        folder = tmp_path / str(num_ranks)
        folder.mkdir()
        with server_of(folder, num_ranks, model, mode="all") as server:
            found.append(
                [ask_quoting(server, chat, f"chat {at}", []) for at, chat in enumerate(chats)]
            )
            ranks = settled(server).get("tp_ranks", [])
            log = server.log()
    one, two = found
    assert [moved(answer) for answer in two] == [moved(answer) for answer in one]
    assert min(moved(answer) for answer in two) > STORED - FIRST - 2 * PAGE
    assert max(differences(two, one)) < ROUNDING
    told = sum(moved(answer) for answer in two)
    assert [rank["host"]["moved_tokens"] for rank in ranks] == [told, told]
    assert "Found rank divergence" not in log
