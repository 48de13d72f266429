"""Models made of other models: SGLang looks for their classes without importing all there are.

For the text model and the encoder of a Llava, and of a Mistral 3, SGLang asks transformers for the
class of every configuration that it knows, which imports 1,300 modules: 4 s of a core in each
scheduler. It goes by the classes' names, and transformers has these in a table.
"""

from __future__ import annotations

import sys
from typing import Any

_LLAVA = "sglang.srt.models.llava"
_METHOD = "_config_cls_name_to_arch_name_mapping"


def find_parts_by_name() -> None:
    """Has SGLang take the names from the table, in processes that have models."""
    llava = sys.modules.get(_LLAVA)
    owner = getattr(llava, "LlavaForConditionalGeneration", None)
    if hasattr(owner, _METHOD):  # as releases have it that were looked at
        setattr(owner, _METHOD, lambda _, auto_class: names_of(auto_class))


def names_of(auto_class: Any) -> dict[str, str | tuple[str, ...]]:
    """The names of the models' classes by those of their configurations'.

    Args:
        auto_class: of transformers, as ``AutoModel``.
    """
    mapping = auto_class._model_mapping
    models = mapping._model_mapping
    names: dict[str, str | tuple[str, ...]] = {}
    for model_type, config in mapping._config_mapping.items():
        if model_type not in models:
            continue
        # Of several types with one configuration transformers takes the last, if that has a model.
        last = mapping._reverse_config_mapping[config]
        found = models[last] if last in models else models[model_type]
        names.setdefault(config, found if isinstance(found, str) else tuple(found))
    for config, model in mapping._extra_content.items():
        names[config.__name__] = model.__name__
    return names
