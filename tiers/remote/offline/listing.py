"""What a store that can list its values does for those who look into it without a server."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from sglang_ext.tiers.records.record import ByteArray


class StoredValue(NamedTuple):
    """A value of this deployment.

    Attributes:
        name: as `remote.base.value_name` has it, or that of a part.
        num_bytes: what it takes there; no value is longer.
        age_s: seconds since it was stored or read; None where the store does not say.
    """

    name: str
    num_bytes: int
    age_s: float | None


class Listing(abc.ABC):
    """The values of one deployment in one store. For one thread; calls block."""

    @abc.abstractmethod
    def values(self) -> Iterator[StoredValue]:
        """Every value that is there from the beginning to the end, once or more often.

        Raises:
            RemoteError: the store does not say.
            OSError: it is a folder, and cannot be read.
        """

    @abc.abstractmethod
    def read(self, name: str, out: ByteArray) -> int:
        """Reads a value from its start, and makes it no younger if that can be had.

        Returns:
            Its bytes, at most those of `out`; 0 where there is no value.

        Raises:
            RemoteError, OSError: it cannot be read.
        """

    @abc.abstractmethod
    def remove(self, names: Sequence[str]) -> None:
        """Removes values; those that are gone already are none the worse.

        Raises:
            RemoteError, OSError: some may be left.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees connections."""
