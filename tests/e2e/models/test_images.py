"""Prompts with images, on the real server: a small Qwen2.5-VL.

A plain server of SGLang's says what is right; of the plugin's, one is killed, and another one goes
on with its disk.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.images.vision_model import IMAGE, picture, write_vision_model
from testkit.server import Server
from tests.e2e.hier_server import GIB, settled, state, tokens_and_logprobs
from tests.e2e.models.hybrid_answers import cached, check_hits, drop_device, values

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE = 64
NUM_TOKENS = 12
TOLERANCE = 2e-3  # how far rounding takes a log-probability; another image takes it to 1 and more
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", "--dtype", "float32"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--image-processor-backend", "pil", "--sleep-on-idle"]
PLUGIN = ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
PLUGIN += ["--hier-kv-prefetch-timeout-ms", "60000", "--hier-kv-disk-size", "0.5"]
PLUGIN += ["--hier-kv-disk-segment-size", "0.01"]
SLOT_BYTES = 135_168
WORDS = ("server", "page", "writes", "reads", "disk", "before", "asked", "of", "the", "it")


@dataclass(frozen=True)
class Prompt:
    """A text with images in it."""

    text: str
    images: tuple[str, ...]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count)) + " "


def prompts() -> list[Prompt]:
    """Images begin anywhere in a page, end in another one, and are alone or several."""
    found = []
    for seed, (before, size, behind) in enumerate(
        [
            (3, (8, 8), 90),
            (60, (5, 13), 40),
            (75, (16, 16), 5),
            (120, (3, 3), 150),
            (40, (9, 30), 1),
        ]
    ):
        image = picture(seed, width=size[0], height=size[1])
        found.append(Prompt(words(seed, before) + IMAGE + words(seed + 50, behind), (image,)))
    two = words(7, 30) + IMAGE + words(8, 20) + IMAGE + words(9, 30)
    found.append(Prompt(two, (picture(20), picture(21, width=4))))
    return found


def ask(server: Server, prompt: Prompt, num: int = NUM_TOKENS, **fields: Any) -> dict[str, Any]:
    return server.generate(
        text=prompt.text,
        image_data=list(prompt.images),
        sampling_params={"max_new_tokens": num, "ignore_eos": True, "temperature": 0},
        return_logprob=True,
        **fields,
    )


def answers(server: Server, which: Sequence[Prompt]) -> list[Any]:
    return [ask(server, prompt) for prompt in which]


def check_right(found: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Answers are those of another computation, but for rounding."""
    for answer, right in zip(found, wanted, strict=True):
        tokens, logprobs = tokens_and_logprobs(answer)
        right_tokens, right_logprobs = tokens_and_logprobs(right)
        assert tokens == right_tokens
        assert logprobs == pytest.approx(right_logprobs, abs=TOLERANCE)


@dataclass
class World:
    """Two servers that are alike but for the plugin."""

    plain: Server
    hier: Server
    model: Path
    folder: Path


def hier_server(world_model: Path, folder: Path, *args: str, host_pages: int = 400) -> Server:
    host = f"{(host_pages + 0.5) * SLOT_BYTES / GIB:.9f}"
    tiers = ["--hier-kv-host-size", host, "--hier-kv-disk-dir", str(folder / "disk")]
    return Server([*BASE, *PLUGIN, *tiers, *args], model=str(world_model), stop="kill")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("images")
    model = write_vision_model(folder / "model")
    args = [*BASE, "--max-total-tokens", "16384"]
    with (
        Server(args, model=str(model), stop="kill") as plain,
        hier_server(model, folder, "--max-total-tokens", "16384") as hier,
    ):
        yield World(plain, hier, model, folder)


def test_images_come_back_from_dram_and_from_disk(world: World, tmp_path: Path) -> None:
    """Bit for bit as they do from the device of plain SGLang."""
    which = prompts()
    computed = answers(world.plain, which)
    hits = answers(world.plain, which)
    with hier_server(world.model, tmp_path, "--max-total-tokens", "16384") as server:
        check_right(answers(server, which), computed)
        assert values(answers(server, which)) == values(hits)
        drop_device(server)
        check_hits(answers(server, which), hits, "host", above=1000)
        settled(server)
        assert state(server)["host"]["image_requests"] == 3 * len(which)
    with hier_server(world.model, tmp_path, "--max-total-tokens", "16384") as server:
        check_hits(answers(server, which), hits, "disk", above=1000)


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
    """Images leave the device while others come, and chunks end inside of them."""
    texts = [words(600 + n, 30 + 17 * n) + IMAGE + words(700 + n, 50) for n in range(3)]
    which = [
        Prompt(text, (picture(600 + seed, width=10, height=12),))
        for text in texts
        for seed in range(4)
    ]
    right = dict(zip(which, answers(world.plain, which), strict=True))
    rng = random.Random(0)
    asked = [rng.choice(which) for _ in range(60)]
    with hier_server(world.model, tmp_path, "--max-total-tokens", "1536", host_pages=20) as server:
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda prompt: ask(server, prompt), asked))
        check_right(found, [right[prompt] for prompt in asked])
        counts = settled(server)["host"]
    assert counts["loaded_pages"] > 20
    assert not counts.get("image_name_conflicts")
