"""Text to calibrate on when none is given: what every Python installation carries.

The language reference (English prose with examples) and some modules of the standard library. It
stays where it is: nothing is copied into this package.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_MODULES = ("argparse", "asyncio.tasks", "datetime", "email.message", "http.client", "textwrap")


def default_texts() -> list[str]:
    """Prose and code, about 1.2 MB.

    Raises:
        ValueError: this Python installation was stripped of them.
    """
    texts = [*_reference(), *_sources()]
    if sum(map(len, texts)) < 400_000:
        raise ValueError(
            "this Python installation lacks its reference texts; give your own with --text"
        )
    return texts


def _reference() -> list[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return []
    # Several topics share one text.
    return list(dict.fromkeys(topics.values()))


def _sources() -> list[str]:
    found = []
    for name in _MODULES:
        try:
            spec = importlib.util.find_spec(name)
        except ImportError:
            continue
        origin = Path(spec.origin) if spec and spec.origin else None
        if origin is not None and origin.suffix == ".py" and origin.is_file():
            found.append(origin.read_text(encoding="utf-8", errors="replace"))
    return found
