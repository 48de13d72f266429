"""What small models in the format of transformers share: a class by its name, and a tokenizer."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.server import TINYLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_tokenizer(folder: Path) -> None:
    """Gives a model's folder the tokenizer of the bundled model."""
    for name in TOKENIZER_FILES:
        shutil.copy(TINYLM / name, folder / name)


@dataclass(frozen=True)
class PublishedModel:
    """An architecture of transformers.

    Attributes:
        make_config: its small configuration.
        class_name: transformers' class with a head.
    """

    make_config: Callable[[], Any]
    class_name: str

    def open(self, folder: Path) -> Any:
        """The model that was written into a folder, by transformers, in float32."""
        import torch

        return self.model_class().from_pretrained(folder, dtype=torch.float32)

    def model_class(self) -> Any:
        """Transformers' class."""
        # With Qwen3.5's, sentencepiece is imported, whose compiled types warn. Where warnings are
        # errors the import ends half-way, unnoticed, and the process with a crash.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            import transformers

            return getattr(transformers, self.class_name)
