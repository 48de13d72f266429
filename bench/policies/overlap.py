"""Layer-wise loading beside prefill, layer by layer (AttentionStore 3.2.1, 4.3.1, 4.3.2).

Loads go one after the other, and so does computation; a layer is computed when its load and the
layer before are done. A read buffer of k layers has been filled with the first k while the job
before ran. What the formula S_buf = B (T_load L_hist - T_pref L_new) promises is checked against
this: with a buffer of that many layers no load is waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bench.core.case import CaseFailedError
from bench.core.output import Table
from bench.policies.workloads.models import LLAMA_13B, PCIE_BYTES_PER_S, Model

BUFFERS = (0, 5, 10, 15)
RATIOS = ((500, 500), (600, 400), (700, 300), (800, 200), (900, 100))
# 4.3.2: what is saved of the time without layer-wise loading, by layers of buffer.
PAPER_SAVED = {0: 0.35, 15: 0.61}


@dataclass(frozen=True)
class Prefill:
    """One batched prefill of new tokens behind stored ones.

    Attributes:
        load_s: bytes of the stored tokens' KV over the host link.
        compute_s: of the new tokens.
    """

    load_s: float
    compute_s: float
    layers: int

    def in_sequence_s(self) -> float:
        """All loads first, then computation: the paper's NO-PL."""
        return self.load_s + self.compute_s

    def overlapped_s(self, buffer_layers: int) -> float:
        """With layer-wise loading and a read buffer of that many layers."""
        load, compute = self.load_s / self.layers, self.compute_s / self.layers
        done = 0.0
        for layer in range(self.layers):
            loaded = max(layer + 1 - buffer_layers, 0) * load
            done = max(done, loaded) + compute
        return done

    def buffer_layers(self) -> int:
        """Layers of read buffer by the paper's formula, rounded up."""
        if self.load_s <= self.compute_s:
            return 1 if self.load_s else 0  # the first layer has nothing to hide behind
        share = (self.load_s - self.compute_s) / self.load_s
        return min(math.ceil(self.layers * share - 1e-9) + 1, self.layers)


def prefill(model: Model, history: int, new: int, *, gpus: int, batch: int) -> Prefill:
    """A prefill of `batch` prompts on `gpus` of the model's GPUs.

    The paper's host link is 26 GB/s for the machine, so more GPUs do not load faster.
    """
    load_s = batch * history * model.kv_bytes_per_token / PCIE_BYTES_PER_S
    rate = model.prefill_tokens_per_s * gpus / model.num_gpus
    return Prefill(load_s, batch * new / rate, model.layers)


def measure_read_buffer() -> tuple[dict[str, Any], Table]:
    """4.3.2: 16 prompts of 1K stored and 100 new tokens, LLaMA-13B on one GPU, by read buffer.

    Raises:
        CaseFailedError: a buffer of the formula's size leaves a load visible.
    """
    one = prefill(LLAMA_13B, 1024, 100, gpus=1, batch=16)
    needed = one.buffer_layers()
    if not math.isclose(one.overlapped_s(needed), one.compute_s):
        raise CaseFailedError(f"a read buffer of {needed} layers does not hide the load")
    points = [_buffer_point(one, layers) for layers in (*BUFFERS, needed)]
    table = Table(
        "4.3.2 read buffer: LLaMA-13B, 16 prompts of 1K stored and 100 new tokens, one GPU",
        ("buffer, layers", "prefill ms", "saved", "paper"),
        [("none, in sequence", one.in_sequence_s() * 1e3, 0.0, 0.0)],
    )
    for point in points:
        row = (str(point["layers"]), point["prefill_ms"], point["saved"], point["paper_saved"])
        table.rows.append(row)
    return {"points": points, "formula_layers": needed}, table


def _buffer_point(one: Prefill, layers: int) -> dict[str, Any]:
    total = one.overlapped_s(layers)
    return {
        "layers": layers,
        "prefill_ms": total * 1e3,
        "saved": 1 - total / one.in_sequence_s(),
        "paper_saved": PAPER_SAVED.get(layers),
    }


def measure_ratios() -> tuple[list[dict[str, Any]], Table]:
    """4.3.1: 16 prompts of 1K tokens, LLaMA-13B on one GPU, by share of stored tokens."""
    points = []
    table = Table(
        "4.3.1 stored / new tokens of 16 prompts of 1K: prefill ms, LLaMA-13B, one GPU",
        ("stored / new", "recompute", "in sequence", "layer-wise", "with read buffer", "speedup"),
    )
    for stored, new in RATIOS:
        one = prefill(LLAMA_13B, stored, new, gpus=1, batch=16)
        whole = prefill(LLAMA_13B, 0, stored + new, gpus=1, batch=16).compute_s
        point = {
            "stored": stored,
            "new": new,
            "recompute_ms": whole * 1e3,
            "in_sequence_ms": one.in_sequence_s() * 1e3,
            "layer_wise_ms": one.overlapped_s(0) * 1e3,
            "buffered_ms": one.overlapped_s(one.buffer_layers()) * 1e3,
        }
        points.append(point)
        times = [point[name] for name in point if name.endswith("_ms")]
        table.rows.append((f"{stored} / {new}", *times, times[0] / times[-1]))
    return points, table
