"""What the settings say about keys: seals for the disk tier, and for a remote store its names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from sglang_ext.config import HierKVConfig, HierKVConfigError
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.record_seals import CHECKSUMS, RecordSeals
from sglang_ext.tiers.remote import RemoteKey


class Trust(NamedTuple):
    """How what leaves the process is protected.

    Attributes:
        seals: of records.
        hide: gives keys of a remote store other digests; None where names may say what they are of.
    """

    seals: RecordSeals = CHECKSUMS
    hide: Callable[[RemoteKey], RemoteKey] | None = None


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
        seals, hide = open_protection(Path(config.key_file), config.protect)
    except TierConfigError as error:
        raise HierKVConfigError(str(error)) from error
    return Trust(seals, hide)
