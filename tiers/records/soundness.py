"""What a check of a stored record means for whoever keeps it, in four words."""

from __future__ import annotations

import enum

from sglang_ext.tiers.records.record import VerifyResult


class Soundness(enum.Enum):
    """From good to unknown."""

    SOUND = "sound"
    CORRUPT = "corrupt"  # damaged: its checksum is wrong, or it is none, or another page's
    UNAUTHENTIC = "unauthentic"  # a key is given, and nobody who has it wrote this
    UNREADABLE = "unreadable"  # it cannot be said: an I/O error, a key that is not given


_MEANING = {
    VerifyResult.OK: Soundness.SOUND,
    VerifyResult.UNAUTHENTIC: Soundness.UNAUTHENTIC,
    VerifyResult.UNPROTECTED: Soundness.UNAUTHENTIC,
    VerifyResult.UNKNOWN_KEY: Soundness.UNAUTHENTIC,
    VerifyResult.PROTECTED: Soundness.UNREADABLE,
    VerifyResult.BAD_VERSION: Soundness.UNREADABLE,  # a later release's, as far as one can say
}


def soundness_of(result: VerifyResult) -> Soundness:
    """What a result means."""
    return _MEANING.get(result, Soundness.CORRUPT)


def is_damage(soundness: Soundness, reason: str) -> bool:
    """Whether a page is damaged for certain, and not of somebody else or unknown.

    Args:
        soundness: what it is.
        reason: why, a `VerifyResult` value or another word.
    """
    return soundness is Soundness.CORRUPT or reason == VerifyResult.UNAUTHENTIC.value
