"""What SGLang's front process checks of a request before the scheduler meets it.

Prompts that are too long are let through, for the scheduler to cut, up to a bound; a request that
asks for more than the operator allows is refused. Work that grows with a prompt is bounded before
it is done, and done where it holds up nobody else. Imports no SGLang: it is handed SGLang's objects
by a hook.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sglang_ext.hints.request_hints import PARAM as HINTS_PARAM
from sglang_ext.hints.request_hints import hints_of
from sglang_ext.identity.tenancy import OWNER_PARAM, owner_of
from sglang_ext.provenance.request_state import EXACT_PARAM
from sglang_ext.seam.hooks.answers import note_cut
from sglang_ext.seam.hooks.body_bound import BodyBound
from sglang_ext.seam.hooks.early_aborts import went_to_thread
from sglang_ext.truncation.modes import PARAM as TRUNCATION_PARAM
from sglang_ext.truncation.modes import (
    STATED,
    check_length,
    cuts_overflow,
    mode_of,
    why_not_cut,
)

# A text with more characters than this for each token that a prompt may have is not even tokenised.
# Text has about four; tokens of more exist, for runs of spaces say, but no prompt is made of them.
_CHARS_PER_TOKEN = 16
# A longer text is tokenised on a thread: SGLang would serve nobody else meanwhile. About 20 ms.
_CHARS_ON_LOOP = 1 << 15
# What a chat's template is given of a request, and what of that is not text.
_RENDERED = ("messages", "tools", "chat_template_kwargs")
_MEDIA = ("image_url", "video_url", "audio_url", "input_audio")
# Keys of `custom_params` that begin so are the plugin's; others are nobody's here.
_PREFIX = "hier_kv_"
_WISHES = (EXACT_PARAM, HINTS_PARAM, OWNER_PARAM, TRUNCATION_PARAM)


def around_validate(original: Callable[..., Any], self: Any, obj: Any, input_ids: Any) -> Any:
    """AROUND hook of `TokenizerManager._validate_one_request`.

    A prompt that the scheduler will cut is checked as if it had been; the whole of it travels on.

    Raises:
        ValueError: SGLang refuses the request, it names a wish that there is not, it asks for a
            mode that is none or not allowed here, it names no owner where it says it does, its
            hints are none, or its prompt is too long to be cut.
    """
    settings = self.server_args._hier_kv
    params = obj.sampling_params
    if not isinstance(params, dict) or input_ids is None:
        return original(self, obj, input_ids)
    check_wishes(params.get("custom_params"))
    mode = mode_of(params.get("custom_params"), settings["truncation"])
    owner_of(params.get("custom_params"))
    hints_of(params.get("custom_params"))
    wish = params.get("max_new_tokens")
    stated = wish if isinstance(wish, int) and not isinstance(wish, bool) else 0
    fits = self.context_len - 1 - self.num_reserved_tokens
    too_long = len(input_ids) > fits or len(input_ids) + stated > fits + 1
    # A scheduler that embeds cuts nothing, and would run the whole of it. Room for half of the
    # context at most is made for an output (`CutRule.room`).
    is_cut = too_long and cuts_overflow(mode) and self.is_generation
    if not is_cut or 2 * stated > self.context_len or why_not_cut(obj):
        return original(self, obj, input_ids)
    check_length(len(input_ids), self.context_len, settings["truncation_longest"])
    if wish is not None:
        custom = params.get("custom_params")
        params["custom_params"] = {**(custom if isinstance(custom, dict) else {}), STATED: True}
    note_cut()
    return original(self, obj, list(input_ids[: min(fits, fits + 1 - stated)]))


def check_wishes(custom_params: Any) -> None:
    """Refuses a wish of the plugin's that there is not, such as a mistyped one.

    Args:
        custom_params: the request's, from its sampling parameters.

    Raises:
        ValueError: there is one.
    """
    if not isinstance(custom_params, dict):
        return
    # SGLang may hand the same parameters for every prompt of a batch, so `STATED` is met again.
    known = (*_WISHES, STATED)
    for name in custom_params:
        if isinstance(name, str) and name.startswith(_PREFIX) and name not in known:
            raise ValueError(
                f"custom_params may have {', '.join(_WISHES[:-1])} and {_WISHES[-1]} of the names "
                f"that begin with {_PREFIX}, got {name[:80]!r}."
            )


async def around_tokenizing(
    original: Callable[..., Any], self: Any, texts: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook of `TokenizerManager._tokenize_texts`, a coroutine.

    Refuses what is too long in any case. What is long goes to a thread, as SGLang's chat endpoints
    do it with all they tokenise: the tokenizer gives the interpreter free.

    Raises:
        ValueError: a text is too long to be cut.
    """
    lengths = [len(t) for t in ([texts] if isinstance(texts, str) else texts or ()) if t]
    check_num_chars(self, max(lengths, default=0))
    here = not cuts_overflow(self.server_args._hier_kv["truncation"])
    here |= self.async_dynamic_batch_tokenizer is not None  # that one lives on this loop
    if here or sum(lengths) <= _CHARS_ON_LOOP:
        return await original(self, texts, *args, **kwargs)
    went_to_thread(self)
    return await asyncio.get_running_loop().run_in_executor(
        None, lambda: asyncio.run(original(self, texts, *args, **kwargs))
    )


def before_rendering(self: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `OpenAIServingChat._process_messages`: chats have the same bound as texts.

    Raises:
        ValueError: all that is rendered of the chat together is too long to be cut.
    """
    rendered = (getattr(request, name, None) for name in _RENDERED)
    check_num_chars(self.tokenizer_manager, _num_chars(list(rendered)))


def check_num_chars(manager: Any, num_chars: int) -> None:
    """Refuses a text that is longer than any prompt that may be cut.

    Args:
        manager: SGLang's `TokenizerManager`.
        num_chars: of the text.

    Raises:
        ValueError: it is longer.
    """
    settings = manager.server_args._hier_kv
    longest = settings["truncation_longest"]
    most = _CHARS_PER_TOKEN * longest * manager.context_len
    if cuts_overflow(settings["truncation"]) and num_chars > most:
        raise ValueError(
            f"A prompt may have {most} characters on this server ({_CHARS_PER_TOKEN} for each "
            f"token of {longest} contexts, --hier-kv-truncation-longest), got {num_chars}; "
            "send less of the conversation."
        )


def _num_chars(value: Any) -> int:
    """Characters at least that a chat's template makes of this; media are bounded elsewhere."""
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, dict):
            rest += (*each, *each.values())
        elif isinstance(each, list | tuple):
            rest += each
        elif fields := getattr(each, "__dict__", None):
            rest += (part for name, part in fields.items() if name not in _MEDIA)
        elif each is not None:
            total += 1  # a number, say
    return total


def bound_bodies(app: Any, manager: Any) -> None:
    """Puts `BodyBound` innermost around SGLang's app, behind what unpacks bodies and checks keys.

    Args:
        app: SGLang's `FastAPI`, before it serves.
        manager: SGLang's `TokenizerManager`.
    """
    settings = manager.server_args._hier_kv
    if not cuts_overflow(settings["truncation"]):
        return
    longest = settings["truncation_longest"]
    app.add_middleware(
        BodyBound,
        longest_tokens=longest * manager.context_len,
        advice=f"the tokens of {longest} contexts, --hier-kv-truncation-longest",
    )
    app.user_middleware.append(app.user_middleware.pop(0))  # the last is the innermost
