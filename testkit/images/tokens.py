"""Tokens that a small model with images has beside those of the bundled tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path


def add_tokens(folder: Path, special: Mapping[str, int]) -> None:
    """Adds tokens to the tokenizer in a model's folder, and one for padding.

    Args:
        folder: has the bundled tokenizer.
        special: number of each by its text, behind the bundled vocabulary.
    """
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer["added_tokens"] += [
        {"id": number, "content": text, **plain, "special": True}
        for text, number in special.items()
    ]
    path.write_text(json.dumps(tokenizer))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pad_token": "</s>"}))
