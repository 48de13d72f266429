"""Pages written to disk beside those that were new there: what capacity that adds up costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

STEADY_LIMIT = 1.3
"""Most pages written for each that was new on disk, once a DRAM full of them was written again."""


@dataclass(frozen=True)
class Writes:
    """What a store wrote, in pages.

    Attributes:
        acknowledged: pages written, those of `again` included.
        again: those of them that the disk had had before, and given up while DRAM had them.
        moved: pages copied from one place on disk to another.
    """

    acknowledged: int = 0
    again: int = 0
    moved: int = 0

    @classmethod
    def of(cls, counters: Mapping[str, float], moved: float) -> Writes:
        """From a store's counters, and how many records its disk moved."""
        acknowledged, again = (
            int(counters.get(name, 0)) for name in ("written_pages", "written_again_pages")
        )
        return cls(acknowledged, again, int(moved))

    @property
    def all(self) -> int:
        """All that went to disk."""
        return self.acknowledged + self.moved

    @property
    def first(self) -> int:
        """Pages that were new on disk."""
        return self.acknowledged - self.again

    @property
    def amplification(self) -> float:
        """Pages written for each that was new; 1 without any."""
        return self.all / self.first if self.first else 1.0

    def steady_amplification(self, host_pages: int) -> float:
        """The same without the first pages that were written again, as many as DRAM holds.

        So many may be before any is owed to new ones (`WritePolicy`), which a short run is mostly
        made of.
        """
        at_once = min(self.again, host_pages)
        return (self.all - at_once) / self.first if self.first else 1.0
