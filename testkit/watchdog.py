"""Ends a process group when whoever started it is gone, however that ended."""

from __future__ import annotations

import os
import subprocess

# Blocks until the pipe's other end is closed: by the kernel when its owner dies, kill -9 included.
# (PR_SET_PDEATHSIG would fire at the end of the *thread* that started the process, and leave the
# process's own children.)
_SCRIPT = 'read -r _; kill -s KILL -- "-$0"'


class Watchdog:
    """A shell that waits for the end of this process and then kills a process group.

    Args:
        group: id of a process group; the shell is not of it.
    """

    def __init__(self, group: int) -> None:
        read_end, self._write_end = os.pipe()  # not inherited by other children
        try:
            self._shell = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, str(group)],
                stdin=read_end,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except BaseException:
            os.close(self._write_end)
            raise
        finally:
            os.close(read_end)

    def close(self) -> None:
        """Ends the watch and leaves the group alone. Safe to call twice."""
        if self._shell.returncode is None:
            self._shell.kill()
            self._shell.wait()
            os.close(self._write_end)
