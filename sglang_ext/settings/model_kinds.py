"""Kinds of models by what SGLang keeps for a token, and which of them can be stored.

The kind is told from the model's configuration before its weights load (``seam/model_kind.py``).
Imports no SGLang; docs/compatibility.md is generated from here.
"""

from __future__ import annotations

from dataclasses import dataclass

WITHOUT = "start this model without --enable-hier-kv"


@dataclass(frozen=True)
class ModelKind:
    """One kind.

    Attributes:
        name: what SGLang keeps.
        examples: architectures.
        expected: what a refusal says is needed; empty for a kind that is served.
        found: what a refusal says came.
        reused: what is reused of a served kind, or why a kind is not served; for the docs.
        proof: the test that shows a served kind; for the docs.
        advice: what a refusal says to do.
    """

    name: str
    examples: str
    reused: str
    proof: str = ""
    expected: str = ""
    found: str = ""
    advice: str = WITHOUT

    @property
    def is_served(self) -> bool:
        """Whether pages of such a model can be stored."""
        return not self.expected


def may_move(kind: str, num_ranks: int) -> bool:
    """Whether pages of a model may go to other positions, as far as its kind says.

    Several ranks do not agree yet on what a window behind a cut is made of, and K of blocks, of
    layers beside states and of latent rows with an index is stored as the engine has it.

    Args:
        kind: a key of `MODEL_KINDS`.
        num_ranks: that serve a request together.
    """
    return kind in ("mha", "mla") or (kind == "swa" and num_ranks == 1)


_ONE_POOL = "add --disable-hybrid-swa-memory, which keeps all layers' KV in one pool, or " + WITHOUT

MODEL_KINDS = {
    "mha": ModelKind(
        "K and V of every head, every layer (MHA, GQA, MQA), dense or with experts",
        "Llama, Qwen 2 and 3, Mistral, Phi, GLM-4, Cohere, Gemma 2 and 3; hybrids of window and "
        "full layers with `--disable-hybrid-swa-memory`",
        "exact; moved where the rotation of all layers is understood; coded; prompts with images "
        'of some models (docs/compatibility.md, "Images")',
        "tests/e2e/models/test_model_kinds.py; tests/e2e/images/test_images.py; "
        "tests/e2e/images/test_image_models.py; tests/e2e/images/test_image_ranks.py",
    ),
    "mla": ModelKind(
        "one latent row a token (MLA)",
        "DeepSeek V2, V3, R1; Kimi K2; MiniCPM 3",
        "exact; moved where the rotation of all layers is understood; coded; of these models only "
        "a small MiniCPM 3, and a small DeepSeek V3 with its draft layer, were run, on a CPU",
        "tests/e2e/remote/test_remote_latent_ranks.py; tests/e2e/drafts/test_latent_drafts.py; "
        "tests/unit/device/test_copier.py",
    ),
    "swa": ModelKind(
        "a second pool for layers that see a window or a chunk, with K and V of the same shape",
        "gpt-oss, Mellum, Laguna, Llama 4, Step 3.5",
        "exact, by one rank or several tensor parallel ones, with codecs that lose nothing, "
        "without adapters, sessions or `--hier-kv-slo-ms`; moved by one rank, where the rotation "
        "of all layers is understood (by more, what is cut is computed anew behind each new cut); "
        "run on a CPU with a small gpt-oss and a small Mellum, and "
        "by one rank, exact alone, with a small Llama 4 and a small Step 3.5 without experts",
        "tests/e2e/models/test_windows.py; tests/e2e/models/test_restored_kinds.py; "
        "tests/e2e/models/test_hybrid_ranks.py; tests/e2e/models/test_cut_hybrids.py; "
        "tests/property/hybrids/test_window_interleavings.py; "
        "tests/property/hybrids/test_window_truncation.py",
    ),
    "swa of two shapes": ModelKind(
        "a second pool for the window's layers, with K and V of another shape",
        "Gemma 4 (prompts with images or sound are neither stored nor loaded), MiMo V2",
        "exact, at the saved position, by one rank or several tensor parallel ones, without "
        "codec, adapters, sessions or `--hier-kv-slo-ms`; prompts that are cut, computed anew "
        "behind each new cut (run with Gemma 4); run on a CPU with a small model of each, without "
        "experts, by one rank and by two, of which MiMo V2 had a remote store",
        "tests/e2e/models/test_restored_kinds.py; tests/unit/device/test_blocks.py; "
        "tests/e2e/models/test_cut_hybrids.py; "
        "tests/property/hybrids/test_window_interleavings.py; "
        "tests/property/hybrids/test_hybrid_ranks_decide.py",
    ),
    "two shapes in one pool": ModelKind(
        "one pool for all layers, of which those with a window have K and V of another shape",
        "Gemma 4, MiMo V2 with `--disable-hybrid-swa-memory`",
        "SGLang's pool has rows of one shape, and its first forward fails",
        "",
        "a pool of its own for window layers with K and V of another shape",
        "--disable-hybrid-swa-memory with such a model",
        "leave --disable-hybrid-swa-memory out, or " + WITHOUT,
    ),
    "windows of another kind": ModelKind(
        "a second pool for the window's layers, without full layers, of latent rows, or of models "
        "that were never tried",
        "Step 3.7, Unlimited-OCR, Dots3 Note, EmbeddingGemma 2",
        "their prefixes, rows or masks are of another kind, or nobody tried them",
        "",
        "window layers with K and V of every head beside full layers",
        "a model with others",
    ),
    "chunks": ModelKind(
        "a second pool for layers that see a chunk, of which SGLang keeps a shorter window",
        "none that is published",
        "SGLang's tree does not have the chunk behind every prefix that it goes on from",
        "",
        "layers with chunked attention of which SGLang keeps whole chunks",
        "a model whose configuration names a window that is shorter than its chunk",
        _ONE_POOL,
    ),
    "state": ModelKind(
        "a state a sequence beside K and V of every head (Mamba2, gated delta rule)",
        "Granite 4, Nemotron-H, Falcon-H1, Qwen3-Next, Qwen3.5",
        "exact, at the positions at which SGLang's tree keeps a state, by one rank or several "
        "tensor parallel ones, with codecs that lose nothing, without adapters or "
        "sessions; prompts that are cut, computed anew behind each new cut (run by one rank of "
        "Qwen3-Next); run on a CPU with a small model of each, those of "
        "Granite 4 and Nemotron-H without experts, by two ranks Qwen3-Next, Qwen3.5 and "
        "Nemotron-H, all three with a remote store; "
        'prompts with images of Qwen3.5 (docs/compatibility.md, "Images"); Qwen3-Next, Qwen3.5 and '
        "Nemotron-H with their draft layers (the latter's without experts); "
        "Granite 4 and Falcon-H1 without "
        "`--cuda-graph-backend-prefill breakable`, SGLang's default on a GPU",
        "tests/e2e/models/test_states.py; tests/e2e/models/test_restored_kinds.py; "
        "tests/e2e/models/test_hybrid_ranks.py; tests/e2e/models/test_state_store_ranks.py; "
        "tests/e2e/images/test_image_states.py; tests/e2e/models/test_cut_hybrids.py; "
        "tests/property/hybrids/test_state_interleavings.py; "
        "tests/property/hybrids/test_hybrid_ranks_decide.py",
    ),
    "state beside latent rows": ModelKind(
        "a state a sequence (KDA) beside one latent row a token (MLA)",
        "Kimi Linear, Kimi K3 (prompts with images are neither stored nor loaded)",
        "exact, at the positions at which SGLang's tree keeps a state, by one rank or several "
        "tensor parallel ones, with codecs that lose nothing, without adapters or sessions; "
        "prompts that are cut, computed anew behind each new cut; without "
        "`--cuda-graph-backend-prefill breakable`, and Kimi Linear without data parallel attention "
        "(SGLang spreads its heads over all ranks, and in its pool "
        "those of a group); run with a small model of each with two "
        "experts, of which each token takes both, on a CPU, by one rank and by two, with a remote "
        "store, too",
        "tests/e2e/models/test_states.py; tests/e2e/models/test_hybrid_ranks.py; "
        "tests/e2e/models/test_restored_kinds.py; tests/e2e/models/test_state_store_ranks.py",
    ),
    "state without pages": ModelKind(
        "a state a sequence, behind single tokens and not behind pages",
        "LFM2, Zaya, Jet Nemotron",
        "SGLang's tree keeps these states with `--page-size 1` only, and pages of one token are "
        "not stored",
        "",
        "states that SGLang's tree keeps behind pages of tokens",
        "a model whose states it keeps with --page-size 1 only",
    ),
    "state of another kind": ModelKind(
        "a state a sequence of another kind, or beside windows",
        "Bailing, Inkling, GLM-5 Next, Mamba without attention, Kimi K3's text alone "
        "(`KimiK3LinearForCausalLM`)",
        "these were never tried; of Kimi K3's text alone SGLang keeps no states of pages",
        "",
        "attention in every layer, or Mamba2, a gated delta rule or KDA beside full attention",
        "a hybrid model with other states",
    ),
    "indexed": ModelKind(
        "rows of an index beside the latent row (sparse attention)",
        "DeepSeek V3.2, GLM-5",
        "exact, at the saved position, index rows with the latent ones; by one rank or several "
        "tensor parallel ones, with data parallel attention, with prefill and decode "
        "servers, with their draft layer, with codecs that lose nothing, "
        "without adapters or sessions; prompts that are cut, computed anew behind each new cut "
        "(run with GLM-5, by one rank); run with a small GLM-5 and a small DeepSeek V3.2, with "
        "experts in the draft layer alone, on a CPU",
        "tests/e2e/models/test_index.py; tests/e2e/drafts/test_latent_drafts.py; "
        "tests/e2e/models/test_latent_attention_dp.py; tests/e2e/models/test_cut_hybrids.py; "
        "tests/e2e/remote/test_disaggregation_index.py; tests/unit/device/test_index_pool.py",
    ),
    "sparse": ModelKind(
        "rows of an index that are kept in another way (sparse attention)",
        "DeepSeek V4, MiniMax M3, GLM-5 Next, LongCat Flash, Dots3 Note",
        "their rows lie in other pools, or are of several tokens, or were never tried",
        "",
        "an index of one row a token beside latent rows (DeepSeek V3.2, GLM-5)",
        "a model with sparse attention over another one",
    ),
    "encoder-decoder": ModelKind(
        "rows of an encoder before those of the tokens",
        "Whisper, Mllama",
        "the encoder's rows are no function of the prompt's tokens",
        "",
        "a decoder only",
        "a model with cross attention to an encoder",
    ),
    "no tree": ModelKind(
        "nothing behind the end of a request",
        "multimodal models on the Transformers implementation",
        "SGLang disables its radix cache",
        "",
        "SGLang's radix cache",
        "a model for which SGLang disables it",
    ),
}

# Those that SGLang's tree keeps states of, behind pages.
STATE_KINDS = ("state", "state beside latent rows")


@dataclass(frozen=True)
class ServedMode:
    """One mode in which the kinds that are served run.

    Attributes:
        name: the mode and its arguments.
        reused: what is reused in it.
        proof: the test that shows it.
    """

    name: str
    reused: str
    proof: str


SERVED_MODES = (
    ServedMode("one scheduler", "exact, moved, coded", "tests/e2e/reuse/test_equality.py"),
    ServedMode(
        "several tensor parallel ranks (`--tp-size`)",
        "exact, moved, coded; with MLA on one node one rank keeps each page for all; on several "
        "nodes, over loopback, run with K and V of every head, Mellum, "
        "Qwen3-Next and Kimi Linear",
        "tests/e2e/reuse/test_ranks.py; tests/e2e/reuse/test_nodes.py; "
        "tests/e2e/models/test_hybrid_ranks.py; tests/e2e/ranks/test_truncated_ranks.py; "
        "tests/e2e/ranks/test_quoting_ranks.py; "
        "tests/e2e/ranks/test_cost_ranks.py; tests/e2e/ranks/test_profile_ranks.py",
    ),
    ServedMode(
        "pipeline stages (`--pp-size`), of one or several tensor parallel ranks, on one node or "
        "several",
        "exact; with codecs that lose nothing, but none in the remote store; without truncation, "
        "speculation, adapters or sessions; of hybrids gpt-oss, Nemotron-H, Qwen3.5 (dense) and "
        "Kimi Linear alone; no models with rows of an index; where weights change, "
        "nothing until a restart; run on a CPU by two stages of one rank and of two, with a "
        "remote store on one node: latent rows (a small DeepSeek V3), windows (a small gpt-oss), "
        "states (a small Nemotron-H) and both (a small Kimi Linear); of one rank with a disk: a "
        "small Qwen3.5; on several nodes, over loopback: K and V of every head, Kimi Linear, "
        "Qwen3.5, Nemotron-H and gpt-oss; images of Qwen2.5-VL and Qwen3.5, by one rank a stage, "
        "on one node",
        "tests/e2e/ranks/test_stages.py; tests/e2e/ranks/test_more_stages.py; "
        "tests/e2e/images/test_image_stages.py",
    ),
    ServedMode(
        "several whole schedulers (`--dp-size`)",
        "exact, moved, coded; each its own, shared through the remote store only; of hybrids "
        "gpt-oss, Qwen3-Next and Qwen3.5 with images were run",
        "tests/e2e/reuse/test_ranks.py; tests/e2e/ranks/test_killed_schedulers.py; "
        "tests/e2e/images/test_image_states.py",
    ),
    ServedMode(
        "context parallel ranks (`--attn-cp-size`), which share a prefill (`--enable-prefill-cp "
        "--cp-strategy zigzag`) or repeat it",
        "exact; one rank keeps each page for all; Qwen 3 (dense) alone, as many of them as "
        "`--tp-size` says, on one node, without codec, truncation, speculation, adapters or "
        "sessions; run by two ranks on a CPU",
        "tests/e2e/ranks/test_context_parallel.py",
    ),
    ServedMode(
        "data parallel attention (`--attn-dp-size`, `--enable-dp-attention`)",
        "exact; coded, which was not tried with a calibrated profile; moved by `overflow`, tried "
        "where a group is one rank; shared between groups through the remote store only; without "
        "adapters or sessions; drafts (chains; coded without loss, run with Qwen3-Next and "
        "GLM-4.5 by groups of one rank): the draft layer of models of latent rows, of GLM-4.5, of "
        "Qwen3-Next and of Qwen3.5, and EAGLE3 for gpt-oss and for "
        "models with K and V of every head; prompts that are cut with DeepSeek V3's and GLM-4.5's "
        "draft layer and with EAGLE3 for Qwen 3; of "
        "hybrids MiMo V2, Mellum, Qwen3-Next and Kimi K3 were run, each with a remote store, too; "
        "on several nodes, over loopback, run with K and V of every head, the latent rows of "
        "DeepSeek V3 with its draft layer, DeepSeek V3.2, GLM-5 with its draft layer, Mellum and "
        "Qwen3-Next",
        "tests/e2e/reuse/test_attention_dp.py; tests/e2e/models/test_latent_attention_dp.py; "
        "tests/e2e/drafts/test_draft_attention_dp.py",
    ),
    ServedMode(
        "SGLang's gateway (`--smg-grpc-mode`)",
        "exact; all requests are one tenant's, images are served only; run by one rank on a CPU",
        "tests/e2e/remote/test_gateway.py",
    ),
    ServedMode("adapters (`--enable-lora`)", "exact", "tests/e2e/updates/test_adapter_promises.py"),
    ServedMode(
        "weights that change in service", "exact", "tests/e2e/updates/test_weight_promises.py"
    ),
    ServedMode(
        "streaming sessions (`--enable-streaming-session`)",
        "what SGLang's tree gets of them",
        "tests/e2e/reuse/test_tenants.py",
    ),
    ServedMode(
        "drafts of n-grams (`--speculative-algorithm NGRAM`, breadth 1)",
        "exact; pages are those of a server without it; with attention that masks branches only, "
        "and no layer with a window",
        "tests/e2e/drafts/test_speculation.py",
    ),
    ServedMode(
        "a draft model with KV of its own (EAGLE, NEXTN, EAGLE3, STANDALONE)",
        "exact, at the saved position, the draft's KV with the target's; chains, and for models "
        "with K and V of every head and no window trees (`--speculative-eagle-topk` over 1), run "
        "by one rank and by two, and for latent rows without an index, run by one; chains "
        "whose length SGLang adapts (`--speculative-adaptive`), not "
        "of hybrids, run with EAGLE by one rank and by two; coded without loss, by "
        "one scheduler or several tensor parallel ranks, with data parallel attention, too; "
        "coded with `hier`, of models with K and V of every head, the draft's KV without loss "
        "(docs/codec.md), run with EAGLE by one rank; by one rank or several "
        "tensor parallel ones, for models with K and V of every head, and the draft layer (MTP) "
        "of models of latent rows, with an index or without; of hybrids "
        "the draft layer of Qwen3-Next, Qwen3.5 and Nemotron-H and no other draft of "
        "theirs, and gpt-oss with EAGLE3 (window layers in a pool of their own; the draft's KV "
        "with the full layers'), all of them run by one rank and by two, from a remote store, too; "
        "prompts with images of Qwen3.5, and of Qwen-VL with EAGLE3 (docs/compatibility.md, "
        '"Images"); prompts that are cut, '
        "computed anew behind each new cut (not of hybrids); without adapters or sessions; codecs "
        "that lose nothing run by one rank and by two, with a remote store, too, of hybrids with "
        "`lossless` (Qwen3-Next, gpt-oss); EAGLE3 run with "
        "random weights where all layers are full, none of them on a GPU",
        "tests/e2e/drafts/test_speculation.py; tests/e2e/drafts/test_latent_drafts.py; "
        "tests/e2e/drafts/test_coded_drafts.py; tests/e2e/drafts/test_state_drafts.py; "
        "tests/e2e/drafts/test_window_drafts.py; tests/property/drafts/test_late_results.py; "
        "tests/property/drafts/test_verified_states.py; "
        "tests/property/drafts/test_rejected_windows.py",
    ),
    ServedMode(
        "prefill and decode servers (`--disaggregation-mode`)",
        "exact; a decode server only saves, and what it wrote is loaded by prefill servers on the "
        "same remote store; by one rank or several tensor parallel ones, for models with K and V "
        "of every head, alike in window layers (without chunks), or with MLA, with an index or "
        "without, or with a state beside either; with drafts of EAGLE, EAGLE3 or NEXTN as one "
        "server takes them, run with hybrids, too (gpt-oss, Qwen3-Next, Qwen3.5, Nemotron-H); "
        "without lossy codec, truncation, adapters or sessions; not run on a GPU",
        "tests/e2e/remote/test_disaggregation.py; tests/e2e/remote/test_disaggregation_ranks.py; "
        "tests/e2e/remote/test_disaggregation_drafts.py; "
        "tests/e2e/remote/test_disaggregation_index.py; "
        "tests/e2e/remote/test_disaggregation_windows.py; "
        "tests/e2e/remote/test_disaggregation_states.py; "
        "tests/e2e/remote/test_disaggregation_coded.py",
    ),
    ServedMode(
        "fp8 KV (`--kv-cache-dtype fp8_e4m3`, `fp8_e5m2`)",
        "exact, at the saved position only: such a pool has K rounded to 3 or 2 bits of "
        "mantissa behind its rotation, so many values without rotation give the same bits, and "
        "rotated elsewhere none of them is sure to give what the engine computes there. So "
        "behind a new cut of `--hier-kv-truncation` the kept text is computed anew, and `match` "
        "finds nothing. Run with full layers, latent rows, window layers and layers with a "
        "state, by one rank, and by two tensor parallel ones full and window layers; with "
        "`remote=lossless`, with EAGLE and NGRAM by one rank, with truncation; with the draft's "
        "KV in fp8, too, the draft layer of Qwen3-Next (by two ranks, too), Qwen3.5 and "
        "Nemotron-H, and gpt-oss with EAGLE3 (by one rank and by two, where both checkpoints ask "
        "for it); with STANDALONE, EAGLE3 where all layers are full, and EAGLE by two ranks; "
        "`fp8_e5m2` by one rank, with full layers, with window layers, with states beside latent "
        "rows and with the draft layer of Qwen3-Next; lossy are the "
        "pages of a lossy codec here, too, run on the disk with `hier` alone. Not run: other "
        "codecs, latent rows and states without drafts by several ranks, and rows of an index",
        "tests/e2e/models/test_model_kinds.py; tests/e2e/models/test_restored_kinds.py; "
        "tests/e2e/drafts/test_speculation.py; tests/e2e/drafts/test_state_drafts.py; "
        "tests/e2e/drafts/test_window_drafts.py; tests/e2e/reuse/test_truncation.py; "
        "tests/e2e/reuse/test_codecs.py",
    ),
)
