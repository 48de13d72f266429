"""The bundled model with output weights of its own, as SGLang's Llama needs in pipeline stages.

There the last stage has no embeddings to use for them.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from testkit.server import TINYLM

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"


def write_untied_model(folder: Path) -> Path:
    """Writes the model into a new folder, which is returned; it answers as the bundled one."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(TINYLM, folder, ignore=shutil.ignore_patterns(_WEIGHTS, _CONFIG))
    config = json.loads((TINYLM / _CONFIG).read_text())
    (folder / _CONFIG).write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(TINYLM / _WEIGHTS)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    return folder
