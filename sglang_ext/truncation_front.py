"""Lets prompts that are too long through SGLang's front process; the scheduler cuts them.

Imports no SGLang: it is handed SGLang's objects by a hook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_ext.truncation.policy import STATED, cuts_overflow, mode_of, why_not_cut


def around_validate(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    """AROUND hook of `TokenizerManager._validate_one_request`.

    A prompt that the scheduler will cut is checked as if it had been; the whole of it travels on.

    Raises:
        ValueError: SGLang refuses the request, or it names no mode of truncation.
    """
    default = self.server_args._hier_kv["truncation"]
    params = obj.sampling_params
    if not isinstance(params, dict) or input_ids is None:
        return original(self, obj, input_ids)
    mode = mode_of(params.get("custom_params"), default)
    wish = params.get("max_new_tokens")
    stated = wish if isinstance(wish, int) and not isinstance(wish, bool) else 0
    fits = self.context_len - 1 - self.num_reserved_tokens
    too_long = len(input_ids) > fits or len(input_ids) + stated > fits + 1
    # Room for half of the context at most is made for an output (`CutRule.room`).
    if not (too_long and cuts_overflow(mode)) or 2 * stated > self.context_len or why_not_cut(obj):
        return original(self, obj, input_ids)
    if wish is not None:
        custom = params.get("custom_params")
        params["custom_params"] = {**(custom if isinstance(custom, dict) else {}), STATED: True}
    return original(self, obj, list(input_ids[: min(fits, fits + 1 - stated)]))
