"""A scheduler around the real cache, tree, linker and store, whose prompts have images in them.

There are fewer numbers for images than images, so that numbers stand for several: SGLang's tree
takes such images for one. What a row of an image's token holds says which image it is, so that KV
of another one is seen wherever a request attends to it.
"""

from __future__ import annotations

import random
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.mem_cache import utils  # noqa: E402

from sglang_ext.identity.media import CARRIER, FIRST_PAD, keyed_identity  # noqa: E402
from sglang_ext.seam.media.page_digests import install_page_digests  # noqa: E402
from sglang_ext.settings.images import ALONG_AXES, ALONG_THE_PROMPT, PLAIN  # noqa: E402
from tests.property.worlds.taint_world import Request, World  # noqa: E402

SECRET = "s" * 64
NUM_PADS = 2  # images go by one of these
PAD = FIRST_PAD + (1 << 40)
Span = tuple[int, int]


def pads_of(number: int) -> tuple[int, ...]:
    return tuple(PAD + 8 * number + n for n in range(4))


def image_item(image: int, *spans: Span, number: int | None = None, secret: str = SECRET) -> Any:
    """An image as a scheduler is handed it.

    Args:
        image: which one.
        spans: first and last token of each run of its tokens.
        number: what it goes by; other images do, too.
        secret: of the server whose front named it.
    """
    content = image.to_bytes(32, "little")
    pads = pads_of(image % NUM_PADS if number is None else number)
    return SimpleNamespace(
        image=image,
        offsets=list(spans),
        identity=keyed_identity(secret, content),
        model_specific_data={CARRIER: content},
        padding_values=lambda: pads,
    )


def scheduler(architecture: str = ALONG_AXES[0], **options: Any) -> Any:
    """What of SGLang's scheduler is asked whether images can be named."""
    args = {
        "_hier_kv_secret": SECRET, "enable_precise_embedding_interpolation": False,
        "enable_lora": False, "lora_paths": None, "speculative_algorithm": None,
        "disaggregation_mode": "null", "tp_size": 1, "pp_size": 1, "dp_size": 1, "nnodes": 1,
        "attn_dp_size": 1, "enable_dp_attention": False, "enable_mm_global_cache": False,
        "tokenizer_worker_num": 1,
    }  # fmt: skip
    config = SimpleNamespace(architectures=[architecture])
    model = SimpleNamespace(is_multimodal=True, hf_config=config)
    return SimpleNamespace(server_args=SimpleNamespace(**args | options), model_config=model)


@dataclass
class MediaRequest(Request):
    """A request with images.

    Attributes:
        items: its images.
        has_axes: the model has positions on axes for them.
        multimodal_inputs: as SGLang has them.
        num_reused: tokens of the prompt, when it was last admitted.
    """

    items: tuple[Any, ...] = ()
    num_reused: int = 0
    has_axes: bool = True
    multimodal_inputs: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items:
            self.multimodal_inputs = inputs_of(self.items, len(self.tokens), self.has_axes)


def inputs_of(items: Any, num_tokens: int, has_axes: bool) -> Any:
    """What SGLang's scheduler has of a request's images.

    Args:
        items: of `image_item`.
        num_tokens: of the prompt.
        has_axes: the model has positions on axes for them.
    """
    place = torch.arange(num_tokens).expand(3, -1)
    delta = torch.zeros(1, 1, dtype=torch.int64)
    return SimpleNamespace(
        mm_items=items,
        mrope_positions=place if has_axes else None,
        mrope_position_delta=delta if has_axes else None,
    )


class MediaWorld(World):
    """As its base; `step` does one random thing.

    Attributes:
        has_axes: the model rotates by several; without them an image may be several runs of tokens.
    """

    has_axes = True

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        patch.setattr(utils, "get_native_hash", utils.get_native_hash)
        install_page_digests()
        super().__init__(folder, patch, seed, lossy=False, **options)
        architecture = (ALONG_AXES if self.has_axes else ALONG_THE_PROMPT)[0]
        self.cache.media.begin(scheduler(architecture), keeps=PLAIN, of_pairs=self.of_pairs)
        self.num_waits = 0

    def row_values(self, tokens: list[int], end: int) -> torch.Tensor:
        """As its base, of what tokens stand for: with images, of which `_meant` knows."""
        prints, print_ = [], 0
        for token, image in zip(tokens[:end], self._meant, strict=False):
            what = token if image is None else (1 << 30) + image
            print_ = zlib.crc32(what.to_bytes(8, "little"), print_)
            prints.append([print_ >> shift & 127 for shift in (0, 8, 16, 24)])
        return torch.tensor(prints, dtype=torch.bfloat16)

    def forward(self, req: Request, start: int, end: int) -> None:
        self._meant = meaning(req)
        super().forward(req, start, end)

    def check_attended(self, req: Request, end: int) -> None:
        self._meant = meaning(req)
        super().check_attended(req, end)

    def check_report(self, req: Request) -> None:
        super().check_report(req)
        req.num_reused = req.prefix_len  # type: ignore[attr-defined]

    def check_store(self) -> None:
        """Where pages lie is checked by what is in them, in whoever loads them."""

    # ---- requests ----

    def make(
        self, tokens: list[int], items: list[Any], *, num_new: int = 0, named: bool = True
    ) -> MediaRequest:
        """A request as the hooks leave it when it enters the queue.

        Args:
            tokens: of text; images take the place of some.
            items: of `image_item`.
            num_new: tokens to compute behind the prompt.
            named: the hooks saw it; else it is one that nothing is known of.
        """
        req = MediaRequest(
            f"r{self._next}",
            with_images(tokens, items),
            num_new,
            False,
            items=tuple(items),
            has_axes=self.has_axes,
        )
        self._next += 1
        if named:
            self.cache.media.made(
                SimpleNamespace(origin_input_ids=array("q", [1]), session=None)  # without images
            )
            self.cache.media.arrived(req)
        return req

    def arrive(self, *args: Any, **options: Any) -> Request:
        """A request enters the queue, with none, one or two images in it."""
        tokens = self.tokens()
        items = some_images(self.rng, len(tokens), has_axes=self.has_axes)
        req = self.make(tokens, items, num_new=self.rng.randint(0, 4))
        self.enqueue(req)
        return req

    def run_to_end(self, req: MediaRequest) -> MediaRequest:
        """From its arrival to its end; saves land. As the base's `run`."""
        self.enqueue(req)
        self.wait_for(lambda: self.admit(req))
        while req in self.running:
            self.go_on(req)
        self.settle()
        return req

    def finish(self, req: Request) -> None:
        super().finish(req)
        req.multimodal_inputs = None  # type: ignore[attr-defined]  # as SGLang does


def with_images(tokens: list[int], items: list[Any]) -> list[int]:
    """A prompt with the numbers of images in the place of some of its tokens."""
    tokens = list(tokens)
    for item in items:
        for first, last in item.offsets:
            number = np.resize(item.padding_values(), last - first + 1)
            tokens[first : last + 1] = number.tolist()
    return tokens


def some_images(rng: random.Random, num_tokens: int, *, has_axes: bool) -> list[Any]:
    """None, one or two images anywhere in a prompt; in a tenth of the prompts not proved."""
    items: list[Any] = []
    proved = rng.random() < 0.9
    at = rng.choice((2, 3, 4, 7, 9))
    while at < num_tokens - 2 and len(items) < 2 and rng.random() < 0.8:
        length = min(rng.choice((1, 2, 3, 5, 9)), num_tokens - 1 - at)
        # Those that are not proved go by SGLang's names, one image by one number.
        image = rng.randrange(5 if proved else NUM_PADS)
        spans = [(at, at + length - 1)]
        if length > 4 and not has_axes:
            spans = [(at, at + 1), (at + 3, at + length - 1)]
        items.append(image_item(image, *spans))
        at += length + rng.choice((1, 2, 5))
    if items and not proved:
        items[0].identity = None
    return items


def meaning(req: Any) -> list[int | None]:
    """Which image each token of a request stands for."""
    found: list[int | None] = [None] * len(req.tokens)
    for item in req.items:
        for first, last in item.offsets:
            found[first : last + 1] = [item.image] * (last - first + 1)
    return found
