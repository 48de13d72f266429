"""Where messages begin in a tokenised prompt, by the special tokens of its chat template.

Nothing is known of any model's template: it is rendered for a few probes, and what it puts before a
user's, an assistant's or a tool's words is read off. Only marks that begin with a special token
count, as plain text tokenises differently from place to place.

A client can write a special token into a message. That moves where a cut falls in its own prompt,
and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.truncation.cut import I64, Messages

Render = Callable[[list[dict[str, str]]], str]
Encode = Callable[[str], Sequence[int]]
Mark = tuple[int, ...]

_USER, _ASSISTANT, _OTHER = "zqUSERqz", "zqREPLYqz", "zqOTHERqz"
# What a message may begin with: a mark's last tokens may merge with it, and then do not count.
_BEGINNINGS = ("x", "7", " y", "\n", "{")


@dataclass(frozen=True)
class MessageMarks:
    """Token sequences that messages begin with.

    Attributes:
        turn: those of a user's message.
        other: those of an assistant's or a tool's.
    """

    turn: tuple[Mark, ...] = ()
    other: tuple[Mark, ...] = ()

    def find(self, tokens: npt.ArrayLike) -> Messages:
        """Where messages begin in `tokens` [n]; linear in n.

        A mark that is not whole, at the end, does not count.
        """
        ids = np.asarray(tokens, np.int64)
        are_turns = _begin(ids, self.turn)
        return Messages(
            np.flatnonzero(are_turns | _begin(ids, self.other)), np.flatnonzero(are_turns)
        )


def marks_of_tokenizer(tokenizer: Any) -> MessageMarks:
    """The marks of a Hugging Face tokenizer; none without a chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return MessageMarks()
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = {index for index, token in added.items() if getattr(token, "special", False)}

    def render(messages: list[dict[str, str]]) -> str:
        text: str = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=False
        )
        return text

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    return marks_of_renderer(render, encode, special | set(tokenizer.all_special_ids))


def marks_of_renderer(render: Render, encode: Encode, special_ids: Collection[int]) -> MessageMarks:
    """The marks of whatever renders messages.

    Args:
        render: text of messages (dicts of `role` and `content`), without a prompt for an answer;
            it may raise for roles that it does not know.
        encode: tokens of a text, without special ones around it.
        special_ids: tokens that no plain text makes.
    """
    chat = [_message("user", _USER), _message("assistant", _ASSISTANT)]
    turn = _mark(render, encode, special_ids, chat, _message("user", _OTHER))
    other = [
        _mark(render, encode, special_ids, chat[:1], _message("assistant", _OTHER)),
        _mark(render, encode, special_ids, chat, _message("tool", _OTHER)),
    ]
    known = {mark for mark in other if mark} - {turn}
    return MessageMarks((turn,) if turn else (), tuple(sorted(known)))


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _mark(
    render: Render,
    encode: Encode,
    special_ids: Collection[int],
    before: list[dict[str, str]],
    message: dict[str, str],
) -> Mark:
    """What is put between the end of `before` and the words of `message`; empty if unclear."""
    try:
        shorter, longer = render(before), render([*before, message])
    except Exception:  # templates raise what they like for a role or an order that they refuse
        return ()
    end, begin = longer.find(before[-1]["content"]), longer.find(message["content"])
    shared = _shared(shorter, longer)
    if end < 0 or begin < 0 or not end + len(before[-1]["content"]) <= shared < begin:
        return ()
    text = longer[shared:begin]
    encodings = [list(encode(text + beginning)) for beginning in _BEGINNINGS]
    mark = tuple(encodings[0][: min(_shared(encodings[0], each) for each in encodings)])
    return mark if mark and mark[0] in special_ids else ()


def _shared(first: Sequence[object], second: Sequence[object]) -> int:
    """Length of what both begin with."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def _begin(ids: I64, marks: Sequence[Mark]) -> npt.NDArray[np.bool_]:
    """At which tokens one of the marks begins."""
    found = np.zeros(ids.size, np.bool_)
    for mark in marks:
        whole = max(0, ids.size - len(mark) + 1)
        begins = ids[:whole] == mark[0]
        for offset, token in enumerate(mark[1:], start=1):
            begins &= ids[offset : offset + whole] == token
        found[:whole] |= begins
    return found
