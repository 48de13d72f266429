"""Loops that numba compiles, kept on disk for as long as no source of this package changes.

numba asks whether the file of a function changed, not whether those that it calls did, and it
reads what it kept before it asks. So what was kept of other sources is removed before anything of
it is looked at: an upgrade compiles anew, some seconds, and never runs or stumbles over old code.

Nor does numba keep processes apart that compile at the same time, as the ranks of a server do at
its first start: two that choose the same file leave one's code under the other's types, for good.
So one process at a time keeps something in a folder.

And it names a file before it writes it: who is killed in between leaves another one's code under
its name. So what is kept here is written before it is named, and what a crash of the machine left
half written is compiled anew.

Where neither the package's folder nor the user's cache can be written, as in a read-only container,
every process compiles for itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import event

logger = logging.getLogger(__name__)
if not logging.getLogger("numba").level:
    # On DEBUG it tells of each loop in thousands of lines, and SGLang's --log-level is everybody's.
    logging.getLogger("numba").setLevel(logging.INFO)

_Function = TypeVar("_Function", bound=Callable[..., Any])

_PACKAGE = Path(__file__).parent
_STAMP = "sglang-hier-kv.sources"  # beside what numba keeps: the sources that it was made of
_LOCK = "sglang-hier-kv.lock"  # held while something is kept or read there
_LOCK_PATIENCE_S = 60.0  # it is held for one file at a time; longer only by who was stopped
_LOCK_POLL_S = 0.02
_NS_PER_S = 1_000_000_000
_functions: set[Callable[..., Any]] = set()  # all that `jit` was given
_unkept: set[str] = set()  # folders whose loops could be kept nowhere
_unlocked: set[str] = set()  # folders whose lock was waited for in vain, and not had since


class _Announcer(event.Listener):  # type: ignore[misc]
    """Says once a process that loops are compiled: a start is silent for a minute meanwhile."""

    def __init__(self) -> None:
        self._has_told = False

    def on_start(self, event: event.Event) -> None:
        """Tells of the first loop that was not kept."""
        if not self._has_told and event.data["dispatcher"].py_func in _functions:
            self._has_told = True
            logger.info(
                "hier-kv: loops that are not kept for this machine and release are being compiled, "
                "which takes about a minute once; `hier-kv prebuild` does it ahead of a start"
            )

    def on_end(self, event: event.Event) -> None:
        """Nothing: others follow."""


event.register("numba:compile", _Announcer())


def jit(*signatures: Any, **options: Any) -> Callable[[_Function], _Function]:
    """`numba.njit`, kept on disk.

    Args:
        signatures: types to compile for now; none: for those of the first call.
        options: numba's.
    """

    def decorate(function: _Function) -> _Function:
        _functions.add(function)
        try:
            dispatcher: Any = numba.njit(cache=True, **options)(function)
        except RuntimeError:  # there is nowhere to keep it
            _unkept.add(str(Path(function.__code__.co_filename).parent))
            dispatcher = numba.njit(**options)(function)
        else:
            _remove_outdated(dispatcher.stats.cache_path)
            _keep_apart(dispatcher)
        for signature in signatures:
            dispatcher.compile(signature)
        if signatures:
            dispatcher.disable_compile()
        result: _Function = dispatcher
        return result

    return decorate


def check_kept() -> str:
    """Whether what was compiled up to now is kept.

    Returns:
        The folder where loops of this package's own folder are kept.

    Raises:
        OSError: there is no folder for some of it, or nothing can be kept there; one sentence.
    """
    dispatcher: Any = jit()(_nothing)
    if _unkept:
        raise OSError(
            f"compiled loops of {min(_unkept)} need a folder to be kept in, but neither its "
            "__pycache__ nor numba's cache folder in HOME can be written; set NUMBA_CACHE_DIR to "
            "a folder that this user may write to"
        )
    folder = str(dispatcher.stats.cache_path)
    if not _is_of_now(Path(folder, _STAMP)):
        raise OSError(
            f"compiled loops are to be kept in {folder}, but a file there could not be locked or "
            "written; set NUMBA_CACHE_DIR to a folder on a disk of this machine with room"
        )
    return folder


def round_source_times() -> None:
    """Gives sources that may be touched times of whole seconds.

    numba takes what it kept for outdated when the time of a source is not what it was, and layers
    of an image have whole seconds only.
    """
    for path in _source_paths():
        found = path.stat()
        whole_ns = found.st_mtime_ns // _NS_PER_S * _NS_PER_S
        if whole_ns != found.st_mtime_ns:
            with contextlib.suppress(OSError):
                os.utime(path, ns=(found.st_atime_ns, whole_ns))


def _nothing() -> None:
    """A loop to be kept."""


@functools.cache
def _remove_outdated(folder: str) -> None:
    """Removes what was compiled of other sources than those of now; once a process and folder."""
    stamp = Path(folder, _STAMP)
    with contextlib.suppress(OSError):
        if _is_of_now(stamp):
            return
        stamp.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder, fcntl.LOCK_EX):
            if _is_of_now(stamp):  # another process was first
                return
            for kept in (*stamp.parent.glob("*.nbi"), *stamp.parent.glob("*.nbc")):
                kept.unlink(missing_ok=True)
            temp = stamp.with_suffix(f".{os.getpid()}")
            temp.write_text(_sources())
            temp.replace(stamp)


def _keep_apart(dispatcher: Any) -> None:
    """Has a loop be kept and read under its folder's lock, and only among loops of these sources.

    numba reads a loop's index, takes a file that it does not name, writes the index and then the
    file. In between the file may be another signature's, or left from other sources.
    """
    folder = str(dispatcher.stats.cache_path)
    file = dispatcher._cache._cache_file
    load = file.load

    def save_alone(key: Any, data: Any) -> None:
        # A folder without locks, or one that a newer release has made its own: not kept.
        with contextlib.suppress(OSError), _locked(folder, fcntl.LOCK_EX):
            if _is_of_now(Path(folder, _STAMP)):
                _save(file, key, data)

    def load_alone(key: Any) -> Any:
        # In a folder that was never locked and cannot be, nobody keeps anything.
        is_locked = os.access(folder, os.W_OK) or Path(folder, _LOCK).exists()
        lock = _locked(folder, fcntl.LOCK_SH) if is_locked else contextlib.nullcontext()
        try:
            with lock:
                return load(key) if _is_of_now(Path(folder, _STAMP)) else None
        except Exception:  # it cannot be read, or is half a file: unpickling that raises anything
            return None

    file.save, file.load = save_alone, load_alone


def _save(file: Any, key: Any, data: Any) -> None:
    """As numba's, but that a file is there before the index names it.

    Args:
        file: numba's `IndexDataCacheFile`.
        key: names a signature and a machine.
        data: its code.
    """
    try:
        names = file._load_index()
    except OSError:
        raise
    except Exception:  # half an index names nothing
        names = {}
    name = names.get(key)
    if name is None:
        numbered = (file._data_name(number) for number in itertools.count(1))
        taken = set(names.values())
        name = next(each for each in numbered if each not in taken)
    file._save_data(name, data)
    if key not in names:
        file._save_index({**names, key: name})


def _is_of_now(stamp: Path) -> bool:
    """Whether what is kept beside a stamp was made of the sources of now."""
    return stamp.is_file() and stamp.read_bytes() == _sources().encode()


@contextlib.contextmanager
def _locked(folder: str, how: int) -> Iterator[None]:
    """Holds a folder's lock, which ends with the process that holds it.

    Raises:
        OSError: it has none, or another process holds it for too long, as one that was stopped. It
            is waited for once then, not once a loop.
    """
    path = Path(folder, _LOCK)
    try:  # on NFS who holds it alone has to be able to write it
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError:
        handle = os.open(path, os.O_RDONLY)
    try:
        _lock(handle, how, folder)
        try:
            yield
        finally:  # a process that was forked meanwhile has the handle, too, and may live for long
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def _lock(handle: int, how: int, folder: str) -> None:
    deadline_s = time.monotonic() + (0.0 if folder in _unlocked else _LOCK_PATIENCE_S)
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                _unlocked.add(folder)
                raise
        else:
            return _unlocked.discard(folder)
        time.sleep(_LOCK_POLL_S)


@functools.cache
def _sources() -> str:
    """Digest of all modules of the package, in hex."""
    digest = hashlib.sha256()
    for path in _source_paths():
        digest.update(f"{path.relative_to(_PACKAGE)}\0".encode())
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _source_paths() -> Iterator[Path]:
    """All modules of the package, in an order that is always the same."""
    for folder, folders, files in os.walk(_PACKAGE, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                yield Path(folder, name)
