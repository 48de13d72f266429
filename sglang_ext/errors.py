"""What ends a start."""

from __future__ import annotations


class HierKVConfigError(ValueError):
    """A setting that cannot work; the message is one sentence that says what to do."""
