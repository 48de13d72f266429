"""Stands for Hugging Face's `datasets`, which SGLang's benchmark imports for what it downloads."""

from typing import Any


def load_dataset(*_: Any, **__: Any) -> Any:
    """Would download; what the tests ask for is generated."""
    raise NotImplementedError("datasets is a stand-in here; pip install datasets")
