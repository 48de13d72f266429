"""The one function that SGLang takes from the package: weights that come through a socket.

The package passes a handle of GPU memory and then names and offsets within it; here the tensors
themselves come. What SGLang does before and after is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def update_weights_from_ipc(
    zmq_ctx: Any,
    zmq_handle: str,
    device_id: Any,
    *,
    run: Callable[[list[tuple[str, Any]]], None],
    post_hook: Callable[[], None] | None = None,
) -> None:
    """Loads buckets of weights until None comes; answers each message."""
    import zmq

    with zmq_ctx.socket(zmq.REP) as socket:
        socket.connect(zmq_handle)
        while (bucket := socket.recv_pyobj()) is not None:
            run(bucket)
            socket.send(b"")
        if post_hook is not None:
            post_hook()
        socket.send(b"")
