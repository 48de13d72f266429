"""SGLang's chained page hash without a compiler.

SGLang builds its page hash from C++ when it is first used; on a machine without a compiler the
first request would fail. Then this replacement is used: the same chain, from hashlib.

    digest of page i = sha256(digest of page i-1 | 0xff if wide | tokens)

Tokens are uint32 little endian, or all uint64 when one of them needs it (`wide`).
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

_NARROW_MAX = 2**32 - 1


def ensure_page_hash() -> None:
    """Uses SGLang's native page hash where it builds, else installs the replacement.

    Runs at start: the build takes seconds, and belongs to no request.
    """
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.cpp_utils import native_hash

    try:
        native_hash.get_native_hash([1, 2, 3], None, page_size=1)
    except Exception as error:
        logger.warning(
            "hier-kv: SGLang's native page hash does not build here (%s); using hashlib", error
        )
        native_hash.get_native_hash = get_page_hash
        utils.get_native_hash = get_page_hash


def get_page_hash(
    token_ids: Any, prior_digest: bytes | None, page_size: int | None = None
) -> str | list[str]:
    """The same as SGLang's `get_native_hash`, from hashlib."""
    from sglang.srt.mem_cache.cpp_utils.native_hash import _native_hash_input

    raw, logical_len, unit_width, is_bigram = _native_hash_input(token_ids)
    tokens = np.asarray(raw, np.int64).reshape(-1)
    if is_bigram:
        tokens = np.stack([tokens[:-1], tokens[1:]], axis=1).reshape(-1)
        unit_width = 2
    units = tokens[: logical_len * unit_width].reshape(logical_len, unit_width)
    if page_size is None:
        return _hash(units, prior_digest).hex()
    digest, out = prior_digest, []
    for start in range(0, logical_len, page_size):  # a last page cut short has a hash too
        digest = _hash(units[start : start + page_size], digest)
        out.append(digest.hex())
    return out


def _hash(units: np.ndarray[Any, np.dtype[np.int64]], prior: bytes | None) -> bytes:
    values = units.reshape(-1)
    wide = bool(values.size) and int(values.max()) > _NARROW_MAX
    digest = hashlib.sha256(prior or b"")
    if wide:
        digest.update(b"\xff")
    digest.update(values.astype("<u8" if wide else "<u4").tobytes())
    return digest.digest()
