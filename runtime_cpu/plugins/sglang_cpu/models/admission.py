"""Models that SGLang admits with backends of certain names only (Gemma 4)."""

from __future__ import annotations

from typing import Any

# One that SGLang admits for every such model.
_ADMITTED = "triton"


def admit(name: str) -> None:
    """Lets a backend pass where SGLang looks at its name; what is chosen stays as it is.

    Args:
        name: of the backend.
    """
    from sglang.srt.arg_groups import model_hook

    found = model_hook.attention_backends_of
    if getattr(found, "admits", "") == name:
        return

    def backends_of(view: Any) -> tuple[Any, ...]:
        return tuple(_ADMITTED if each == name else each for each in found(view))

    setattr(backends_of, "admits", name)  # noqa: B010
    setattr(model_hook, "attention_backends_of", backends_of)  # noqa: B010
