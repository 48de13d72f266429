"""Where profiles lie: beside a model's files, or in the user's cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

FILE_NAME = "hier-kv.hkp"
# Overrides the cache folder.
ENV_CACHE = "SGLANG_HIER_KV_CACHE"


def candidate_paths(model_path: str) -> list[Path]:
    """Where a model's profile is looked for, in this order."""
    folder = Path(model_path)
    found = [folder / FILE_NAME] if folder.is_dir() else []
    with contextlib.suppress(OSError):  # there is none
        found.append(cache_path(model_path))
    return found


def find_profile(model_path: str) -> Path | None:
    """The model's profile, or None if it has none."""
    return next((path for path in candidate_paths(model_path) if path.is_file()), None)


def path_to_write(model_path: str) -> Path:
    """Where a new profile goes: beside the model if that can be written, else the cache folder.

    Raises:
        OSError: there is no cache folder; one sentence.
    """
    folder = Path(model_path)
    if folder.is_dir() and os.access(folder, os.W_OK):
        return folder / FILE_NAME
    return cache_path(model_path)


def cache_path(model_path: str) -> Path:
    """The profile's place in the cache folder; its name tells folders of equal names apart.

    Raises:
        OSError: there is no cache folder; one sentence.
    """
    folder = Path(model_path)
    whole = str(folder.resolve()) if folder.exists() else model_path
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.name or "model")[:80]
    digest = hashlib.blake2b(whole.encode(), digest_size=6).hexdigest()
    return _cache_folder() / f"{name}-{digest}.hkp"


def _cache_folder() -> Path:
    own = os.environ.get(ENV_CACHE)
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "sglang-hier-kv"
    except RuntimeError as error:  # of a user without a name
        raise OSError(
            f"this user has no home, so no cache folder; set HOME or {ENV_CACHE}"
        ) from error
