"""Batches that SGLang pads on a CPU: ranks that run in step bring equally many rows each.

With data parallel attention a rank that decodes fewer requests than another one is padded with
requests that nobody asked. SGLang asks the attention backend how many tokens such a request has;
``torch_native`` has no answer, and the first request would end the server.
"""

from __future__ import annotations

import sys

# As SGLang's own CPU kernels have it: one row to attend to, so that no softmax is over nothing.
NUM_TOKENS = 1


def load() -> None:
    """Gives ``torch_native`` the answer, in processes that have attention layers."""
    if "sglang.srt.managers.scheduler" not in sys.modules:
        return
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    if not hasattr(TorchNativeAttnBackend, "get_cpu_graph_seq_len_fill_value"):
        TorchNativeAttnBackend.get_cpu_graph_seq_len_fill_value = lambda _: NUM_TOKENS
