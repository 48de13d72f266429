"""What SGLang admits with backends of certain names only: Gemma 4, trees of drafts."""

from __future__ import annotations

from typing import Any

# One that SGLang admits for all of these.
_ADMITTED = "triton"


def admit(name: str) -> None:
    """Lets a backend pass where SGLang looks at its name; what is chosen stays as it is.

    Args:
        name: of the backend.
    """
    _admit_trees(name)
    from sglang.srt.arg_groups import model_hook

    found = model_hook.attention_backends_of
    if getattr(found, "admits", "") == name:
        return

    def backends_of(view: Any) -> tuple[Any, ...]:
        return tuple(_ADMITTED if each == name else each for each in found(view))

    setattr(backends_of, "admits", name)  # noqa: B010
    setattr(model_hook, "attention_backends_of", backends_of)  # noqa: B010


def _admit_trees(name: str) -> None:
    """As `admit`, where SGLang looks for attention to trees of drafts in pages of many tokens."""
    from sglang.srt.arg_groups import speculative_hook

    found = speculative_hook.resolved_view
    if getattr(found, "admits", "") == name:
        return

    def view_of(server_args: Any) -> Any:
        view = found(server_args)
        if view.attention_backend != name:
            return view
        overlay = {**view._overlay, "attention_backend": _ADMITTED}
        return type(view)(server_args, overlay=overlay)

    setattr(view_of, "admits", name)  # noqa: B010
    setattr(speculative_hook, "resolved_view", view_of)  # noqa: B010
