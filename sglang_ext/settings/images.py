"""On which servers prompts with images are saved and loaded."""

from __future__ import annotations

from functools import partial
from typing import Any

from sglang_ext.settings.untried import has_attention_dp

# Models of which they are: their tokens see what is before them and no more, an image is to them
# what an encoder makes of it, in the place of its tokens, and their rotation is by three axes.
NAMEABLE_IMAGES = (
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)


def why_not_images(args: Any, architecture: str) -> str:
    """Why they are served only; empty where they are saved and loaded.

    Args:
        args: SGLang's arguments, resolved.
        architecture: of the model.
    """
    if architecture not in NAMEABLE_IMAGES:
        return f"{architecture} was not tried"
    if args.enable_lora or args.lora_paths:
        return "adapters"
    if args.speculative_algorithm is not None:
        return "speculative decoding"
    if args.disaggregation_mode != "null":
        return "prefill and decode servers"
    if args.pp_size > 1:
        return "several pipeline stages"
    if args.dp_size > 1 or has_attention_dp(partial(getattr, args)):
        return "several schedulers"
    if args.nnodes > 1:
        return "several nodes"
    if args.tokenizer_worker_num > 1:
        return "several tokenizer workers, which name no images"
    if args.enable_mm_global_cache:
        return "a cache of encoded images that servers share"
    return ""


def image_facts(args: Any, architecture: str) -> str:
    """What of a server decides what an encoder makes of an image, beside its weights."""
    return f"{architecture} precise={bool(args.enable_precise_embedding_interpolation)}"
