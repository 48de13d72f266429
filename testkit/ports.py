"""TCP ports of test servers, of which all processes of this machine take turns.

A server listens seconds after its port was chosen. Were ports chosen by chance, another process
could be given the same one in between, and whoever listens first would answer for both.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

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
