"""Which server of a cluster holds a value, and the idle connections to each."""

from __future__ import annotations

import binascii
import re
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Self

import numpy as np

from sglang_ext.tiers.remote.base import Deadline, RemoteError, RemoteUnavailableError
from sglang_ext.tiers.remote.engines.resp import (
    Connection,
    Login,
    Reply,
    ReplyBounds,
    ReplyError,
    refusal,
)

Address = tuple[str, int]

_NUM_SLOTS = 16384
_MAX_IDLE = 16  # connections kept a node
_MAX_NODES = 2048  # with slots; twice as many as clusters are made for
# A reply to CLUSTER SLOTS: ranges of slots, and for each node its name, port, id and metadata.
_SLOTS_BOUNDS = ReplyBounds(depth=4, num_items=1 << 18, num_bytes=8 << 20)


def slot_of(name: str) -> int:
    """The cluster's slot of a name: CRC16 (XMODEM) over it, as the cluster specification has it.

    Names of this tier have no braces, so the rule for hash tags never applies.
    """
    return binascii.crc_hqx(name.encode(), 0) % _NUM_SLOTS


class Nodes:
    """The servers of one store. Thread-safe."""

    def __init__(self, hosts: Sequence[Address], login: Login, *, is_cluster: bool) -> None:
        self._seeds = tuple(hosts)
        self._login = login
        self._is_cluster = is_cluster
        self._lock = threading.Lock()
        self._known: list[Address] = list(hosts[:1])  # guarded by _lock
        # Position in `_known` of the node of each slot, -1 for none; guarded by _lock.
        self._owner = np.full(_NUM_SLOTS, -1 if is_cluster else 0, np.int16)
        self._idle: dict[Address, list[Connection]] = {}  # guarded by _lock
        self._closed = False  # guarded by _lock

    def addresses(self) -> list[Address]:
        """Every node that has slots."""
        with self._lock:
            return [self._known[index] for index in np.unique(self._owner).tolist() if index >= 0]

    def address_of(self, name: str) -> Address:
        """The node of a value.

        Raises:
            RemoteUnavailableError: no node has its slot.
        """
        if not self._is_cluster:
            return self._seeds[0]
        with self._lock:
            index = int(self._owner[slot_of(name)])
            if index < 0:
                raise RemoteUnavailableError("no node of the cluster has this value's slot")
            return self._known[index]

    @property
    def is_cluster(self) -> bool:
        """Whether a server may point to another one."""
        return self._is_cluster

    def redirect_address(self, error: str) -> Address | None:
        """The node that `ASK slot host:port` names, if it is one that may be asked.

        The password is sent to every node that is connected to, so only those are that the URL or
        the cluster's list of slots names: a node that has no slots yet is not asked.
        """
        host, _, port = error.rpartition(" ")[2].rpartition(":")
        if not re.fullmatch(r"[0-9]{1,5}", port):
            return None
        address = (host.strip("[]") or self._seeds[0][0], int(port))
        with self._lock:
            return address if address in self._known or address in self._seeds else None

    def refresh(self, deadline: Deadline) -> None:
        """Asks the cluster which node has which slots; nothing for a single server.

        Raises:
            RemoteError: no node could say.
        """
        if not self._is_cluster:
            return
        with self._lock:
            asked = list(dict.fromkeys([*self._known, *self._seeds]))
        last: RemoteError | None = None
        for address in asked:
            try:
                with Lease(self) as lease:
                    connection = lease.get(address, deadline)
                    reply = connection.call(["CLUSTER", "SLOTS"], deadline, _SLOTS_BOUNDS)
                self._enter(reply, address[0])
                return
            except ReplyError as error:
                last = refusal(error)
            except RemoteError as error:
                last = error
        raise last or RemoteUnavailableError("the cluster has no nodes")

    def take(self, address: Address, deadline: Deadline) -> Connection:
        """An idle connection to a node, or a new one."""
        while True:
            with self._lock:
                if self._closed:
                    raise RemoteUnavailableError("closed")
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
            if connection is None:
                return Connection(*address, self._login, deadline)
            if not connection.is_stale():
                return connection
            connection.close()

    def give(self, connection: Connection) -> None:
        """Keeps a connection for the next call."""
        with self._lock:
            idle = self._idle.setdefault(connection.address, [])
            if not self._closed and len(idle) < _MAX_IDLE:
                idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Closes the idle connections; those in use close when their call ends."""
        with self._lock:
            self._closed = True
            idle = [connection for group in self._idle.values() for connection in group]
            self._idle.clear()
        for connection in idle:
            connection.close()

    def _enter(self, reply: Reply, asked_host: str) -> None:
        """Takes a reply to CLUSTER SLOTS: [first, last, [host, port, ...], replicas...] each.

        Raises:
            RemoteUnavailableError: it is none.
        """
        owner = np.full(_NUM_SLOTS, -1, np.int16)
        known: dict[Address, int] = {}  # with their numbers
        try:
            for first, last, master, *_ in reply:  # type: ignore[union-attr, misc]
                name = master[0] or b""  # type: ignore[index]
                if not isinstance(name, bytes) or len(known) > _MAX_NODES:
                    raise ValueError("no list of slots of a cluster")
                host = name.decode() or asked_host
                address = (host, int(master[1]))  # type: ignore[index, arg-type]
                if not 0 < address[1] < 1 << 16 or "\0" in host:
                    raise ValueError("no address of a node")
                number = known.setdefault(address, len(known))
                owner[int(first) : int(last) + 1] = number  # type: ignore[arg-type]
        except (TypeError, ValueError, IndexError) as error:
            raise RemoteUnavailableError("the cluster's list of slots cannot be read") from error
        if not known:
            raise RemoteUnavailableError("the cluster has no slots yet")
        with self._lock:
            self._known, self._owner = list(known), owner


class Lease:
    """The connections of one call: one a node, given back if the call ends well, else closed."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._held: dict[Address, Connection] = {}

    def get(self, address: Address, deadline: Deadline) -> Connection:
        """The call's connection to a node.

        Raises:
            RemoteError: there is none to be had.
        """
        if address not in self._held:
            self._held[address] = self._nodes.take(address, deadline)
        return self._held[address]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for connection in self._held.values():
            if error is None:
                self._nodes.give(connection)
            else:
                connection.close()
        self._held.clear()
