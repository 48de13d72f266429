"""Prompts with images of a model with a state a sequence, on the real server: small Qwen3.5.

A plain server of SGLang's says what is right; of the plugin's, one is killed, and another one goes
on with its disk. Chunks of prompts end inside of images, where SGLang keeps states, too.

By default a model with experts has one rank, and a store, and a dense one two; the long form has
the dense one on one rank, too.
"""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from testkit.hybrids.image_model import DENSE_IMAGE_MODEL, IMAGE_MODEL, write_image_model
from testkit.images.vision_model import IMAGE, picture
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import connected, send_in_halves, settled, states
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

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.newest_release,
    pytest.mark.sampled("experts"),
]

KINDS = {"dense": DENSE_IMAGE_MODEL, "experts": IMAGE_MODEL}
STATES = ("--max-mamba-cache-size", "100")
TEXT = words(100, 70) + IMAGE + words(101, 60)
ALIKE = [Prompt(TEXT, (picture(seed),)) for seed in range(200, 204)]
TEXTS = [Prompt(words(seed, count), ()) for seed, count in ((110, 150), (111, 400))]


@dataclass
class Plain:
    """What SGLang without the plugin answered.

    Attributes:
        model: its folder.
        computed: to `prompts()`.
        hits: the same again.
        alike: to `ALIKE`.
        texts: to `TEXTS`.
        turns: to `TURNS`.
        many: to `MANY`.
    """

    model: Path
    computed: list[Any]
    hits: list[Any]
    alike: list[Any]
    texts: list[Any]
    turns: list[Any]
    many: list[Any]


def turns() -> list[Prompt]:
    """A conversation with an image in each turn; a turn is all before, and more."""
    text, found = "", []
    images: tuple[str, ...] = ()
    for turn in range(4):
        text += words(300 + turn, 40) + IMAGE + words(400 + turn, 30)
        images = (*images, picture(300 + turn, width=6 + turn))
        found.append(Prompt(text, images))
    return found


TURNS = turns()
MANY = [
    Prompt(text, (picture(600 + seed, width=10, height=12),))
    for text in (words(600 + n, 30 + 17 * n) + IMAGE + words(700 + n, 50) for n in range(3))
    for seed in range(3)
] + [Prompt(words(620, 300), ())]


def server_of(
    model: Path,
    *args: str,
    folder: Path | None = None,
    store: Path | None = None,
    host_pages: int = 400,
    ranks: int = 1,
) -> Server:
    """A server; with a folder one of the plugin's, with that store if there is one."""
    env = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
    if store is not None:
        store.mkdir(exist_ok=True)
        args = (*args, "--hier-kv-remote-url", f"file://{store}?size=1GB")
    args = (*BASE, *args)
    if folder is not None:
        tiers = ["--hier-kv-host-size", host_size(ranks * host_pages)]
        args = (*args, *PLUGIN, *tiers, "--hier-kv-disk-dir", str(folder / "disk"))
    if ranks > 1 or "--dp-size" in args:
        env |= ENVIRONMENT
    if ranks > 1:
        args = (*args, "--tp-size", str(ranks))
        if folder is not None:
            env[ENV_JITTER] = str(JITTER_MS)
    return Server(list(args), model=str(model), env=env, stop="kill", start_timeout_s=300)


def plain_answers(model: Path, ranks: int = 1) -> Plain:
    with server_of(model, *LARGE, *STATES, ranks=ranks) as server:
        which = prompts()
        return Plain(
            model, answers(server, which), answers(server, which), answers(server, ALIKE),
            answers(server, TEXTS), answers(server, TURNS), answers(server, MANY),
        )  # fmt: skip


@pytest.fixture(scope="module", params=list(KINDS))
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = tmp_path_factory.mktemp(f"image-states-{request.param}")
    return plain_answers(write_image_model(folder / "model", KINDS[request.param]))


def check_counts(server: Server) -> dict[str, Any]:
    """Every request with images was named, and nothing failed; the plugin's counters."""
    host: dict[str, Any] = settled(server)["host"]
    assert host["image_requests"]
    for name in ("unnamed_image_requests", "image_name_conflicts", "load_failures"):
        assert not host.get(name), name
    assert not host.get("save_failures")
    return host


def check_down_to_dram(server: Server, plain: Plain) -> None:
    """Prompts and some of one shape, computed, then off the device, then from DRAM."""
    which = prompts()
    check_right(answers(server, which), plain.computed)
    assert values(answers(server, which)) == values(plain.hits)
    check_right(answers(server, ALIKE[:2]), plain.alike[:2])
    drop_device(server)
    check_hits(answers(server, which), plain.hits, "host", above=1000)
    check_right(answers(server, ALIKE[1::-1]), plain.alike[1::-1])


def test_images_and_states_come_back_from_dram_and_from_disk(plain: Plain, tmp_path: Path) -> None:
    """Bit for bit as they do from the device of plain SGLang; another image is another prompt."""
    which = prompts()
    (_, one), (_, other), *_ = values(plain.alike)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE
    args = (*LARGE, *STATES)
    with server_of(plain.model, *args, folder=tmp_path) as server:
        check_down_to_dram(server, plain)
        drop_device(server)
        with ThreadPoolExecutor(6) as pool:  # of one shape, stored and new, beside texts
            found = list(pool.map(lambda prompt: ask(server, prompt), [*ALIKE[:3], *TEXTS]))
        check_right(found, [*plain.alike[:3], *plain.texts])
        drop_device(server)
        host = check_counts(server)
    assert host["image_requests"] == 3 * len(which) + 7
    assert host["saved_states"] > len(which)
    with server_of(plain.model, *args, folder=tmp_path) as server:
        check_hits(answers(server, which), plain.hits, "disk", above=1000)
        new = ask(server, ALIKE[3])
        check_right([new], plain.alike[3:])
        assert cached([new])[0] < 2 * PAGE, "the text before the image, and no more"
        check_counts(server)


def test_other_servers_have_images_and_states_from_a_store(plain: Plain, tmp_path: Path) -> None:
    """One that is new, and the other one of two whole schedulers, which know each other's none."""
    which, store = prompts(), tmp_path / "store"
    args = (*LARGE, *STATES)
    with server_of(plain.model, *args, folder=tmp_path / "one", store=store) as server:
        connected(server)
        check_right(answers(server, which[:4]), plain.computed[:4])
        check_counts(server)
    two = (*args, "--dp-size", "2")
    with server_of(plain.model, *two, folder=tmp_path / "two", store=store) as server:
        connected(server)
        for rank, reused in ((0, which[:4]), (1, which)):
            hits = plain.hits[: len(reused)]
            check_hits(
                [ask(server, each, routed_dp_rank=rank) for each in reused], hits, "remote",
                above=300,
            )  # fmt: skip
            found = [ask(server, each, routed_dp_rank=rank) for each in which[4:]]
            check_right(found, plain.computed[4:])
            settled(server)
        other = ask(server, ALIKE[0], routed_dp_rank=1)
        check_right([other], plain.alike[:1])
        assert cached([other])[0] < 2 * PAGE, "the text before the image, and no more"
        check_counts(server)
        for each in states(server):
            assert not each["host"].get("unnamed_image_requests")
            assert not each["host"].get("image_name_conflicts")


def test_a_conversation_with_another_image_in_each_turn(plain: Plain, tmp_path: Path) -> None:
    """A turn goes on from the state behind the one before, on the positions behind its image."""
    with server_of(plain.model, *LARGE, *STATES, folder=tmp_path) as server:
        for prompt, right in zip(TURNS, plain.turns, strict=True):
            found = ask(server, prompt)
            check_right([found], [right])
            assert cached([found]) == cached([right])
            drop_device(server)
        assert cached([found])[0] > 200
        assert found["meta_info"]["cached_tokens_details"]["hier_kv"]["host"] == cached([found])[0]
        check_counts(server)


def test_many_at_once_on_a_small_device(plain: Plain, tmp_path: Path) -> None:
    """Images and states leave the device while others come, beside a text; some clients leave."""
    right = dict(zip(MANY, plain.many, strict=True))
    rng = random.Random(0)
    asked = [rng.choice(MANY) for _ in range(40)]

    def say(number: int) -> Any:
        if number % 5 == 0:
            return leave_early(server, asked[number])
        return ask(server, asked[number])

    small = ("--max-total-tokens", "2048", "--max-mamba-cache-size", "32")
    with server_of(plain.model, *small, folder=tmp_path, host_pages=16) as server:
        found = send_in_halves(server, say, range(len(asked)))
        stayed = [number for number in range(len(asked)) if number % 5]
        check_right([found[n] for n in stayed], [right[asked[n]] for n in stayed])
        assert check_counts(server)["loaded_pages"] > 10


def leave_early(server: Server, prompt: Prompt) -> None:
    """Asks, and is gone once the answer has begun."""
    for _ in server.stream(
        text=prompt.text,
        image_data=list(prompt.images),
        sampling_params={"max_new_tokens": 60, "ignore_eos": True},
    ):
        return


def test_two_ranks_keep_images_and_states(tmp_path: Path) -> None:
    """Their page stores are late, each by its own chance; the checker of SGLang's ranks is on.

    Another server has from a store what the first computed.
    """
    model, store = write_image_model(tmp_path / "model", DENSE_IMAGE_MODEL), tmp_path / "store"
    which = prompts()
    plain = plain_answers(model, ranks=2)
    args = (*LARGE, *STATES)
    with server_of(model, *args, folder=tmp_path / "one", store=store, ranks=2) as server:
        connected(server)
        check_down_to_dram(server, plain)
        check_counts(server)
    small = ("--max-total-tokens", "3072", "--max-mamba-cache-size", "32")
    right = dict(zip(MANY, plain.many, strict=True))
    rng = random.Random(1)
    asked = [rng.choice(MANY) for _ in range(20)]
    with server_of(
        model, *small, folder=tmp_path / "two", store=store, ranks=2, host_pages=40
    ) as server:
        connected(server)
        check_hits(answers(server, which), plain.hits, "remote", above=1000)
        with ThreadPoolExecutor(6) as pool:
            found = list(pool.map(lambda prompt: ask(server, prompt), asked))
        check_right(found, [right[each] for each in asked])
        check_counts(server)
