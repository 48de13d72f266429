"""Which set-ups of models with an index beside their latent rows are served, and what is refused.

Rows of an index carry a rotation and are quantised, so they are kept as the engine has them: pages
are bound to their positions. Allowed is what was run. `device/pools.py` has the rows themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.lossless import lossy_codec
from sglang_ext.settings.untried import adapters_and_sessions, of_match, outside

KIND = "indexed"


def outside_index(read: Callable[[str], Any], config: HierKVConfig) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with an index.

    Args:
        read: an argument's value by its name.
        config: the plugin's settings.
    """
    rows = (
        ("--pp-size 1", read("pp_size") or 1),
        ("--dp-size 1", read("dp_size") or 1),
        *adapters_and_sessions(read),
        of_match(read, config, KIND),
        ("--hier-kv-tree-core python", config.tree_core),
        ("a --hier-kv-codec that loses nothing", lossy_codec(config)),
    )
    yield from outside(rows, "with rows of an index beside latent ones")
