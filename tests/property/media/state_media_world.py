"""As `media_world`, of a model with a state a sequence.

A state holds a fingerprint of all that the tokens before it stand for, images included; what
requests go on from, and what lies in DRAM under any key, is compared with that.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.property.media.media_world import (
    inputs_of,
    meaning,
    scheduler,
    some_images,
    with_images,
)
from tests.property.worlds.state_world import StateWorld
from tests.property.worlds.window_world import Request

from sglang.srt.mem_cache import utils  # isort: skip

from sglang_ext.identity.media import images_of
from sglang_ext.seam.media.page_digests import install_page_digests, naming
from sglang_ext.settings.images import STATES, WITH_STATES


@dataclass
class StateMediaRequest(Request):
    """A request with images.

    Attributes:
        items: its images.
        skip_radix_cache_insert: SGLang's; it keeps what it computes to itself.
        multimodal_inputs: as SGLang has them.
    """

    items: tuple[Any, ...] = ()
    skip_radix_cache_insert: bool = False
    multimodal_inputs: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.items:
            self.multimodal_inputs = inputs_of(self.items, len(self.tokens), has_axes=True)


class StateMediaWorld(StateWorld):
    """One server's cache; `step` does one random thing."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        patch.setattr(utils, "get_native_hash", utils.get_native_hash)
        install_page_digests()
        super().__init__(folder, patch, seed, **options)
        self.cache.media.begin(scheduler(WITH_STATES[0]), keeps=STATES)

    def meant(self, req: Request) -> list[int]:
        """See the base; the image in the place of its tokens."""
        images = meaning(req)
        return [
            token if image is None else (1 << 30) + image
            for token, image in zip(req.tokens, images, strict=True)
        ]

    def note_pages(self, req: Request) -> None:
        """As the base; nothing may be stored of a request whose images have no names."""
        if images_of(req) == ():
            return
        with naming.pages_of(req):
            super().note_pages(req)

    # ---- requests ----

    def make(
        self, tokens: list[int], items: list[Any], *, num_new: int = 0, **options: Any
    ) -> StateMediaRequest:
        """A request as the hooks leave it when it enters the queue.

        Args:
            tokens: of text; images take the place of some.
            items: of `image_item`.
            num_new: tokens to compute behind the prompt.
            options: of a request.
        """
        req = StateMediaRequest(
            f"r{self._next}", with_images(tokens, items), num_new, items=tuple(items), **options
        )
        self._next += 1
        self.cache.media.made(
            SimpleNamespace(origin_input_ids=array("q", [1]), session=None)  # without images
        )
        self.cache.media.arrived(req)
        return req

    def arrive(self) -> None:
        """A request enters the queue, with none, one or two images in it."""
        tokens = self.tokens()
        items = some_images(self.rng, len(tokens), has_axes=True)
        num_new = self.rng.choice((0, 1, 3, 6, 14))
        self.enqueue(
            self.make(tokens, items, num_new=num_new, extra_key=self.rng.choice((None, None, "a")))
        )

    def run_to_end(self, req: StateMediaRequest, chunk: int | None = None) -> StateMediaRequest:
        """From its arrival to its end; saves land.

        Args:
            req: of `make`.
            chunk: tokens of the first part that is computed of it; None: all.
        """
        self.enqueue(req)
        self.wait_for(lambda: self.admit(req, chunk))
        while req in self.running:
            self.go_on(req)
        self.settle()
        return req

    def checkpoint(self, req: Request, up_to: int) -> None:
        """As `checkpoint_kv_cache` does."""
        if not req.skip_radix_cache_insert:  # type: ignore[attr-defined]
            super().checkpoint(req, up_to)
            return
        req.extend_end = req.prefix_len = req.kv.kv_committed_len = up_to
        self.check_attended(req, up_to)
        self.check_state(req, up_to)

    def finish(self, req: Request) -> None:
        """As `release_kv_cache` does."""
        req.done = True
        self.running.remove(req)
        self.note_pages(req)
        assert not self.cache.claim_kv_row(req)
        inserts = not req.skip_radix_cache_insert  # type: ignore[attr-defined]
        if inserts:
            self.cache.checkpoint(req, up_to=req.prefix_len)
        self.cache.on_release(req, checkpointed=inserts)
        assert not req.kv.holds_mamba, "its state is lost"
        self.release(req)
        req.multimodal_inputs = None  # type: ignore[attr-defined]  # as SGLang does

    def _do_change_weights(self) -> bool:
        """Images have no names from then on."""
        return False
