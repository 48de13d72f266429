"""Makes SGLang importable in this process, for tests of modules that import it."""

from __future__ import annotations

import os
import sys
import warnings

from runtime_cpu import launch


def prepare() -> None:
    """Sets the CPU engine's environment and puts the stand-ins on the import path. Idempotent.

    Must run before the first import of `sglang`. What `sglang` warns of as it is imported is none
    of our tests' business, so a test run that turns warnings into errors goes on.
    """
    os.environ.update(launch.environment())
    before = dict(os.environ)
    stubs = str(launch.STUBS)
    if stubs not in sys.path:
        sys.path.insert(0, stubs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import sglang.srt.mem_cache.memory_pool
        import sglang.srt.mem_cache.unified_cache.unified_cache_linker  # noqa: F401
    # The import names folders for caches, as it does in each server. Servers that are started from
    # here with these would have another environment than those before, and could not be forked.
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
