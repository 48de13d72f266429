"""SGLang's radix keys and page hashes, for everything in the plugin that names pages.

A page's hash is chained from the root of its prompt, so equal hashes mean equal prefixes: SGLang
hashes the tokens, `extra_key` and salt. Model and weights are in no hash; they are the namespace
beside it (`identity/namespace.py`). With an
EAGLE draft model SGLang's keys are of pairs, each token with the next one, as its draft's KV of a
token depends on the next one: then N tokens are N - 1 pairs, and a page is named by P + 1 tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

from sglang_ext.device.transfers import Hashes, hashes_from_hex


def whole_pages_key(
    tokens: Any,
    extra_key: str | None,
    salt: str | None,
    page_size: int,
    *,
    of_pairs: bool = False,
) -> Any:
    """SGLang's `RadixKey` of the whole pages of some tokens."""
    key = RadixKey(tokens, extra_key, is_bigram=of_pairs, cache_salt=salt)
    return key.page_aligned(page_size)


def request_key(req: Any, num_tokens: int, page_size: int, *, of_pairs: bool = False) -> Any:
    """The `RadixKey` of the whole pages among a request's first `num_tokens` tokens."""
    tokens = req.full_untruncated_fill_ids[:num_tokens]
    return whole_pages_key(tokens, req.extra_key, req.cache_salt, page_size, of_pairs=of_pairs)


def hex_hashes_of(key: Any, page_size: int) -> list[str]:
    """Hashes of a key's pages as SGLang's tree keeps them."""
    return list(get_storage_hash_str(key, None, page_size=page_size))


def hashes_of(key: Any, page_size: int) -> Hashes:
    """Hashes of a key's pages, u8 `[N, 32]`."""
    return hashes_from_hex(hex_hashes_of(key, page_size))


def page_hasher(page_size: int) -> Callable[[array[int], str | None, str | None], Hashes]:
    """A function for the page hashes of (tokens, extra_key, salt), u8 `[N, 32]`."""

    def hash_of(tokens: array[int], extra_key: str | None, salt: str | None) -> Hashes:
        return hashes_of(whole_pages_key(tokens, extra_key, salt, page_size), page_size)

    return hash_of
