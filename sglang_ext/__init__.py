"""Hierarchical KV cache for an unmodified SGLang.

Importing this package imports neither torch nor sglang: ``sglang_ext.plugin`` does, when SGLang
loads it through its entry point.
"""

__version__ = "0.1.0"
