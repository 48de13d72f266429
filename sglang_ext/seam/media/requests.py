"""Requests with images, in the scheduler: which of them may be named, and what they match.

Every method runs on the scheduler's thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import count
from typing import Any

import numpy as np
from sglang.srt.managers.schedule_batch import MultimodalDataItem

from sglang_ext.identity.media import (
    CARRIER,
    FIRST_PAD,
    Item,
    Media,
    are_told_apart,
    bindings,
    images_of,
    keyed_identity,
    note_images,
)
from sglang_ext.identity.tenancy import is_alone, keep_alone
from sglang_ext.seam.media.page_digests import naming
from sglang_ext.seam.page_hash import hex_hashes_of, request_key
from sglang_ext.seam.radix_tree import RadixTree
from sglang_ext.settings.images import has_axes, image_facts, why_not_images
from sglang_ext.tiers.store.types import StoreCounters

logger = logging.getLogger(__name__)

_CUT = "_hier_kv_cut"  # of a session: what a turn has of the one before was cut


class MediaRequests:
    """Requests with images of one cache. None is named until `begin`.

    Args:
        tree: the cache's.
        counters: of the page store.
    """

    def __init__(self, tree: RadixTree, counters: StoreCounters) -> None:
        self._tree = tree
        self._counters = counters
        self._secret = ""
        self._facts = ""
        self._has_images = False
        self._has_axes = False  # the model rotates by several of them
        self._keys_are_pairs = False  # SGLang's; see `page_hash`
        self._has_named = False  # there may be pages on the device that go by images
        self._why_not = "the scheduler is not built"
        # Of this scheduler's requests, which its ranks meet in one order: each gives the same ones.
        self._numbers_alone = count()

    def begin(self, scheduler: Any, *, keeps: str, of_pairs: bool = False) -> None:
        """The scheduler is built: sees whether images can be named on this server.

        Args:
            scheduler: SGLang's.
            keeps: what SGLang keeps of a token, a word of `settings.images`.
            of_pairs: SGLang's keys are of pairs of tokens; see `page_hash`.
        """
        self._keys_are_pairs = of_pairs
        args, model = scheduler.server_args, scheduler.model_config
        self._has_images = bool(model.is_multimodal)
        if not self._has_images:
            return
        architecture = model.hf_config.architectures[0]
        self._facts = image_facts(args, architecture)
        self._has_axes = has_axes(architecture)
        self._secret = args._hier_kv_secret
        self._why_not = why_not_images(args, architecture, keeps)
        if not self._tree.shows_nodes:
            self._why_not = "a tree in Rust"
        if not hasattr(MultimodalDataItem, "padding_values"):
            self._why_not = "this release of SGLang has no digests of them"
        if self._why_not:
            logger.info(
                "hier-kv: requests with images are served and neither stored nor loaded: %s",
                self._why_not,
            )
        self._has_named = not self._why_not

    def end(self, reason: str) -> None:
        """From now on none is named."""
        if self._has_images and not self._why_not:
            logger.warning("hier-kv: requests with images are no longer stored: %s", reason)
            self._why_not = reason

    @property
    def stores_images(self) -> bool:
        """Whether there may be pages that go by images, stored or on the device."""
        return self._has_named

    def allows(self, req: Any) -> bool:
        """Whether a request's images, if it has any, may still be named: the end came before it."""
        return not images_of(req) or not self._why_not

    def made(self, req: Any, session_params: Any = None) -> None:
        """A request was made, without its images yet: its tokens must all be of text.

        Those of a session's turn may stand for images of turns before, and a client may send any.

        Args:
            req: the request.
            session_params: of the client's message, of a turn of a session.
        """
        if not self._has_images:
            return
        if _has_wide(req.origin_input_ids or ()):
            note_images(req, ())
        if req.session is not None and getattr(session_params, "offset", None):
            setattr(req.session, _CUT, True)

    def arrived(self, req: Any) -> None:
        """A request was given its images, and its tokens the numbers that stand for them."""
        inputs = req.multimodal_inputs
        if inputs is None or not inputs.mm_items:
            return
        images = None
        if not self._why_not and req.session is None and images_of(req) is None:
            images = self._images(req, inputs)
        self._counters.add("image_requests" if images else "unnamed_image_requests")
        note_images(req, images or ())

    def placeholders_match(self, req: Any) -> bool:
        """Whether a request's placeholder tokens are exactly where its images say that they lie.

        SGLang lays what an encoder makes of all images of a batch over all tokens of the batch that
        stand for one, in order. With one token too many each image behind it, other requests' too,
        is a row off, and what is computed of those goes by their right names. InternVL's tokens
        are replaced between `<img>` and `</img>`, which a text may have in it as well.
        """
        inputs = req.multimodal_inputs
        if self._why_not or inputs is None:
            return True
        return _placeholders_match(np.asarray(req.origin_input_ids, np.int64), inputs.mm_items)

    def _images(self, req: Any, inputs: Any) -> tuple[Media, ...] | None:
        """A request's images; None where something of them is not proved."""
        items = [_proved(item, self._secret) for item in inputs.mm_items]
        axes = inputs.mrope_positions
        if None in items or not self._are_expected(axes):
            return None
        known = [item for item in items if item is not None]
        tokens = np.asarray(req.origin_input_ids, np.int64)
        positions = None if axes is None else axes.numpy().astype(np.int64)
        found = bindings(known, tokens, positions, self._facts)
        if found is None or not _goes_on(tokens, positions, inputs.mrope_position_delta):
            return None
        images = tuple(
            Media(item.pads, binding) for item, binding in zip(known, found, strict=True)
        )
        if are_told_apart(images):
            return images
        self._conflicts(req)
        keep_alone(req, next(self._numbers_alone))
        return None

    def _are_expected(self, axes: Any) -> bool:
        """Whether positions on axes are there, in host memory, exactly where the model has axes.

        Without them SGLang finds out later where such a model's tokens are.
        """
        if axes is None or not self._has_axes:
            return axes is None and not self._has_axes
        return bool(axes.device.type == "cpu")

    def begin_match(self, key: Any, req: Any, result: Any) -> Any:
        """The device match of a request, or an empty one where it is of other images.

        SGLang's tree knows images by their numbers alone. A node's hashes know them all. A turn
        behind what was cut of its session lies where the images lay that were there before, though
        its tokens may be of text alone: SGLang keeps their positions. Nobody goes on from it.
        """
        is_cut = getattr(req.session, _CUT, False) and req.multimodal_inputs is not None
        if is_cut and not is_alone(req):
            keep_alone(req, next(self._numbers_alone))
            note_images(req, ())
            return self._tree.match(key[:0])
        if not result.device_prefix_len or not self._is_compared(req):
            return result
        if self._holds(req, key[: result.device_prefix_len], result.last_device_node):
            return result
        self._conflicts(req)
        keep_alone(req, next(self._numbers_alone))
        return self._tree.match(key[:0])

    def may_insert(self, req: Any, up_to: int) -> bool:
        """Whether what the tree has of a request's tokens is of its own images, before an insert.

        SGLang's insert binds a request to what the tree has already. A match ends before the last
        token of a prompt, so the page of that was not compared, nor what came in since. From the
        first False on a request keeps its rows to itself: SGLang's own mark of such a request.
        """
        if not self._is_compared(req):
            return True
        key = request_key(req, up_to, self._tree.page_size, of_pairs=self._keys_are_pairs)
        num_pages, node_id = self._tree.device_prefix(key)
        if not num_pages or self._holds(req, key[: num_pages * self._tree.page_size], node_id):
            return True
        self._conflicts(req)
        req.skip_radix_cache_insert = True
        return False

    def _is_compared(self, req: Any) -> bool:
        """Whether a request has images, of which the tree may hold others under their numbers."""
        return self._has_named and images_of(req) is not None

    def _holds(self, req: Any, key: Any, node_id: Any) -> bool:
        """Whether the pages of a request's key are those on the path to a node, with their images.

        Those of a request of which nothing is proved are named as SGLang names them, and so are
        never those of an image that was.
        """
        with naming.pages_of(req):
            own = hex_hashes_of(key, self._tree.page_size)
        return self._tree.path_hashes(node_id)[: len(own)] == own

    def _conflicts(self, req: Any) -> None:
        """A number of a request's images stands for another image: it shares nothing any more."""
        self._counters.add("image_name_conflicts")
        logger.warning("hier-kv: images of request %s go by numbers of other images", req.rid)
        note_images(req, ())


def _proved(item: Any, secret: str) -> Item | None:
    """An item as the front of this server named it; None for any other."""
    content = item.model_specific_data.get(CARRIER)
    identity, spans = getattr(item, "identity", None), item.offsets
    if not isinstance(content, bytes) or not isinstance(identity, bytes) or not spans:
        return None
    if identity != keyed_identity(secret, content):
        return None
    pads = tuple(int(pad) for pad in item.padding_values())
    return Item(content, tuple((int(first), int(last)) for first, last in spans), pads)


def _placeholders_match(tokens: Any, items: Sequence[Any]) -> bool:
    """Whether the placeholders of each kind of media are exactly where the items say.

    Args:
        tokens: i64 `[T]`, the prompt.
        items: SGLang's. What of one lies behind the prompt's end was cut off. Where none says where
            it lies (LLaVA with another encoder than Pixtral's), the model lays each request's own
            rows over that request's own tokens.
    """
    if all(item.offsets is None for item in items):
        return True
    by_kind: dict[Any, list[Any]] = {}
    for item in items:
        by_kind.setdefault(getattr(item, "modality", None), []).append(item)
    is_known = tokens < FIRST_PAD
    for alike in by_kind.values():
        expected = np.zeros(len(tokens), bool)
        for first, last in (span for item in alike for span in item.offsets or ()):
            expected[first : last + 1] = True
        found = np.isin(tokens, [pad for item in alike for pad in item.padding_values()])
        if not np.array_equal(expected, found):
            return False
        is_known |= found
    return bool(is_known.all())


def _goes_on(tokens: Any, positions: Any, delta: Any) -> bool:
    """Whether what is generated behind a prompt lies where a prompt of the same tokens has it.

    Without axes it does. With them SGLang goes on from a difference that it was handed; from the
    first axis of the prompt's last token, once the request was retracted, which is right behind
    text alone.
    """
    if positions is None:
        return True
    follows = delta is not None and delta.numel() == 1
    follows = follows and int(delta) == int(positions.max()) + 1 - len(tokens)
    return bool(follows) and int(tokens[-1]) < FIRST_PAD


def _has_wide(tokens: Any) -> bool:
    """Whether any token is none of a text."""
    return bool(len(tokens)) and int(np.asarray(tokens, np.int64).max()) >= FIRST_PAD
