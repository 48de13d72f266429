"""Bodies and texts that are longer than any prompt: refused before work that grows with them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from sglang_ext.seam.hooks.body_bound import BodyBound, Message, NumberRun
from sglang_ext.seam.hooks.early_aborts import (
    around_sending,
    around_sending_batch,
    before_abort,
    begin_flight,
)
from sglang_ext.seam.hooks.front import around_tokenizing, before_rendering, bound_bodies

LONGEST = 40_000
JSON = {b"content-type": b"application/json"}


class Client:
    """One request to the middleware, and what the app behind it was given.

    Args:
        parts: the body, as it arrives.
        headers: of the request, beside the body's length.
        chunked: no length is said.
    """

    def __init__(
        self, parts: list[bytes], headers: dict[bytes, bytes] = JSON, *, chunked: bool = False
    ) -> None:
        self.served: list[bytes] | None = None
        self.answer: list[Message] = []
        length = {b"content-length": b"%d" % sum(map(len, parts))}
        length = {b"transfer-encoding": b"chunked"} if chunked else length
        self.left = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
        self.left[-1]["more_body"] = False
        self.num_parts = len(parts)
        self.read_before = self.num_parts
        scope = {"type": "http", "headers": [*headers.items(), *length.items()]}
        app = BodyBound(self.app, longest_tokens=LONGEST, advice="so it is")
        asyncio.run(app(scope, self.receive, self.send))

    async def receive(self) -> Message:
        return self.left.pop(0)

    async def send(self, message: Message) -> None:
        self.answer.append(message)

    async def app(self, scope: Message, receive: Any, send: Any) -> None:
        self.read_before = self.num_parts - len(self.left)
        self.served = []
        while True:
            message = await receive()
            self.served.append(message["body"])
            if not message["more_body"]:
                return

    @property
    def refusal(self) -> str:
        """What the client reads; empty when its request was served."""
        if self.served is not None:
            return ""
        assert self.answer[0]["status"] == 413
        assert not self.left
        return str(json.loads(self.answer[1]["body"])["error"]["message"])


def cut(body: bytes, size: int) -> list[bytes]:
    return [body[at : at + size] for at in range(0, len(body), size)]


def ids(num: int) -> bytes:
    return json.dumps({"text": "1, 2", "input_ids": list(range(num)), "stream": True}).encode()


@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 30])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_list_that_no_prompt_can_have_is_refused(size: int, chunked: bool) -> None:
    too_long = Client(cut(ids(LONGEST + 20_000), size), chunked=chunked)
    assert f"may have {LONGEST} of them on this server (so it is), got more" in too_long.refusal
    fits = Client(cut(ids(LONGEST), size), chunked=chunked)
    assert b"".join(fits.served or []) == ids(LONGEST)


@pytest.mark.parametrize(
    "value",
    [
        "7, 8 " * 2 * LONGEST,  # a text
        "iVBORw0KGgo" * LONGEST,  # an image
        [[1] * 400] * 200,  # a batch, all of it longer than one prompt
        [0.5] * 2 * LONGEST,  # features of an image
        ["1", "2"] * LONGEST,
    ],
)
def test_what_is_no_prompt_in_numbers_is_served(value: Any) -> None:
    body = json.dumps({"value": value}).encode()
    assert b"".join(Client(cut(body, 1 << 15)).served or []) == body


@pytest.mark.parametrize(
    "value",
    [
        [[1]] * 2 * LONGEST,  # so many prompts
        [[]] * 2 * LONGEST,
        ([1] * 100 + [None]) * 500,
        [1.0] * 2 * LONGEST,  # taken for whole numbers
        [{"a": [[3, 4.0, True]] * 2 * LONGEST}],
    ],
)
@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 30])
@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":"), ("\n,\n", ":")])
def test_a_list_of_what_takes_as_long_as_numbers_is_refused(
    value: Any, size: int, separators: tuple[str, str]
) -> None:
    body = json.dumps({"text": '",[{"', "value": value}, separators=separators).encode()
    assert Client(cut(body, size)).refusal


def longest_list(value: Any) -> int:
    """As `NumberRun` counts, of what was parsed."""
    if isinstance(value, dict):
        return max([1, *map(longest_list, value.values())])
    if not isinstance(value, list):
        return 0
    counted = [
        not isinstance(each, str | dict) and not (isinstance(each, float) and each % 1)
        for each in value[1:]
    ]
    is_less = bool(value) and isinstance(value[0], float) and value[0] % 1
    return max([1 + sum(counted) - bool(is_less), *map(longest_list, value)])


def test_every_list_is_counted_however_the_body_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a count of the parsed body: texts with quotes, brackets and backslashes, depth."""
    monkeypatch.setattr("sglang_ext.seam.hooks.body_bound._PIECE_BYTES", 97)
    for seed in range(300):
        rng = random.Random(seed)

        def made(depth: int, rng: random.Random = rng) -> Any:
            kind = rng.randrange(8 if depth else 6)
            if kind == 6:
                return [made(depth - 1) for _ in range(rng.randrange(9))]
            if kind == 7:
                return {str(number): made(depth - 1) for number in range(rng.randrange(5))}
            text = "".join(rng.choices('"\\[]{},.1 \n', k=rng.choice([0, 3, 200])))
            return [text, rng.randrange(10**9), 0.05, 2.0, None, -1.25e-7][kind]

        value = [[made(4) for _ in range(9)], list(range(rng.randrange(60)))]
        body = json.dumps(value, indent=rng.choice([None, 3])).encode()
        for size in (1, 13, 96, 97, 98, 1000):
            run = NumberRun()
            for part in cut(body, size):
                run.add(part)
            run.finish()
            assert run.longest == longest_list(value), (seed, size)


def test_small_bodies_and_uploads_are_not_read_before_the_app_asks() -> None:
    assert Client(cut(ids(1000), 100)).read_before == 0
    assert (
        Client(cut(ids(5 * LONGEST), 1 << 16), {b"content-type": b"multipart/x"}).read_before == 0
    )


def test_the_run_does_not_depend_on_how_the_body_is_cut() -> None:
    body = b'{"a": [' + b"1, " * 70_000 + b"1], [" + b"2,\n" * 90_000 + b'2], "b": 3}'
    for size, num in ((1, 9_999), (7, 9_999), (4096, 90_001), (1 << 16, 90_001), (1 << 20, 90_001)):
        run = NumberRun()
        for part in cut(body if num > 10_000 else body[:30_000], size):
            run.add(part)
        run.finish()
        assert run.longest == num, size


def manager_of(truncation: str = "overflow", **fields: Any) -> SimpleNamespace:
    settings = {"truncation": truncation, "truncation_longest": 8}
    return SimpleNamespace(
        context_len=10_000,
        server_args=SimpleNamespace(_hier_kv=settings),
        async_dynamic_batch_tokenizer=None,
        **fields,
    )


def test_others_are_served_while_a_long_text_is_tokenised() -> None:
    """The tokenizer ends when another coroutine of the same loop has run: at once, or never."""
    other_ran = threading.Event()

    async def tokenize(self: Any, texts: Any) -> str:
        assert other_ran.wait(300), "the loop is held up"
        return "ids"

    async def both() -> str:
        long = asyncio.ensure_future(around_tokenizing(tokenize, manager_of(), "x" * 100_000))
        await asyncio.sleep(0)
        other_ran.set()
        return str(await long)

    assert asyncio.run(both()) == "ids"


@pytest.mark.parametrize("texts", ["short", ["a", "b" * 100], None])
def test_short_texts_stay_on_the_loop(texts: Any) -> None:
    threads = []

    async def tokenize(self: Any, texts: Any) -> None:
        threads.append(threading.current_thread())

    asyncio.run(around_tokenizing(tokenize, manager_of(), texts))
    asyncio.run(around_tokenizing(tokenize, manager_of("off"), "x" * 100_000))
    assert threads == [threading.main_thread()] * 2


def test_texts_and_chats_have_one_bound() -> None:
    async def never(self: Any, texts: Any) -> None:
        raise AssertionError("it is tokenised")

    whole = "x" * (16 * 8 * 10_000)
    with pytest.raises(ValueError, match="1280000 characters on this server"):
        asyncio.run(around_tokenizing(never, manager_of(), ["x", whole + "x"]))

    def chat(words: str, image: int, **more: Any) -> Any:
        parts = [SimpleNamespace(text=words), SimpleNamespace(image_url="i" * image)]
        messages = [SimpleNamespace(content=words), SimpleNamespace(content=parts)]
        return SimpleNamespace(messages=[*messages, SimpleNamespace(content=None)], **more)

    serving = SimpleNamespace(tokenizer_manager=manager_of())
    half = whole[: len(whole) // 2]
    before_rendering(serving, chat(half, image=10 * len(whole)))
    with pytest.raises(ValueError, match="characters on this server"):
        before_rendering(serving, chat(half + "x", image=0))
    tool = SimpleNamespace(function=SimpleNamespace(parameters={"a": {"enum": [1] * 9, "b": "x"}}))
    before_rendering(serving, chat(half[16:], image=0, tools=[tool] * 2))
    with pytest.raises(ValueError, match="characters on this server"):
        before_rendering(serving, chat(half[15:], image=0, tools=[tool] * 2))
    with pytest.raises(ValueError, match="characters on this server"):
        before_rendering(serving, chat("", image=0, chat_template_kwargs={"documents": [whole]}))
    off = SimpleNamespace(tokenizer_manager=manager_of("off"))
    before_rendering(off, chat(whole, image=0))


def test_bodies_are_bounded_where_prompts_are_cut() -> None:
    for truncation, num in (("overflow", 1), ("all", 1), ("off", 0), ("match", 0)):
        app = FastAPI()
        app.add_middleware(CORSMiddleware)
        bound_bodies(app, manager_of(truncation))
        names = [str(each) for each in app.user_middleware]
        assert [name.startswith("Middleware(BodyBound") for name in names] == [False, True][
            : 1 + num
        ]


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("all_at", ["never", "while a thread has the text", "before"])
@pytest.mark.parametrize("of_one", [False, True])
def test_what_was_aborted_before_it_was_sent_is_aborted_once_it_was(
    of_one: bool, all_at: str, batch: bool
) -> None:
    """A text on its thread: SGLang's abort came to a scheduler that did not know the request."""
    told: list[str] = []
    state = SimpleNamespace(abort_sent=False)

    def abort_request(rid: str = "", abort_all: bool = False) -> None:
        before_abort(manager, rid, abort_all)
        assert abort_all or not state.abort_sent, "SGLang tells of an abort once"
        told.append("abort all" if abort_all else f"abort {rid}")

    async def tokenize(self: Any, texts: Any) -> None:
        if all_at.startswith("while"):
            abort_request(abort_all=True)
        state.abort_sent = of_one

    async def send(_: Any, request: Any) -> None:
        told.append("send")

    async def serve() -> None:
        begin_flight()
        await asyncio.gather(around_tokenizing(tokenize, manager, "x" * 100_000))  # as with n > 1
        requests = [SimpleNamespace(rid=rid) for rid in ("a", "gone")]
        if batch:
            await around_sending_batch(send, manager, requests)
        else:
            for request in requests:
                await around_sending(send, manager, request)

    manager = manager_of()
    manager.rid_to_state, manager.abort_request = {"a": state}, abort_request
    if all_at == "before":
        abort_request(abort_all=True)
    asyncio.run(serve())
    aborts_a = ["abort a"] if of_one or all_at.startswith("while") else []
    assert told == [
        *(["abort all"] if all_at != "never" else []),
        "send",
        *aborts_a,
        *(["send"] if not batch else []),
    ]


def test_an_abort_of_all_is_not_for_the_next_request_of_the_same_task() -> None:
    async def nothing(self: Any, _: Any) -> None: ...

    async def serve() -> None:
        begin_flight()
        await around_tokenizing(nothing, manager, "x" * 100_000)
        before_abort(manager, abort_all=True)
        begin_flight()  # token ids: nothing is tokenised
        await around_sending(nothing, manager, SimpleNamespace(rid="a"))

    manager = manager_of()
    manager.rid_to_state = {"a": SimpleNamespace(abort_sent=False)}
    asyncio.run(serve())  # which would call `abort_request`, and there is none
