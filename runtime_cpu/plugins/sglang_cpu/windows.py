"""Windows that a dummy model is given from outside."""

from __future__ import annotations

# "WINDOW:EVERY" in this variable gives a model windows that its architecture does not have: all
# layers but each EVERY-th see WINDOW tokens back. For dummy models that are to compute little.
WINDOW_VARIABLE = "CPU_EXTEND_WINDOW"


def parse_windows(value: str) -> tuple[int, int]:
    """Reads `WINDOW:EVERY`; (0, 1) for an empty text.

    Raises:
        ValueError: it is something else.
    """
    if not value:
        return 0, 1
    window, _, every = value.partition(":")
    if not (window.isdecimal() and every.isdecimal() and int(every)):
        raise ValueError(
            f"expected {WINDOW_VARIABLE} as WINDOW:EVERY, for instance 128:8, got {value!r}"
        )
    return int(window), int(every)
