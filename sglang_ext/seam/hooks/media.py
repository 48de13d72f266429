"""Hooks for requests with images: their content is digested in front, and believed in a scheduler.

Imports no SGLang: it is handed SGLang's objects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.identity.media import (
    CARRIER,
    FIRST_PAD,
    UnknownContentError,
    content_digest,
    keyed_identity,
)
from sglang_ext.seam.hooks.early_aborts import went_to_thread
from sglang_ext.settings.images import NAMEABLE_IMAGES

logger = logging.getLogger(__name__)

# SGLang's words for images that its own processor prepared; a client's tensors are of another kind.
# Videos and sound were not tried.
_RAW, _IMAGE = "NORMAL", "IMAGE"


async def around_tokenizing_one(
    original: Callable[..., Any], self: Any, obj: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `TokenizerManager._tokenize_one_request`, a coroutine.

    Names the images of a request by all that the model is given of them. SGLang would hash them,
    too, in each scheduler; it does not where they have a name.

    Raises:
        ValueError: a client's tokens are numbers that stand for images. In a batch with images,
            SGLang would put rows of those there, and all behind them would be off.
    """
    is_nameable = self.model_config.hf_config.architectures[0] in NAMEABLE_IMAGES
    if is_nameable and _has_wide(getattr(obj, "input_ids", None)):
        raise ValueError("input_ids has numbers in it that stand for no token of the model's.")
    tokenized = await original(self, obj, *args, **kwargs)
    inputs = getattr(tokenized, "mm_inputs", None)
    items = [] if inputs is None else getattr(inputs, "mm_items", None) or []
    # Who names images himself wants SGLang's names of them.
    if not items or getattr(obj, "mm_hashes", None) or not all(map(_is_raw_image, items)):
        return tokenized
    if not is_nameable:
        return tokenized
    went_to_thread(self)
    loop = asyncio.get_running_loop()
    contents = await loop.run_in_executor(None, _contents_of, items)
    if contents is not None:
        _name(inputs, items, contents, self.server_args._hier_kv_secret)
    return tokenized


def _has_wide(token_ids: Any) -> bool:
    """Whether any of a client's tokens is none of a text. SGLang sees what is no list of them."""
    try:
        return bool(token_ids) and max(token_ids) >= FIRST_PAD
    except TypeError:
        return False


def _is_raw_image(item: Any) -> bool:
    """Whether an item is an image that is still to be encoded, in a release with long names."""
    kind = getattr(item.format, "name", ""), getattr(item.modality, "name", "")
    is_whole = item.feature is not None and item.precomputed_embeddings is None
    return kind == (_RAW, _IMAGE) and is_whole and hasattr(item, "set_identity")


def _contents_of(items: Sequence[Any]) -> list[bytes] | None:
    """Digests of all items; None where one cannot be digested."""
    try:
        return [
            content_digest(item.modality.name, item.feature, item.model_specific_data)
            for item in items
        ]
    except UnknownContentError as error:
        logger.debug("hier-kv: an image is not digested: %s", error)
        return None


def _name(inputs: Any, items: Sequence[Any], contents: Sequence[bytes], secret: str) -> None:
    """Gives items the names that SGLang makes its numbers of, and their digests on their way."""
    for item, content in zip(items, contents, strict=True):
        item.set_identity(keyed_identity(secret, content))
        item.model_specific_data[CARRIER] = content
    if inputs.padded_input_ids is not None:  # with the numbers of the names before
        inputs.padded_input_ids = inputs.build_padded_input_ids(inputs.input_ids, items)
