"""Where DRAM lies on a machine with several NUMA nodes: the choice, and the system calls."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_ext.device import pinning
from sglang_ext.device.ports import numa
from sglang_ext.tiers.host import HostArena

GPU = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
ADDRESS = "0000:c1:00.0"


def machine(folder: Path, nodes: tuple[int, ...], near: str | None) -> tuple[Path, Path]:
    """A sysfs with some nodes, which says of the GPU that it is near one."""
    devices, known = folder / "devices", folder / "nodes"
    for node in nodes:
        (known / f"node{node}").mkdir(parents=True)
    (devices / ADDRESS).mkdir(parents=True)
    if near is not None:
        (devices / ADDRESS / "numa_node").write_text(f"{near}\n")
    return devices, known


@pytest.mark.parametrize(
    ("nodes", "near", "chosen"),
    [
        ((0, 1), "1", 1),
        ((0, 1), "0", 0),
        ((0, 8, 12), "12", 12),
        ((0,), "0", None),  # nothing to choose
        ((0, 1), "-1", None),  # the kernel does not know
        ((0, 1), "2", None),  # one without memory here
        ((0, 1), "near", None),
        ((0, 1), None, None),
    ],
)
def test_the_node_is_the_one_nearest_to_the_gpu(
    nodes: tuple[int, ...], near: str | None, chosen: int | None, tmp_path: Path
) -> None:
    assert numa.pci_address(0, 0xC1, 0) == ADDRESS
    assert numa.node_near(ADDRESS, *machine(tmp_path, nodes, near)) == chosen
    assert numa.node_near("0000:01:00.0", tmp_path / "devices", tmp_path / "nodes") is None


def test_memory_is_given_the_preference_and_keeps_its_bytes() -> None:
    """On this machine's first node; also where pages are there already."""
    arena = HostArena(4, 8192)
    try:
        arena.slots[1] = 7
        if problem := numa.prefer_node(arena.address, arena.nbytes, 0):
            pytest.skip(f"this machine does not permit it: {problem}")
        assert numa.preferred_nodes(arena.address) == [0]
        assert numa.preferred_nodes(arena.address + arena.nbytes - 4096) == [0]
        assert (arena.slots == np.array([0, 7, 0, 0], np.uint8)[:, None]).all()
    finally:
        arena.close()


@pytest.mark.parametrize("node", [1000, 5000, -1])
def test_a_node_that_is_not_there_is_told_and_changes_nothing(node: int) -> None:
    arena = HostArena(4, 8192)
    try:
        assert numa.prefer_node(arena.address, arena.nbytes, node)
        assert numa.preferred_nodes(arena.address) == []
    finally:
        arena.close()


@pytest.mark.parametrize(
    ("nodes", "told"),
    [
        ((0,), ""),
        ((1, 0), "DRAM lies on NUMA node 0, nearest to the GPU at 0000:c1:00.0"),
        ((0, 1000), "not placed on NUMA node 1000"),
    ],
)
def test_a_start_says_where_dram_lies(
    nodes: tuple[int, ...], told: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    devices, known = machine(tmp_path, nodes, str(nodes[-1]))
    real = numa.node_near
    monkeypatch.setattr(numa, "node_near", lambda address: real(address, devices, known))
    arena = HostArena(4, 8192)
    try:
        problem = numa.prefer_node(arena.address, arena.nbytes, 0) if "lies" in told else ""
        if problem:
            pytest.skip(f"this machine does not permit it: {problem}")
        pinning.place_near(arena, GPU)
    finally:
        arena.close()
    assert told in caplog.text
    assert bool(caplog.text) == bool(told)


def test_a_torch_that_does_not_say_where_a_gpu_is_ends_no_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    arena = HostArena(4, 8192)
    try:
        pinning.place_near(arena, SimpleNamespace(name="NVIDIA H200"))
    finally:
        arena.close()
    assert not caplog.text
