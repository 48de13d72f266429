"""Records that only holders of a key can write, and if wished only they can read. Start here.

`keys.py` reads key files, `aead.py` derives keys from them, `header.py` and `keyed_seals.py` are
the formats. docs/security.md says against whom it helps.
"""

from collections.abc import Sequence
from pathlib import Path

from sglang_ext.tiers.protection.aead import Mode, Protection
from sglang_ext.tiers.protection.keyed_seals import KeyedSeals
from sglang_ext.tiers.protection.keys import read_key_file, write_key_file
from sglang_ext.tiers.protection.names import HidingEngine
from sglang_ext.tiers.records.seals import RecordSeals

__all__ = [
    "HidingEngine",
    "KeyedSeals",
    "Mode",
    "Protection",
    "open_file_keys",
    "open_protection",
    "write_key_file",
]


def open_protection(path: Path, mode: str) -> tuple[RecordSeals, Sequence[bytes]]:
    """Seals with the keys of a file; and keys for names, none where these need not be hidden.

    Args:
        path: the key file.
        mode: `tag` or `encrypt`.

    Raises:
        TierConfigError: the file cannot be used.
    """
    protection = Protection(read_key_file(path), Mode[mode.upper()])
    name_keys = protection.name_keys if protection.mode is Mode.ENCRYPT else ()
    return KeyedSeals(protection), name_keys


def open_file_keys(path: Path) -> Sequence[bytes]:
    """Keys for small files beside the records, of each key of a file; the first writes.

    Raises:
        TierConfigError: the file cannot be used.
    """
    return Protection(read_key_file(path), Mode.TAG).file_keys
