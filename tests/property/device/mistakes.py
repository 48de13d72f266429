"""What ways to get the order wrong have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

Mutation = Callable[[pytest.MonkeyPatch], None]


def say_layers_early(patch: pytest.MonkeyPatch, path: type, stream: str) -> None:
    """Each layer of a load is said to be there behind what was queued before it.

    Args:
        patch: takes it back.
        path: the load path, which has `queue`.
        stream: name of its stream that writes the layers.
    """
    real: Any = path.queue  # type: ignore[attr-defined]

    def queue(self: Any, loads: Any, fence: Any, on_layer: Any) -> Any:
        early = self._port.record(getattr(self, stream))
        return real(self, loads, fence, lambda _: on_layer(early))

    patch.setattr(path, "queue", queue)
