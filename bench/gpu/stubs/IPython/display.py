"""What shows things in a notebook."""

from typing import Any


class HTML(str):
    """Text."""

    __slots__ = ()


def display(*shown: Any) -> None:
    """Shows nothing."""
