"""Ranks in shared memory: the results of gloo, the same bits in all ranks, an end that is seen."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from runtime_cpu.plugins.sglang_cpu import collectives

ROOT = Path(__file__).resolve().parents[2]
SHAPES = [(1, 256), (3, 5, 7), (513, 64), (1,)]


def never(*_: Any) -> Any:
    raise AssertionError("it went through gloo")


def coordinator() -> Any:
    """What the hooks use of SGLang's `GroupCoordinator`."""
    return SimpleNamespace(
        world_size=distributed.get_world_size(), cpu_group=distributed.group.WORLD
    )


def gathered(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Every rank's tensor, by gloo."""
    found = [torch.empty_like(tensor) for _ in range(distributed.get_world_size())]
    distributed.all_gather(found, tensor)
    return found


def compare_with_gloo(rank: int) -> None:
    """Tensors of several shapes, many times, so that slots are used again."""
    group = coordinator()
    generator = torch.Generator().manual_seed(rank)
    for turn in range(40):
        for dtype in (torch.bfloat16, torch.float32):
            shape = SHAPES[turn % len(SHAPES)]
            mine = torch.randn(shape, generator=generator).to(dtype)
            everybody = gathered(mine)
            with torch.inference_mode():
                total = collectives._all_reduce(never, group, mine.clone())
                beside = collectives._all_gather(never, group, mine, -1)
                below = torch.empty((len(everybody) * shape[0], *shape[1:]), dtype=dtype)
                collectives._all_gather_into_tensor(never, group, below, mine)
            assert torch.equal(beside, torch.cat(everybody, -1))
            assert torch.equal(below, torch.cat(everybody))
            assert all(torch.equal(total, other) for other in gathered(total))
            expected = everybody[0]
            for other in everybody[1:]:
                expected = expected + other
            assert torch.equal(total, expected)
            if len(everybody) == 2:
                distributed.all_reduce(mine)
                assert torch.equal(total, mine)


def find_what_ended(rank: int) -> None:
    """The last rank ends between two exchanges; the others fail instead of waiting."""
    group = coordinator()
    collectives._all_reduce(never, group, torch.ones(3))
    if rank == group.world_size - 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="another rank of the group has ended"):
        collectives._all_reduce(never, group, torch.ones(3))


def find_another_machine(rank: int) -> None:
    """One rank runs elsewhere: all of them go through gloo."""
    if rank == 1:
        collectives._machine = lambda: ("another", "machine")
    group = coordinator()
    calls: list[torch.Tensor] = []

    def through_gloo(_: Any, tensor: torch.Tensor) -> torch.Tensor:
        calls.append(tensor)
        return tensor

    collectives._all_reduce(through_gloo, group, torch.ones(3))
    assert len(calls) == 1


def send_what_is_too_large(rank: int) -> None:
    """No group is even connected for it."""
    group = coordinator()
    large = torch.zeros(collectives.MAX_TENSOR_BYTES + 1, dtype=torch.uint8)
    assert collectives._ranks_for(group, large) is None
    fits = large[:-1].fill_(rank)
    ranks = collectives._ranks_for(group, fits)
    assert ranks is not None
    assert [int(one[-1]) for one in ranks.exchange(fits)] == [0, 1]


CHECKS: dict[str, Callable[[int], None]] = {
    one.__name__: one
    for one in (
        compare_with_gloo,
        find_what_ended,
        find_another_machine,
        send_what_is_too_large,
    )
}


def run_ranks(name: str, size: int, folder: Path) -> int:
    """Forks the ranks of a group, lets each make a check, and returns how many failed."""
    pids = []
    for rank in range(size):
        if (pid := os.fork()) == 0:
            store = f"file://{folder / name}-{size}"
            distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=size)
            CHECKS[name](rank)
            os._exit(0)
        pids.append(pid)
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(["compare_with_gloo:2", "compare_with_gloo:3"], id="results"),
        pytest.param(["find_what_ended:2", "find_what_ended:3"], id="a-rank-ends"),
        pytest.param(["find_another_machine:2", "send_what_is_too_large:2"], id="gloo"),
    ],
)
def test_ranks_in_shared_memory(runs: list[str], tmp_path: Path) -> None:
    """In an interpreter of their own: ranks are forked, which a process with threads must not."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    line = [sys.executable, __file__, str(tmp_path), *runs]
    done = subprocess.run(line, check=False, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    failed = 0
    for run in sys.argv[2:]:
        check, _, number = run.partition(":")
        failed += run_ranks(check, int(number), Path(sys.argv[1]))
    sys.exit(failed)
