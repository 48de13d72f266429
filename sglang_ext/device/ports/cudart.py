"""Calls of CUDA's runtime library that torch has no name for."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

logger = logging.getLogger(__name__)

_MAPS = Path("/proc/self/maps")
_LIBRARY = re.compile(r"\S+/libcudart[\w.-]*\.so\.(\d+)\S*")
# Copies of a batch read their sources when the stream gets to them.
_IN_STREAM_ORDER = 1
_RELAXED_CAPTURE = 2
_HOST_ADDRESSES = 91  # an attribute of a device
_WITH_FAILED_INDEX = 12  # major version whose batch call has one argument more


class CudartError(RuntimeError):
    """A call of CUDA's failed."""


class _Attributes(ctypes.Structure):
    """`cudaMemcpyAttributes`; locations are hints, none is given."""

    _fields_ = (
        ("source_order", ctypes.c_int),
        ("source_hint", ctypes.c_int * 2),
        ("target_hint", ctypes.c_int * 2),
        ("flags", ctypes.c_uint),
    )


class Cudart:
    """CUDA's runtime library, as it is loaded in this process. Thread-safe.

    Args:
        path: of the library.
        major: its version.

    Raises:
        OSError: it cannot be opened.
        AttributeError: it is too old for copies in batches (before CUDA 12.8).
    """

    def __init__(self, path: str, major: int) -> None:
        library = ctypes.CDLL(path)
        self._exchange_mode = library.cudaThreadExchangeStreamCaptureMode
        self._copy_many = library.cudaMemcpyBatchAsync
        self._attribute = library.cudaDeviceGetAttribute
        self._last_error = library.cudaGetLastError
        self._major = major
        self._attributes = _Attributes(_IN_STREAM_ORDER)

    def allow_during_capture(self) -> None:
        """What the calling thread asks for from now on ends no capture of another thread's.

        While one captures a graph in CUDA's default mode, waiting for an event or taking memory
        on any other thread fails, and the capture with it.

        Raises:
            CudartError: CUDA refuses.
        """
        mode = ctypes.c_int(_RELAXED_CAPTURE)
        status = self._exchange_mode(ctypes.byref(mode))
        self._require(status, "cudaThreadExchangeStreamCaptureMode")

    def takes_host_addresses(self, device: int) -> bool:
        """Whether a device has registered memory at the addresses that the host has it at.

        Where it does not, as under WSL2, batches take addresses of the device's for it. With the
        host's they seem to be queued, and end all that the process has on the device.

        Args:
            device: its number.

        Raises:
            CudartError: CUDA refuses.
        """
        value = ctypes.c_int(0)
        status = self._attribute(ctypes.byref(value), _HOST_ADDRESSES, device)
        self._require(status, "cudaDeviceGetAttribute")
        return bool(value.value)

    def copy_many(
        self,
        targets: npt.NDArray[np.int64],
        sources: npt.NDArray[np.int64],
        num_bytes: int,
        stream: int,
    ) -> None:
        """Queues copies of equal size, in no order among themselves.

        Args:
            targets: addresses, `[n]`, on the device or page-locked, none overlapping another.
            sources: addresses, `[n]`.
            num_bytes: of each.
            stream: handle of a stream that is not the default one.

        Raises:
            CudartError: CUDA refuses.
        """
        count = len(targets)
        if not count:
            return
        sizes, first = np.full(count, num_bytes, np.uint64), ctypes.c_size_t(0)
        targets, sources = targets.astype(np.uint64), sources.astype(np.uint64)
        failed = [ctypes.byref(ctypes.c_size_t(0))] if self._major == _WITH_FAILED_INDEX else []
        status = self._copy_many(
            targets.ctypes.data_as(ctypes.c_void_p),
            sources.ctypes.data_as(ctypes.c_void_p),
            sizes.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_size_t(count),
            ctypes.byref(self._attributes),
            ctypes.byref(first),
            ctypes.c_size_t(1),
            *failed,
            ctypes.c_void_p(stream),
        )
        self._require(status, "cudaMemcpyBatchAsync")

    def _require(self, status: int, what: str) -> None:
        if status:
            self._last_error()  # see `forget_error`
            raise CudartError(f"{what} must succeed, got CUDA error {status}")


def forget_error(maps: Path = _MAPS) -> None:
    """Takes back the calling thread's last error of CUDA, which was dealt with.

    CUDA keeps it, and torch would take it for one of the next kernel that it launches.
    """
    for path in {match[0] for match in _LIBRARY.finditer(maps.read_text())}:
        # Its file may be gone, or its path have a space; nothing depends on this.
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(path).cudaGetLastError()


def find_cudart(maps: Path = _MAPS) -> Cudart | None:
    """The library that torch has loaded; None, and a line in the log, where it is of no use."""
    reason = "its library is not loaded"
    for match in _LIBRARY.finditer(maps.read_text()):
        try:
            return Cudart(match[0], int(match[1]))
        except (OSError, AttributeError) as error:
            reason = str(error)
    logger.info("hier-kv: pages are copied one by one, as CUDA has no batches here: %s", reason)
    return None
