"""Whether a server could listen at an address. SGLang tries it when the model is loaded."""

from __future__ import annotations

import contextlib
import errno
import socket


def listening_problem(host: str, port: int) -> str:
    """Why nobody can listen there; "" where a server could. Listens itself for a moment.

    Args:
        host: SGLang's `--host`.
        port: SGLang's `--port`.
    """
    shown = f"--port {port} of {host}"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.closing(socket.socket(family, kind, proto)) as probe:
            # As SGLang's HTTP server: connections of one that just ended do not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"{shown} is taken by another process; end that one, or choose another port."
        reason = error.strerror or str(error)
        return f"{shown} is nothing that this user can listen at ({reason}); choose another."
    return ""
