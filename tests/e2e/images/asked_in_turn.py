"""Prompts with images that a server is asked in turn, and what has to hold of the answers.

For servers whose ranks or stages each have a page store: what comes back, other images in one text,
and two images under one name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from testkit.images.vision_model import IMAGE, picture
from testkit.server import Server
from tests.e2e.hier_server import settled
from tests.e2e.images.image_prompts import PAGE, TOLERANCE, Prompt, check_right, words
from tests.e2e.models.hybrid_answers import cached, drop_device, values

Ask = Callable[..., dict[str, Any]]

TEXT = words(100, 70) + IMAGE + words(101, 60)
ALIKE = [Prompt(TEXT, (picture(seed),)) for seed in range(200, 202)]
MINE, YOURS = (Prompt(words(500, 40) + IMAGE + words(501, 80), (picture(n),)) for n in (500, 501))
MANY = [
    Prompt(words(600 + n, 30 + 17 * n) + IMAGE + words(700 + n, 50), (picture(seed, width=12),))
    for n in range(3)
    for seed in (600, 601)
]


@dataclass(frozen=True)
class Plain:
    """What a server without the plugin answered.

    Attributes:
        computed, hits: at first, and the same again.
        right: to each other prompt that is asked at any time.
    """

    computed: list[Any]
    hits: list[Any]
    right: dict[Prompt, Any]


@dataclass(frozen=True)
class Told:
    """What a server with the plugin answered.

    Attributes:
        found, again, from_dram: at first, the same again, and behind a flush.
        alike: to other images in one text, and the same again behind a flush.
        unnamed: to two images under one name, and between these to one of them without it.
        counters: of the server.
        log: of it.
    """

    found: list[Any]
    again: list[Any]
    from_dram: list[Any]
    alike: list[Any]
    unnamed: list[Any]
    counters: dict[str, Any]
    log: str


def asked(server: Server, which: Sequence[Prompt], ask: Ask) -> list[Any]:
    """Answers to prompts, one after the other."""
    return [ask(server, prompt) for prompt in which]


def ask_plain(server: Server, which: Sequence[Prompt], ask: Ask) -> Plain:
    """Asks a server without the plugin that keeps all of it on its device.

    Args:
        server: it runs.
        which: prompts that come back.
        ask: asks one, with fields of the request.
    """
    others = [*ALIKE, MINE, YOURS, *MANY]
    computed, hits = asked(server, which, ask), asked(server, which, ask)
    return Plain(computed, hits, dict(zip(others, asked(server, others, ask), strict=True)))


def ask_in_turn(server: Server, which: Sequence[Prompt], ask: Ask) -> Told:
    """Asks a server with the plugin the same, and has its device dropped twice."""
    found, again = asked(server, which, ask), asked(server, which, ask)
    drop_device(server)
    from_dram = asked(server, which, ask)
    alike = asked(server, ALIKE, ask)
    unnamed = [
        ask(server, MINE, mm_hashes=["ab12"]),
        ask(server, YOURS),
        ask(server, YOURS, mm_hashes=["ab12"]),
    ]
    drop_device(server)
    alike += asked(server, ALIKE[::-1], ask)
    unnamed += asked(server, [YOURS, MINE], ask)
    return Told(found, again, from_dram, alike, unnamed, settled(server), server.log())


def check_alike(plain: Plain, told: Told, most_cached: int) -> None:
    """Another image in the same text is another prompt.

    Args:
        plain: what is right.
        told: what was answered.
        most_cached: fewer tokens are in front of the image.
    """
    right = [plain.right[prompt] for prompt in ALIKE]
    (_, one), (_, other) = values(right)
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 10 * TOLERANCE
    check_right(told.alike, [*right, *right[::-1]])
    assert cached(told.alike[1:2])[0] < most_cached, "the text before the image, and no more"


def check_unnamed(plain: Plain, told: Told) -> None:
    """Two images under one name are one to SGLang; the stores never hear of it."""
    mine, named, _, named_again, mine_again = told.unnamed
    check_right([mine, mine_again], [plain.right[MINE]] * 2)
    check_right([named, named_again], [plain.right[YOURS]] * 2)
    assert cached([mine_again])[0] < PAGE <= cached([named_again])[0]
