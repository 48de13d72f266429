"""Saves and loads as they are queued: whose pages, where on their path, from or to which rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sglang_ext.device.composition import Composition
from sglang_ext.tiers.records.quality import ANY, Qualities
from sglang_ext.tiers.store import KeySpace, LivePages, LoadTicket

Hashes = npt.NDArray[np.uint8]


def hashes_from_hex(keys: list[str]) -> Hashes:
    """SGLang's page hashes as u8 `[N, 32]`."""
    return np.frombuffer(bytes.fromhex("".join(keys)), np.uint8).reshape(-1, 32)


def hashes_to_hex(hashes: Hashes) -> list[str]:
    """Page hashes u8 `[N, 32]` as SGLang has them."""
    return [row.tobytes().hex() for row in hashes]


@dataclass(frozen=True)
class Place:
    """Where on a radix path the pages of a transfer lie.

    Attributes:
        space: namespace and adapter.
        position: index of the first token.
        ancestors: hashes of the pages before, u8 `[M, 32]`.
        quality: of the pages of a save, u8 `[N]`; None when all are exact.
        max_quality: the worst that may be loaded.
        composition: how the pages of a load are made of stored ones; None: they are stored.
        aliased: pages of a save that can be made of stored ones and are not stored again, bool
            `[N]`; None for none.
        take: hands over pages of a load that are pinned and verified; None to look them up.
    """

    space: KeySpace
    position: int
    ancestors: Hashes
    quality: Qualities | None = None
    max_quality: int = ANY
    composition: Composition | None = None
    aliased: npt.NDArray[np.bool_] | None = None
    take: Callable[[Hashes], LoadTicket | None] | None = None


@dataclass(frozen=True)
class SaveJob:
    """A node's pages on their way to DRAM.

    Attributes:
        place: where they belong.
        hashes: u8 `[N, 32]`.
        token_slots: `[N * P]`, rows of the device pool.
        ready_events: CUDA events after which these rows are complete.
        num_resets: of the device pool until the save was offered.
        dropped: it ends as not stored, in its turn.
        is_of_windows: the pages are of window layers: `hashes` are `[G * N, 32]`, one group's after
            another's, and the rows of their own pool.
        is_of_state: they are the parts of a state, and `token_slots` is `[1]`, its slot; `place` is
            that of the page which the state is behind.
    """

    place: Place
    hashes: Hashes
    token_slots: torch.Tensor
    ready_events: list[Any]
    num_resets: int
    dropped: bool = False
    is_of_windows: bool = False
    is_of_state: bool = False


@dataclass(frozen=True)
class WindowRows:
    """Rows of a model's window layers, of pages that follow one another.

    Attributes:
        num_pages: stored pages of each group that they are loaded from.
        token_slots: rows of the window layers' pool, of whole pages.
        position: position of the first token.
        composition: how the pages are made of the stored ones; None: they are these.
    """

    num_pages: int
    token_slots: torch.Tensor
    position: int
    composition: Composition | None = None


@dataclass(frozen=True)
class StateSlot:
    """Where a request's state goes.

    Attributes:
        num_parts: parts of it in DRAM.
        slot: `[1]`, in the pool of states.
    """

    num_parts: int
    slot: torch.Tensor


@dataclass(frozen=True)
class LoadJob:
    """A request's pages on their way to rows of its own.

    Attributes:
        pages: the pages, pinned, as the gate let them through: of the full layers, then, with
            `windows`, of one group of window layers after the other, or, with `state`, its parts.
        token_slots: `[N * P]`, rows of the device pool.
        position: position of the first token.
        composition: how the pages of the full layers are made of the ticket's; None: they are
            the ticket's.
        windows: where the window layers' go; None where there are none to load.
        state: where the state goes; None where there is none to load.
    """

    pages: LivePages
    token_slots: torch.Tensor
    position: int
    composition: Composition | None = None
    windows: WindowRows | None = None
    state: StateSlot | None = None

    @property
    def ticket(self) -> LoadTicket:
        """The pages' pins."""
        return self.pages.ticket

    def slots_of(self, part: int, num_groups: int) -> npt.NDArray[np.int64]:
        """Slots of the pages of one part.

        Args:
            part: 0 for the full layers, 1 and on for groups of window layers.
            num_groups: groups of window layers.
        """
        slots = self.ticket.slots.astype(np.int64)
        if self.state is not None:
            slots = slots[: -self.state.num_parts]
        num_window = 0 if self.windows is None else self.windows.num_pages
        num_full = len(slots) - num_groups * num_window
        if part == 0:
            return slots[:num_full]
        first = num_full + (part - 1) * num_window
        return slots[first : first + num_window]

    @property
    def state_slots(self) -> npt.NDArray[np.int64]:
        """Slots of the parts of the state; none without."""
        slots = self.ticket.slots.astype(np.int64)
        return slots[len(slots) if self.state is None else -self.state.num_parts :]
