"""Records that only holders of a key can write, and if wished only they can read. Start here.

`keys.py` reads key files, `aead.py` derives keys from them, `header.py` and `seals.py` are the
formats. docs/security.md says against whom it helps.
"""

from collections.abc import Callable
from pathlib import Path

from sglang_ext.tiers.protection.aead import Mode, Protection
from sglang_ext.tiers.protection.keys import read_key_file, write_key_file
from sglang_ext.tiers.protection.names import hidden_key
from sglang_ext.tiers.protection.seals import KeyedSeals
from sglang_ext.tiers.record_seals import RecordSeals
from sglang_ext.tiers.remote import RemoteKey

__all__ = ["KeyedSeals", "Mode", "Protection", "open_protection", "write_key_file"]


def open_protection(
    path: Path, mode: str
) -> tuple[RecordSeals, Callable[[RemoteKey], RemoteKey] | None]:
    """Seals with the keys of a file, and what hides the names of values where they are encrypted.

    Args:
        path: the key file.
        mode: `tag` or `encrypt`.

    Raises:
        TierConfigError: the file cannot be used.
    """
    protection = Protection(read_key_file(path), Mode[mode.upper()])
    hide = hidden_key(protection) if protection.mode is Mode.ENCRYPT else None
    return KeyedSeals(protection), hide
