"""What lies in the tier's folder and is not this user's to use.

A server or a command that root ran on the folder of a service's user leaves what is root's alone.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from sglang_ext.tiers.disk.folder import namespace_folders, rank_folders, segment_files


def closed_paths(root: Path) -> Iterator[Path]:
    """The tier's files and folders that this user may not both read and write.

    What lies in such a folder is not looked at, nor is anything that has no name of the tier's.

    Args:
        root: the tier's folder, or the one of a server's with several ranks.

    Raises:
        OSError: a folder cannot be listed.
    """
    for folder in (root, *rank_folders(root)):
        if not _is_open(folder):
            yield folder
            continue
        yield from _closed_files(folder / "LOCK", folder / "folder.msgpack")
        for names in namespace_folders(folder, _is_folder):
            if not _is_open(names):
                yield names
                continue
            yield from _closed_files(names / "ns.msgpack")
            yield from _closed_files(*(path for _, path in segment_files(names)))


def closed_locks(root: Path) -> Iterator[Path]:
    """Of these the locks alone: no namespace is looked into.

    Raises:
        OSError: the folder cannot be listed.
    """
    for folder in (root, *rank_folders(root)):
        yield from _closed_files(folder / "LOCK")


def _closed_files(*paths: Path) -> Iterator[Path]:
    for path in paths:
        if not os.access(path, os.R_OK | os.W_OK, effective_ids=True) and path.is_file():
            yield path


def _is_open(folder: Path) -> bool:
    return os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()
