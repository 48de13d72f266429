"""SGLang's page hash with the digests of the images that lie in a page; see `identity.media`.

Pages of text keep SGLang's hashes, and outside of `naming.pages_of` nothing is looked at.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_ext.identity.media import FIRST_PAD, Naming, images_of_tokens, page_digest

# A request is matched many times while it waits. Of one with 8,000 tokens of images the hashes take
# milliseconds to make. A page's is some 120 bytes, and a long prompt may have 100,000 pages.
_MAX_REMEMBERED_PAGES = 1 << 17

naming = Naming()
"""Whose pages are hashed, in this process; whoever has a request's pages hashed says so."""


class HashMemo:
    """Hashes of pages by what they are made of; the oldest leave first.

    Args:
        most_pages: of how many pages, at most.

    Attributes:
        num_pages: of how many, with one more for each entry.
    """

    def __init__(self, most_pages: int = _MAX_REMEMBERED_PAGES) -> None:
        self._most_pages = most_pages
        self._found: OrderedDict[bytes, list[str]] = OrderedDict()
        self.num_pages = 0

    def get(self, name: bytes) -> list[str] | None:
        """Hashes under a name; None where they are not remembered."""
        hashes = self._found.get(name)
        if hashes is not None:
            self._found.move_to_end(name)
        return hashes

    def put(self, name: bytes, hashes: list[str]) -> None:
        """Remembers hashes under a new name."""
        self._found[name] = hashes
        self.num_pages += len(hashes) + 1
        while self.num_pages > self._most_pages:
            _, oldest = self._found.popitem(last=False)
            self.num_pages -= len(oldest) + 1


def install_page_digests() -> None:
    """Puts the images into SGLang's hashes; once, behind `ensure_page_hash`."""
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input

    plain: Callable[..., str | list[str]] = utils.get_native_hash
    if getattr(plain, "_hier_kv_knows_images", False):
        return

    memo = HashMemo()

    def get_native_hash(
        token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
    ) -> str | list[str]:
        images = naming.images
        if not images:
            return plain(token_ids, prior_digest, page_size)
        raw, length, width, of_pairs = _native_hash_input(token_ids)
        assert of_pairs or width == 1
        tokens = np.asarray(raw, np.int64)[: length + of_pairs]
        which, bindings = images_of_tokens(tokens, images)
        if not bindings or not length:
            return plain(token_ids, prior_digest, page_size)
        tokens = np.where(which >= 0, FIRST_PAD, tokens)  # other servers have other numbers
        size = page_size or length
        name = _name_of(tokens, which, bindings, prior_digest, size, of_pairs)
        hashes = memo.get(name)
        if hashes is None:
            # A page of pairs is named by the token behind it, too, which may be of another image.
            ends = range(size, length + size, size)
            runs = [_runs(which[end - size : end + of_pairs], bindings) for end in ends]
            key_of = _pairs_of if of_pairs else _tokens_of
            hashes = _chained(plain, tokens, prior_digest, size, runs, key_of)
            memo.put(name, hashes)
        return hashes[0] if page_size is None else list(hashes)

    get_native_hash._hier_kv_knows_images = True  # type: ignore[attr-defined]
    utils.get_native_hash = get_native_hash


def _name_of(
    tokens: Any,
    which: Any,
    bindings: list[bytes],
    prior: bytes | None,
    size: int,
    of_pairs: bool,
) -> bytes:
    """What hashes of pages are remembered by: a digest of all that they are made of."""
    digest = hashlib.sha256(f"{size} {of_pairs} {len(tokens)} {len(bindings)} ".encode())
    for part in (prior or b"", *bindings, tokens.tobytes(), which.astype(np.int32).tobytes()):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()


def _tokens_of(tokens: Any, first: int, end: int) -> Any:
    """A key of tokens."""
    return array("q", tokens[first:end].tobytes())


def _pairs_of(tokens: Any, first: int, end: int) -> Any:
    """A key of pairs: each token with the next one."""
    return RadixKey(array("q", tokens[first : end + 1].tobytes()), is_bigram=True)


def _chained(
    plain: Any,
    tokens: Any,
    prior: bytes | None,
    size: int,
    runs: list[list[tuple[bytes, int]]],
    key_of: Callable[[Any, int, int], Any],
) -> list[str]:
    """Hashes of pages: runs of pages without images by SGLang's function, the others one by one."""
    hashes: list[str] = []
    first = 0
    while first < len(runs):
        end = first + 1
        if not runs[first]:
            while end < len(runs) and not runs[end]:
                end += 1
        found = plain(key_of(tokens, first * size, end * size), prior, size)
        if runs[first]:
            found = [page_digest(bytes.fromhex(found[0]), runs[first]).hex()]
        hashes += found
        prior = bytes.fromhex(hashes[-1])
        first = end
    return hashes


def _runs(which: Any, bindings: list[bytes]) -> list[tuple[bytes, int]]:
    """Images that tokens in a row stand for, and how many do."""
    starts = np.flatnonzero(np.diff(which, prepend=-2))
    lengths = np.diff(starts, append=len(which))
    return [
        (bindings[index], length)
        for index, length in zip(which[starts].tolist(), lengths.tolist(), strict=True)
        if index >= 0
    ]
