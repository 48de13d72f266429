"""Compiles SGLang's page-hash extension ahead of time, so that no server stops for it (10 s).

And imports what servers import, which leaves their bytecode: several servers or tests that start
together would each compile all of it. Called by ``make dev``. A machine that cannot compile is no
error: the plugin then hashes in Python.
"""

import subprocess
import sys

from runtime_cpu.launch import environment

_BUILD = (
    "import importlib\n"
    "from runtime_cpu.zygote import PRELOADED\n"
    "for module in PRELOADED:\n"
    "    importlib.import_module(module)\n"
    "from array import array\n"
    "from sglang.srt.mem_cache.cpp_utils.native_hash import get_native_hash\n"
    "get_native_hash(array('q', range(64)), None, 64)\n"
)


def main() -> None:
    """Builds in a process of its own, with the environment of a server."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _BUILD],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        print(f"prebuild: no native page hash on this machine ({reason})", file=sys.stderr)


if __name__ == "__main__":
    main()
