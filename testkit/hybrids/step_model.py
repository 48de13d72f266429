"""A small Step 3.5 with random weights: window layers with more query heads than full ones.

As published, but for sizes and experts: one layer in four is full, full layers rotate half of a
head and scale its frequencies, heads have gates, and the lists of what layers are go on behind the
last one, with layers that draft. K and V are of one shape in all layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from testkit.published_model import class_of_transformers, write_random_model

# SGLang's layers see so many tokens before their own; transformers' count their own among them.
WINDOW = 128
PATTERN = "fsssfss"
NUM_FULL_LAYERS = PATTERN.count("f")
KV_HEADS, HEAD_DIM = 2, 32
_HIDDEN, _INNER, _VOCAB, _DRAFTS = 128, 256, 4096, "sss"
_QUERY_HEADS = {"f": 4, "s": 6}
_NAMES = {"s": "sliding_attention", "f": "full_attention"}
_LISTED = PATTERN + _DRAFTS
STEP_CONFIG: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"], "model_type": "step3p5", "torch_dtype": "bfloat16",
    "hidden_size": _HIDDEN, "intermediate_size": _INNER, "vocab_size": _VOCAB,
    "num_hidden_layers": len(PATTERN), "num_nextn_predict_layers": len(_DRAFTS),
    "layer_types": [_NAMES[kind] for kind in _LISTED], "sliding_window": WINDOW,
    "num_attention_heads": _QUERY_HEADS["f"], "num_attention_groups": KV_HEADS,
    "head_dim": HEAD_DIM, "use_head_wise_attn_gate": True,
    "attention_other_setting": {
        "attention_type": _NAMES["s"], "num_attention_heads": _QUERY_HEADS["s"],
        "num_attention_groups": KV_HEADS, "head_dim": HEAD_DIM,
    },
    "rope_theta": [{"f": 5e6, "s": 1e4}[kind] for kind in _LISTED],
    "partial_rotary_factors": [{"f": 0.5, "s": 1.0}[kind] for kind in _LISTED],
    "rope_scaling": {
        "rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 32.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn_only_types": [_NAMES["f"]],
    "max_position_embeddings": 2048, "max_seq_len": 2048, "rms_norm_eps": 1e-5,
    # No layer has experts.
    "moe_layers_enum": str(len(_LISTED)), "moe_num_experts": 2, "moe_top_k": 1,
    "moe_intermediate_size": 64, "share_expert_dim": 64, "moe_router_scaling_factor": 1.0,
    "use_moe_router_bias": True, "need_fp32_gate": True,
    "swiglu_limits": [0.0] * len(_LISTED), "swiglu_limits_shared": [0.0] * len(_LISTED),
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip

# As with the published weights; of transformers' own class SGLang cannot read what differs by
# layer. It takes lists that are longer than the model only while it looks at them.
_CLASS = """
from transformers import PretrainedConfig


class Step3p5Config(PretrainedConfig):
    model_type = "step3p5"

    def __init__(
        self, num_hidden_layers=1, layer_types=None, rope_theta=1e4, rope_scaling=None, **kwargs
    ):
        self.layer_types = layer_types
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.num_hidden_layers = len(layer_types or [None])
        super().__init__(**kwargs)
        self.num_hidden_layers = num_hidden_layers
"""


def write_step_model(folder: Path) -> Path:
    """Writes configuration, weights and tokenizer into a new folder; returns it."""
    name = "configuration_step3p5"
    config = {**STEP_CONFIG, "auto_map": {"AutoConfig": f"{name}.Step3p5Config"}}
    write_random_model(folder, config, _shapes())
    (folder / f"{name}.py").write_text(_CLASS)
    return folder


class OpenStepModel:
    """The model that `write_step_model` wrote, by transformers, in float32; called as models are.

    Transformers has its text model as a part of Step 3.7.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors.torch import load_file

        make = class_of_transformers("Step3p7TextConfig")
        config = make(**{**STEP_CONFIG, "sliding_window": WINDOW + 1})
        stored = load_file(folder / "model.safetensors")
        weights = {name: value.float() for name, value in stored.items()}
        self._head = weights.pop("lm_head.weight")
        self._model = class_of_transformers("Step3p7TextModel")(config).eval()
        self._model.load_state_dict(
            {name.removeprefix("model."): value for name, value in weights.items()}
        )

    def __call__(self, input_ids: Any) -> Any:
        """The answer of a model of transformers, of which `logits` are filled."""
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self._model(input_ids=input_ids, use_cache=False).last_hidden_state
        return CausalLMOutput(logits=hidden @ self._head.T)


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", (_VOCAB, _HIDDEN)
    yield "model.norm.weight", (_HIDDEN,)
    for layer, kind in enumerate(PATTERN):
        prefix = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (_HIDDEN,)
        queries = _QUERY_HEADS[kind]
        attention = f"{prefix}.self_attn"
        for name in ("q_norm", "k_norm"):
            yield f"{attention}.{name}.weight", (HEAD_DIM,)
        yield f"{attention}.q_proj.weight", (queries * HEAD_DIM, _HIDDEN)
        yield f"{attention}.k_proj.weight", (KV_HEADS * HEAD_DIM, _HIDDEN)
        yield f"{attention}.v_proj.weight", (KV_HEADS * HEAD_DIM, _HIDDEN)
        yield f"{attention}.g_proj.weight", (queries, _HIDDEN)
        yield f"{attention}.o_proj.weight", (_HIDDEN, queries * HEAD_DIM)
        for name, shape in (
            ("gate_proj", (_INNER, _HIDDEN)),
            ("up_proj", (_INNER, _HIDDEN)),
            ("down_proj", (_HIDDEN, _INNER)),
        ):
            yield f"{prefix}.mlp.{name}.weight", shape
