"""What the plugin asks SGLang's scheduler of its model, where that is given text alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar


class OfTextModel:
    """A scheduler, or a world in its place, of a model without images."""

    waiting_queue: Any = ()
    server_args: ClassVar[Any] = SimpleNamespace()
    model_config: ClassVar[Any] = SimpleNamespace(is_multimodal=False)
