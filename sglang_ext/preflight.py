"""Checks of the machine before the model loads: memory for the host tier, the disk folder.

They run in the main process so that a mistake is answered in a second, not after minutes of
loading weights. The tiers check again when they open.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from sglang_ext.config import GIB, HierKVConfig, HierKVConfigError
from sglang_ext.key_setup import build_trust
from sglang_ext.remote_setup import check_remote
from sglang_ext.tiers.access import make_folder, problem_of


def check_machine(config: HierKVConfig) -> None:
    """Checks that memory, disk folder, key and event log are there and usable.

    Raises:
        HierKVConfigError: with one sentence.
    """
    _check_memory(config)
    if config.disk_dir:
        _check_folder(Path(config.disk_dir))
    build_trust(config)
    if config.remote_url:
        check_remote(config.remote_url, config.disk_dir)
    if config.event_log:
        _check_log(config.event_log)


def _check_log(text: str) -> None:
    path = Path(text)
    parent = Path(os.path.abspath(path.parent))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise HierKVConfigError(
            f"--hier-kv-event-log must be a file in a writable folder, got {text}; create {parent} "
            "or choose another path."
        )
    if os.path.lexists(path) and not (path.is_file() and not path.is_symlink()):
        raise HierKVConfigError(
            f"--hier-kv-event-log must be a file, but {text} is a folder, a link or a device; "
            "choose another path."
        )


def _check_memory(config: HierKVConfig) -> None:
    available = _available_memory_bytes()
    if config.host_bytes > available:
        raise HierKVConfigError(
            f"--hier-kv-host-size {config.host_size:g} is more than the {available / GIB:.1f} GB "
            "of memory that are free; give a smaller size."
        )


def _available_memory_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _check_folder(folder: Path) -> None:
    if folder.exists() and not folder.is_dir():
        raise HierKVConfigError(
            f"--hier-kv-disk-dir must be a folder, but {folder} is a file; choose another path."
        )
    try:
        make_folder(folder)
        problem = problem_of(os.stat(folder), os.geteuid())
        if problem:
            raise HierKVConfigError(f"--hier-kv-disk-dir: {folder} {problem}.")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise HierKVConfigError(
            f"--hier-kv-disk-dir must be writable, but {folder} is not ({error.strerror}); change "
            "its permissions or choose another folder."
        ) from error
