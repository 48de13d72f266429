"""What the kit raises."""

from __future__ import annotations


class UnexpectedAnswerError(RuntimeError):
    """A server did not do what was to be measured or tested, so the figures would mean nothing."""
