"""Lists the values of a Redis or Valkey server, or of a cluster.

What a list needs makes no value younger: neither OBJECT IDLETIME nor MEMORY USAGE does. Reading
does, unless the server knows CLIENT NO-TOUCH (Redis 7.2).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import Deadline, Fetch, RemoteEngine, RemoteUnavailableError
from sglang_ext.tiers.remote.engines.redis_nodes import Lease, Nodes
from sglang_ext.tiers.remote.engines.resp import (
    Argument,
    Connection,
    Reply,
    ReplyBounds,
    ReplyError,
    refusal,
)
from sglang_ext.tiers.remote.offline.listing import Listing, StoredValue

_TIMEOUT_S = 30.0  # of one command, or of one page of names
_SCAN_BOUNDS = ReplyBounds(depth=2, num_items=1 << 20, num_bytes=64 << 20)
_SCAN_COUNT = 1000
_AT_ONCE = 250


class RedisListing(Listing):
    """See `Listing`."""

    def __init__(self, engine: RemoteEngine, nodes: Nodes, prefix: str) -> None:
        """Does not connect.

        Args:
            engine: of the store; closed by `close`.
            nodes: its servers.
            prefix: what the names begin with, up to the version.
        """
        self._engine = engine
        self._nodes = nodes
        self._pattern = f"{prefix}:*"

    def values(self) -> Iterator[StoredValue]:
        """See `Listing.values`."""
        nodes = self._nodes
        nodes.refresh(Deadline.after(_TIMEOUT_S))
        for address in nodes.addresses():
            with Lease(nodes) as lease:
                connection = lease.get(address, Deadline.after(_TIMEOUT_S))
                with contextlib.suppress(ReplyError):
                    connection.call(["CLIENT", "NO-TOUCH", "ON"], Deadline.after(_TIMEOUT_S))
                try:
                    for names in self._names(connection):
                        yield from _looked_at(connection, names)
                except ReplyError as error:
                    raise refusal(error) from error

    def read(self, name: str, out: ByteArray) -> int:
        """See `Listing.read`."""
        found = [0]

        def on_fetched(position: int, num_bytes: int) -> None:
            found[position] = num_bytes

        self._engine.fetch([Fetch(name, out)], on_fetched, Deadline.after(_TIMEOUT_S))
        return found[0]

    def remove(self, names: Sequence[str]) -> None:
        """See `Listing.remove`."""
        for at in range(0, len(names), _AT_ONCE):
            self._engine.delete(names[at : at + _AT_ONCE], Deadline.after(_TIMEOUT_S))

    def close(self) -> None:
        """See `Listing.close`."""
        self._engine.close()

    def _names(self, connection: Connection) -> Iterator[list[bytes]]:
        cursor, seen = b"0", set[bytes]()
        while True:
            command: list[Argument] = ["SCAN", cursor, "MATCH", self._pattern, "COUNT", _SCAN_COUNT]
            reply = connection.call(command, Deadline.after(_TIMEOUT_S), _SCAN_BOUNDS)
            cursor, names = _page(reply)
            for at in range(0, len(names), _AT_ONCE):
                yield names[at : at + _AT_ONCE]
            if cursor == b"0":
                return
            if cursor in seen:
                raise RemoteUnavailableError("the server's list of names has no end")
            seen.add(cursor)


def _page(reply: Reply) -> tuple[bytes, list[bytes]]:
    """The cursor and the names in a reply to SCAN.

    Raises:
        RemoteUnavailableError: it is none.
    """
    if isinstance(reply, list) and len(reply) == 2:
        cursor, names = reply
        if isinstance(cursor, bytes) and isinstance(names, list):
            return cursor, [name for name in names if isinstance(name, bytes)]
    raise RemoteUnavailableError("the server's list of names cannot be read")


def _looked_at(connection: Connection, names: Sequence[bytes]) -> Iterator[StoredValue]:
    deadline = Deadline.after(_TIMEOUT_S)
    asked: list[tuple[Argument, ...]] = []
    for name in names:
        asked += [("OBJECT", "IDLETIME", name), ("MEMORY", "USAGE", name)]
    connection.send(asked, deadline)
    found: list[StoredValue] = []
    refused: ReplyError | None = None
    for name in names:
        age_s = None
        with contextlib.suppress(ReplyError):  # a policy that counts how often has no ages
            idle = connection.reply(deadline)
            age_s = float(idle) if isinstance(idle, int) else None
        try:
            num_bytes = connection.reply(deadline)
        except ReplyError as error:
            refused = error
            continue
        if isinstance(num_bytes, int):
            found.append(StoredValue(name.decode("ascii", "replace"), num_bytes, age_s))
    if refused is not None:
        raise refused
    yield from found
