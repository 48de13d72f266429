"""Which memory of the machine is near a GPU, and a preference for it. Linux; elsewhere nothing."""

from __future__ import annotations

import ctypes
import platform
from pathlib import Path

PCI_DEVICES, NODES = Path("/sys/bus/pci/devices"), Path("/sys/devices/system/node")
_MBIND = {"x86_64": 237, "aarch64": 235}
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_PREFERRED = 1  # a kind of policy
_MOVE_THOSE_THERE = 2
_OF_ADDRESS = 2
_MASK_BITS = 1024


def pci_address(domain: int, bus: int, device: int) -> str:
    """A GPU's name in sysfs; a GPU is function 0 of its device."""
    return f"{domain:04x}:{bus:02x}:{device:02x}.0"


def node_near(address: str, devices: Path = PCI_DEVICES, nodes: Path = NODES) -> int | None:
    """The NUMA node whose memory is nearest to a PCI device.

    Args:
        address: the device's; see `pci_address`.
        devices: of sysfs.
        nodes: of sysfs.

    Returns:
        Its number; None where the machine has a single node, or does not say.
    """
    known = {int(path.name[4:]) for path in nodes.glob("node[0-9]*")}
    try:
        near = int((devices / address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return near if len(known) > 1 and near in known else None


def prefer_node(start: int, num_bytes: int, node: int) -> str:
    """Has a part of memory lie on a node, as far as that has room; pages there are moved.

    A policy that the process was started under (`numactl --interleave`, `--membind`) stays. One
    that is for this node alone, as SGLang starts its ranks where it can, is as good.

    Args:
        start: address, of a page.
        num_bytes: how many.
        node: its number.

    Returns:
        Why it was not done; empty when it was.
    """
    machine = platform.machine()
    if machine not in _MBIND or not 0 <= node < _MASK_BITS - 1:
        return f"this is not known for node {node} on {machine}"
    try:
        own = preferred_nodes()
    except OSError as error:
        return f"the system call get_mempolicy failed (errno {error.errno})"
    if own == [node]:
        return ""
    if own:
        return f"the process was started under a memory policy of its own, for nodes {own}"
    libc, mask = ctypes.CDLL(None, use_errno=True), (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    failed = libc.syscall(
        _MBIND[machine], ctypes.c_void_p(start), ctypes.c_ulong(num_bytes), _PREFERRED, mask,
        ctypes.c_ulong(_MASK_BITS), _MOVE_THOSE_THERE,
    )  # fmt: skip
    return f"the system call mbind failed (errno {ctypes.get_errno()})" if failed else ""


def preferred_nodes(start: int | None = None) -> list[int]:
    """The nodes that a memory policy names.

    Args:
        start: address of the memory that it is of; None: the calling thread's own.

    Raises:
        OSError: the system call failed.
    """
    libc, mask = ctypes.CDLL(None, use_errno=True), (ctypes.c_ulong * (_MASK_BITS // 64))()
    if libc.syscall(
        _GET_MEMPOLICY[platform.machine()], None, mask, ctypes.c_ulong(_MASK_BITS),
        ctypes.c_void_p(start), 0 if start is None else _OF_ADDRESS,
    ):  # fmt: skip
        raise OSError(ctypes.get_errno(), "get_mempolicy")
    return [at for at in range(_MASK_BITS) if int(mask[at // 64]) >> at % 64 & 1]
