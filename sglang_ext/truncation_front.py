"""What SGLang's front process checks of a request before the scheduler meets it.

Prompts that are too long are let through, for the scheduler to cut, up to a bound; a request that
asks for more than the operator allows is refused. Imports no SGLang: it is handed SGLang's objects
by a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.tenancy import owner_of
from sglang_ext.truncation.policy import (
    STATED,
    check_length,
    cuts_overflow,
    mode_of,
    why_not_cut,
)

# A text with more characters than this for each token that a prompt may have is not even tokenised.
# Text has about four; tokens of more exist, for runs of spaces say, but no prompt is made of them.
_CHARS_PER_TOKEN = 16


def around_validate(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    """AROUND hook of `TokenizerManager._validate_one_request`.

    A prompt that the scheduler will cut is checked as if it had been; the whole of it travels on.

    Raises:
        ValueError: SGLang refuses the request, it asks for a mode that is none or not allowed here,
            it names no owner where it says it does, or its prompt is too long to be cut.
    """
    settings = self.server_args._hier_kv
    params = obj.sampling_params
    if not isinstance(params, dict) or input_ids is None:
        return original(self, obj, input_ids)
    mode = mode_of(params.get("custom_params"), settings["truncation"])
    owner_of(params.get("custom_params"))
    wish = params.get("max_new_tokens")
    stated = wish if isinstance(wish, int) and not isinstance(wish, bool) else 0
    fits = self.context_len - 1 - self.num_reserved_tokens
    too_long = len(input_ids) > fits or len(input_ids) + stated > fits + 1
    # Room for half of the context at most is made for an output (`CutRule.room`).
    if not (too_long and cuts_overflow(mode)) or 2 * stated > self.context_len or why_not_cut(obj):
        return original(self, obj, input_ids)
    check_length(len(input_ids), self.context_len, settings["truncation_longest"])
    if wish is not None:
        custom = params.get("custom_params")
        params["custom_params"] = {**(custom if isinstance(custom, dict) else {}), STATED: True}
    return original(self, obj, list(input_ids[: min(fits, fits + 1 - stated)]))


def before_tokenizing(self: Any, texts: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `TokenizerManager._tokenize_texts`: refuses what is too long in any case.

    Raises:
        ValueError: a text is too long to be cut.
    """
    settings = self.server_args._hier_kv
    if not cuts_overflow(settings["truncation"]):
        return
    longest = settings["truncation_longest"]
    most = _CHARS_PER_TOKEN * longest * self.context_len
    for text in [texts] if isinstance(texts, str) else texts:
        if isinstance(text, str) and len(text) > most:
            raise ValueError(
                f"A prompt may have {most} characters on this server ({_CHARS_PER_TOKEN} for each "
                f"token of {longest} contexts, --hier-kv-truncation-longest), got {len(text)}; "
                "send less of the conversation."
            )
