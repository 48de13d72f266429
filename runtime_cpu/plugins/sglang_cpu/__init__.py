"""``--attention-backend cpu_extend``: SGLang's ``torch_native``, computing the new tokens only.

SGLang finds this package through the entry point beside it, in each of its processes.
"""

from __future__ import annotations

import sys
from typing import Any

from .context import allow_sharded_prefills
from .models.admission import admit
from .models.experts import bind_shared_expert
from .models.parts import find_parts_by_name
from .models.residuals import allow_streams, bind_residuals
from .models.rotation import rotate_in_place
from .pools.narrow import allow_narrow_pools
from .sparse.indexer import allow_sparse_models, bind_indexer
from .states import allow_snapshots, bind_kernels

NAME = "cpu_extend"


def load() -> None:
    """Offers the backend's name to the command line, and the backend where attention runs."""
    from sglang.srt.arg_groups.choices import (
        ATTENTION_BACKEND_CHOICES,
        add_attention_backend_choices,
    )

    if NAME not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([NAME])
    admit(NAME)
    find_parts_by_name()
    allow_snapshots()
    allow_sparse_models()
    # Importing the attention layers costs seconds, and only a scheduler process has them anyway.
    if "sglang.srt.managers.scheduler" in sys.modules:
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        register_attention_backend(NAME)(_create)
        allow_sharded_prefills()
        allow_streams()
        allow_narrow_pools()


def _create(runner: Any) -> Any:
    from .backend import CpuExtendAttnBackend

    if not runner.spec_algorithm.is_none():
        from .speculation import prepare_speculation

        prepare_speculation()
    bind_kernels(runner.model)
    bind_shared_expert()
    bind_residuals()
    bind_indexer(NAME)
    rotate_in_place(runner.model)
    return CpuExtendAttnBackend(runner)
