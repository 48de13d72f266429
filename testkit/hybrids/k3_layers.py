"""Kimi K3 in plain torch, as SGLang and its checkpoints have it; transformers has no such model.

Kimi Linear with a residual stream that is mixed from snapshots of itself, gates of KDA with a
bound, experts in a space of their own, and gates of attention. What is computed of a token depends
on it and on those before it alone. Names of weights are the published ones.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as everybody names it
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.kimi_linear.modeling_kimi_linear import (
    causal_conv1d_fn,
    chunk_kimi_delta_attention,
)

GATE_EPS = 1e-5  # of the norm behind KDA, whatever the configuration says


class KimiK3Config(PretrainedConfig):  # type: ignore[misc]  # of no types
    """Text and images, each a dictionary."""

    model_type = "kimi_k3"


def linear(num_in: int, num_out: int) -> nn.Linear:
    """As all of the model's: without a bias."""
    return nn.Linear(num_in, num_out, bias=False)


class Mix(nn.Module):
    """What a layer reads of the stream: its head and the snapshots, weighted for each token."""

    def __init__(self, owner: nn.Module, name: str, size: int, eps: float) -> None:
        super().__init__()
        # Published beside the layer's others.
        norm, proj = nn.RMSNorm(size, eps=eps), linear(size, 1)
        owner.add_module(f"{name}_norm", norm)
        owner.add_module(f"{name}_proj", proj)
        self._parts = (norm, proj)

    def forward(self, head: torch.Tensor, snapshots: list[torch.Tensor]) -> torch.Tensor:
        """`[T, D]` of a head and snapshots `[T, D]`."""
        if not snapshots:
            return head
        norm, proj = self._parts
        rows = torch.stack([*snapshots, head], 1)
        mixed: torch.Tensor = (proj(norm(rows)).softmax(1) * rows).sum(1)
        return mixed


class Mlp(nn.Module):
    """Dense layers, and experts that all tokens take."""

    def __init__(self, text: dict[str, Any], size: int) -> None:
        super().__init__()
        self._text = text
        self.gate_proj = linear(text["hidden_size"], size)
        self.up_proj = linear(text["hidden_size"], size)
        self.down_proj = linear(size, text["hidden_size"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, D]`."""
        found: torch.Tensor = self.down_proj(situ(self._text, self.gate_proj(x), self.up_proj(x)))
        return found


def situ(text: dict[str, Any], gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """SiLU of which both factors are bounded."""
    beta, bound = text["activation_situ_beta"], text["activation_situ_linear_beta"]
    left: torch.Tensor = beta * (gate / beta).tanh() * gate.sigmoid()
    right: torch.Tensor = bound * (up / bound).tanh()
    return left * right


class Expert(nn.Module):
    """One expert, in the experts' space."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        outer, inner = text["routed_expert_hidden_size"], text["moe_intermediate_size"]
        self._text = text
        self.w1, self.w3, self.w2 = linear(outer, inner), linear(outer, inner), linear(inner, outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, D]`."""
        found: torch.Tensor = self.w2(situ(self._text, self.w1(x), self.w3(x)))
        return found


class Experts(nn.Module):
    """Experts of which each token takes all, and their router."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        size, space = text["hidden_size"], text["routed_expert_hidden_size"]
        self.gate = linear(size, text["num_experts"])
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(text["num_experts"]))
        self.experts = nn.ModuleList(Expert(text) for _ in range(text["num_experts"]))
        self.shared_experts = Mlp(text, text["moe_intermediate_size"] * text["num_shared_experts"])
        self.routed_expert_down_proj = linear(size, space)
        self.routed_expert_norm = nn.RMSNorm(space, eps=text["rms_norm_eps"])
        self.routed_expert_up_proj = linear(space, size)
        self._scale = text["routed_scaling_factor"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, D]`."""
        weights = self.gate(x).sigmoid()
        weights = self._scale * weights / weights.sum(-1, keepdim=True)
        inner = self.routed_expert_down_proj(x)
        found = torch.stack([expert(inner) for expert in self.experts], -1)
        routed = self.routed_expert_norm((found * weights.unsqueeze(1)).sum(-1))
        out: torch.Tensor = self.routed_expert_up_proj(routed) + self.shared_experts(x)
        return out


class DeltaAttention(nn.Module):
    """KDA with a bound for what a token leaves of a state, and a gate of full rank."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        size, kind = text["hidden_size"], text["linear_attn_config"]
        self._heads, self._dim, self._bound = (
            kind[name] for name in ("num_heads", "head_dim", "gate_lower_bound")
        )
        width, taps = self._heads * self._dim, kind["short_conv_kernel_size"]
        for name in ("q", "k", "v"):
            self.add_module(f"{name}_proj", linear(size, width))
            self.add_module(
                f"{name}_conv1d", nn.Conv1d(width, width, taps, groups=width, bias=False)
            )
        self.g_proj, self.b_proj = linear(size, width), linear(size, self._heads)
        self.f_a_proj, self.f_b_proj = linear(size, self._dim), linear(self._dim, width)
        self.A_log, self.dt_bias = (nn.Parameter(torch.zeros(n)) for n in (self._heads, width))
        self.o_norm = nn.RMSNorm(self._dim, eps=GATE_EPS)
        self.o_proj = linear(width, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, D]`."""
        gates = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (self._heads, -1))
        left = self._bound * (self.A_log.exp().unsqueeze(-1) * gates).sigmoid()
        found, _ = chunk_kimi_delta_attention(
            *(self._conv(name, x) for name in ("q", "k", "v")),
            g=left.unsqueeze(0),
            beta=self.b_proj(x).sigmoid().unsqueeze(0),
            use_qk_l2norm_in_kernel=True,
        )
        gate = self.g_proj(x).view(found.shape[1:]).sigmoid()
        out: torch.Tensor = self.o_proj((self.o_norm(found[0]) * gate).flatten(1))
        return out

    def _conv(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """Queries, keys or values `[1, T, H, K]`."""
        rows = self.get_submodule(f"{name}_proj")(x).T.unsqueeze(0)
        weight = self.get_parameter(f"{name}_conv1d.weight").squeeze(1)
        found: torch.Tensor = causal_conv1d_fn(rows, weight=weight, activation="silu")
        return found[:, :, : len(x)].transpose(1, 2).reshape(1, len(x), self._heads, -1)


class LatentAttention(nn.Module):
    """MLA without a rotation, with a gate."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        size, heads, eps = text["hidden_size"], text["num_attention_heads"], text["rms_norm_eps"]
        plain, shared, value = (
            text[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        )
        query, latent = text["q_lora_rank"], text["kv_lora_rank"]
        self._heads, self._plain, self._latent = heads, plain, latent
        self.q_a_proj, self.q_b_proj = linear(size, query), linear(query, heads * (plain + shared))
        self.q_a_layernorm = nn.RMSNorm(query, eps=eps)
        self.kv_a_proj_with_mqa = linear(size, latent + shared)
        self.kv_a_layernorm = nn.RMSNorm(latent, eps=eps)
        self.kv_b_proj = linear(latent, heads * (plain + value))
        self.g_proj, self.o_proj = linear(size, heads * value), linear(heads * value, size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[T, D]`."""
        queries = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        latent, shared = self.kv_a_proj_with_mqa(x).tensor_split([self._latent], -1)
        rows = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self._heads, -1))
        keys, values = rows.tensor_split([self._plain], -1)
        keys = torch.cat([keys, shared.unsqueeze(1).expand(-1, self._heads, -1)], -1)
        heads = (queries.unflatten(-1, (self._heads, -1)), keys, values)
        q, k, v = (each.transpose(0, 1).unsqueeze(0) for each in heads)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.o_proj(
            found[0].transpose(0, 1).flatten(1) * self.g_proj(x).sigmoid()
        )
        return out


class Layer(nn.Module):
    """One layer, which may leave a snapshot of the stream for all behind it."""

    def __init__(self, text: dict[str, Any], number: int) -> None:
        super().__init__()
        size, eps = text["hidden_size"], text["rms_norm_eps"]
        is_delta = number + 1 in text["linear_attn_config"]["kda_layers"]
        self.self_attn = DeltaAttention(text) if is_delta else LatentAttention(text)
        if number < text["first_k_dense_replace"]:
            self.mlp: nn.Module = Mlp(text, text["intermediate_size"])
        else:
            self.block_sparse_moe: nn.Module = Experts(text)
        self.input_layernorm = nn.RMSNorm(size, eps=eps)
        self.post_attention_layernorm = nn.RMSNorm(size, eps=eps)
        self._mixes = [Mix(self, name, size, eps) for name in ("self_attention_res", "mlp_res")]
        self._leaves_snapshot = number % text["attn_res_block_size"] == 0

    def forward(self, head: torch.Tensor, snapshots: list[torch.Tensor]) -> torch.Tensor:
        """The head of the stream, `[T, D]`; a snapshot of the one before may be added."""
        before, behind = self._mixes
        added = self.self_attn(self.input_layernorm(before(head, snapshots)))
        if self._leaves_snapshot:
            snapshots.append(head)
            head = added
        else:
            head = head + added
        inner = self.mlp if hasattr(self, "mlp") else self.block_sparse_moe
        out: torch.Tensor = head + inner(self.post_attention_layernorm(behind(head, snapshots)))
        return out


class Text(nn.Module):
    """All layers."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        size, eps = text["hidden_size"], text["rms_norm_eps"]
        self.embed_tokens = nn.Embedding(text["vocab_size"], size)
        self.layers = nn.ModuleList(Layer(text, n) for n in range(text["num_hidden_layers"]))
        self._mix = [Mix(self, "output_attn_res", size, eps)]
        self.norm = nn.RMSNorm(size, eps=eps)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """`[T, D]` of `[T]`."""
        head = self.embed_tokens(tokens)
        snapshots: list[torch.Tensor] = []
        for layer in self.layers:
            head = layer(head, snapshots)
        found: torch.Tensor = self.norm(self._mix[0](head, snapshots))
        return found


class Language(nn.Module):
    """Text with a head."""

    def __init__(self, text: dict[str, Any]) -> None:
        super().__init__()
        self.model = Text(text)
        self.lm_head = linear(text["hidden_size"], text["vocab_size"])


def encoder_of_images(images: dict[str, Any], size: int) -> dict[str, nn.Module]:
    """Weights of the encoder and of what makes its output the text's; nothing is computed here."""
    dim, inner, heads = (images[f"vt_{name}"] for name in (
        "hidden_size", "intermediate_size", "num_attention_heads",
    ))  # fmt: skip
    assert dim % heads == 0
    block = nn.ModuleDict({
        "norm0": nn.RMSNorm(dim), "norm1": nn.RMSNorm(dim),
        "mlp": nn.ModuleDict({"fc0": linear(dim, inner), "fc1": linear(inner, dim)}),
        "wqkv": linear(dim, 3 * images["qkv_hidden_size"]),
        "wo": linear(images["qkv_hidden_size"], dim),
    })  # fmt: skip
    places = nn.Embedding(1, 1)
    side = images["init_pos_emb_height"]
    places.weight = nn.Parameter(torch.randn(side, images["init_pos_emb_width"], dim))
    side = images["patch_size"]
    patches = nn.Conv2d(3, dim, side, stride=side, bias=False)
    rows, columns = images["merge_kernel_size"]
    merged = dim * rows * columns
    return {
        "vision_tower": nn.ModuleDict({
            "patch_embed": nn.ModuleDict({"proj": patches, "pos_emb": places}),
            "encoder": nn.ModuleDict({
                "blocks": nn.ModuleList([block]), "final_layernorm": nn.RMSNorm(dim),
            }),
        }),
        "mm_projector": nn.ModuleDict({
            "proj": nn.Sequential(linear(merged, merged), nn.GELU(), linear(merged, size)),
            "post_norm": nn.RMSNorm(size),
        }),
    }  # fmt: skip


class KimiK3ForConditionalGeneration(PreTrainedModel):  # type: ignore[misc]  # of no types
    """The model; called as transformers' are, with text."""

    config_class = KimiK3Config
    base_model_prefix = "language_model"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.language_model = Language(config.text_config)
        images = encoder_of_images(config.vision_config, config.text_config["hidden_size"])
        for name, module in images.items():
            self.add_module(name, module)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """Weights so large that answers depend on every token."""
        if isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d):
            module.weight.data.normal_(0.0, self.config.text_config["initializer_range"])
        elif isinstance(module, nn.RMSNorm):
            module.weight.data.fill_(1.0)

    def forward(self, input_ids: torch.Tensor) -> Any:
        """An answer of which `logits` are filled, of `[1, T]`."""
        from transformers.modeling_outputs import CausalLMOutput

        language = self.language_model
        hidden = language.model(input_ids[0])
        return CausalLMOutput(logits=language.lm_head(hidden).unsqueeze(0))
