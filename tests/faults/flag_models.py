"""Small configurations of models of each kind, for what needs no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testkit.published_model import TOKENIZER_FILES
from testkit.server import TINYLM

_LATENT = {
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    # A draft layer behind the model's own, with experts as it always has.
    "num_nextn_predict_layers": 1, "first_k_dense_replace": 8, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "moe_layer_freq": 1,
    # SGLang has no other rotation of rows of an index on a CPU.
    "rope_parameters": {
        "type": "yarn", "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 1024,
    },
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
}  # fmt: skip
_WINDOWS = {"sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 4}

# What differs from the bundled model's configuration.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_EXPERTS,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "sliding_window": 128,
        "query_pre_attn_scalar": 64,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_LATENT,
    },
    "deepseek-v3.2": {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", **_LATENT,
        "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4, "kv_lora_rank": 128,
        "qk_rope_head_dim": 64,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", **_WINDOWS,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "granite-windows": {
        "architectures": ["GraniteSWAForCausalLM"], "model_type": "granite_swa", **_WINDOWS,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", **_EXPERTS,
        "full_attention_interval": 4,
    },
    "nemotron-h": {
        "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h",
        "hybrid_override_pattern": "M*" * 4, "n_groups": 8, "mamba_num_heads": 16,
        "mamba_head_dim": 16, "ssm_state_size": 16, "chunk_size": 64, "conv_kernel": 4,
    },
    "lfm2": {
        "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2",
        "layer_types": ["conv", "full_attention"] * 4,
    },
    "whisper": {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper",
    },
}  # fmt: skip

# The kinds that are served; drawn more often, as others are refused whatever their arguments are.
SERVED = (
    *("llama", "qwen3", "qwen3-moe", "gemma3", "deepseek-v3", "deepseek-v3.2"),
    *("gpt-oss", "qwen3-next", "nemotron-h"),
)

# States have a pool of their own, as large as SGLang makes it of a device's memory, or is told.
ARGUMENTS = {name: ["--max-mamba-cache-size", "24"] for name in ("qwen3-next", "nemotron-h")}


def model_folder(folder: Path, changes: dict[str, Any]) -> Path:
    """Makes a folder with the configuration of a model and a tokenizer, and no weights.

    Args:
        folder: made here.
        changes: what differs from the bundled model's configuration.
    """
    folder.mkdir()
    for file in TOKENIZER_FILES:
        (folder / file).symlink_to(TINYLM / file)
    config = json.loads((TINYLM / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder
