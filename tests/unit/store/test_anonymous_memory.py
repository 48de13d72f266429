"""Anonymous memory and how much of it there is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sglang_ext.tiers.anonymous_memory import (
    PAGE_BYTES,
    available_bytes,
    lazy_zeros,
    map_anonymous,
    populate,
    round_up,
)
from sglang_ext.tiers.errors import TierConfigError


def resident_bytes(address: int, num_bytes: int) -> int:
    """Bytes of `[address, address + num_bytes)` that are in memory, by the kernel's own count."""
    with open("/proc/self/pagemap", "rb") as pagemap:
        pagemap.seek(address // PAGE_BYTES * 8)
        entries = np.frombuffer(pagemap.read(num_bytes // PAGE_BYTES * 8), np.uint64)
    return int(np.count_nonzero(entries >> np.uint64(63))) * PAGE_BYTES


@pytest.mark.parametrize(("value", "multiple", "up"), [(0, 8, 0), (1, 8, 8), (8, 8, 8), (9, 8, 16)])
def test_round_up(value: int, multiple: int, up: int) -> None:
    assert round_up(value, multiple) == up


def test_lazy_zeros_commits_only_what_is_written() -> None:
    array = lazy_zeros((1 << 20, 4), np.uint32)
    assert array.shape == (1 << 20, 4)
    assert array.ctypes.data % PAGE_BYTES == 0
    assert not array[123].any()
    assert resident_bytes(array.ctypes.data, array.nbytes) <= PAGE_BYTES
    array[500_000] = 1
    assert resident_bytes(array.ctypes.data, array.nbytes) <= 2 * PAGE_BYTES


def test_populate_commits_and_keeps_the_contents() -> None:
    num_bytes = 64 * PAGE_BYTES
    array = np.frombuffer(map_anonymous(num_bytes, hugepages=False), np.uint8)
    array[5] = 77
    if not populate(array.ctypes.data, num_bytes):
        pytest.skip("this kernel is older than 5.14")
    assert resident_bytes(array.ctypes.data, num_bytes) == num_bytes
    assert array[5] == 77
    assert np.count_nonzero(array) == 1


def test_address_space_that_the_kernel_refuses_is_a_config_error() -> None:
    with pytest.raises(TierConfigError, match="refused"):
        map_anonymous(1 << 60, hugepages=False)


def machine(folder: Path, *, available_kib: int, membership: str) -> Path:
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(
        f"MemTotal:  99999999 kB\nMemFree:  1 kB\nMemAvailable: {available_kib} kB\n"
    )
    (folder / "proc/self/cgroup").write_text(membership)
    return folder


def ask(folder: Path) -> int:
    return available_bytes(folder / "proc", folder / "cgroup")


def write_group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_without_a_cgroup_the_machine_decides(tmp_path: Path) -> None:
    assert ask(machine(tmp_path, available_kib=1000, membership="0::/\n")) == 1000 * 1024


def test_cgroup_2_limit_counts_and_its_droppable_cache_does_not(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=10**9, membership="0::/a/b\n")
    write_group(tmp_path / "cgroup/a/b", {"memory.max": "max\n", "memory.current": "500\n"})
    write_group(
        tmp_path / "cgroup/a",
        {
            "memory.max": "10000\n",
            "memory.current": "7000\n",
            "memory.stat": "anon 1000\ninactive_file 2000\nactive_file 4000\n",
        },
    )
    assert ask(tmp_path) == 10_000 - 7_000 + 2_000


def test_cgroup_1_limit_counts_and_no_limit_is_none(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=10**9, membership="5:cpu:/x\n4:memory:/x/y\n")
    write_group(
        tmp_path / "cgroup/memory/x/y",
        {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "1\n"},
    )
    write_group(
        tmp_path / "cgroup/memory",
        {
            "memory.limit_in_bytes": "8000\n",
            "memory.usage_in_bytes": "3000\n",
            "memory.stat": "total_inactive_file 100\n",
        },
    )
    assert ask(tmp_path) == 5_100


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=10**9, membership="0::/\n")
    write_group(
        tmp_path / "cgroup",
        {"memory.max": "100\n", "memory.current": "300\n", "memory.stat": ""},
    )
    assert ask(tmp_path) == 0


def test_a_group_outside_the_visible_tree_is_not_followed(tmp_path: Path) -> None:
    machine(tmp_path, available_kib=77, membership="0::/../../elsewhere\n")
    write_group(tmp_path / "elsewhere", {"memory.max": "1\n", "memory.current": "0\n"})
    assert ask(tmp_path) == 77 * 1024


def test_this_machine_has_some_memory() -> None:
    assert 1 << 20 < available_bytes() < 1 << 50
