"""Reads the documents that `hier-kv warm` is given, and makes a request to SGLang of each."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

TENANT = ("cache_salt", "extra_key")
_PROMPTS = ("text", "input_ids", "messages")
# Other fields that a line with `messages` may have: SGLang's chat template reads them. `model` is
# not among them: it may name an adapter, and the steering endpoint does not find adapters' pages.
_OF_CHATS = (
    "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "continue_final_message",
)  # fmt: skip
_GENERATE, _CHAT = "/generate", "/v1/chat/completions"


@dataclass(frozen=True)
class Document:
    """One prompt.

    Attributes:
        where: the file, and the line in a `.jsonl`; for messages.
        num_bytes: length of the document in its file.
        path: of the endpoint that it is sent to.
        body: of the request to that endpoint.
    """

    where: str
    num_bytes: int
    path: str
    body: dict[str, Any]

    @property
    def tenant(self) -> dict[str, str]:
        """The fields `TENANT` of the request, which the steering endpoint is given, too."""
        return {name: self.body[name] for name in TENANT if name in self.body}


def read_documents(files: Sequence[str], common: Mapping[str, str]) -> Iterator[Document]:
    """The documents of files, in order; one is in memory at a time.

    Args:
        files: `.jsonl` for a document a line, anything else is one text.
        common: values of `TENANT` for documents that do not give their own.

    Raises:
        ValueError: a line or a file is no document; it says which.
        OSError: a file cannot be read.
    """
    for name in files:
        path = Path(name)
        if path.suffix == ".jsonl":
            with path.open("rb") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _of_line(line, f"{name}:{number}", common)
        else:
            content = path.read_bytes()
            document = _of_object({"text": _decoded(content, name), **common}, name)
            yield replace(document, num_bytes=len(content))


def _of_line(line: bytes, where: str, common: Mapping[str, str]) -> Document:
    text = _decoded(line, where)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: expected a JSON object in one line ({error}).") from error
    if not isinstance(found, dict):
        raise ValueError(f"{where}: expected a JSON object, got {str(found)[:40]!r}.")
    return replace(_of_object({**common, **found}, where), num_bytes=len(line))


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: expected text in UTF-8 ({error}).") from error


def _of_object(found: dict[str, Any], where: str) -> Document:
    kinds = [name for name in _PROMPTS if name in found]
    if len(kinds) != 1:
        got = " and ".join(kinds) or "none of them"
        raise ValueError(f"{where}: expected one of {', '.join(_PROMPTS)}, got {got}.")
    of_chats = _OF_CHATS if "messages" in found else ()
    names = (kinds[0], *TENANT, *of_chats)
    for name in found:
        if name not in names:
            raise ValueError(f"{where}: expected some of {', '.join(names)}, got {name[:80]!r}.")
    for name in TENANT:
        if name in found and not isinstance(found[name], str):
            raise ValueError(f"{where}: {name} must be a text.")
    if not _is_prompt(kinds[0], found[kinds[0]]):
        raise ValueError(f"{where}: {kinds[0]} must be {_EXPECTED[kinds[0]]}.")
    if "messages" in found:
        return Document(where, 0, _CHAT, {**found, **_OF_CHAT_REQUESTS})
    return Document(where, 0, _GENERATE, {**found, **_OF_REQUESTS})


# With 0 new tokens SGLang computes the prompt's KV and generates nothing.
_OF_REQUESTS: dict[str, Any] = {
    "sampling_params": {"max_new_tokens": 0},
    "return_prompt_token_ids": True,
}
_OF_CHAT_REQUESTS: dict[str, Any] = {
    "max_tokens": 0,
    "return_prompt_token_ids": True,
    "return_meta_info": True,
}
_EXPECTED = {
    "text": "a text that is not empty",
    "input_ids": "a list of token ids that is not empty",
    "messages": "a list of a chat's messages that is not empty, all of text",
}


def _is_prompt(name: str, value: Any) -> bool:
    if name == "text":
        return isinstance(value, str) and bool(value)
    if not isinstance(value, list) or not value:
        return False
    if name == "messages":
        return all(isinstance(each, dict) and _is_text(each.get("content")) for each in value)
    return all(type(each) is int and each >= 0 for each in value)


def _is_text(content: Any) -> bool:
    """Whether a message's content has no images.

    The names of pages with images depend on the images' digests, so the steering endpoint, which is
    given token ids, would not find them.
    """
    if isinstance(content, list):
        return all(isinstance(part, dict) and part.get("type") == "text" for part in content)
    return content is None or isinstance(content, str)
