"""The one answer of every function here."""

from typing import NoReturn


def refuse(*args: object, **kwargs: object) -> NoReturn:
    """Raises: images need the real torchvision."""
    raise NotImplementedError(
        "torchvision was called, but this CPU runtime has only a stand-in for it: "
        "serve a text model, or install torchvision"
    )
