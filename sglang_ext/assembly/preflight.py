"""Checks of the machine before the model loads: memory for the host tier, the disk folder.

They run in the main process so that a mistake is answered in a second, not after minutes of
loading weights. The tiers check again when they open.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

from sglang_ext.assembly.key_setup import build_trust
from sglang_ext.assembly.remote_setup import check_remote
from sglang_ext.codec.base import CodecError
from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import CODED_TIERS, GIB, HierKVConfig
from sglang_ext.settings.values import flag_name
from sglang_ext.tiers.access import is_trusted_folder, make_folder, problem_of, shown
from sglang_ext.tiers.anonymous_memory import available_bytes
from sglang_ext.tiers.disk import DiskConfig
from sglang_ext.tiers.disk.config import SEGMENTS_PER_BOUND
from sglang_ext.tiers.disk.folder import (
    holder_of,
    namespace_folders,
    rank_folders,
    segment_files,
)
from sglang_ext.tiers.disk.others_files import closed_locks, closed_paths
from sglang_ext.tiers.disk.segments.fileio import FileIO
from sglang_ext.tiers.errors import TierConfigError

_POLL_S = 0.1


def check_machine(config: HierKVConfig) -> None:
    """Checks that memory, folders and files are there and usable, and that nothing is too large.

    Raises:
        HierKVConfigError: with one sentence.
    """
    _check_memory(config)
    if config.disk_dir:
        _check_folder(Path(config.disk_dir))
        _check_room(config)
    for name in ("profile", "key_file"):
        if getattr(config, name):
            _check_file(flag_name(name), getattr(config, name))
    _check_levels(config)
    _check_profile(config)
    build_trust(config)
    if config.remote_url:
        check_remote(config.remote_url, config.disk_dir)
    if config.event_log:
        _check_log(config.event_log)


def check_free(folder: str, patience_s: float) -> None:
    """Checks that no other server has the disk tier's folder.

    Args:
        folder: of `--hier-kv-disk-dir`.
        patience_s: how long a server that is just ending may still have it.

    Raises:
        HierKVConfigError: one has it all that time.
    """
    deadline_s = time.monotonic() + patience_s
    while holder := _holder(Path(folder)):
        if time.monotonic() >= deadline_s:
            raise HierKVConfigError(
                f"the disk folder {shown(folder)} is in use by {holder}; give each server a folder "
                "of its own, or stop that one first."
            )
        time.sleep(_POLL_S)


def _holder(folder: Path) -> str:
    try:
        return holder_of(FileIO(), folder)
    except OSError:  # what is wrong with it is said by who takes it
        return ""


def room_problem(config: HierKVConfig) -> str:
    """What is to be said of a file system with less room than the disk tier may take; "" for none.

    Raises:
        OSError: the folder cannot be looked at.
    """
    folder = Path(config.disk_dir)
    room = room_bytes(folder)
    floor = int(config.disk_free_floor * GIB)
    if room >= config.disk_bytes + floor:
        return ""
    said = (
        f"--hier-kv-disk-size {config.disk_size:g} and the free-space floor of "
        f"{config.disk_free_floor:g} GiB are more than the {room / GIB:.1f} GiB that "
        f"{shown(folder)} has room for, with what it holds already; "
    )
    segment = min(config.disk_segment_size * GIB, config.disk_bytes // SEGMENTS_PER_BOUND)
    if room < segment + floor:
        return f"{said}not one segment fits, so nothing is written there: make room"
    return f"{said}the disk tier will stay smaller"


def others_problem(folder: Path) -> str:
    """What is to be said of the tier's files that are another user's; "" for nothing."""
    with contextlib.suppress(OSError):  # what is gone again is nothing to tell of
        if closed := list(closed_paths(folder)):
            return (
                f"in the disk folder {shown(folder)} this user may not read and write "
                f"{len(closed)} of the disk tier's files and folders, such as {shown(closed[0])} "
                f"of user {closed[0].lstat().st_uid}: pages in them are not found, and do not "
                "count in --hier-kv-disk-size; give all of the folder to the server's user "
                "(chown -R)"
            )
    return ""


def room_bytes(folder: Path) -> int:
    """Bytes that a disk tier may have in a folder: what is free there, and its own segments.

    What else lies there is not looked into: the folder may be a whole file system's.
    """
    status = os.statvfs(folder)
    held = 0
    for root in (folder, *rank_folders(folder)):
        with contextlib.suppress(OSError):  # another user's: who takes it says what is wrong
            held += sum(map(_held_in, namespace_folders(root, is_trusted_folder)))
    return status.f_bavail * status.f_frsize + held


def _held_in(namespace: Path) -> int:
    with contextlib.suppress(OSError):  # another user's; it is passed over by the tier, too
        return sum(_size_of(path) for _, path in segment_files(namespace))
    return 0


def _size_of(path: Path) -> int:
    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
        return path.lstat().st_size
    return 0


def _check_memory(config: HierKVConfig) -> None:
    available = available_bytes()
    if config.host_size * GIB > available:
        raise HierKVConfigError(
            f"--hier-kv-host-size {config.host_size:g} is more than the {available / GIB:.1f} GiB "
            "of memory that are free here; give a smaller size."
        )


def _check_folder(folder: Path) -> None:
    try:
        if folder.exists() and not folder.is_dir():
            raise HierKVConfigError(
                f"--hier-kv-disk-dir must be a folder, but {shown(folder)} is a file; "
                "choose another path."
            )
        make_folder(folder)
        problem = problem_of(os.stat(folder), os.geteuid())
        if problem:
            raise HierKVConfigError(f"--hier-kv-disk-dir: {shown(folder)} {problem}.")
        with tempfile.TemporaryFile(dir=folder):
            pass
        _check_locks(folder)
    except OSError as error:
        raise HierKVConfigError(
            f"--hier-kv-disk-dir must be writable, but {shown(folder)} is not ({error.strerror}); "
            "change its permissions or choose another folder."
        ) from error


def _check_locks(folder: Path) -> None:
    """Refuses a folder that this user may write to and not lock."""
    with contextlib.suppress(OSError):  # of a rank's folder: who takes it says what is wrong
        for path in closed_locks(folder):
            raise HierKVConfigError(
                f"--hier-kv-disk-dir: {shown(path)} belongs to user {path.lstat().st_uid} and "
                f"user {os.geteuid()} may not write to it, as a server of that user made it; "
                "give all of the folder to this server's user (chown -R)."
            )


def _check_room(config: HierKVConfig) -> None:
    """Refuses a disk tier that can never hold anything."""
    status = os.statvfs(config.disk_dir)
    total = status.f_blocks * status.f_frsize
    if total and config.disk_free_floor * GIB >= total:
        raise HierKVConfigError(
            f"--hier-kv-disk-free-floor {config.disk_free_floor:g} is all of the file system, "
            f"which has {total / GIB:.1f} GiB; give a smaller one."
        )
    try:
        DiskConfig(
            path=Path(config.disk_dir),
            max_bytes=config.disk_bytes,
            min_free_bytes=int(config.disk_free_floor * GIB),
            segment_bytes=int(config.disk_segment_size * GIB),
        ).check()
    except TierConfigError as error:
        raise HierKVConfigError(f"--hier-kv-disk-size: {error}.") from error


def _check_file(flag: str, text: str) -> None:
    try:
        # To open a pipe would wait for whoever writes to it.
        if not stat.S_ISREG(os.stat(text).st_mode):
            raise HierKVConfigError(
                f"{flag} must be a file, and {shown(text)} is none; give another."
            )
        with Path(text).open("rb"):
            pass
    except OSError as error:
        raise HierKVConfigError(
            f"{flag} must be a file that can be read, but {shown(text)} is not ({error.strerror}); "
            "give another or leave it out."
        ) from error


def _check_levels(config: HierKVConfig) -> None:
    for tier in CODED_TIERS:
        codec, level = config.of_tier("codec", tier), config.of_tier("level", tier)
        if codec == "none" or not level:
            continue
        # Imported late: who sets no level need not wait for it.
        from sglang_ext.codec.page_codec import parse_level

        try:
            parse_level(codec, level)
        except CodecError as error:
            raise HierKVConfigError(f"--hier-kv-level: of {codec}, {error}.") from error


def _check_profile(config: HierKVConfig) -> None:
    """Refuses a profile that no codec takes, or that is none; of which model it is told later."""
    if not config.profile:
        return
    # Imported late, as above.
    from sglang_ext.codec.registry import kind_of

    codecs = {config.record_codec, config.of_tier("codec", "remote")}
    kinds = {codec_id: kind for codec_id in codecs if (kind := kind_of(codec_id)) is not None}
    if not kinds:
        used = " and ".join(sorted(codecs - {"none"}))
        raise HierKVConfigError(
            f"--hier-kv-profile has no effect with --hier-kv-codec {used}; leave it out."
        )
    for kind in kinds.values():
        try:
            kind.load(Path(config.profile))
        except (OSError, CodecError) as error:
            raise HierKVConfigError(
                f"--hier-kv-profile {shown(config.profile)} cannot be used: {error}; make one with "
                "`hier-kv calibrate` or leave it out."
            ) from error


def _check_log(text: str) -> None:
    path = Path(text)
    parent = Path(os.path.abspath(path.parent))
    try:
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise HierKVConfigError(
                f"--hier-kv-event-log must be a file in a writable folder, got {shown(text)}; "
                f"create {shown(parent)} or choose another path."
            )
        is_there = os.path.lexists(path)
        if is_there and not (path.is_file() and not path.is_symlink()):
            raise HierKVConfigError(
                f"--hier-kv-event-log must be a file, but {shown(text)} is a folder, a link "
                "or a device; choose another path."
            )
        if not is_there:
            os.lstat(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise HierKVConfigError(
            f"--hier-kv-event-log cannot be {shown(text)} ({error.strerror}); choose another path."
        ) from error
