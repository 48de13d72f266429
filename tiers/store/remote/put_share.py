"""Which pages a process puts into a remote store, where several hold the same ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.store.types import Hashes


@dataclass(frozen=True)
class PutShare:
    """This process's share of the pages that some processes hold alike; by default all of them.

    Each page is in exactly one share, and page hashes are as good as random, so shares are equal.

    Attributes:
        number: of this share, from 0.
        num_shares: processes that hold the same pages and put them under the same names.
    """

    number: int = 0
    num_shares: int = 1

    @property
    def is_all(self) -> bool:
        """Whether every page is in it."""
        return self.num_shares == 1

    def has(self, hashes: Hashes) -> npt.NDArray[np.bool_]:
        """Which pages are in the share: bool `[N]`.

        Args:
            hashes: u8 `[N, 32]`.
        """
        # Not the first bytes: these choose a page's place in tables elsewhere.
        words = np.ascontiguousarray(hashes[:, -8:]).view("<u8").reshape(-1)
        mine: npt.NDArray[np.bool_] = words % np.uint64(self.num_shares) == self.number
        return mine


EVERY_PAGE = PutShare()
