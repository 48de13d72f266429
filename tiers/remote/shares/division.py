"""Who has which share of a store, in words that tell its readers no tenant's name."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Division:
    """How a store is divided among tenants, who are numbered; 0 is all that have no share.

    Attributes:
        shares: of tenants 1, 2, ..., each above 0, at most 1 together; all others have the rest.
        labels: of the same tenants: digests that stand for one in the store, the same on every
            server. The first is written, all are understood.
        num_putters: processes of this server that put values there, each its part.
    """

    shares: tuple[float, ...]
    labels: tuple[tuple[bytes, ...], ...]
    num_putters: int = 1

    @property
    def rights(self) -> tuple[float, ...]:
        """The share of each number, from 0 on."""
        return max(0.0, 1.0 - sum(self.shares)), *self.shares
