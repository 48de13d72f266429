"""What the admin endpoint takes, refuses and hands on, and what the command sends."""

from __future__ import annotations

import argparse
import asyncio
import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI

from runtime_cpu import inprocess
from sglang_ext.cli import steer as command
from sglang_ext.hints.request_hints import RequestHints
from sglang_ext.hints.steering_request import Steering, from_text, parse_body, to_text
from sglang_ext.seam.hooks.admin.steering_endpoint import CARRIER, PATH, add_steering, answer_to


@pytest.mark.parametrize(
    ("body", "steering", "prompt"),
    [
        ({"text": "a", "prefetch": True}, Steering(prefetch=True), "a"),
        ({"text": "a", "locate": True}, Steering(locate=True), "a"),
        ({"input_ids": [1, 2], "demote": True, "unpin": True, "prefetch": False},
         Steering(demote=True, unpin=True), [1, 2]),
        ({"text": "a", "pin_s": 5, "prefetch": True, "cache_salt": "s", "extra_key": "k"},
         Steering("s", "k", prefetch=True, hints=RequestHints(pin_s=5.0)), "a"),
        ({"text": "a", "ends": True, "cache_salt": ""},
         Steering(hints=RequestHints(ends=True)), "a"),
    ],
)  # fmt: skip
def test_a_body_is_read_and_reaches_a_scheduler_as_it_was(
    body: Any, steering: Steering, prompt: Any
) -> None:
    assert parse_body(body) == (steering, prompt)
    assert from_text(to_text(steering, [3, 4])) == (steering, [3, 4])


@pytest.mark.parametrize(
    ("body", "refusal"),
    [
        ([], "expected a JSON object with some of text, input_ids, cache_salt"),
        ({"text": "a", "pin": True}, "got 'pin'"),
        ({"text": "a"}, "expected something to do: locate, prefetch, demote, unpin"),
        ({"text": "a", "ends": False}, "expected something to do"),
        ({"prefetch": True}, "expected text or input_ids, one of the two"),
        ({"text": "a", "input_ids": [1], "prefetch": True}, "one of the two"),
        ({"text": "", "prefetch": True}, "a text that is not empty"),
        ({"text": 5, "prefetch": True}, "a text that is not empty"),
        ({"input_ids": "12", "prefetch": True}, "must be a list of token ids"),
        ({"input_ids": [1, True], "prefetch": True}, "must be a list of token ids"),
        ({"input_ids": [-1], "prefetch": True}, "must be a list of token ids"),
        ({"input_ids": [1 << 31], "prefetch": True}, "must be a list of token ids"),
        ({"input_ids": [10**30], "prefetch": True}, "must be a list of token ids"),
        ({"text": "\ud800", "prefetch": True}, "a text that is not empty"),
        ({"text": "a", "cache_salt": "\ud800", "prefetch": True}, "cache_salt must be a text"),
        ({"text": "a", "extra_key": "x\udfff", "prefetch": True}, "extra_key must be a text"),
        ({"text": "a", "prefetch": "yes"}, "prefetch must be true or false"),
        ({"text": "a", "prefetch": True, "demote": True}, "expected demote or prefetch, got both"),
        ({"text": "a", "prefetch": True, "ends": True}, "expected ends or prefetch, got both: of"),
        ({"text": "a", "locate": True, "unpin": True}, "locate or unpin, got both: it says where"),
        ({"text": "a", "locate": True, "pin_s": 5}, "expected locate or pin_s, got both"),
        ({"text": "a", "unpin": True, "pin_s": 5}, "unpin or pin_s, got both: one ends pins and"),
        ({"text": "a", "demote": True, "pin_s": 5}, "demote or pin_s, got both: pinned pages are"),
        ({"text": "a", "pin_s": -1}, r"the body\['pin_s'\] must be a number of seconds above 0"),
        ({"text": "a", "cache_salt": 5, "unpin": True}, "cache_salt must be a text of at most"),
        ({"text": "a", "extra_key": "x" * 5000, "unpin": True}, "extra_key must be a text of at"),
    ],
)
def test_what_cannot_be_is_refused_with_what_was_expected(body: Any, refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        parse_body(body)


class _Manager:
    """SGLang's front process, over one scheduler that gives an answer of the test's."""

    context_len = 8

    def __init__(self, answer: Any, api_key: str | None = None, admin: str | None = None) -> None:
        self.answer, self.carried = answer, ""
        self.server_args = SimpleNamespace(api_key=api_key, admin_api_key=admin)

    def auto_create_handle_loop(self) -> None:
        pass

    async def _tokenize_texts(self, text: str) -> tuple[list[int], None]:
        return [ord(each) for each in text], None

    async def get_internal_state_communicator(self, request: Any) -> list[Any]:
        self.carried = request.rid
        return [SimpleNamespace(internal_state=self.answer)]


def _ask(manager: _Manager, body: Any) -> tuple[int, dict[str, Any]]:
    async def read() -> Any:
        return json.loads(body) if isinstance(body, str) else body

    return asyncio.run(answer_to(manager, read, lambda rid: SimpleNamespace(rid=rid)))


def test_a_prompt_reaches_the_schedulers_as_tokens() -> None:
    manager = _Manager({"hier_kv": {"steered": {"pages": 1}}})
    body = {"text": "ab", "prefetch": True, "cache_salt": "s"}
    assert _ask(manager, body) == (200, {"schedulers": [{"pages": 1}]})
    assert manager.carried.startswith(CARRIER)
    assert from_text(manager.carried.removeprefix(CARRIER)) == (
        Steering("s", prefetch=True),
        [97, 98],
    )


@pytest.mark.parametrize(
    ("body", "answer", "status", "refusal"),
    [
        ("{", {}, 400, "Expecting"),
        ("[" * 100_000, {}, 400, "recursion"),
        ({"text": "a"}, {}, 400, "expected something to do"),
        ({"input_ids": [1] * 9, "demote": True}, {}, 400, "at most the 8 tokens"),
        ({"text": "a", "demote": True}, {}, 503, "no scheduler has done it"),
        ({"text": "a", "demote": True}, {"hier_kv": {"steered": {"error": "later"}}}, 503, "later"),
    ],
)
def test_a_refusal_says_why(body: Any, answer: Any, status: int, refusal: str) -> None:
    found = _ask(_Manager(answer), body)
    assert found[0] == status
    assert refusal in found[1]["error"]


def test_of_a_prefetch_is_said_what_is_brought_and_what_is_nowhere() -> None:
    done = {"pages": 16, "host": 16, "disk": 0, "prefetching": True}
    partly = {**done, "host": 12, "disk": 1}
    answers = [
        done,
        {**done, "host": 15, "disk": 1},
        partly,
        {**partly, "asking_remote": True},
        {**done, "host": 0},
        {**partly, "prefetching": False},
        {"pages": 16, "host": 12, "disk": 1},
    ]
    here, none = "16 whole pages, 12 in DRAM, 1 on disk", "16 whole pages, 0 in DRAM, 0 on disk"
    coming, first = "those on disk are being brought to DRAM", "come with the first request"
    busy = "nothing is brought: too many prompts are on their way already, try again later"
    assert command.lines_of({"schedulers": answers}) == [
        "scheduler 0: 16 whole pages, 16 in DRAM, 0 on disk",
        f"scheduler 1: 16 whole pages, 15 in DRAM, 1 on disk; {coming}",
        f"scheduler 2: {here}; {coming}; the other 3 are not stored, and {first}",
        f"scheduler 3: {here}; {coming}; the remote store is asked for the other 3",
        f"scheduler 4: {none}; the other 16 are not stored, and {first}",
        f"scheduler 5: {here}; {busy}",
        f"scheduler 6: {here}",
    ]


def test_the_endpoint_is_guarded_as_sglangs_own() -> None:
    inprocess.prepare()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from sglang.srt.utils.auth import add_api_key_middleware
    app, manager = FastAPI(), _Manager({"hier_kv": {"steered": {"pages": 1}}})
    for _ in range(2):  # a second front process in the same one adds no second
        add_steering(app, manager)
    assert [getattr(route, "path", "") for route in app.routes].count(PATH) == 1
    add_api_key_middleware(app, api_key="of all", admin_api_key="of the operator")
    assert [_post(app, key) for key in ("", "of all", "of the operator")] == [401, 401, 200]
    assert manager.carried.startswith(CARRIER)


@pytest.mark.parametrize(
    ("api_key", "admin", "statuses"),
    [
        (None, "of the operator", [401, 401, 401, 200]),
        ("of all", "of the operator", [401, 401, 401, 200]),
        ("of all", None, [401, 200, 401, 401]),
        (None, None, [200, 200, 200, 200]),
    ],
)
def test_the_endpoint_asks_for_its_key_where_sglang_does_not(
    api_key: str | None, admin: str | None, statuses: list[int]
) -> None:
    """As with several tokenizer workers, whose app has no middleware for keys."""
    inprocess.prepare()
    app = FastAPI()
    manager = _Manager({"hier_kv": {"steered": {"pages": 1}}}, api_key, admin)
    add_steering(app, manager)
    keys = ("", "of all", "\xfcber", "of the operator")
    assert [_post(app, key) for key in keys] == statuses


def test_a_key_may_have_any_characters() -> None:
    inprocess.prepare()
    app, manager = FastAPI(), _Manager({"hier_kv": {"steered": {"pages": 1}}}, admin="schlüssel")
    add_steering(app, manager)
    assert [_post(app, key) for key in ("schlüssel", "schlussel")] == [200, 401]


def _post(app: FastAPI, key: str) -> int:
    """The status that the endpoint answers a request with a key with."""
    sent: list[Any] = []
    body = json.dumps({"text": "ab", "prefetch": True}).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": PATH, "query_string": b"", "root_path": "",
        "http_version": "1.1", "scheme": "http", "server": ("here", 80), "client": ("there", 1),
        "headers": [(b"authorization", f"Bearer {key}".encode())],
    }  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SGLang answers with a class that FastAPI gave up
        asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    return status


def test_the_command_sends_what_it_was_given(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    command.add_command(parser, lambda _: None)
    text, ids = tmp_path / "text", tmp_path / "ids"
    text.write_text("the prompt")
    ids.write_text("[5, 6]")
    chosen = parser.parse_args(["--text", str(text), "--prefetch", "--pin-s", "60"])
    assert command.body_of(chosen) == {"text": "the prompt", "prefetch": True, "pin_s": 60.0}
    chosen = parser.parse_args(["--ids", str(ids), "--demote", "--extra-key", "k", "--ttl-s", "5"])
    assert command.body_of(chosen) == {
        "input_ids": [5, 6], "demote": True, "extra_key": "k", "ttl_s": 5.0,
    }  # fmt: skip
    assert parse_body(command.body_of(chosen))[0].demote
