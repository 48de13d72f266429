"""Folders and files that other users of the machine may neither read nor put in our place.

KV can give the prompt back, so what the tiers make is for one user alone: folders 0700, files
0600. A store that several users' servers share may name a group instead.
"""

from __future__ import annotations

import grp
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FOLDER_MODE = 0o700
FILE_MODE = 0o600
_GROUP_FOLDER_MODE = 0o2770  # what is made in it belongs to the group too
_GROUP_FILE_MODE = 0o660
_SHOWN_CHARS = 160


@dataclass(frozen=True)
class Access:
    """Who may use what is made: this user alone, or a group.

    Attributes:
        group: its number; -1 for none.
    """

    group: int = -1

    @classmethod
    def of_group(cls, name: str) -> Self:
        """Access for a group that this process belongs to.

        Raises:
            ValueError: there is none; the message says what is wanted.
        """
        try:
            group = grp.getgrnam(name).gr_gid
        except (KeyError, ValueError):
            raise ValueError("the name of a group of this machine") from None
        if os.geteuid() != 0 and group not in (os.getegid(), *os.getgroups()):
            raise ValueError("a group that the server's user belongs to")
        return cls(group)

    @property
    def folder_mode(self) -> int:
        """Permissions of folders."""
        return FOLDER_MODE if self.group < 0 else _GROUP_FOLDER_MODE

    @property
    def file_mode(self) -> int:
        """Permissions of files."""
        return FILE_MODE if self.group < 0 else _GROUP_FILE_MODE

    def apply(self, fd: int) -> None:
        """Gives a file or folder that was made just now to the group; nothing without one.

        Raises:
            OSError: it cannot be given.
        """
        if self.group >= 0:
            is_folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            os.fchown(fd, -1, self.group)
            os.fchmod(fd, self.folder_mode if is_folder else self.file_mode)


def make_folder(path: Path) -> None:
    """Makes a folder for this user alone, and those above it that are absent.

    Raises:
        OSError: it cannot be made, or something else lies there.
    """
    if not path.parent.exists():
        make_folder(path.parent)
    try:
        path.mkdir(mode=FOLDER_MODE)
    except FileExistsError:
        if not path.is_dir():
            raise


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only this user can read, over what lies there; never through a link.

    Raises:
        OSError: it cannot be written.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, FILE_MODE), "wb") as file:
        os.fchmod(file.fileno(), FILE_MODE)
        file.write(data)


def read_own(path: Path, most: int) -> bytes:
    """Leading bytes of a file. No link is followed, and nothing but a file is waited for.

    Raises:
        OSError: it cannot be read, or is no file.
    """
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(path, flags), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(f"{path} is no file")
        return file.read(most)


def tighten(folder: Path) -> bool:
    """Takes a folder inside one of ours from everybody else.

    Returns:
        False when it is no folder, a symbolic link, or another user's.
    """
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        if not _is_trusted(status, os.geteuid()):
            return False
        if stat.S_IMODE(status.st_mode) & 0o077 and status.st_uid == os.geteuid():
            os.fchmod(fd, FOLDER_MODE)
        return True
    except OSError:  # a file system without permissions has none to take
        return True
    finally:
        os.close(fd)


def is_trusted_folder(path: Path) -> bool:
    """Whether this is a folder, no symbolic link, and of a user who is trusted; changes nothing."""
    return _is_there_and_trusted(path, stat.S_ISDIR)


def is_trusted_file(path: Path) -> bool:
    """Whether this is a file, no symbolic link, and of a user who is trusted; changes nothing."""
    return _is_there_and_trusted(path, stat.S_ISREG)


def _is_there_and_trusted(path: Path, is_kind: Callable[[int], bool]) -> bool:
    try:
        status = os.lstat(path)
    except OSError:
        return False
    return is_kind(status.st_mode) and _is_trusted(status, os.geteuid())


def problem_of(status: os.stat_result, uid: int) -> str:
    """What makes a folder unfit to hold KV; "" for nothing. What it says goes after its name.

    A folder that another user owns or that everybody may write to can be swapped for another, and
    what is in it with it. Root may use everybody's, as in a container on a volume of its user.

    Args:
        status: of the folder.
        uid: of the user who is to use it.
    """
    if status.st_mode & stat.S_IWOTH and status.st_mode & stat.S_ISVTX:  # /tmp needs its mode
        return (
            "may be written to by every user of the machine, as /tmp may; name a folder in it that "
            "is the server's own"
        )
    if status.st_mode & stat.S_IWOTH:
        return "may be written to by every user of the machine; take that away with chmod o-w"
    if not _is_trusted(status, uid):
        return f"belongs to user {status.st_uid} and not to user {uid}; give the server its own"
    return ""


def shown(path: object) -> str:
    """A path for a message: as much of it as a sentence bears."""
    text = str(path)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}..."


def _is_trusted(status: os.stat_result, uid: int) -> bool:
    return uid == 0 or status.st_uid in (0, uid)
