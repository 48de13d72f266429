"""Which of a path's states are worth their bytes: pure.

A state spares whoever resumes behind it the tokens since the nearest earlier one that is stored, or
all tokens where there is none. A page spares its own, so a state is worth as much for its bytes
where these are as many tokens as its bytes would hold as pages. Where a conversation ends and where
paths part more requests go on than from anywhere else: these states are needed whatever they spare.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class PathState(NamedTuple):
    """A state on a path.

    Attributes:
        end: pages before it.
        is_stored: it is there already, so that later ones spare what is behind it alone.
        is_needed: it is kept whatever it spares.
    """

    end: int
    is_stored: bool
    is_needed: bool


def worth_keeping(states: Sequence[PathState], least_pages: int) -> list[bool]:
    """Which states spare enough for their size.

    What is left out costs whoever would have resumed there fewer than `least_pages` pages, and no
    fewer states would do for that.

    Args:
        states: of one path, root first.
        least_pages: pages that have the size of a state.
    """
    kept, last = [], 0
    for state in states:
        keep = state.is_needed or state.end - last >= least_pages
        if keep or state.is_stored:
            last = state.end
        kept.append(keep)
    return kept
