"""Errors of the tiers.

Only faults of set-up and of the program itself are raised. Bad, short, stale or missing data is a
miss and a counter, never one of these.
"""

from __future__ import annotations


class TierError(Exception):
    """Root of every error that a tier raises."""


class TierConfigError(TierError, ValueError):
    """A setting cannot work; the message is one sentence: expected, found, what to do."""


class TierClosedError(TierError):
    """A tier was used after its `close()`."""


class TierUsageError(TierError):
    """The caller broke a rule of the interface, such as freeing a slot twice."""


class TierInvariantError(TierError):
    """A tier's own books do not balance; found by a `check()`, and always a bug."""
