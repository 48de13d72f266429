"""What a base order is: two booleans."""

from __future__ import annotations

from typing import ClassVar


class BaseOrder:
    """An order of leaving that follows from when pages were used.

    Each tier keeps its pages in lists (`tier_kernels.py`). The two attributes say when a page is
    put at the young end of its list, and from which end pages are evicted. So a decision costs the
    same whatever is stored.

    Attributes:
        restamps_on_use: a use moves the page to the young end; otherwise it stays where its first
            use put it.
        youngest_first: the young end leaves first.
    """

    restamps_on_use: ClassVar[bool]
    youngest_first: ClassVar[bool]
