"""What images in a prompt are: a digest of all that the model is given of each, and where it lies.

SGLang names an image in its radix keys by numbers that stand for its tokens, made of 64 bits of a
hash that clients may give (`mm_hashes`). Neither is enough for a store that outlives the server.
So the front process digests what the processor made of an image, every byte of it, and has SGLang
name the image by a keyed digest of that, which no client can name or aim at. The scheduler believes
a digest only with the key, and mixes the digest itself into the hashes of the pages that the image
lies in; pages behind are chained to those.

Pure: no SGLang.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt

# SGLang's: what stands for an image is at least this, and every token of a text is less.
FIRST_PAD = 1_000_000
# Where an item carries the digest of its content to the scheduler.
CARRIER = "hier_kv_content"
_CONTENT = b"hier-kv-media-content-v1"
_BINDING = b"hier-kv-media-binding-v1"
_PAGE = b"hier-kv-media-page-v1"
_KEYED = b"hier-kv-media-identity-v1"
_ATTRIBUTE = "_hier_kv_images"

Positions = npt.NDArray[np.int64]
Span = tuple[int, int]


class UnknownContentError(Exception):
    """Something of an item is of a kind of which no digest can be taken."""


def content_digest(modality: str, feature: Any, details: dict[str, Any]) -> bytes:
    """Digest of all that the model is given of an image, 32 bytes. Gives the interpreter free.

    Args:
        modality: `IMAGE` and the like.
        feature: what the processor made of it: tensors, arrays, lists of them. Those on a GPU are
            waited for.
        details: what else it made of it, by name, as grids and seconds a frame.

    Raises:
        UnknownContentError: something is of another kind, or lies on another device.
    """
    digest = hashlib.sha256(_CONTENT)
    for value in (modality, feature, {k: v for k, v in details.items() if k != CARRIER}):
        _feed(digest, value)
    return digest.digest()


def _feed(digest: Any, value: Any) -> None:
    """Adds a value: its kind, its size, its bytes, so that no two values add the same."""
    import torch  # here only: hints and commands know tenants, and run without it

    if isinstance(value, torch.Tensor):
        flat = _on_host(value).contiguous().reshape(-1)
        _head(digest, f"tensor {value.dtype} {tuple(value.shape)}", flat.nbytes)
        if flat.numel():
            digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise UnknownContentError("an array of objects")
        flat_bytes = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        _head(digest, f"array {value.dtype.str} {value.shape}", flat_bytes.nbytes)
        digest.update(flat_bytes.data)
    elif isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise UnknownContentError("names that are no text")
        _head(digest, "dict", len(value))
        for name in sorted(value):
            _feed(digest, name)
            _feed(digest, value[name])
    elif isinstance(value, list | tuple):
        _head(digest, "list", len(value))  # which of both it is, the way to the model may change
        for each in value:
            _feed(digest, each)
    elif isinstance(value, bytes):
        _head(digest, "bytes", len(value))
        digest.update(value)
    elif value is None or isinstance(value, bool | int | float | str):
        text = f"{type(value).__name__} {value!r}".encode()
        _head(digest, "plain", len(text))
        digest.update(text)
    else:
        raise UnknownContentError(type(value).__name__)


def _on_host(tensor: Any) -> Any:
    """A plain tensor in host memory; one on a GPU is copied, behind all that was queued there."""
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise UnknownContentError(f"a tensor of layout {tensor.layout}")
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)  # whichever stream makes it
        return tensor.detach().cpu()
    if tensor.device.type != "cpu":
        raise UnknownContentError(f"a tensor on {tensor.device}")
    return tensor.detach()


def _head(digest: Any, kind: str, size: int) -> None:
    digest.update(struct.pack("<II", len(kind), size >> 32) + struct.pack("<I", size & 0xFFFFFFFF))
    digest.update(kind.encode())


def keyed_identity(secret: str, content: bytes) -> bytes:
    """What an image is called inside of one server, 32 bytes; only that server can make it.

    Args:
        secret: of the server, which all of its processes know and no client does.
        content: as `content_digest` gives it.
    """
    return hmac.digest(secret.encode(), _KEYED + content, "sha256")


@dataclass(frozen=True)
class Item:
    """An image as the scheduler was handed it.

    Attributes:
        content: digest of its content, proved to be of this server's front.
        spans: first and last token of each run of tokens that stands for it, in order.
        pads: SGLang's numbers for it, of which each run repeats the sequence.
    """

    content: bytes
    spans: tuple[Span, ...]
    pads: tuple[int, ...]


def bindings(
    items: Sequence[Item], tokens: Positions, axes: Positions | None, facts: str
) -> list[bytes] | None:
    """What KV of each image's tokens, and behind them, depends on beside the tokens: 32 bytes each.

    Args:
        items: all images of a prompt.
        tokens: i64 `[T]`, the prompt, with the numbers that stand for images.
        axes: i64 `[A, T]`, positions of the tokens where the model rotates by several axes; None:
            by their place in the prompt.
        facts: what else of the server decides what an encoder makes of an image.

    Returns:
        None: tokens, items and positions do not fit each other, or positions are not what follows
        from the images before.
    """
    spans = sorted((span, index) for index, item in enumerate(items) for span in item.spans)
    if not _placeholders_match(items, spans, tokens):
        return None
    layouts = None if axes is None else _layouts(spans, axes, len(tokens))
    if axes is not None and layouts is None:
        return None
    found = []
    for index, item in enumerate(items):
        digest = hashlib.sha256(_BINDING + item.content)
        lengths = [last - first + 1 for first, last in item.spans]
        _feed(digest, [facts, lengths])
        if layouts is not None:
            _feed(digest, layouts[index])
        found.append(digest.digest())
    return found


def _placeholders_match(
    items: Sequence[Item], spans: list[tuple[Span, int]], tokens: Positions
) -> bool:
    """Whether the spans of all images cover exactly the placeholder tokens of the prompt.

    Each image has its spans in ascending order, no two images overlap or alternate, and images are
    in the order of the prompt: SGLang writes the rows that an encoder makes of them over their
    placeholders in that order. A placeholder's row then follows from how many placeholders of its
    image are before it; between the runs of two equal images that alternate it would not.
    """
    if not all(item.spans and list(item.spans) == sorted(item.spans) for item in items):
        return False
    if [index for index, _ in groupby(index for _, index in spans)] != list(range(len(items))):
        return False
    expected, behind = np.zeros(len(tokens), np.int64), 0
    for (first, last), index in spans:
        if not behind <= first <= last < len(tokens):
            return False
        pads, behind = items[index].pads, last + 1
        expected[first:behind] = np.resize(np.array(pads, np.int64), behind - first)
    is_placeholder = expected != 0
    return bool(
        np.array_equal(tokens[is_placeholder], expected[is_placeholder])
        and (tokens[~is_placeholder] < FIRST_PAD).all()
    )


def _layouts(
    spans: list[tuple[Span, int]], axes: Positions, num_tokens: int
) -> dict[int, list[Positions]] | None:
    """Positions inside each run of an image's tokens, from where the run begins.

    Text goes on by one a token on all axes, behind an image from its furthest position: so where
    everything is follows from what is before, and two prompts with equal prefixes agree there.

    Returns:
        By item, i64 `[A, n]` of each of its runs; None where it is not so.
    """
    if axes.ndim != 2 or axes.shape[1] != num_tokens:
        return None
    found: dict[int, list[Positions]] = {}
    at, position = 0, 0
    for (first, last), index in [*spans, ((num_tokens, num_tokens - 1), -1)]:
        text = np.arange(position, position + first - at)
        if not (axes[:, at:first] == text).all():
            return None
        position += first - at
        if index < 0:
            break
        inside = axes[:, first : last + 1]
        found.setdefault(index, []).append(inside - position)
        at, position = last + 1, int(inside.max()) + 1
    return found


@dataclass(frozen=True)
class Media:
    """An image of a request.

    Attributes:
        pads: the numbers that stand for it.
        binding: 32 bytes, of `bindings`.
    """

    pads: tuple[int, ...]
    binding: bytes


def are_told_apart(images: Sequence[Media]) -> bool:
    """Whether no number stands for two images of these."""
    by_pad: dict[int, bytes] = {}
    return all(
        by_pad.setdefault(pad, image.binding) == image.binding
        for image in images
        for pad in image.pads
    )


def images_of_tokens(
    tokens: Positions, images: Sequence[Media]
) -> tuple[npt.NDArray[np.intp], list[bytes]]:
    """Which image each token `[n]` stands for: index into the bindings, -1 for none.

    Args:
        tokens: i64 `[n]`.
        images: those that are told apart by their numbers.
    """
    by_pad = {pad: image.binding for image in images for pad in image.pads}
    which = np.full(len(tokens), -1, np.intp)
    wide = np.flatnonzero(tokens >= FIRST_PAD)
    found: dict[bytes, int] = {}
    pads, place = np.unique(tokens[wide], return_inverse=True)
    known = [by_pad.get(pad) for pad in pads.tolist()]
    index = [-1 if b is None else found.setdefault(b, len(found)) for b in known]
    which[wide] = np.array(index, np.intp)[place]
    return which, list(found)


class Naming(threading.local):
    """Whose pages a thread names just now: by that request's images, and by no other's.

    So what a page is named by follows from its request alone. It may not depend on which others are
    there: the ranks of a server free their requests at moments of their own, and would name a page
    differently. Nor does what a request leaves in the tree whose images are not proved go by the
    images of others that have its numbers.
    """

    _req: Any = None

    @property
    def images(self) -> tuple[Media, ...]:
        """Images of that request; empty where nothing of it may be named, or nobody's are."""
        return images_of(self._req) or ()

    @contextmanager
    def pages_of(self, req: Any) -> Iterator[None]:
        """Inside, pages are those of a request."""
        before, self._req = self._req, req
        try:
            yield
        finally:
            self._req = before


def page_digest(plain: bytes, runs: Sequence[tuple[bytes, int]]) -> bytes:
    """Hash of a page in which images lie.

    Args:
        plain: SGLang's hash of it, chained to what is before, with `FIRST_PAD` for each token that
            stands for an image; 32 bytes.
        runs: binding, and number of tokens in a row that stand for that image, in order.
    """
    digest = hashlib.sha256(_PAGE + plain)
    for binding, length in runs:
        digest.update(binding + struct.pack("<I", length))
    return digest.digest()


def note_images(req: Any, images: tuple[Media, ...]) -> None:
    """Notes which images a request has; none: it has some of which nothing may be named.

    The note stays: SGLang takes a request's images away when it ends, and its KV stays what it is.
    """
    setattr(req, _ATTRIBUTE, images)


def images_of(req: Any) -> tuple[Media, ...] | None:
    """Images noted of a request; empty: nothing of it may be named; None: it has none."""
    return getattr(req, _ATTRIBUTE, None)
