"""Values that a save cannot store position-free, listed in the tails of pages as they lie on disk.

`save_to_pages` and `begin_tails` here are the plain statement; `gpu.py` does the same on a device,
where nothing waits to learn how many there are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .api import save_k
from .spec import COUNT_WORD, HEAD_WORDS, Listing, PagedView, RopeSpec

if TYPE_CHECKING:
    import torch


def begin_tails(tails: Any, heads: Any) -> None:
    """Writes heads of 24 bytes, as i64 `[3 * n]`, and nothing listed.

    Args:
        tails: u8 `[n, bytes]`, where the kernels find them.
        heads: i64 `[3 * n]`.
    """
    tails[:] = 0
    tails[:, : 4 * HEAD_WORDS] = heads.reshape(len(tails), -1).view(np.uint8)


def clear(pages: Any) -> None:
    """Writes zeros to pages, where not all bytes of them are some layer's."""
    pages[:] = 0


def save_to_pages(
    pool: torch.Tensor,
    rows: Any,
    positions: Any,
    spec: RopeSpec,
    out: PagedView,
    listing: Listing,
    layer: int,
) -> None:
    """`save_k` whose corrections go to the pages' tails, in the order of their values.

    Args:
        pool: `[S, H, D]`.
        rows: i64 `[n * P]`, rows of the pool.
        positions: i64 `[n * P]`.
        spec: the layer's rotation.
        out: the pages.
        listing: their tails, which list the layers before this one.
        layer: which.
    """
    found = save_k(pool, rows, positions, spec, out)
    words = listing.tails.view(np.uint32)
    for page in range(len(words)):
        of_page = np.flatnonzero(found.page == page)
        of_page = of_page[np.argsort(found.element[of_page], kind="stable")]
        before = int(words[page, COUNT_WORD])
        words[page, COUNT_WORD] = before + len(of_page)
        words[page, HEAD_WORDS + layer] = len(of_page)
        of_page = of_page[: max(0, listing.capacity - before)]
        at = HEAD_WORDS + listing.num_layers + 2 * before
        entries = words[page, at : at + 2 * len(of_page)].reshape(-1, 2)
        entries[:, 0], entries[:, 1] = found.element[of_page], found.bits[of_page]
