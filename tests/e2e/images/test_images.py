"""Prompts with images, on the real server: a small Qwen2.5-VL.

A plain server of SGLang's says what is right; of the plugin's, one is killed, and another one goes
on with its disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

from testkit.images.vision_model import IMAGE, picture, write_vision_model
from testkit.rank_requests import ENVIRONMENT
from testkit.server import Server
from tests.e2e.hier_server import send_in_halves, settled, state, states
from tests.e2e.images.image_chats import Said, converse, questions
from tests.e2e.images.image_prompts import (
    BASE,
    LARGE,
    PAGE,
    PLUGIN,
    TOLERANCE,
    Prompt,
    answers,
    ask,
    check_right,
    host_size,
    prompts,
    words,
)
from tests.e2e.models.hybrid_answers import cached, check_hits, drop_device, values

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.newest_release]

LONG = 60  # tokens of an answer that nobody waits for


@dataclass
class World:
    """Two servers that are alike but for the plugin."""

    plain: Server
    hier: Server
    model: Path
    folder: Path


def hier_server(
    world_model: Path,
    folder: Path,
    *args: str,
    host_pages: int = 400,
    env: dict[str, str] | None = None,
) -> Server:
    tiers = ["--hier-kv-host-size", host_size(host_pages), "--enable-cache-report"]
    tiers += ["--hier-kv-disk-dir", str(folder / "disk")]
    return Server([*BASE, *PLUGIN, *tiers, *args], model=str(world_model), env=env, stop="kill")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("images")
    model = write_vision_model(folder / "model")
    args = [*BASE, *LARGE, "--enable-cache-report"]
    with (
        Server(args, model=str(model), stop="kill") as plain,
        hier_server(model, folder, *LARGE) as hier,
    ):
        yield World(plain, hier, model, folder)


@dataclass
class Chat:
    """What plain SGLang answers in a chat with images, and again from its device.

    Attributes:
        first: as it computes them.
        hits: again.
    """

    first: list[Said]
    hits: list[Said]

    @classmethod
    def on(cls, plain: Server) -> Self:
        """Of a server."""
        first = converse(plain, streamed=False)
        replies = [said.text for said in first]
        return cls(first, converse(plain, replies, streamed=False))

    @property
    def replies(self) -> list[str]:
        """Of the assistant."""
        return [said.text for said in self.first]

    def check_first(self, server: Server) -> None:
        """Each turn goes on from the one before."""
        found = converse(server, self.replies, streamed=False)
        assert [said.cached for said in found] == [said.cached for said in self.first]
        assert found[2].cached > found[1].cached > 100
        for said, right in zip(found, self.first, strict=True):
            assert said.text == right.text
            assert said.logprobs == pytest.approx(right.logprobs, abs=TOLERANCE)

    def check_again(self, server: Server, tier: str, *, streamed: bool) -> None:
        """As the device hits of plain SGLang, and each turn says from where it has what."""
        found = converse(server, self.replies, streamed=streamed)
        for said, right in zip(found, self.hits, strict=True):
            assert said.text == right.text
            if streamed:  # SGLang leaves out those of tokens that two steps have put into one piece
                in_order = iter(right.logprobs)
                assert said.logprobs
                assert all(each in in_order for each in said.logprobs)
            else:
                assert said.logprobs == right.logprobs
            assert said.cached == right.cached == (said.num_prompt - 1) // PAGE * PAGE
            assert sum(said.tiers.values()) == said.cached
        assert found[0].tiers == {tier: found[0].cached}
        assert found[2].tiers[tier] >= PAGE

    def check_others(self, server: Server, **whose: str) -> None:
        """The same images under another salt, or another key, were nobody's."""
        found = converse(server, self.replies, streamed=False, **whose)
        assert [said.cached for said in found] == [said.cached for said in self.first]
        assert found[0].cached == 0
        assert [said.text for said in found] == self.replies


def test_images_come_back_from_dram_and_from_disk(world: World, tmp_path: Path) -> None:
    """Bit for bit as they do from the device of plain SGLang; those of a chat, too."""
    which = prompts()
    computed = answers(world.plain, which)
    hits = answers(world.plain, which)
    chat = Chat.on(world.plain)
    with hier_server(world.model, tmp_path, *LARGE) as server:
        check_right(answers(server, which), computed)
        assert values(answers(server, which)) == values(hits)
        chat.check_first(server)
        drop_device(server)
        check_hits(answers(server, which), hits, "host", above=1000)
        chat.check_again(server, "host", streamed=True)
        drop_device(server)
        chat.check_again(server, "host", streamed=False)
        chat.check_others(server, cache_salt="another")
        chat.check_others(server, extra_key="another")
        settled(server)
        assert state(server)["host"]["image_requests"] == 3 * len(which) + 5 * len(questions())
    with hier_server(world.model, tmp_path, *LARGE) as server:
        check_hits(answers(server, which), hits, "disk", above=1000)
        chat.check_again(server, "disk", streamed=True)
        chat.check_others(server, cache_salt="yet another")


def test_another_image_in_the_same_text_is_another_prompt(world: World) -> None:
    text = words(100, 70) + IMAGE + words(101, 60)
    which = [Prompt(text, (picture(seed),)) for seed in range(200, 205)]
    right = answers(world.plain, which)
    assert len({tuple(answer["output_ids"]) for answer in right}) > 1
    check_right(answers(world.hier, which), right)
    drop_device(world.hier)
    for prompt, wanted in zip(reversed(which), reversed(right), strict=True):
        check_right([ask(world.hier, prompt)], [wanted])
    new = Prompt(text, (picture(299),))
    drop_device(world.hier)
    answer = ask(world.hier, new)
    check_right([answer], [ask(world.plain, new)])
    assert cached([answer])[0] < 100, "the text before the image, and no more"


def test_a_conversation_with_another_image_in_each_turn(world: World) -> None:
    """A turn goes on from the one before, and so do both servers alike."""
    text = ""
    images: tuple[str, ...] = ()
    turns = []
    for turn in range(4):
        text += words(300 + turn, 40) + IMAGE + words(400 + turn, 30)
        images = (*images, picture(300 + turn, width=6 + turn))
        turns.append(Prompt(text, images))
    for prompt in turns:  # what a turn reuses is the turn before, in whole pages
        right, found = ask(world.plain, prompt), ask(world.hier, prompt)
        check_right([found], [right])
        assert cached([found]) == cached([right])
        drop_device(world.hier)
    assert cached([found])[0] > 200
    reused = found["meta_info"]["cached_tokens_details"]["hier_kv"]
    assert reused["host"] == cached([found])[0]


def test_each_of_several_schedulers_names_and_keeps_its_own(world: World, tmp_path: Path) -> None:
    """All are handed the names of one front, and whichever is asked proves them by itself."""
    which = prompts()[1:5:2]
    computed = answers(world.plain, which)
    hits = answers(world.plain, which)
    with hier_server(
        world.model, tmp_path, *LARGE, "--dp-size", "2", env=ENVIRONMENT, host_pages=160
    ) as server:

        def of(rank: int) -> list[Any]:
            return [ask(server, prompt, routed_dp_rank=rank) for prompt in which]

        check_right(of(0), computed)
        check_right(found := of(1), computed)
        assert cached(found) == [0] * len(which), "what the other one has"
        for _ in range(2):
            drop_device(server)
            for rank in (0, 1):
                check_hits(of(rank), hits, "host", above=200)
        counts = [each["host"] for each in states(server)]
    assert [each["image_requests"] for each in counts] == [3 * len(which)] * 2
    for each in counts:
        assert not each.get("unnamed_image_requests")
        assert not each.get("image_name_conflicts")


def test_who_names_images_himself_is_served_and_not_stored(world: World) -> None:
    """Two images under one name are one to SGLang; the store never hears of it."""
    text = words(500, 40) + IMAGE + words(501, 80)
    mine, yours = (Prompt(text, (picture(seed),)) for seed in (500, 501))
    saved = settled(world.hier)["host"]["saved_pages"]
    ask(world.hier, mine, mm_hashes=["ab12"])
    ask(world.hier, yours, mm_hashes=["ab12"])
    drop_device(world.hier)
    assert settled(world.hier)["host"]["saved_pages"] == saved
    right = answers(world.plain, [yours, mine])
    found = answers(world.hier, [yours, mine])
    assert cached(found)[0] == 0
    check_right(found, right)
    drop_device(world.hier)
    check_right(answers(world.hier, [yours, mine]), right)


def test_many_at_once_on_a_small_device(world: World, tmp_path: Path) -> None:
    """Images leave the device while others come, and chunks end inside of them.

    Some clients leave in the middle of their answer.
    """
    texts = [words(600 + n, 30 + 17 * n) + IMAGE + words(700 + n, 50) for n in range(3)]
    which = [
        Prompt(text, (picture(600 + seed, width=10, height=12),))
        for text in texts
        for seed in range(4)
    ]
    right = dict(zip(which, answers(world.plain, which), strict=True))
    rng = random.Random(0)
    asked = [rng.choice(which) for _ in range(60)]

    def say(number: int) -> Any:
        if number % 5 == 0:
            return leave_early(server, asked[number])
        return ask(server, asked[number])

    with hier_server(world.model, tmp_path, "--max-total-tokens", "1536", host_pages=20) as server:
        found = send_in_halves(server, say, range(len(asked)))
        stayed = [number for number in range(len(asked)) if number % 5]
        check_right([found[number] for number in stayed], [right[asked[n]] for n in stayed])
        counts = settled(server)["host"]
    assert counts["loaded_pages"] > 20
    assert counts["image_requests"] == len(asked)
    assert not counts.get("image_name_conflicts")


def leave_early(server: Server, prompt: Prompt) -> None:
    """Asks, and is gone once the answer has begun."""
    for _ in server.stream(
        text=prompt.text,
        image_data=list(prompt.images),
        sampling_params={"max_new_tokens": LONG, "ignore_eos": True},
    ):
        return
