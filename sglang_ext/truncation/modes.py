"""Which requests may be truncated, and in which mode (off, overflow, match, all).

The mode is the server's setting, or less where a request wishes so; `cut.py` decides where a prompt
is cut. Pure. Runs in SGLang's front process, which lets long prompts through that it would refuse,
and again in the scheduler, which cuts them.
"""

from __future__ import annotations

from typing import Any

OFF, OVERFLOW, MATCH, ALL = MODES = ("off", "overflow", "match", "all")
# What a request may choose, by the server's flag: never more than that.
CHOICES = {OFF: (OFF,), OVERFLOW: (OFF, OVERFLOW), MATCH: (OFF, MATCH), ALL: MODES}
PARAM = "hier_kv_truncation"
# Set by the front process where the client stated max_new_tokens; the scheduler cannot tell.
STATED = "hier_kv_stated_max_new_tokens"

# Attributes of a request, before or after tokenising, that index its prompt or stand in for it.
_NOT_CUT = {
    "input_embeds": "input embeddings",
    "positional_embed_overrides": "embedding overrides",
    "image_data": "images",
    "video_data": "videos",
    "audio_data": "audio",
    "mm_inputs": "multimodal inputs",
    "return_hidden_states": "hidden states of the prompt",
    "return_routed_experts": "routed experts of the prompt",
    "return_indexer_topk": "indexer results of the prompt",
    "multi_item_delimiter_indices": "several items in one prompt",
    "token_type_ids": "token types",
    "token_indices_to_pool": "pooled tokens",
}


def why_not_cut(request: Any) -> str:
    """What of a request forbids to cut its prompt; empty when nothing does.

    Args:
        request: SGLang's `GenerateReqInput` or `TokenizedGenerateReqInput`.
    """
    for name, what in _NOT_CUT.items():
        value = getattr(request, name, None)
        if value is not None and value is not False and value != []:
            return what
    start = getattr(request, "logprob_start_len", None)
    if getattr(request, "return_logprob", False) and start is not None and start >= 0:
        return "log-probabilities of the prompt"
    return ""


def mode_of(custom_params: Any, default: str) -> str:
    """The mode of a request: its own, or the server's. It may choose less than that, never more.

    Args:
        custom_params: the request's, from its sampling parameters.
        default: of the server.

    Raises:
        ValueError: the request names no mode, or one that the server's flag does not allow.
    """
    if not isinstance(custom_params, dict) or PARAM not in custom_params:
        return default
    mode = custom_params[PARAM]
    if mode not in MODES:
        raise ValueError(
            f"custom_params[{PARAM!r}] must be one of {', '.join(MODES)}, got {str(mode)[:80]!r}."
        )
    if mode not in CHOICES[default]:
        raise ValueError(
            f"custom_params[{PARAM!r}] must be {' or '.join(CHOICES[default])} on this server, "
            f"which runs with --hier-kv-truncation {default}, got {mode!r}."
        )
    return str(mode)


def check_length(num_tokens: int, context_len: int, longest: int) -> None:
    """Refuses a prompt on which the server would work for long only to drop most of it.

    Args:
        num_tokens: of the whole prompt.
        context_len: of the model, in tokens.
        longest: contexts that a prompt may be long.

    Raises:
        ValueError: it is longer.
    """
    if num_tokens > longest * context_len:
        raise ValueError(
            f"A prompt may have {longest * context_len} tokens on this server ({longest} contexts, "
            f"--hier-kv-truncation-longest), got {num_tokens}; send less of the conversation."
        )


def cuts_overflow(mode: str) -> bool:
    """Whether a prompt over the context length is cut."""
    return mode in (OVERFLOW, ALL)


def matches_content(mode: str) -> bool:
    """Whether a prompt that fits is searched for stored text."""
    return mode in (MATCH, ALL)
