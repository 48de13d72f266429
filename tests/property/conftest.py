"""What the worlds share.

Nobody waits for the device on the scheduler's thread, and what a server takes out of the books by
the thousand is taken out in small pieces here, as a world has few pages.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import sglang_ext
from sglang_ext.tiers.store import clearing
from sglang_ext.tiers.store.books import disk_pages

_PLUGIN = Path(sglang_ext.__file__).parent
# Of torch: of a tensor on a device these wait until its stream got there ...
_READS = ("item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__", "__float__",
          "__index__", "__contains__", "__array__")  # fmt: skip
# ... and these make tensors of what the host has, which has to be uploaded, and that waits, too.
_UPLOADS = ("tensor", "as_tensor", "from_numpy")
# These do so with a mask, as the device alone knows how many it names, and with the host's indices.
_INDEXES = ("__getitem__", "__setitem__")
# These work on memory of the machine's own alone.
_OF_THE_CPU = (
    _PLUGIN / "device/ports/host.py",
    _PLUGIN / "kernels/rope/cpu.py",
    _PLUGIN / "seam/media/requests.py",  # positions as the front sent them
)


class SchedulerWaits:
    """Notes what the plugin asks of torch on one thread that would wait for a device.

    Attributes:
        seen: where, and what.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: set[str] = set()
        self._thread = threading.get_ident()
        for name in _READS:
            patch.setattr(torch.Tensor, name, self._noting(getattr(torch.Tensor, name), name))
        for name in _INDEXES:
            patch.setattr(torch.Tensor, name, self._noting_index(getattr(torch.Tensor, name), name))
        for name in _UPLOADS:
            patch.setattr(torch, name, self._noting(getattr(torch, name), name))

    def _noting(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() == self._thread:
                self.note(sys._getframe(1).f_code.co_filename, name)
            return real(*args, **kwargs)

        return call

    def _noting_index(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(real)
        def call(tensor: Any, index: Any, *args: Any) -> Any:
            if threading.get_ident() == self._thread and _waits(index):
                self.note(sys._getframe(1).f_code.co_filename, name)
            return real(tensor, index, *args)

        return call

    def note(self, caller: str, name: str) -> None:
        """Something was asked of torch by the code of a file."""
        if (place := _place_of(caller)) is not None:
            self.seen.add(f"{place}: {name}")


def _waits(index: Any) -> bool:
    """Whether an index has a mask in it, or indices that have to be uploaded."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(each, list | range | np.ndarray)
        or (isinstance(each, torch.Tensor) and each.dtype == torch.bool)
        for each in parts
    )


@functools.cache
def _place_of(caller: str) -> Path | None:
    """Where in the plugin a file is that must not wait for a device; None for any other."""
    path = Path(caller)
    if not path.is_relative_to(_PLUGIN) or path in _OF_THE_CPU:
        return None
    return path.relative_to(_PLUGIN)


@pytest.fixture
def scheduler_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchedulerWaits]:
    """Fails where the plugin would have let the scheduler's thread wait for a device."""
    waits = SchedulerWaits(monkeypatch)
    yield waits
    assert not waits.seen


@pytest.fixture
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keeps the log short of worlds in which pages are lost and failures injected on purpose."""
    caplog.set_level(logging.CRITICAL)


@pytest.fixture(autouse=True, scope="module")
def few_at_once() -> Iterator[None]:
    """Clears, segments that go, and pages that the disk gives up come in pieces."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clearing, "AT_ONCE", 2)
        patch.setattr(disk_pages, "_LOST_AT_ONCE", 2)
        yield
