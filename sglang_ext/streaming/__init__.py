"""Fetching the coded KV of a context over a link: which chunk, at which level, or as text.

Pure: clocks, sizes and speeds are arguments, and nothing here sends or decodes a byte. The server's
remote tier and ``python -m bench stream`` drive the same code.
"""

from sglang_ext.streaming.costs import ChunkOffer, QualityScale, StreamCosts
from sglang_ext.streaming.planner import ChunkFetch, ContextStream, StreamPlan
from sglang_ext.streaming.sharing import LinkShare
from sglang_ext.streaming.throughput import LinkEstimator

__all__ = [
    "ChunkFetch",
    "ChunkOffer",
    "ContextStream",
    "LinkEstimator",
    "LinkShare",
    "QualityScale",
    "StreamCosts",
    "StreamPlan",
]
