"""Provenance of KV: how far a page may differ from what the model computes on exact KV.

A page is as good as the worst of two things: how it was coded, and the KV that its tokens attended
to. So a page computed over a lossy one is lossy too, however well it is kept itself.

The number counts what was lost: it grows as KV gets worse, and 0 is exact. Clients are told its
name, as the field `quality` of their answers (`seam/reuse_report.py`).
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

Qualities = npt.NDArray[np.uint8]


class Quality(IntEnum):
    """From best to worst; the worse of two is the greater number.

    Stored in record headers and segment footers: never renumber. Values from 2 on are worse than
    anything that a codec does; 2 is KV that attended to tokens which were cut off since.
    """

    EXACT = 0
    LOSSY = 1
    APPROXIMATED = 2


ANY = 255
"""As a limit: whatever there is."""


def name_of(quality: int) -> str:
    """Name for reports; numbers of later releases count as the worst known."""
    return Quality(min(quality, max(Quality))).name.lower()


def worst(qualities: Qualities) -> int:
    """The worst of some pages; exact when there are none."""
    return int(qualities.max()) if len(qualities) else int(Quality.EXACT)
