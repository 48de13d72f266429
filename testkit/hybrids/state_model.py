"""Small models with a state a sequence and random weights, in the format of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from testkit.hybrids.k3_model import add_processor, k3_class, k3_config
from testkit.published_model import PublishedModel, copy_tokenizer, seeded

CHUNK = 64
_KIMI_LAYERS = {"M": "linear_attention", "*": "full_attention"}
# What all of them have; random weights so large that answers depend on every token.
COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "initializer_range": 0.1,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class StateModel(PublishedModel):
    """An architecture, and what SGLang keeps of it.

    Attributes:
        page_values: of K and V of a page of 64 tokens.
        conv_values: of a state, the inputs of convolutions.
        matrix_values: of a state, a matrix a head; in float32.
        grid: tokens; SGLang keeps states at multiples of it, with 64 tokens a page.
        dtype_name: of all but matrices.
        gate_bias: of what a token leaves of a state, beside what its gate says.
        gate_scales: the logarithm of its factor lies between them; states last for 100s of tokens.
        own_class: finds the class that computes it, where transformers has none.
        server_args: that SGLang needs for it.
    """

    page_values: int
    conv_values: int
    matrix_values: int
    grid: int = 64
    dtype_name: str = "float32"
    gate_bias: float = 1.0
    gate_scales: tuple[float, float] = (-7.0, -1.0)
    own_class: Callable[[], Any] | None = None
    server_args: tuple[str, ...] = ()

    def model_class(self) -> Any:
        """The class that computes it without SGLang."""
        return self.own_class() if self.own_class is not None else super().model_class()

    @property
    def page_bytes(self) -> int:
        """K and V of a page."""
        return self.page_values * self._value_bytes

    @property
    def state_bytes(self) -> int:
        """A state, in all layers that have one."""
        return self.conv_values * self._value_bytes + 4 * self.matrix_values

    @property
    def _value_bytes(self) -> int:
        return 4 if self.dtype_name == "float32" else 2


def _granite() -> Any:
    """Granite 4 without experts: Mamba2 and full attention in turn, no rotary embedding."""
    from transformers import GraniteMoeHybridConfig

    pattern = "MM*MM*M"
    return GraniteMoeHybridConfig(
        **COMMON,
        intermediate_size=256,
        shared_intermediate_size=256,
        num_local_experts=0,
        num_experts_per_tok=0,
        num_hidden_layers=len(pattern),
        layer_types=["mamba" if kind == "M" else "attention" for kind in pattern],
        num_key_value_heads=2,
        attention_multiplier=32**-0.5,
        position_embedding_type=None,
        mamba_n_heads=8,
        mamba_d_head=32,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=CHUNK,
        tie_word_embeddings=True,
    )


def _qwen3_next() -> Any:
    """Qwen3-Next: gated delta rule and gated attention 3:1, rotation of a quarter of a head.

    Each token takes all experts: two computations that differ by rounding choose the same.
    """
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        **COMMON,
        intermediate_size=256,
        num_hidden_layers=8,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 2,
        full_attention_interval=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_experts=2,
        num_experts_per_tok=2,
    )


def _qwen3_5(num_blocks: int = 1) -> Any:
    """Qwen3.5 without images: as Qwen3-Next, but dense, with projections of their own."""
    from transformers import Qwen3_5TextConfig

    return Qwen3_5TextConfig(
        **COMMON,
        intermediate_size=256,
        num_hidden_layers=4 * num_blocks,
        layer_types=(["linear_attention"] * 3 + ["full_attention"]) * num_blocks,
        full_attention_interval=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        partial_rotary_factor=0.25,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.25,
            "mrope_section": [4, 2, 2],
            "mrope_interleaved": True,
        },
    )


def _nemotron_h() -> Any:
    """Nemotron-H: a layer is Mamba2, attention without rotation, or an MLP."""
    from transformers import NemotronHConfig

    return NemotronHConfig(
        **COMMON,
        hybrid_override_pattern="M-M*-MM-*M",
        intermediate_size=256,
        num_key_value_heads=2,
        head_dim=32,
        mamba_num_heads=16,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=8,
        chunk_size=2 * CHUNK,
        time_step_min=1e-12,  # transformers bounds steps by it, SGLang does not
        rescale_prenorm_residual=False,
    )


def _falcon_h1() -> Any:
    """Falcon-H1: Mamba2 and attention, which rotates, side by side in each layer."""
    from transformers import FalconH1Config

    return FalconH1Config(
        **COMMON,
        intermediate_size=256,
        num_hidden_layers=4,
        num_key_value_heads=1,
        head_dim=32,
        mamba_d_ssm=192,
        mamba_n_heads=6,
        mamba_d_state=32,
        mamba_n_groups=1,
        mamba_chunk_size=CHUNK,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
    )


def _kimi_linear() -> Any:
    """Kimi Linear: KDA and latent rows (MLA) without rotation 3:1, experts behind the first layer.

    Each token takes all experts: two computations that differ by rounding choose the same.
    """
    from transformers import KimiLinearConfig

    pattern = "MMM*MMM*"
    return KimiLinearConfig(
        **COMMON,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=len(pattern),
        layer_types=[_KIMI_LAYERS[kind] for kind in pattern],
        num_key_value_heads=4,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        linear_num_heads=4,
        linear_head_dim=32,
        num_experts=2,
        num_experts_per_token=2,
        num_shared_experts=1,
        routed_scaling_factor=1.0,
    )


STATE_MODELS = {
    "granite": StateModel(
        _granite, "GraniteMoeHybridForCausalLM",
        page_values=2 * 2 * 64 * 2 * 32,
        conv_values=5 * 3 * (8 * 32 + 2 * 32), matrix_values=5 * 8 * 32 * 32,
    ),
    "qwen3_next": StateModel(
        _qwen3_next, "Qwen3NextForCausalLM",
        page_values=2 * 2 * 64 * 2 * 32,
        conv_values=6 * 3 * (2 * 2 * 32 + 8 * 16), matrix_values=6 * 8 * 16 * 32,
    ),
    "qwen3_5": StateModel(
        _qwen3_5, "Qwen3_5ForCausalLM",
        page_values=1 * 2 * 64 * 2 * 64,
        conv_values=3 * 3 * (3 * 4 * 32), matrix_values=3 * 4 * 32 * 32,
    ),
    "nemotron_h": StateModel(
        _nemotron_h, "NemotronHForCausalLM",
        page_values=2 * 2 * 64 * 2 * 32,
        conv_values=5 * 3 * (16 * 16 + 2 * 8 * 16), matrix_values=5 * 16 * 16 * 16,
        grid=2 * CHUNK,
    ),
    "falcon_h1": StateModel(
        _falcon_h1, "FalconH1ForCausalLM",
        page_values=4 * 2 * 64 * 1 * 32,
        conv_values=4 * 3 * (6 * 32 + 2 * 32), matrix_values=4 * 6 * 32 * 32,
        dtype_name="bfloat16",
    ),
    "kimi_linear": StateModel(
        _kimi_linear, "KimiLinearForCausalLM",
        page_values=2 * 64 * (64 + 16),
        conv_values=6 * 3 * (3 * 4 * 32), matrix_values=6 * 4 * 32 * 32,
    ),
    "kimi_k3": StateModel(
        partial(k3_config, COMMON), "KimiK3ForConditionalGeneration",
        page_values=2 * 64 * (64 + 16),
        conv_values=6 * 3 * (3 * 4 * 32), matrix_values=6 * 4 * 32 * 32,
        gate_bias=-6.0, gate_scales=(-0.3, 0.2), own_class=k3_class,
        server_args=("--trust-remote-code",),
    ),
}  # fmt: skip


_QWEN = STATE_MODELS["qwen3_5"]
# With a layer of each kind in both of two stages.
DEEP_QWEN = replace(
    _QWEN, make_config=partial(_qwen3_5, 2), page_values=2 * _QWEN.page_values,
    conv_values=2 * _QWEN.conv_values, matrix_values=2 * _QWEN.matrix_values,
)  # fmt: skip


def write_state_model(folder: Path, name: str = "granite", *, seed: int = 0) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it.

    Args:
        folder: made here.
        name: of `STATE_MODELS`.
        seed: of the weights.
    """
    return write_model(folder, STATE_MODELS[name], seed=seed)


def write_model(folder: Path, kind: StateModel, *, seed: int = 0) -> Path:
    """As `write_state_model`, of a kind that need not be among `STATE_MODELS`."""
    import torch

    config = kind.make_config()
    config.dtype = getattr(torch, kind.dtype_name)
    # torch's generator is everybody's; the weights should not depend on what ran before.
    with seeded(seed):
        model = kind.model_class()(config)
        with torch.no_grad():
            for parameter, values in model.named_parameters():
                if parameter.endswith(".dt_bias"):
                    values.fill_(kind.gate_bias)
                if parameter.endswith(".A_log"):
                    values.uniform_(*kind.gate_scales)
    model.to(config.dtype).save_pretrained(folder)
    publish(folder)
    copy_tokenizer(folder)
    if config.model_type == "kimi_k3":
        add_processor(folder)
    return folder


def publish(folder: Path) -> None:
    """Gives a folder that transformers wrote the published names, where SGLang reads no others."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    if config["model_type"] == "nemotron_h":
        letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
        layers = config.pop("layers_block_type")
        config["hybrid_override_pattern"] = "".join(letters[layer] for layer in layers)
    elif config["model_type"] == "kimi_linear":
        _publish_kimi_linear(folder, config)
    path.write_text(json.dumps(config, indent=2))


def _publish_kimi_linear(folder: Path, config: dict[str, Any]) -> None:
    """Layers are numbered from one, and those in front have no experts."""
    from safetensors.torch import load_file, save_file

    layers = list(enumerate(config.pop("layer_types"), 1))
    config["linear_attn_config"] = {
        "kda_layers": [number for number, kind in layers if kind == _KIMI_LAYERS["M"]],
        "full_attn_layers": [number for number, kind in layers if kind == _KIMI_LAYERS["*"]],
        "head_dim": config.pop("linear_head_dim"),
        "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }
    num_dense = config.pop("mlp_layer_types").count("dense")
    config |= {"first_k_dense_replace": num_dense, "moe_layer_freq": 1, "mla_use_nope": True}
    path = folder / "model.safetensors"
    tensors = load_file(path) if path.exists() else {}
    for layer in range(num_dense):
        prefix = f"model.layers.{layer}."
        for name in [name for name in tensors if name.startswith(f"{prefix}block_sparse_moe.")]:
            tensors[name.replace(".block_sparse_moe.", ".mlp.")] = tensors.pop(name)
    save_file(tensors, path, metadata={"format": "pt"})
