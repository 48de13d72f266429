"""What is wrong with a command line, whatever machine, files and servers are like."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 130
"""Exit statuses: it ran, and found something wrong or could not; or it was asked wrongly, as by
argparse; or it was interrupted, as of a program that the signal ended."""


class UsageError(ValueError):
    """A command line that cannot be meant; one sentence."""


def key_argument(text: str) -> str:
    """A key for a server, as argparse takes it; of what is none nothing is repeated.

    Raises:
        argparse.ArgumentTypeError: it cannot be sent.
    """
    if not (text.isascii() and text.isprintable()):
        raise argparse.ArgumentTypeError(
            "a key of printable ASCII on one line is expected, and it has other characters; "
            "correct it, or the environment's variable"
        )
    return text


@contextlib.contextmanager
def of_the_command_line() -> Iterator[None]:
    """Where all that is refused was given on the command line.

    Raises:
        UsageError: in place of any `ValueError`.
    """
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from error
