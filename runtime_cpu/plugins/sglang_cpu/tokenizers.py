"""A tokenizer of the class that its folder names: it is loaded once, not three times.

Of a tokenizer that transformers loads as a ``TokenizersBackend`` SGLang wants a better class. It
loads it again, and then as the class that ``tokenizer_config.json`` names. Where that is
``TokenizersBackend``, as the bundled model's, the third is what the first was. Three processes of a
server do so, for a sixth of what a start takes of a core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

_MODULE = "sglang.srt.utils.hf_transformers.tokenizer"


def load() -> None:
    """Has SGLang keep the first one, in processes that load tokenizers."""
    module: Any = sys.modules.get(_MODULE)
    load_first = getattr(module, "_auto_tokenizer_from_pretrained", None)
    load_again = getattr(module, "_resolve_tokenizers_backend", None)
    if load_first is None or load_again is None or load_again.__module__ == __name__:
        return
    loaded: dict[str, Any] = {}

    def first(name: Any, *args: Any, **kwargs: Any) -> Any:
        loaded[str(name)] = found = load_first(name, *args, **kwargs)
        return found

    def again(name: Any, *args: Any, **kwargs: Any) -> Any:
        found = loaded.pop(str(name), None)
        if found is not None and is_as_declared(found, Path(name)):
            return found
        return load_again(name, *args, **kwargs)

    module._auto_tokenizer_from_pretrained = first
    module._resolve_tokenizers_backend = again


def is_as_declared(tokenizer: Any, folder: Path) -> bool:
    """Whether it is of the class that the folder's configuration names."""
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(config.get("tokenizer_class") == type(tokenizer).__name__)
