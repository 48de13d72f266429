"""``CPU_SHARED_MEMORY_RANKS``: ranks on one machine add and gather tensors in shared memory.

SGLang has this in a compiled kernel for CPUs with AMX; elsewhere each collective of a forward pass
goes through gloo: threads, and TCP. With two ranks that is two fifths of the CPU time of a request
to a small model. What is not called from here (requests handed on, the plugin's own agreement)
stays with gloo.

Every rank adds in the order of the ranks, so all of them get the same bits, whatever the tensor's
shape; of two ranks they are gloo's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import distributed

ENV_SHARED_MEMORY_RANKS = "CPU_SHARED_MEMORY_RANKS"
MAX_TENSOR_BYTES = 8 << 20  # a larger one goes through gloo; only what is used takes memory
_COORDINATOR = "sglang.srt.distributed.parallel_state.GroupCoordinator"
_ATTRIBUTE = "_shared_memory_ranks"


def load() -> None:
    """Hooks SGLang's collectives of model layers; does nothing without the variable."""
    if not int(os.environ.get(ENV_SHARED_MEMORY_RANKS) or 0):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for name, hook in (
        ("all_reduce", _all_reduce),
        ("all_gather", _all_gather),
        ("all_gather_into_tensor", _all_gather_into_tensor),
    ):
        HookRegistry.register(f"{_COORDINATOR}.{name}", hook, HookType.AROUND)


class SharedMemoryRanks:
    """One rank's end of a group whose ranks exchange tensors in shared memory.

    Each rank has two slots, used in turn, and a pipe from each other rank. It writes its tensor to
    a slot, sends each rank a byte, and waits for a byte of each. Whoever has everybody's byte of an
    exchange knows that all have read what was written two exchanges before: that slot may be
    written again.

    One thread at a time may use it, and all ranks in the same order.

    Args:
        rank: this process's place in the group.
        slots: the slots of each rank, as bytes; ``slots[rank]`` is written, the others are read.
        readers: pipes on which the other ranks' bytes come.
        writers: pipes to the other ranks.
    """

    def __init__(
        self,
        rank: int,
        slots: list[tuple[torch.Tensor, torch.Tensor]],
        readers: list[int],
        writers: list[int],
    ) -> None:
        self._rank = rank
        self._slots = slots
        self._readers = readers
        self._writers = writers
        self._turn = 0

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns every rank's tensor, in order; they may be read until the next exchange.

        Args:
            tensor: of the same shape and dtype in all ranks, at most `MAX_TENSOR_BYTES`.

        Raises:
            RuntimeError: a rank has ended.
        """
        self._turn = 1 - self._turn
        num_bytes = tensor.numel() * tensor.element_size()
        views = [
            slots[self._turn][:num_bytes].view(tensor.dtype).view(tensor.shape)
            for slots in self._slots
        ]
        views[self._rank].copy_(tensor)
        try:
            for pipe in self._writers:
                os.write(pipe, b"\0")
            gone = not all(os.read(pipe, 1) for pipe in self._readers)
        except BrokenPipeError:
            gone = True
        if gone:
            raise RuntimeError("another rank of the group has ended")
        return views

    def close(self) -> None:
        """Gives up the pipes; the other ranks then fail at their next exchange."""
        for pipe in (*self._readers, *self._writers):
            os.close(pipe)
        self._readers, self._writers = [], []


def connect(group: Any) -> SharedMemoryRanks | None:
    """Connects the ranks of a group, all of which call this at once.

    Args:
        group: a process group of torch.

    Returns:
        This rank's end; None in every rank where one cannot reach the memory of another one,
        because it runs on another machine.
    """
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    memory = os.memfd_create("sglang-cpu-ranks")
    os.ftruncate(memory, 2 * MAX_TENSOR_BYTES)
    pipes = [os.pipe() for _ in range(size)]
    # Which machine, as a process's number alone may be somebody else's on another one.
    place = (_machine(), os.getpid(), memory, [writer for _, writer in pipes])
    places: list[Any] = [None] * size
    distributed.all_gather_object(places, place, group=group)
    opened: list[int] = []
    slots: list[tuple[torch.Tensor, torch.Tensor]] = []
    with suppress(OSError):
        for number, (machine, pid, memory_fd, writers) in enumerate(places):
            if machine != place[0]:
                break
            slots.append(_map(f"/proc/{pid}/fd/{memory_fd}"))
            if number != rank:
                opened.append(os.open(f"/proc/{pid}/fd/{writers[rank]}", os.O_WRONLY))
    reached: list[Any] = [None] * size
    distributed.all_gather_object(reached, len(slots) == size, group=group)
    os.close(memory)
    for _, writer in pipes:  # a rank that ends is seen when nobody else has its pipe open
        os.close(writer)
    os.close(pipes[rank][0])
    readers = [reader for number, (reader, _) in enumerate(pipes) if number != rank]
    found = SharedMemoryRanks(rank, slots, readers, opened)
    if all(reached):
        return found
    found.close()
    return None


def _machine() -> tuple[str, str]:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as boot:
        return boot.read(), os.readlink("/proc/self/ns/pid")


def _map(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's two slots."""
    fd = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(fd, 2 * MAX_TENSOR_BYTES)
    finally:
        os.close(fd)
    first, second = torch.frombuffer(memory, dtype=torch.uint8).chunk(2)
    return first, second


def _ranks_for(coordinator: Any, tensor: torch.Tensor) -> SharedMemoryRanks | None:
    """What a group's collective of a tensor may use; the same answer in all of its ranks."""
    num_bytes = tensor.numel() * tensor.element_size()
    if coordinator.world_size == 1 or not 0 < num_bytes <= MAX_TENSOR_BYTES:
        return None
    if not hasattr(coordinator, _ATTRIBUTE):
        with torch.inference_mode(False):  # the slots outlive the pass that is under way
            setattr(coordinator, _ATTRIBUTE, connect(coordinator.cpu_group))
    found: SharedMemoryRanks | None = getattr(coordinator, _ATTRIBUTE)
    return found


def _all_reduce(
    original: Callable[..., torch.Tensor], coordinator: Any, input_: torch.Tensor
) -> torch.Tensor:
    ranks = _ranks_for(coordinator, input_)
    if ranks is None:
        return original(coordinator, input_)
    first, second, *others = ranks.exchange(input_)
    torch.add(first, second, out=input_)
    for other in others:
        input_ += other
    return input_


def _all_gather(
    original: Callable[..., Any],
    coordinator: Any,
    input_: torch.Tensor,
    dim: int = -1,
    output_tensor_list: list[torch.Tensor] | None = None,
) -> Any:
    ranks = None if output_tensor_list is not None else _ranks_for(coordinator, input_)
    if ranks is None:
        return original(coordinator, input_, dim, output_tensor_list)
    return torch.cat(ranks.exchange(input_), dim)


def _all_gather_into_tensor(
    original: Callable[..., None], coordinator: Any, output: torch.Tensor, input: torch.Tensor
) -> None:
    ranks = _ranks_for(coordinator, input)
    if ranks is None:
        original(coordinator, output, input)
    else:
        output.copy_(torch.cat(ranks.exchange(input)).view(output.shape))
