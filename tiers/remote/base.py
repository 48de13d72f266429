"""What an engine of the remote tier is: its interface and the types that pass through it.

An engine speaks to one kind of store that many servers share: Redis, Mooncake, a mounted folder.
It moves named values and knows nothing of records. `sglang_ext.tiers.remote.remote_store` puts the
rest around it, once for all engines: names, splitting, verification, the circuit breaker, counters.
"""

from __future__ import annotations

import abc
import enum
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from sglang_ext.tiers.errors import TierError
from sglang_ext.tiers.records.record import DIGEST_BYTES, MAX_CODEC_BYTES, RAW_CODEC, ByteArray
from sglang_ext.tiers.remote.shares.division import Division

NAME_VERSION = 1  # part of every stored name; a change of names or of what they mean needs another


class RemoteKey(NamedTuple):
    """What one stored value is: everything that tells it from any other.

    Attributes:
        namespace: 32 bytes, digest of all that makes KV incompatible (model, dtype, layout, shard).
        page_hash: 32 bytes, SGLang's chained page hash; for a value of several pages, the last's.
        lora: 32 bytes (digest of the adapter's weights), or empty for the base model.
        level: how it is coded, as `level_name` says it. In the key, unlike on disk, so that several
            levels of one page can lie in the store at once.
    """

    namespace: bytes
    page_hash: bytes
    lora: bytes = b""
    level: str = RAW_CODEC


def level_name(codec: str, level: int) -> str:
    """Returns the level of a key for a record's codec and level: `raw`, or `hier.2`."""
    return codec if codec == RAW_CODEC else f"{codec}.{level}"


def value_name(prefix: str, key: RemoteKey) -> str:
    """Returns the name that a key's value has in every store.

    ASCII without braces, slashes or spaces, at most 290 characters.

    Args:
        prefix: keeps deployments apart that share a store.
        key: of the right lengths.

    Raises:
        ValueError: a part of the key has another length than it must, or characters.
    """
    lengths = (len(key.namespace), len(key.page_hash), len(key.lora))
    if lengths[:2] != (DIGEST_BYTES, DIGEST_BYTES) or lengths[2] not in (0, DIGEST_BYTES):
        raise ValueError(f"a key has digests of {DIGEST_BYTES} bytes, got lengths {lengths}")
    legal = key.level.isascii() and key.level.replace(".", "").replace("-", "").isalnum()
    if not legal or len(key.level) > MAX_CODEC_BYTES + 4:
        raise ValueError(f"a level is letters, digits, dots and hyphens, got {key.level!r}")
    lora = key.lora.hex() or "-"
    return f"{prefix}:{NAME_VERSION}:{key.namespace.hex()}:{key.page_hash.hex()}:{lora}:{key.level}"


_NAME = re.compile(
    r"([0-9a-f]{64}):([0-9a-f]{64}):([0-9a-f]{64}|-):([A-Za-z0-9.-]{1,36})(/[0-9a-f]{16}\.[0-9]{1,4})?"
)


def key_of_name(prefix: str, name: str) -> tuple[RemoteKey, bool] | None:
    """The key whose value, or a part of it, has a name; None where it is no name of ours.

    Returns:
        The key, and whether it is a part.
    """
    start = f"{prefix}:{NAME_VERSION}:"
    match = _NAME.fullmatch(name, len(start)) if name.startswith(start) else None
    if match is None:
        return None
    namespace, page, lora, level, part = match.groups()
    lora_digest = b"" if lora == "-" else bytes.fromhex(lora)
    key = RemoteKey(bytes.fromhex(namespace), bytes.fromhex(page), lora_digest, level)
    return key, part is not None


class Outcome(enum.Enum):
    """How one item of a call ended. Anything but `OK` is a miss, or not stored, and counted."""

    OK = "ok"
    MISSING = "missing"
    REJECTED = "rejected"  # bytes are there, and are not an intact record of what was asked for
    KEPT = "kept"  # put: the store has it already, at least as good
    FULL = "full"  # put: the store has no room
    OVER_SHARE = "over_share"  # put: its tenant has put as much as its share lets it for now
    MALFORMED = "malformed"  # the item is nothing that could be stored or read: the caller's fault
    TIMEOUT = "timeout"  # the call's time was over before this item's turn had ended
    UNAVAILABLE = "unavailable"  # not connected, lost in the middle, or the breaker is open
    BUSY = "busy"  # more calls at once than are allowed


class RemoteError(TierError):
    """A store could not do what it was asked. Raised by engines, never by `RemoteStore`.

    Messages never hold a password; they may hold addresses.
    """


class RemoteUnavailableError(RemoteError):
    """Refused, reset, closed in the middle, or speaking something else than its protocol."""


class RemoteTimeoutError(RemoteError):
    """The deadline passed."""


class RemoteAuthError(RemoteError):
    """The store wants another password, user or certificate."""


class RemoteFullError(RemoteError):
    """The store has no room and makes none."""


@dataclass(slots=True)
class Fetch:
    """A range of one value to read.

    Attributes:
        name: of the value.
        out: u8 [n], writable and contiguous; the range is [offset, offset + n), or up to the
            value's end. Undefined where the fetch is not reported.
        offset: first byte wanted.
    """

    name: str
    out: ByteArray
    offset: int = 0


class Value(NamedTuple):
    """A value to store.

    Attributes:
        name: its name.
        pieces: u8 [n] each, contiguous; the value is one after another, and not empty.
        replaces: whether to overwrite what lies under the name. With False nothing is overwritten,
            and the store decides: of two writers one wins.
        tenant: whose it is, by the number in the store's `Division`.
    """

    name: str
    pieces: tuple[ByteArray, ...]
    replaces: bool = False
    tenant: int = 0

    @property
    def num_bytes(self) -> int:
        """Length of the value."""
        return sum(piece.size for piece in self.pieces)


class Usage(NamedTuple):
    """How full a store is, where it says so; 0 for what it does not say."""

    used_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in time by which a call ends.

    Attributes:
        at_s: on the clock of `time.monotonic`.
    """

    at_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Self:
        """The deadline a time from now."""
        return cls(time.monotonic() + timeout_s)

    def left_s(self) -> float:
        """Seconds left, more than 0.

        Raises:
            RemoteTimeoutError: none are.
        """
        left = self.at_s - time.monotonic()
        if left <= 0:
            raise RemoteTimeoutError("the call's time is over")
        return left


OnFetched = Callable[[int, int], None]
"""Called with a fetch's position in its call and the bytes read: 0 when no value has its name."""

OnStored = Callable[[int, bool], None]
"""Called with a value's position and whether it was written; False when the name was taken."""


class RemoteEngine(abc.ABC):
    """Speaks to one store. Thread-safe; calls block, each up to its deadline.

    Items are reported as soon as they are done, on the caller's thread, in the order of the call
    but for those that had to be asked for elsewhere. A call that raises has reported what was done
    before; the other items count as failed. After a call has ended, however it ended, nothing
    writes to its `out` arrays any more.

    Attributes:
        max_value_bytes: no value that is stored may be longer.
        keeps_ttl: whether the store itself forgets values after a time.
        tells_size: whether `usage` says how full the store is.
        takes_ends: whether `let_go` does anything.
    """

    max_value_bytes: int
    keeps_ttl: bool
    tells_size: bool = True
    takes_ends: bool = False

    def divide(self, division: Division) -> bool:
        """Asks the engine to keep each tenant's share from now on; called before `begin`.

        Returns:
            Whether the engine does so. It cannot where the store itself decides which values leave.
        """
        return False

    def used_by_tenant(self) -> list[int]:
        """Bytes of each tenant by its number in the division; empty where no shares are kept."""
        return []

    def begin(self) -> None:  # noqa: B027 - most stores tend themselves
        """Starts what tends the store in the background; called once, by who serves from it.

        Before it the engine changes nothing in the store but what its calls ask for, so that tools
        can look at a store and leave it as it is. An engine whose store tends itself does nothing
        here.
        """

    @abc.abstractmethod
    def ping(self, deadline: Deadline) -> None:
        """Connects if need be and makes the store answer.

        Raises:
            RemoteError: it does not.
        """

    @abc.abstractmethod
    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """Reads ranges of values.

        Raises:
            RemoteError: what is not reported could not be read.
        """

    @abc.abstractmethod
    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """Stores values, each whole or not at all as far as readers can see.

        Raises:
            RemoteFullError: there is no room; what is not reported may have to wait for some.
            RemoteError: what is not reported may be stored or not.
        """

    @abc.abstractmethod
    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """Makes values young again, for their TTL and for the order of eviction.

        Raises:
            RemoteError: it did not work for all.
        """

    def let_go(self, names: Sequence[str], deadline: Deadline) -> None:  # noqa: B027 - see there
        """Makes values the first to go, until somebody uses them; see `keeping/retention.py`.

        They can be had until then. A store that decides itself what leaves has nothing to do here.

        Raises:
            RemoteError: it did not work for all.
        """

    @abc.abstractmethod
    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """Removes values; returns how many there were. Some stores keep what was just read.

        Raises:
            RemoteError: some may be left.
        """

    @abc.abstractmethod
    def usage(self, deadline: Deadline) -> Usage:
        """Asks how full the store is.

        Raises:
            RemoteError: the store did not say.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Frees connections, threads and processes. Safe to call twice."""
