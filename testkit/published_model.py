"""What small models in the format of transformers share: a class by its name, and a tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from testkit.server import TINYLM

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def copy_tokenizer(folder: Path) -> None:
    """Gives a model's folder the tokenizer of the bundled model."""
    for name in TOKENIZER_FILES:
        shutil.copy(TINYLM / name, folder / name)


def write_random_model(
    folder: Path, config: Mapping[str, Any], shapes: Iterable[tuple[str, tuple[int, ...]]]
) -> Path:
    """Writes configuration, random weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        config: of the model.
        shapes: name and shape of each weight; of one axis they are ones, and biases zeros.
    """
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in shapes:
        if len(shape) == 2:
            value = torch.randn(shape, generator=random) * shape[1] ** -0.5
        else:
            value = torch.full(shape, float(not name.endswith("bias")))
        weights[name] = value.bfloat16()
    save_file(weights, folder / "model.safetensors")
    copy_tokenizer(folder)
    return folder


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch's random numbers inside follow from the seed; those behind are as without this."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def class_of_transformers(name: str) -> Any:
    """One of transformers' classes."""
    import transformers

    return getattr(transformers, name)


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
        return class_of_transformers(self.class_name)
