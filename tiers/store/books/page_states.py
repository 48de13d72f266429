"""What states a page may be in, and the steps between them.

A state is a row's bits in `PageIndex.flags` (`store/types.py` says what each means). `PageTable`
takes the steps; a step from a state that it does not fit is a mistake of the program, which tests
look for at every step.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.store.types import (
    FILLING,
    GIVEN_UP,
    ON_DISK,
    QUEUED,
    READY,
    SENT,
    SPILLING,
    WRITE_DROPPED,
)

Flags = npt.NDArray[np.uint8]


# What gave its place on disk up is to be written again, unless the disk was asked and refused.
_OWES: Final = GIVEN_UP | WRITE_DROPPED


class Step:
    """A change of state.

    Args:
        name: for messages.
        sets: bits that every page has afterwards.
        clears: bits that none has afterwards.
        needs: bits that every page has before.
        lacks: bits that none has before.
        tells: whether it decides if a page may leave DRAM or the disk, so that their orders hear.

    Attributes:
        owes: whether it may change which pages are to be written a second time (`owes`).
    """

    def __init__(
        self, name: str, sets: int = 0, clears: int = 0, needs: int = 0, lacks: int = 0,
        *, tells: bool = True,
    ) -> None:  # fmt: skip
        self.name = name
        self.sets, self.keeps = np.uint8(sets), np.uint8(0xFF ^ clears)
        self.needs, self.of = np.uint8(needs), np.uint8(needs | lacks)
        self.tells = tells
        self.owes = bool((sets | clears) & _OWES)

    def fits(self, flags: Flags) -> npt.NDArray[np.bool_]:
        """Which of some states it may be taken from."""
        fit: npt.NDArray[np.bool_] = (flags & self.of) == self.needs
        return fit


_IN_DRAM: Final = READY | FILLING
_WRITING: Final = QUEUED | SPILLING

# DRAM
FILL = Step("fill", sets=FILLING, lacks=_IN_DRAM | _WRITING)
PUBLISH = Step("publish", sets=READY, clears=FILLING, needs=FILLING, lacks=READY)
# A better copy takes the place of what there is, whoever reads or writes that now.
REPLACE = Step(
    "replace", sets=READY, clears=FILLING | _WRITING | WRITE_DROPPED | SENT | GIVEN_UP
)  # fmt: skip
LEAVE_DRAM = Step(
    "leave DRAM", clears=READY, needs=READY | ON_DISK, lacks=FILLING | _WRITING, tells=False
)
# The disk has it, and the device computed it all the same.
RETURN = Step("return", sets=READY, needs=ON_DISK, lacks=_IN_DRAM | _WRITING)
WITHDRAW = Step("withdraw", clears=FILLING | WRITE_DROPPED, needs=FILLING | ON_DISK)
SEND = Step("send", sets=SENT, needs=READY, tells=False)

# disk
PLACE = Step("place", sets=ON_DISK, clears=GIVEN_UP, tells=False)
TAKE_OFF = Step("take off", clears=ON_DISK, needs=ON_DISK, tells=False)
GIVE_UP_COPY = Step("give up a copy", sets=GIVEN_UP, needs=READY, lacks=ON_DISK)
LOSE_COPY = Step("lose a copy", sets=WRITE_DROPPED | GIVEN_UP, lacks=ON_DISK)

# on the way to disk
QUEUE = Step("queue", sets=QUEUED, needs=READY, lacks=FILLING | ON_DISK | _WRITING)
UNQUEUE = Step("leave the queue", clears=QUEUED, needs=READY | QUEUED, lacks=SPILLING)
SPILL = Step("spill", sets=SPILLING, needs=READY | QUEUED, lacks=SPILLING)
REFUSE = Step("refuse", sets=WRITE_DROPPED, clears=QUEUED, needs=READY | QUEUED, lacks=SPILLING)
DROP_WRITE = Step("drop a write", sets=WRITE_DROPPED, needs=_WRITING, tells=False)
END_SPILL = Step("end a spill", clears=_WRITING, needs=_WRITING)
SPARE = Step("spare a write", sets=WRITE_DROPPED, needs=READY, lacks=FILLING | ON_DISK | _WRITING)
OFFER = Step("offer", clears=WRITE_DROPPED, tells=False)


def owes(flags: Flags) -> npt.NDArray[np.bool_]:
    """Of which states pages are to be written a second time, as they leave DRAM."""
    owing: npt.NDArray[np.bool_] = (flags & np.uint8(_OWES)) == GIVEN_UP
    return owing


def _is_legal(flags: int) -> bool:
    somewhere = flags & (_IN_DRAM | ON_DISK) != 0
    one_slot = flags & _IN_DRAM != _IN_DRAM
    written_from_dram = not flags & QUEUED or flags & (READY | ON_DISK) == READY
    return somewhere and one_slot and written_from_dram and flags & _WRITING != SPILLING


LEGAL: Final = np.array([_is_legal(flags) for flags in range(256)])
"""Bool `[256]`, by flags: whether a page may be so while nobody holds the lock."""
