"""What the settings say about keys: seals for the disk tier, and for a remote store its names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals


class Trust(NamedTuple):
    """How what leaves the process is protected.

    Attributes:
        seals: of records.
        name_keys: what hides the names of values in a remote store; none where they need not be.
    """

    seals: RecordSeals = CHECKSUMS
    name_keys: Sequence[bytes] = ()


def build_trust(config: HierKVConfig) -> Trust:
    """Reads the key file, if there is one.

    Raises:
        HierKVConfigError: the file cannot be used; one sentence, without a key in it.
    """
    if not config.key_file:
        return Trust()
    # Imported late: who sets no key needs no cryptography.
    from sglang_ext.tiers.protection import open_protection

    try:
        seals, name_keys = open_protection(Path(config.key_file), config.protect)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
    return Trust(seals, name_keys)


def file_keys(config: HierKVConfig) -> Sequence[bytes]:
    """What proves files in the disk folder that are no records; none without a key file.

    Raises:
        HierKVConfigError: as `build_trust`.
    """
    if not config.key_file:
        return ()
    from sglang_ext.tiers.protection import open_file_keys

    try:
        return open_file_keys(Path(config.key_file))
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
