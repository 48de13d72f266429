"""When pages nobody waits for come back: learned by class and age, and followed only while it wins.

See docs/lookahead.md for the definition, its sources and what it was measured to do.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy import return_kernels as kernels
from sglang_ext.tiers.policy.base_orders.base import BaseOrder
from sglang_ext.tiers.policy.page_kernels import LEFT_BEHIND

Names = npt.NDArray[np.uint64]
_MINIATURE_PAGES = 1024  # what either miniature cache holds at most
_DIRECTORY_RATIO = 8  # the directory sees this many times further back than the caches
_DECAY = 0.97  # at each rescoring: what was seen 23 of them ago counts half
_MIN_DIFFERENT = 64  # hits in one cache only, before anything is concluded
_FADE_AT = 4096
# Pages left behind leave first while no more than the share _FEW of them returned. Before any was
# seen, _UNSEEN of them count as not returned.
_FEW, _UNSEEN = 0.05, 64


class ReturnTimes:
    """Estimator and guard for one capacity. Not locked: the owner's lock guards it.

    Args:
        capacity_pages: pages of the tier it decides for.
        order: the base order that it competes with.

    Attributes:
        active: whether the scores are followed now.
        left_never_return: whether hardly any of the pages that were left behind were used again, as
            far as was seen.
    """

    def __init__(self, capacity_pages: int, order: BaseOrder) -> None:
        shift = max(math.ceil(math.log2(max(capacity_pages, 1) / _MINIATURE_PAGES)), 0)
        self._mask = np.uint64((1 << shift) - 1)
        self._capacity = max(capacity_pages >> shift, 1)
        slots = _DIRECTORY_RATIO * max(self._capacity, kernels.WAYS)
        self.directory = kernels.new_directory(1 << math.ceil(math.log2(slots)))
        self._order = order
        self._rescored_at = 0
        self.active = False
        self.left_never_return = True

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """f64[classes, ages], expected returns per page-second; lower leaves sooner."""
        return self.directory.scores

    def learn(
        self, names: Names, kinds: npt.NDArray[np.uint8], now_s: float, arrived_s: float
    ) -> None:
        """Notes that a request used pages.

        Args:
            names: u64[N], what pages are recognised by after they left; root first.
            kinds: u8[N], their classes from now on.
            now_s: time of the use.
            arrived_s: time at which the request arrived.
        """
        kernels.learn(
            self.directory, names, kinds, now_s, arrived_s, self._mask, self._capacity,
            self._order.restamps_on_use, self._order.youngest_first,
        )  # fmt: skip
        uses = int(self.directory.counts[kernels.USES])
        if uses - self._rescored_at >= max(len(self.directory.name) // 16, 64):
            self._rescored_at = uses
            kernels.rescore(self.directory, now_s, _DECAY)
            self._judge()
            self._judge_left_behind()

    def left_behind(self, names: Names, now_s: float) -> None:
        """Notes that a conversation was cut and has gone on without these pages.

        Args:
            names: u64[N], as given to `learn`.
            now_s: time.
        """
        kernels.relabel(self.directory, names, LEFT_BEHIND, now_s, self._mask)

    def counters(self) -> dict[str, float]:
        """What the guard goes by: recent hits of both miniature caches."""
        counts = self.directory.counts
        return {
            "miniature_hits_base": float(counts[kernels.HITS_BASE]),
            "miniature_hits_return_times": float(counts[kernels.HITS_SCORE]),
            "return_times_active": float(self.active),
        }

    def _judge_left_behind(self) -> None:
        directory = self.directory
        returned = directory.hits[LEFT_BEHIND].sum()
        others = directory.exits[LEFT_BEHIND].sum() + np.sum(directory.kind == LEFT_BEHIND)
        self.left_never_return = bool(returned <= _FEW * (returned + others + _UNSEEN))

    def _judge(self) -> None:
        """Follows the scores where their lead is above chance, and until it is gone."""
        counts = self.directory.counts
        lead = int(counts[kernels.HITS_SCORE] - counts[kernels.HITS_BASE])
        different = int(counts[kernels.ONLY_ONE])
        if different >= _MIN_DIFFERENT:
            if lead > 2.0 * math.sqrt(different):
                self.active = True
            elif lead <= 0:
                self.active = False
        if different > _FADE_AT:
            counts[: kernels.ONLY_ONE + 1] //= 2
