"""Hierarchical KV cache for an unmodified SGLang.

Importing this package imports neither torch nor sglang: ``sglang_ext.plugin`` does, when SGLang
loads it through its entry point.

Where to begin: docs/architecture.md has a table of what to open for which change. ``seam/`` is
what SGLang calls; ``assembly/threads.py`` lists all threads.

``sglang_ext.tiers`` and ``sglang_ext.kernels`` are symlinks to the folders ``tiers/`` and
``kernels/`` beside this one (docs/architecture.md).
"""

__version__ = "0.1.0"
