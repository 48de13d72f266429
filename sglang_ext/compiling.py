"""Loops that numba compiles, kept on disk for as long as no source of this package changes.

numba asks whether the file of a function changed, not whether those that it calls did, and it
reads what it kept before it asks. So what was kept of other sources is removed before anything of
it is looked at: an upgrade compiles anew, some seconds, and never runs or stumbles over old code.

Where neither the package's folder nor the user's cache can be written, as in a read-only container,
every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_STAMP = "sglang-hier-kv.sources"  # beside what numba keeps: the sources that it was made of


def jit(*signatures: Any, **options: Any) -> Callable[[_Function], _Function]:
    """`numba.njit`, kept on disk.

    Args:
        signatures: types to compile for now; none: for those of the first call.
        options: numba's.
    """

    def decorate(function: _Function) -> _Function:
        try:
            dispatcher: Any = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # there is nowhere to keep it
            dispatcher = numba.njit(**options)(function)
        else:
            _remove_outdated(dispatcher.stats.cache_path)
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        result: _Function = dispatcher
        return result

    return decorate


@functools.cache
def _remove_outdated(folder: str) -> None:
    """Removes what was compiled of other sources than those of now; once a process and folder."""
    stamp = Path(folder, _STAMP)
    with contextlib.suppress(OSError):
        if stamp.is_file() and stamp.read_text() == _sources():
            return
        stamp.parent.mkdir(parents=True, exist_ok=True)
        for index in stamp.parent.glob("*.nbi"):
            index.unlink(missing_ok=True)
        temp = stamp.with_suffix(f".{os.getpid()}")
        temp.write_text(_sources())
        temp.replace(stamp)


@functools.cache
def _sources() -> str:
    """Digest of all modules of the package, in hex."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(_PACKAGE, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
                digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()
