"""What the save and load paths ask of a device, and the devices that give it."""

from __future__ import annotations

import torch

from sglang_ext.device.ports.base import DevicePort
from sglang_ext.device.ports.cuda import CudaPort
from sglang_ext.device.ports.cudart import find_cudart
from sglang_ext.device.ports.host import HostPort

__all__ = ["DevicePort", "open_port"]


def open_port(device: torch.device, *, pinned: bool = True) -> DevicePort:
    """The port of the device that a pool lies on.

    Args:
        device: which.
        pinned: whether all of the arena is page-locked.
    """
    if device.type != "cuda":
        return HostPort()
    return CudaPort(device, runtime=find_cudart(), batches=pinned)
