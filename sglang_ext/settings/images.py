"""On which servers prompts with images are saved and loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_ext.settings.speculation import EAGLE, answers_guesses
from sglang_ext.settings.untried import has_attention_dp

# Models of which they are: their tokens see what is before them and no more, and an image is to
# them what an encoder makes of it alone, in the place of its tokens. Of these the rotation is by
# three axes, and where a token lies on them depends on the images before;
ALONG_AXES = (
    "Glm4vForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
# of these a token lies where the prompt has it. LLaVA's format with the encoder of Pixtral: with
# another one, SGLang's front does not say where an image lies, and it stays without a name.
ALONG_THE_PROMPT = (
    "InternVLChatModel",
    "LlavaForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
)
# What SGLang keeps: K and V of all layers in one pool, or a state a sequence beside them.
PLAIN, STATES = "plain", "states"
# Along axes, too. Their states are behind pages, and named by the page that they are behind.
WITH_STATES = (
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
# Models whose images were run in stages. Of the others SGLang 0.5.23 runs no stages (InternVL,
# Qwen2-VL), or nobody tried them.
_IN_STAGES = (
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
)
# Algorithms whose drafts were tried with images, by what SGLang keeps. Of each of an image's tokens
# such a draft is given what the encoder made of it, as the model is. A scheduler's arguments have
# either of one draft's two names.
_DRAFTS = {STATES: (EAGLE, "NEXTN"), PLAIN: ("EAGLE3",)}
_KEEPS = dict.fromkeys(ALONG_AXES + ALONG_THE_PROMPT, PLAIN) | dict.fromkeys(WITH_STATES, STATES)
NAMEABLE_IMAGES = tuple(_KEEPS)


def has_axes(architecture: str) -> bool:
    """Whether where a token lies depends on the images before it."""
    return architecture in ALONG_AXES + WITH_STATES


def why_not_images(args: Any, architecture: str, keeps: str) -> str:
    """Why they are served only; empty where they are saved and loaded.

    Args:
        args: SGLang's arguments, resolved.
        architecture: of the model.
        keeps: what of a token: `PLAIN`, `STATES`, or another word.
    """
    if architecture not in NAMEABLE_IMAGES:
        return f"{architecture} was not tried"
    if _KEEPS[architecture] != keeps:
        return "a model of this kind"
    if args.enable_lora or args.lora_paths:
        return "adapters"
    if args.speculative_algorithm not in (None, *_DRAFTS.get(keeps, ())):
        return f"drafts of {args.speculative_algorithm}"
    # Where a chunk of a prompt ended in front of an image, SGLang gave the draft another token than
    # the next one. That row would decide answers then, and a page's name does not tell of it.
    if answers_guesses(partial(getattr, args)):
        return "--speculative-accept-threshold-single or -acc below 1"
    if args.disaggregation_mode != "null":
        return "prefill and decode servers"
    if getattr(args, "smg_grpc_mode", False):  # which makes of an image what the encoder is given
        return "SGLang's gateway"
    if args.pp_size > 1 and architecture not in _IN_STAGES:
        return "several pipeline stages"
    if has_attention_dp(partial(getattr, args)):
        return "data parallel attention"
    if args.nnodes > 1:
        return "several nodes"
    if args.tokenizer_worker_num > 1:
        return "several tokenizer workers, which name no images"
    if args.enable_mm_global_cache:
        return "a cache of encoded images that servers share"
    # With it a prompt's positions are those of text alone, and not those that SGLang says of its
    # images, from which it counts on behind a prompt where it guesses.
    if getattr(args, "rl_on_policy_target", None) is not None:
        return "--rl-on-policy-target"
    return ""


def image_facts(args: Any, architecture: str) -> str:
    """What of a server decides what an encoder makes of an image, beside its weights."""
    return f"{architecture} precise={bool(args.enable_precise_embedding_interpolation)}"
