"""Another user of the machine, as which root can do things."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

ANOTHER_USER = 65534  # nobody's, where it has a name


def as_another_user(folder: Path, work: Callable[[], str]) -> str:
    """What `work` says in a process of a user who is not root, with `folder` as that user's.

    Args:
        folder: in which it is called; folders above it are closed to that user.
        work: what to do.
    """
    reading, writing = os.pipe()
    os.chown(folder, ANOTHER_USER, ANOTHER_USER)
    if (child := os.fork()) == 0:
        said = "it raised"
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setresgid(ANOTHER_USER, ANOTHER_USER, ANOTHER_USER)
            os.setresuid(ANOTHER_USER, ANOTHER_USER, ANOTHER_USER)
            said = work()
        finally:
            os.write(writing, said.encode())
            os._exit(0)
    os.close(writing)
    with open(reading) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said
