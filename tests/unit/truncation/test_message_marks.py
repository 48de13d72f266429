"""Marks of messages, read off chat templates of several kinds."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from sglang_ext.truncation.marks import MessageMarks, marks_of_renderer, marks_of_tokenizer

MODEL = Path(__file__).parents[2] / "assets" / "tinylm"
Chat = list[dict[str, str]]

_SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>"]
_SPECIAL += ["<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]"]
_SPECIAL += ["<start_of_turn>", "<end_of_turn>"]
_PIECES = re.compile("|".join(re.escape(mark) for mark in _SPECIAL) + r"|\w+|\n+|.", re.DOTALL)


def _encode(text: str) -> list[int]:
    """Special tokens by their place, others by a hash; line breaks merge, as in many tokenizers."""
    return [
        _SPECIAL.index(piece) if piece in _SPECIAL else 100 + sum(map(ord, piece)) * len(piece)
        for piece in _PIECES.findall(text)
    ]


def _chatml(chat: Chat) -> str:
    if chat[0]["role"] != "system":
        chat = [{"role": "system", "content": "You help."}, *chat]
    return "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat)


def _headers(chat: Chat) -> str:
    return "<s>" + "".join(
        f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['content']}<|eot_id|>" for m in chat
    )


def _inst(chat: Chat) -> str:
    text = "<s>"
    for at, message in enumerate(chat):
        if message["role"] != ("user", "assistant")[at % 2]:
            raise ValueError("roles must alternate")
        inner = message["content"]
        text += f"[INST] {inner} [/INST]" if at % 2 == 0 else f" {inner}</s>"
    return text


def _turns(chat: Chat) -> str:
    names = {"user": "user", "assistant": "model"}
    return "<s>" + "".join(
        f"<start_of_turn>{names[m['role']]}\n{m['content']}<end_of_turn>\n" for m in chat
    )


def _plain(chat: Chat) -> str:
    return "".join(f"{m['role'].upper()}: {m['content']}\n" for m in chat)


_CHAT = [
    {"role": "user", "content": "one two"},
    {"role": "assistant", "content": "\nthree"},
    {"role": "user", "content": "four"},
]


@pytest.mark.parametrize("render", [_chatml, _headers, _turns])
def test_messages_are_found_where_the_template_puts_them(render) -> None:  # type: ignore[no-untyped-def]
    marks = marks_of_renderer(render, _encode, range(len(_SPECIAL)))
    found = marks.find(_encode(render(_CHAT)))
    begins = [len(_encode(render(_CHAT[:count]))) for count in (1, 2)]
    assert found.all.tolist()[1:] == begins
    assert found.turns.tolist() == [found.all[0], begins[1]]


def test_a_system_prompt_of_the_template_itself_is_head() -> None:
    marks = marks_of_renderer(_chatml, _encode, range(len(_SPECIAL)))
    ids = _encode(_chatml(_CHAT))
    first = marks.find(ids).first
    assert first == len(_encode("<|im_start|>system\nYou help.<|im_end|>\n"))


def test_a_template_that_marks_users_only_still_gives_turns() -> None:
    marks = marks_of_renderer(_inst, _encode, range(len(_SPECIAL)))
    ids = _encode(_inst(_CHAT))
    at = [place for place, token in enumerate(ids) if token == _SPECIAL.index("[INST]")]
    assert marks.find(ids).turns.tolist() == at


def test_plain_text_between_messages_is_no_mark() -> None:
    assert marks_of_renderer(_plain, _encode, range(len(_SPECIAL))) == MessageMarks()


def test_the_bundled_model() -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(MODEL))
    marks = marks_of_tokenizer(tokenizer)
    chat = [{"role": "system", "content": "You answer."}, *_CHAT]
    ids = tokenizer.apply_chat_template(chat, return_dict=False)
    user, assistant = tokenizer.convert_tokens_to_ids(["<|user|>", "<|assistant|>"])
    found = marks.find(ids)
    assert found.turns.tolist() == [at for at, token in enumerate(ids) if token == user]
    assert found.all.size == found.turns.size + ids.count(assistant)
    tokenizer.chat_template = None
    assert marks_of_tokenizer(tokenizer) == MessageMarks()


def test_a_mark_that_is_not_whole_does_not_count() -> None:
    marks = MessageMarks(turn=((1, 2, 3),))
    assert marks.find([1, 2, 3, 9, 1, 2]).turns.tolist() == [0]
    for short in ([], [1], [1, 2]):
        assert marks.find(short).first is None
