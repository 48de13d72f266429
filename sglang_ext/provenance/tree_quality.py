"""Quality of the pages in SGLang's device tree, which has no place for it in its nodes.

A page hash names one place in the tree, whatever nodes are split, evicted or inserted around it,
so the pages that are not exact are kept as a table by hash. Nothing is kept of exact pages: without
lossy KV the table is empty and every question is answered at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from sglang_ext.tiers.records.quality import Qualities, Quality, worst


class DeviceProvenance:
    """Page hash to quality, of pages in the device tree. Scheduler thread only.

    A mark may outlive its page: it says nothing of a page that is not in the tree, and whoever
    inserts one sets or takes away its mark. Marks that are left over are swept out when there are
    more than pages on the device could account for.

    Args:
        max_marks: number of marks from which on a sweep is worth it.
        live_keys: hashes of all pages in the tree; None when the tree cannot tell.
    """

    def __init__(
        self, max_marks: int, live_keys: Callable[[], Iterable[str]] | None = None
    ) -> None:
        self._max_marks = max_marks
        self._live_keys = live_keys
        self._marks: dict[str, int] = {}
        # Quality of pages without a mark; not exact once marks had to be dropped.
        self._floor = int(Quality.EXACT)

    def __bool__(self) -> bool:
        """Whether any page may not be exact."""
        return bool(self._marks) or self._floor > Quality.EXACT

    def __len__(self) -> int:
        """Number of marks."""
        return len(self._marks)

    def of(self, keys: Sequence[str]) -> Qualities:
        """Quality of pages that are in the tree, u8 `[N]`."""
        marks, floor = self._marks, self._floor
        return np.fromiter((marks.get(key, floor) for key in keys), np.uint8, len(keys))

    def worst(self, keys: Sequence[str]) -> int:
        """The worst of some pages."""
        return worst(self.of(keys)) if self else int(Quality.EXACT)

    def num_exact(self, keys: Sequence[str]) -> int:
        """Number of leading pages that are exact."""
        if not self:
            return len(keys)
        inexact = np.flatnonzero(self.of(keys))
        return int(inexact[0]) if len(inexact) else len(keys)

    def note(self, keys: Sequence[str], quality: Qualities) -> None:
        """Sets what is known of pages that are about to enter the tree, or were overwritten."""
        self._make_room()
        for key, value in zip(keys, quality.tolist(), strict=True):
            if value != self._floor:
                self._marks[key] = value
            else:
                self._marks.pop(key, None)

    def clear(self) -> None:
        """The tree is empty."""
        self._marks.clear()
        self._floor = int(Quality.EXACT)

    def _make_room(self) -> None:
        if len(self._marks) < self._max_marks:
            return
        if self._live_keys is None:
            self._floor = max(self._floor, *self._marks.values())
            self._marks.clear()
            return
        live = set(self._live_keys())
        self._marks = {key: value for key, value in self._marks.items() if key in live}
