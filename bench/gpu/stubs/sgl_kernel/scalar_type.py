"""Types of quantised values; only their names are asked for."""

from typing import Any


class ScalarType:
    """One of them."""


class _ScalarTypes:
    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return ScalarType()


scalar_types = _ScalarTypes()
