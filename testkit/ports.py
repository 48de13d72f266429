"""TCP ports of test servers, of which all processes of this machine take turns.

A server listens seconds after its port was chosen. Were ports chosen by chance, another process
could be given the same one in between, and whoever listens first would answer for both.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from runtime_cpu.forked import DATA_OPTIONS

# Below the range that the kernel gives to clients, below those that SGLang takes by chance for its
# ranks (from 22,000 on), and above those that Mooncake does (up to 17,000).
FIRST_PORT, NUM_PORTS = 17_500, 4_200
# No two of sixty in turn are less than 68 apart: SGLang takes some of its own close behind a
# server's, and some 233 behind it.
_STRIDE = 1_033


class NoFreePortError(RuntimeError):
    """All ports of the range are listened on."""


def free_port() -> int:
    """A TCP port nobody listens on, and that nobody is given again before all others were."""
    for _ in range(NUM_PORTS):
        port = FIRST_PORT + _next_turn() * _STRIDE % NUM_PORTS
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise NoFreePortError(
        f"expected a free TCP port of {FIRST_PORT} to {FIRST_PORT + NUM_PORTS - 1}: end the "
        "processes that listen on them"
    )


def port_of_ranks(args: Sequence[str]) -> list[str]:
    """The option for the port at which a server's ranks find each other.

    SGLang draws one by chance and listens seconds later. Two servers that drew the same one: ranks
    of the second join those of the first, which then wait for ever for their own. With data
    parallelism each group of ranks needs a port of its own, which no option gives.
    """
    given = {arg.partition("=")[0] for arg in args}
    if given.intersection(("--nccl-port", "--dist-init-addr", *DATA_OPTIONS)):
        return []
    return ["--nccl-port", str(free_port())]


def _next_turn() -> int:
    """How many ports this user's processes were given before, on this machine."""
    path = Path(tempfile.gettempdir()) / f"hier-kv-test-ports-{os.getuid()}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)
        turn = int(os.pread(file, 32, 0) or 0)
        os.pwrite(file, str(turn + 1).encode(), 0)
    finally:
        os.close(file)
    return turn
