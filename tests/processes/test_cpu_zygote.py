"""Copies of a process that start copies: what they get, and what they must not hold."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from testkit.server import ROOT

# A process starts one, which starts six. A pipe's writing end is passed down to the first only.
_PROGRAM = """
import multiprocessing, os, select
from runtime_cpu import zygote

def leaf(numbers, number):
    held = os.open(os.environ["HOLD"], os.O_RDONLY | os.O_NONBLOCK)  # before the end may come
    numbers.put(number)
    end = select.poll()
    end.register(held, 0)
    end.poll()  # until the writing end was opened and closed

def middle(numbers, ends):
    context = multiprocessing.get_context("spawn")
    for number in range(6):
        context.Process(target=leaf, args=(numbers, number)).start()
    ends.recv()
    os._exit(3)  # its children live on

if __name__ == "__main__":
    zygote._use_children([[[]] * 6, []])
    context = multiprocessing.get_context("spawn")
    numbers = context.Queue()
    ours, theirs = context.Pipe()
    started = context.Process(target=middle, args=(numbers, theirs))
    started.start()
    theirs.close()
    print(sorted(numbers.get(timeout=300) for _ in range(6)))
    ours.send("end")
    started.join()  # by its pid
    ready, _, _ = select.select([started.sentinel], [], [], 300)  # by its end of a pipe
    print(started.exitcode, bool(ready))
    os.close(os.open(os.environ["HOLD"], os.O_WRONLY))
    os._exit(0)
"""


def test_copies_of_a_copy_start_and_hold_nothing_of_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(_PROGRAM)
    os.mkfifo(tmp_path / "hold")
    done = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HOLD": str(tmp_path / "hold")},
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
        check=True,
    )
    assert done.stdout.splitlines() == ["[0, 1, 2, 3, 4, 5]", "3 True"]
