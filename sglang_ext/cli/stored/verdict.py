"""What `hier-kv verify` found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_ext.tiers.records.soundness import Soundness

MOST_LINES = 100
"""Things that are told one by one to people."""
# By reason, of what is most often no attack and no damage, but a key that is not the right one.
_EXPLAINED = {
    "unprotected": "written without a key: before the server had one, or by somebody without it; "
    "a server with the key computes these pages anew",
    "unknown_key": "written with a key that is not in the key file, such as one that was taken out "
    "of it",
    "protected": "written with a key; give its file with --key-file",
}


class BadPlace(NamedTuple):
    """What is not sound.

    Attributes:
        soundness: what it is.
        where: file and byte, or name.
        reason: a word of docs/commands.md.
    """

    soundness: Soundness
    where: str
    reason: str


@dataclass
class Verdict:
    """Counts of a folder's or a store's pages.

    Attributes:
        place: the folder or URL.
        sound: pages that are as they were written.
        bad: the others.
        left_out: what was not looked at, and why.
        notes: what else is to be known, a sentence each.
    """

    place: str
    sound: int = 0
    bad: list[BadPlace] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status: 0 where all that was looked at is sound."""
        return int(bool(self.bad))

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "place": self.place,
            **self._counts(),
            "bad": [
                {"is": bad.soundness.value, "where": bad.where, "reason": bad.reason}
                for bad in self.bad
            ],
            "left_out": self.left_out,
            "notes": self.notes,
        }

    def lines(self) -> list[str]:
        """For people."""
        shown = [f"{bad.soundness.value}: {bad.where} ({bad.reason})" for bad in self.bad]
        if len(shown) > MOST_LINES:
            shown[MOST_LINES:] = [f"... and {len(shown) - MOST_LINES:,} more (--json has all)"]
        shown += [f"left out: {text}" for text in self.left_out]
        found = Counter(bad.reason for bad in self.bad)
        explained = [
            f"{reason} ({found[reason]:,}): {text}"
            for reason, text in _EXPLAINED.items()
            if found[reason]
        ]
        counts = ", ".join(f"{num:,} {name}" for name, num in self._counts().items())
        return [*shown, *explained, *self.notes, f"{self.place}: {counts}"]

    def _counts(self) -> dict[str, int]:
        counts = {each.value: 0 for each in Soundness} | {Soundness.SOUND.value: self.sound}
        for bad in self.bad:
            counts[bad.soundness.value] += 1
        return counts
