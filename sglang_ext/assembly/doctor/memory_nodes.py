"""The NUMA nodes of this machine, and which of them GPUs are near to, as sysfs has it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sglang_ext.settings.config import GIB

NODES, PCI_DEVICES = Path("/sys/devices/system/node"), Path("/sys/bus/pci/devices")
_NVIDIA, _DISPLAY = "0x10de", "0x03"  # a vendor; how a class of devices begins


@dataclass(frozen=True)
class MemoryNodes:
    """What lies where.

    Attributes:
        free_bytes: of each node with memory, by its number: free, or in its page cache.
        gpus: the node that each GPU is nearest to, by the GPU's address.
    """

    free_bytes: dict[int, int]
    gpus: dict[str, int]

    @property
    def near_gpus(self) -> dict[int, int]:
        """Of `free_bytes` what is nearest to some GPU."""
        near = set(self.gpus.values())
        return {node: num for node, num in self.free_bytes.items() if node in near}

    def __str__(self) -> str:
        """In words, for a person."""
        free = [f"node {node} {num / GIB:.1f} GiB" for node, num in self.free_bytes.items()]
        gpus = [f"GPU {gpu} is nearest to node {node}" for gpu, node in self.gpus.items()]
        return "; ".join([f"free on NUMA {', '.join(free)}", *gpus])


def memory_nodes() -> MemoryNodes:
    """Looks at this machine; empty where it does not say."""
    nodes = sorted((int(path.name[4:]), path) for path in NODES.glob("node[0-9]*"))
    free = {number: num for number, path in nodes if (num := _free_bytes(path))}
    gpus = {}
    for device in sorted(PCI_DEVICES.glob("*")):
        node = _node_of_gpu(device)
        if node in free:
            gpus[device.name] = node
    return MemoryNodes(free, gpus)


def _free_bytes(node: Path) -> int:
    """Memory of a node that is free or in its page cache; 0 where that is not told."""
    try:
        words = (node / "meminfo").read_text().split()
        kilobytes = sum(
            int(words[words.index(f"{name}:") + 1]) for name in ("MemFree", "FilePages")
        )
    except (OSError, ValueError):
        return 0
    return 1024 * kilobytes


def _node_of_gpu(device: Path) -> int:
    """The node of a PCI device that is an NVIDIA GPU; -1 of others, as sysfs says of none."""
    try:
        vendor, kind, node = (
            (device / name).read_text().strip() for name in ("vendor", "class", "numa_node")
        )
        return int(node) if vendor == _NVIDIA and kind.startswith(_DISPLAY) else -1
    except (OSError, ValueError):
        return -1
