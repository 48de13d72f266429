"""Which kind of model SGLang will build, by the functions it chooses its pools with itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sglang_ext.settings.ranks.stages import STAGED_HYBRIDS

# Of those for which SGLang keeps states of pages; their states are a convolution's and a
# recurrence's, in every layer that has one.
_STATE_ARCHITECTURES = (
    "GraniteMoeHybridForCausalLM",
    "NemotronHForCausalLM",
    "FalconH1ForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)

# The same, with latent rows in the layers that have no state.
_LATENT_STATE_ARCHITECTURES = ("KimiLinearForCausalLM", "KimiK3ForConditionalGeneration")

# Those of which SGLang keeps states with pages of one token only.
_WITHOUT_SNAPSHOTS = (
    "Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM",
    "Lfm2VlForConditionalGeneration",
    "JetNemotronForCausalLM",
    "JetVLMForConditionalGeneration",
    "ZayaForCausalLM",
)


# Step 3.5 with images, of which no configuration could be tried.
_UNTRIED_WINDOWS = ("Step3p7ForConditionalGeneration",)

# Those with an index of one row a token beside latent rows.
_INDEXED = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")

# Those with K and V of other shapes in window layers than in full ones.
_ARCHITECTURES_OF_TWO_SHAPES = (
    "Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "MiMoV2ForCausalLM",
    "MiMoV2FlashForCausalLM",
)


def model_kind(model_config: Any) -> str:
    """The kind of a model, a key of ``settings.model_kinds.MODEL_KINDS``.

    Args:
        model_config: SGLang's ``ModelConfig``; no weights are needed.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import (
        AttentionArch,
        is_deepseek_dsa,
        is_deepseek_v4,
        is_minimax_sparse,
    )

    hf_config = model_config.hf_config
    if mambaish_config(model_config) is not None:
        return "no tree" if _has_no_tree(model_config) else _state_kind(model_config)
    if is_deepseek_v4(hf_config) or is_minimax_sparse(hf_config):
        return "sparse"
    if is_deepseek_dsa(hf_config):
        return _index_kind(model_config)
    if model_config.is_hybrid_swa:
        return _window_kind(model_config)
    if model_config.is_encoder_decoder:
        return "encoder-decoder"
    if _has_no_tree(model_config):
        return "no tree"
    # SGLang's word for models whose window layers have heads or sizes of their own; with
    # --disable-hybrid-swa-memory these layers write rows that its pool is not made for.
    if model_config.is_hybrid_swa_compress:
        return "two shapes in one pool"
    return "mla" if model_config.attention_arch == AttentionArch.MLA else "mha"


def rows_of(model_config: Any, kv_cache_dtype: str, *, drafts: bool = False) -> str:
    """What SGLang keeps of a token in a full layer, in words; "" where it may be either.

    As `device/pools.py` finds it when the pool is built. Of a draft model, too, whose architecture
    has a name of its own.

    Args:
        model_config: SGLang's ``ModelConfig``.
        kv_cache_dtype: of the pool, as SGLang resolved it.
        drafts: it is a draft model, of which all layers have to be full ones.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch, is_deepseek_dsa

    if mambaish_config(model_config) is not None:
        return "layers with a state a sequence" if drafts else ""
    if drafts and model_config.is_hybrid_swa:
        return "window layers with a pool of their own"
    is_latent = model_config.attention_arch == AttentionArch.MLA
    if is_latent and is_deepseek_dsa(model_config.hf_config):
        rows = "latent rows with an index"
    else:
        rows = "latent rows" if is_latent else "K and V of every head"
    if kv_cache_dtype != "auto":
        return f"{rows} in {kv_cache_dtype}"
    # Of a quantized checkpoint the weights' configuration says what "auto" is.
    return rows if model_config.quantization else f"{rows} in {model_config.dtype}"


def hybrid_stages(model_config: Any, num_stages: int) -> Iterator[tuple[int, int]]:
    """Of each pipeline stage of a hybrid how many layers have full attention, and how many not.

    Of a model that is no hybrid, or is not served in stages, nothing.

    Args:
        model_config: SGLang's ``ModelConfig``.
        num_stages: how many stages there are.

    Raises:
        ValueError: SGLang cannot spread the layers so (``SGLANG_PP_LAYER_PARTITION``).
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.distributed.utils import get_pp_indices

    if model_config.hf_config.architectures[0] not in STAGED_HYBRIDS:
        return
    states = mambaish_config(model_config)
    if states is None and not model_config.is_hybrid_swa:  # all layers' KV is in one pool
        return
    if states is None:
        full, others = model_config.full_attention_layer_ids, model_config.swa_attention_layer_ids
    elif hasattr(states, "linear_layer_ids"):
        full, others = states.full_attention_layer_ids, states.linear_layer_ids
    else:
        full, others = states.full_attention_layer_ids, states.mamba_layer_ids
    num_layers = model_config.hf_text_config.num_hidden_layers
    for stage in range(num_stages):
        layers = range(*get_pp_indices(num_layers, stage, num_stages))
        num_full, num_others = (sum(layer in layers for layer in ids) for ids in (full, others))
        yield num_full, num_others


def kind_of_folder(model_path: str) -> str:
    """The kind of a model that lies in a folder, or whose name a hub knows; reads no weights.

    Imports much of SGLang, for seconds, and runs no code of the model's own.

    Raises:
        ImportError: SGLang cannot be imported here.
        Exception: whatever SGLang raises of what is no model that it knows.
    """
    from sglang.srt.configs.model_config import ModelConfig

    # SGLang's own default here is to run it.
    return model_kind(ModelConfig(model_path, trust_remote_code=False))


def _has_no_tree(model_config: Any) -> bool:
    """Whether SGLang disables its radix cache for a model."""
    if not model_config.is_multimodal:
        return False
    from sglang.srt.configs.model_config import ModelImpl

    # Imports every model that SGLang has, for seconds.
    from sglang.srt.model_loader.utils import get_resolved_model_impl

    return bool(get_resolved_model_impl(model_config) == ModelImpl.TRANSFORMERS)


def _state_kind(model_config: Any) -> str:
    """The kind of a model of which some layers have a state a sequence."""
    from sglang.srt.configs.model_config import AttentionArch

    architecture = model_config.hf_config.architectures[0]
    if architecture in _WITHOUT_SNAPSHOTS:
        return "state without pages"
    for kind, architectures, rows in (
        ("state", _STATE_ARCHITECTURES, AttentionArch.MHA),
        ("state beside latent rows", _LATENT_STATE_ARCHITECTURES, AttentionArch.MLA),
    ):
        is_plain = architecture in architectures and model_config.attention_arch == rows
        if is_plain and not model_config.is_hybrid_swa:
            return kind
    return "state of another kind"


def _index_kind(model_config: Any) -> str:
    """The kind of a model of DeepSeek's sparse attention."""
    from sglang.srt.configs.model_config import get_dsa_index_kpool

    hf_config = model_config.hf_config
    is_plain = hf_config.architectures[0] in _INDEXED and get_dsa_index_kpool(hf_config) == 1
    return "indexed" if is_plain and not model_config.is_hybrid_swa else "sparse"


def _window_kind(model_config: Any) -> str:
    """The kind of a model whose window layers have a pool of their own."""
    from sglang.srt.configs.model_config import AttentionArch

    chunk = model_config.attention_chunk_size
    # SGLang takes a window that the configuration names for what its tree has to keep.
    if chunk is not None and (model_config.sliding_window_size or chunk) < chunk:
        return "chunks"
    full = model_config.get_num_kv_heads(1), model_config.head_dim, model_config.v_head_dim
    window = (
        model_config.get_swa_num_kv_heads(1),
        model_config.swa_head_dim,
        model_config.swa_v_head_dim,
    )
    layers = model_config.full_attention_layer_ids, model_config.swa_attention_layer_ids
    architecture = model_config.hf_config.architectures[0]
    is_plain = model_config.attention_arch == AttentionArch.MHA
    if not all(layers) or not is_plain or architecture in _UNTRIED_WINDOWS:
        return "windows of another kind"
    if full == window and not model_config.is_hybrid_swa_compress:
        return "swa"
    # SGLang builds a window pool of its own shape for these, and the others that it does for have
    # rows beside K and V, or KV that depends on later tokens.
    is_known = architecture in _ARCHITECTURES_OF_TWO_SHAPES
    return "swa of two shapes" if is_known else "windows of another kind"
