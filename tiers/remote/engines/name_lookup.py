"""Connects to a host by a deadline, whatever looks its name up.

A lookup of a name is one call that nothing ends early: it takes as long as the system's resolver
does, for ever where that hangs. So it is made on a thread that is left behind at the deadline.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any

from sglang_ext.tiers.remote.base import Deadline, RemoteTimeoutError
from sglang_ext.tiers.remote.deadline_executor import CancellableTask, DeadlineExecutor

_MAX_LOOKUPS = 16
_LOOKUPS = DeadlineExecutor(_MAX_LOOKUPS, "hier-kv-remote-name", waits=True)

Found = tuple[int, int, int, str, tuple[Any, ...]]
"""Of an address: family, kind and protocol of its socket, "", the address itself."""


def connect(host: str, port: int, deadline: Deadline) -> socket.socket:
    """A socket that is connected to a host, at any of its addresses.

    They are tried one after another; each may take its part of the time that is left.

    Raises:
        RemoteTimeoutError: the deadline passed.
        OSError, UnicodeError: there is no such host, or it does not answer.
    """
    found = _addresses(host, port, deadline)
    last: OSError = OSError("the host has no address")
    for number, (family, kind, protocol, _, address) in enumerate(found):
        try:
            tried = socket.socket(family, kind, protocol)
        except OSError as error:  # of a family that this machine has not
            last = error
            continue
        try:
            tried.settimeout(deadline.left_s() / (len(found) - number))
            tried.connect(address)
        except OSError as error:
            tried.close()
            last = error
        except BaseException:
            tried.close()
            raise
        else:
            return tried
    raise last


def _addresses(host: str, port: int, deadline: Deadline) -> Sequence[Found]:
    """The addresses of a host; see `connect`."""
    with contextlib.suppress(socket.gaierror):  # what is an address needs no lookup
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    found: list[Found] = []

    def work(errand: CancellableTask[Sequence[Found]]) -> None:
        errand.emit(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))

    try:
        _LOOKUPS.run(work, found.extend, deadline)
    except RemoteTimeoutError as error:
        raise RemoteTimeoutError(f"the name {host} was not looked up in time") from error
    return found
