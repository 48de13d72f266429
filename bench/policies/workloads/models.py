"""The paper's machines and models, as the policy bench simulates them (AttentionStore, 4.1).

What the paper's text states is used as it stands: bytes of KV per token (the exact sizes behind its
rounded 0.78, 2.5, 0.31 and 0.12 MB), GPUs, batch 24, context windows, 26 GB/s between host and GPU
and less than 5 GB/s of the disks (2.4), hourly prices (4.2). Rates that it gives only through other
figures are derived here, each where it stands:

- Prefill, LLaMA-65B: 2K tokens take 360 ms on four A100 (2.4), so 5,690 tokens/s. LLaMA-70B and
  Falcon-40B on the same GPUs: in proportion to parameters, as prefill is bound by computation.
- Prefill, LLaMA-13B: 4.3.2 takes 16 prompts of 1K stored and 100 new tokens on one A100. A hidden
  load saves 61 % of the time, so computation is 39 % of load plus computation; the load is
  16 x 1,024 x 0.78 MB over 26 GB/s = 516 ms, computation hence 330 ms for 1,600 tokens: 4,850
  tokens/s for one GPU, twice that for two. (The same numbers say that 14.4 layers of read buffer
  hide the load; the paper found 15.)
- Prefill, Mistral-7B: 28K tokens take 2.5 s (4.3.8).
- Decode: the text gives no rate for the four chat models. A step reads the weights and the KV of
  its batch once, at 60 % of the A100's 2.0 TB/s per GPU: the usual bound, not a figure of the
  paper. For Mistral-7B the text implies 56 ms a step at 28K (4.3.8: 2.5 s are 41 % of a task).
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
HBM_BYTES_PER_S = 2.0e12 * 0.6
PCIE_BYTES_PER_S = 26e9
DISK_BYTES_PER_S = 5e9
GPU_BYTES = 80_000_000_000
BATCH = 24

GPU_DOLLARS_PER_H = 5.0
DRAM_DOLLARS_PER_GB_H = 0.0088
DISK_DOLLARS_PER_GB_H = 0.000082


@dataclass(frozen=True)
class Paper:
    """What the paper reports of a model (4.2, 4.3.4, 4.3.6); ratios are to recomputation.

    Attributes:
        hit_rate: with 128 GB of DRAM and 10 TB of SSD.
        hit_rate_dram: HBM and DRAM only.
        overflow_loss: points lost where truncation invalidates stored KV.
    """

    hit_rate: float
    hit_rate_dram: float
    overflow_loss: float
    ttft_saved: float
    prefill_speedup: float
    gpu_time_speedup: float
    cost_saved: float
    storage_share_of_cost: float


@dataclass(frozen=True)
class Model:
    """A model on its GPUs.

    Attributes:
        kv_bytes_per_token: K and V of all layers in fp16.
        weight_bytes: all weights in fp16.
        context_tokens: where a conversation overflows.
        prefill_tokens_per_s: of all its GPUs together.
        layers: for the read buffer, which is counted in layers.
        paper: the figures to stand beside ours; None for a model that only 4.3.8 uses.
    """

    name: str
    kv_bytes_per_token: int
    weight_bytes: int
    context_tokens: int
    num_gpus: int
    prefill_tokens_per_s: float
    layers: int
    paper: Paper | None = None

    @property
    def hbm_kv_bytes(self) -> int:
        """HBM that weights leave for KV."""
        return self.num_gpus * GPU_BYTES - self.weight_bytes

    def decode_step_s(self, context_tokens: float, batch: int = BATCH) -> float:
        """Seconds of one decode step of `batch` requests of that mean context length."""
        kv_bytes = batch * context_tokens * self.kv_bytes_per_token
        return (self.weight_bytes + kv_bytes) / (self.num_gpus * HBM_BYTES_PER_S)

    def cost_dollars(self, gpu_s: float, host_gb: float, disk_gb: float) -> float:
        """Price of `gpu_s` seconds of these GPUs with that storage beside them (4.2)."""
        storage = host_gb * DRAM_DOLLARS_PER_GB_H + disk_gb * DISK_DOLLARS_PER_GB_H
        return gpu_s / 3600 * (self.num_gpus * GPU_DOLLARS_PER_H + storage)


_PREFILL_65B = 2048 / 0.360
_COMPUTE_13B_S = 16 * 1024 * 800 * KIB / PCIE_BYTES_PER_S * 0.39 / 0.61
_PREFILL_13B = 2 * 1600 / _COMPUTE_13B_S

LLAMA_13B = Model(
    "LLaMA-13B", 800 * KIB, 26 * 10**9, 4096, 2, _PREFILL_13B, 40,
    Paper(0.86, 0.034, 0.176, 0.85, 6.8, 4.0, 0.70, 0.164),
)  # fmt: skip
LLAMA_65B = Model(
    "LLaMA-65B", 2560 * KIB, 130 * 10**9, 2048, 4, _PREFILL_65B, 80,
    Paper(0.71, 0.017, 0.415, 0.61, 2.6, 1.9, 0.43, 0.090),
)  # fmt: skip
LLAMA_70B = Model(
    "LLaMA-70B", 320 * KIB, 138 * 10**9, 4096, 4, _PREFILL_65B * 65 / 69, 80,
    Paper(0.89, 0.077, 0.181, 0.87, 7.8, 3.3, 0.66, 0.090),
)  # fmt: skip
FALCON_40B = Model(
    "Falcon-40B", 120 * KIB, 82 * 10**9, 2048, 4, _PREFILL_65B * 65 / 41, 60,
    Paper(0.90, 0.191, 0.184, 0.86, 7.2, 3.4, 0.68, 0.090),
)  # fmt: skip
CHAT_MODELS = (LLAMA_13B, LLAMA_65B, LLAMA_70B, FALCON_40B)

# 28K tokens in 2.5 s; 32 layers of 8 heads of 128 in fp16.
MISTRAL_7B = Model("Mistral-7B", 128 * KIB, 14_500_000_000, 32768, 1, 28 * KIB / 2.5, 32)
MISTRAL_DECODE_STEP_S = 2.5 * (1 / 0.41 - 1) / 64
