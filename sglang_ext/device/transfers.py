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
        epoch: of the device pool when the save was offered.
        dropped: it ends as not stored, in its turn.
    """

    place: Place
    hashes: Hashes
    token_slots: torch.Tensor
    ready_events: list[Any]
    epoch: int
    dropped: bool = False


@dataclass(frozen=True)
class LoadJob:
    """A request's pages on their way to rows of its own.

    Attributes:
        pages: the pages, pinned, as the gate let them through.
        token_slots: `[N * P]`, rows of the device pool.
        position: position of the first token.
        composition: how the pages are made of the ticket's; None: they are the ticket's.
    """

    pages: LivePages
    token_slots: torch.Tensor
    position: int
    composition: Composition | None = None

    @property
    def ticket(self) -> LoadTicket:
        """The pages' pins."""
        return self.pages.ticket
