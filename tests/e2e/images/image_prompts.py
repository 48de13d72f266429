"""What the tests of prompts with images share: servers' arguments, prompts and checks."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from testkit.images.vision_model import IMAGE, picture
from testkit.requests import let_go
from testkit.server import Server, ServerError
from tests.e2e.hier_server import GIB, settled, tokens_and_logprobs

PAGE = 64
NUM_TOKENS = 4
TOLERANCE = 2e-3  # how far rounding takes a log-probability; another image takes it to 1 and more
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend", "--dtype", "float32"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--image-processor-backend", "pil", "--sleep-on-idle"]
PLUGIN = ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
PLUGIN += ["--hier-kv-prefetch-timeout-ms", "60000", "--hier-kv-disk-size", "0.5"]
PLUGIN += ["--hier-kv-disk-segment-size", "0.01"]
LARGE = ("--max-total-tokens", "16384")  # a device that keeps all of a test's prompts
HEADER_BYTES = 4096
PAGE_BYTES = 131_072  # of each of the small models, K and V
WORDS = ("server", "page", "writes", "reads", "disk", "before", "asked", "of", "the", "it")


@dataclass(frozen=True)
class Prompt:
    """A text with images in it."""

    text: str
    images: tuple[str, ...]


def words(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count)) + " "


def prompts(placeholder: str = IMAGE) -> list[Prompt]:
    """Images begin anywhere in a page, end in another one, and are alone or several.

    Args:
        placeholder: what an image is in the text.
    """
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
        found.append(Prompt(words(seed, before) + placeholder + words(seed + 50, behind), (image,)))
    two = words(7, 30) + placeholder + words(8, 20) + placeholder + words(9, 30)
    found.append(Prompt(two, (picture(20), picture(21, width=4))))
    found.append(Prompt(two, (picture(22), picture(22))))  # a thing shown twice
    # More than a page of text behind them: what a hit leaves to compute has none of them in it, of
    # which an encoder would make another rounding alone than all together.
    many = tuple(picture(30 + n, width=1, height=1) for n in range(8))
    text = words(10, 20) + (placeholder + words(11, 2)) * len(many) + words(12, 90)
    found.append(Prompt(text, many))
    return found


def host_size(num_pages: float) -> str:
    """Value of `--hier-kv-host-size`, of one rank with all heads."""
    return f"{(num_pages + 0.5) * (PAGE_BYTES + HEADER_BYTES) / GIB:.9f}"


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


def is_refused(server: Server, prompt: Prompt) -> bool:
    """Whether a prompt is answered with 400."""
    try:
        ask(server, prompt)
    except ServerError as error:
        return error.status == 400
    return False


def drop(server: Server) -> None:
    """Leaves nothing on the device, and all that was computed in a tier.

    SGLang's front has no cache to clear for processors of LLaVA's family, and fails behind a flush.
    """
    settled(server)
    let_go(server)
    try:
        server.post("/flush_cache")
    except ServerError as error:
        if error.status != 500:  # what it answers where it did not flush is 400
            raise
