"""Tells HTTP clients what was reused for their request, and what was left out of it.

SGLang's OpenAI endpoints keep three of the numbers that a scheduler reports and drop the rest. Here
an `Answer` follows each HTTP request: what the scheduler reported of its prompts is noted as it
comes past, and put where a client looks: the field `hier_kv` of `usage.prompt_tokens_details`, and
a header for answers that have no usage. Imports no SGLang: it is handed SGLang's classes.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextvars import ContextVar
from typing import Any

from pydantic import BaseModel, PrivateAttr, SerializeAsAny, create_model, model_serializer

from sglang_ext.seam.hooks.body_bound import App, Message, Receive, Send
from sglang_ext.seam.hooks.early_aborts import begin_flight
from sglang_ext.seam.reuse_report import DETAILS_KEY, merge_reports

HEADER = b"x-hier-kv"
# Of `/v1/responses`, which makes its `usage` itself, in OpenAI's other shape.
RESPONSE_MODEL = "ResponsesResponse"
# SGLang's other classes of answers with a `usage` that say how a prompt was served.
ANSWER_MODELS = (
    "ChatCompletionResponse",
    "ChatCompletionStreamResponse",
    "CompletionResponse",
    "CompletionStreamResponse",
)

_answer: ContextVar[Answer | None] = ContextVar("hier_kv_answer", default=None)


class Answer:
    """What is known of the prompts of one HTTP request. One event loop's tasks only."""

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, Any]] = {}
        self._num_cut = 0

    def note_cut(self) -> None:
        """One of its prompts is over the context length and will be cut."""
        self._num_cut += 1

    def note(self, output: dict[str, Any], index: int, num_choices: int) -> None:
        """Takes in what SGLang's front process knows of one of its choices by now.

        Args:
            output: what `TokenizerManager.generate_request` yields for one choice.
            index: of the choice, over all prompts.
            num_choices: of each prompt; the first of them says what the prompt cost.
        """
        details = output.get("meta_info", {}).get("cached_tokens_details")
        report = details.get(DETAILS_KEY) if details else None
        if isinstance(report, dict) and index % num_choices == 0:
            self._reports[index] = report

    def report(self) -> dict[str, Any]:
        """Over all prompts: reused tokens by tier, `dropped`, `moved`, `quality`; empty for none.

        With `cut_prompts` where any prompt was cut, also one of which nothing came back yet.
        """
        merged = merge_reports(self._reports.values())
        num_cut = max(self._num_cut, sum("dropped" in report for report in self._reports.values()))
        return {**merged, "cut_prompts": num_cut} if num_cut else merged


class AnswerReports:
    """ASGI middleware: gives each HTTP request its `Answer`, and the answer its header.

    An answer's start is held until something of its body comes: a stream that SGLang opens before
    its first token (Anthropic's) would have no header otherwise.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves one connection's request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer, held = Answer(), list[Message]()

        async def send_with_header(message: Message) -> None:
            if message["type"] == "http.response.start":
                held.append(message)
                return
            if held:
                await send(_with_header(held.pop(), answer.report()))
            await send(message)

        token = _answer.set(answer)
        try:
            await self._app(scope, receive, send_with_header)
        finally:
            _answer.reset(token)


def _with_header(start: Message, report: dict[str, Any]) -> Message:
    """The start of an answer, with the report where there is one."""
    if not report:
        return start
    value = json.dumps(report, separators=(",", ":")).encode()
    return {**start, "headers": [*start.get("headers", ()), (HEADER, value)]}


def note_cut() -> None:
    """A prompt of the HTTP request that is being served will be cut."""
    answer = _answer.get()
    if answer is not None:
        answer.note_cut()


def around_generate(
    original: Callable[..., AsyncGenerator[Any, None]],
    self: Any,
    obj: Any,
    *args: Any,
    **kwargs: Any,
) -> AsyncGenerator[Any, None]:
    """AROUND hook of `TokenizerManager.generate_request`: notes what comes past."""
    begin_flight()
    answer, outputs = _answer.get(), original(self, obj, *args, **kwargs)
    return outputs if answer is None else _noted(outputs, answer, obj)


async def _noted(
    outputs: AsyncGenerator[Any, None], answer: Answer, obj: Any
) -> AsyncGenerator[Any, None]:
    async with contextlib.aclosing(outputs):
        async for output in outputs:
            num_choices = getattr(obj, "parallel_sample_num", 1) or 1  # known once it runs
            for place, one in enumerate(output if isinstance(output, list) else [output]):
                if isinstance(one, dict):
                    answer.note(one, one.get("index", place), num_choices)
            yield output


def reports_usage(usage_class: type[BaseModel], details_class: type[BaseModel]) -> Any:
    """Makes the AFTER hook of the functions that make a `usage`.

    Args:
        usage_class: SGLang's `UsageInfo`.
        details_class: its `PromptTokensDetails`.

    Returns:
        The hook: it adds the report of the request that is being served to its usage.
    """
    details: Any = create_model(
        details_class.__name__, __base__=details_class, hier_kv=(dict[str, Any], ...)
    )
    usage: Any = create_model(
        usage_class.__name__, __base__=usage_class, prompt_tokens_details=(details, ...)
    )

    def after_usage(result: Any, *args: Any, **kwargs: Any) -> Any:
        report = _report_now()
        if not report:
            return None
        known = dict(result.prompt_tokens_details or ())
        values = {
            **dict(result),
            "prompt_tokens_details": details.model_construct(**known, hier_kv=report),
        }
        return usage.model_construct(**values)

    return after_usage


def with_any_usage(model: type[BaseModel]) -> type[BaseModel]:
    """A class of answers whose `usage` may say more than its own type does."""
    field = model.model_fields["usage"]
    as_any: Any = SerializeAsAny  # written as the class it has, not as the one that is declared
    fields: Any = {"usage": (as_any[field.annotation], field)}
    return create_model(model.__name__, __base__=model, __module__=model.__module__, **fields)


def _report_now() -> dict[str, Any]:
    answer = _answer.get()
    return answer.report() if answer is not None else {}


class _ReportedResponse(BaseModel):
    """What an answer of `/v1/responses` says besides: the report as of when it was made.

    One that is kept for later is asked for by another HTTP request, of which nothing is known.
    """

    _report: dict[str, Any] = PrivateAttr(default_factory=_report_now)

    @model_serializer(mode="wrap")
    def _with_report(self, handler: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        shown = handler(self)
        details = (shown.get("usage") or {}).get("input_tokens_details")
        if self._report and isinstance(details, dict):
            details[DETAILS_KEY] = self._report
        return shown


def reported_response(model: type[BaseModel]) -> type[BaseModel]:
    """A class of answers of `/v1/responses` whose `usage` has the report in it."""
    return create_model(
        model.__name__, __base__=(_ReportedResponse, model), __module__=model.__module__
    )


def holders_of(
    protocol: Any, model: type[BaseModel], replacement: type[BaseModel]
) -> list[tuple[str, type[BaseModel]]]:
    """Classes that have such an answer for a field, each with what takes its place.

    A stream's last event is one, in some releases: it would be written as the class that its field
    is declared with, without the report.
    """
    found: list[tuple[str, type[BaseModel]]] = []
    for name, each in vars(protocol).items():
        if isinstance(each, type) and issubclass(each, BaseModel):
            fields: Any = {
                field: (replacement, info)
                for field, info in each.model_fields.items()
                if info.annotation is model
            }
            if fields:
                module = each.__module__
                new = create_model(each.__name__, __base__=each, __module__=module, **fields)
                found.append((name, new))
    return found


def add_reports(app: Any) -> None:
    """Puts `AnswerReports` around SGLang's app.

    Args:
        app: SGLang's `FastAPI`, before it serves.
    """
    app.add_middleware(AnswerReports)


def response_classes(protocol: Any) -> Iterable[tuple[str, type[BaseModel]]]:
    """SGLang's classes of answers by name, each with what takes its place.

    Args:
        protocol: the module `sglang.srt.entrypoints.openai.protocol`.
    """
    found = [(name, with_any_usage(getattr(protocol, name))) for name in ANSWER_MODELS]
    return [*found, (RESPONSE_MODEL, reported_response(getattr(protocol, RESPONSE_MODEL)))]
