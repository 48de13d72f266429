"""What can be said of a model's folder where SGLang cannot be imported: is it one at all."""

from __future__ import annotations

import json
from pathlib import Path

_CONFIG = "config.json"
# What SGLang takes in its place: Mistral's own format, and models in one file.
_OTHERS = ("params.json", "*.gguf")


def folder_problem(model_path: str) -> str:
    """Why no model lies there, in a sentence; "" where one may, also one that a hub knows.

    Args:
        model_path: as `--model-path` has it.
    """
    path = Path(model_path)
    said = f"--model-path must be a model's folder, or its name on a hub, got {model_path}: "
    if path.is_file() and path.suffix == ".gguf":
        return ""
    if not path.is_dir():
        # A hub's names are NAME or OWNER/NAME.
        is_name = len(path.parts) <= 2 and not model_path.startswith((".", "/", "~"))
        if is_name and not path.exists():
            return ""
        return f"{said}there is no such folder; correct the path."
    file = path / _CONFIG
    if not file.exists() and any(next(path.glob(each), None) for each in _OTHERS):
        return ""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return f"{said}its {_CONFIG} cannot be read ({reason}); give the folder that holds it."
    if not isinstance(config, dict) or not config.get("model_type"):
        return f"{said}its {_CONFIG} names no model_type; give the folder of a model."
    return ""
