"""What the demo does with a server: chats and documents, written in SGLang's own frontend.

Every conversation is a program that stays alive over its turns, and every question on a document
is a program of its own. Between two turns of a conversation, and between two questions on a
document, all the others have their turn: by then a small device pool has dropped the prefix.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sglang as sgl
from sglang.lang.chat_template import ChatTemplate, register_chat_template
from tokenizers import Tokenizer

from testkit.requests import by_tier, missed
from testkit.workload import ReuseAudit, load_texts, load_tokenizer

TEMPLATE = "tinylm"
PAGE_SIZE = 64
NEW_TOKENS = 16
IN_FLIGHT = 3
_FIRST_TURN_TOKENS, _LATER_TURN_TOKENS = (700, 1100), (60, 200)
_DOCUMENT_TOKENS, _QUESTION_TOKENS = (1200, 1700), (20, 60)

register_chat_template(
    ChatTemplate(
        name=TEMPLATE,
        default_system_prompt="",
        role_prefix_and_suffix={
            role: (f"<|{role}|>", "<|end|>") for role in ("system", "user", "assistant")
        },
        stop_str=("<|end|>",),
    )
)


@dataclass(frozen=True)
class Served:
    """One request that was answered.

    Attributes:
        kind: "chat" or "document".
        turn: number of the turn or question, from 0.
        ttft_ms: until the first token, from when it was sent.
        prompt_tokens: length of the prompt.
        reusable: tokens of it, in whole pages, that an earlier prompt of the run had.
        cached: tokens of it that were not computed.
        by_tier: the same by tier; empty from plain SGLang.
        missed: tokens that were stored once and computed again, by reason.
        answer: the text.
        sent_s: when it was sent, on a clock of the run's own.
        prompt: its tokens.
        output_tokens: of the answer.
    """

    kind: str
    turn: int
    ttft_ms: float
    prompt_tokens: int
    reusable: int
    cached: int
    by_tier: dict[str, int]
    missed: dict[str, int]
    answer: str
    sent_s: float
    prompt: tuple[int, ...]
    output_tokens: int

    @property
    def reused(self) -> int:
        """The part of the reusable tokens that was reused."""
        return min(self.cached, self.reusable)


@dataclass(frozen=True)
class Material:
    """The texts of a run, the same for both servers.

    Attributes:
        chats: what the user says, by conversation and turn.
        documents: a text and the questions on it.
    """

    chats: tuple[tuple[str, ...], ...]
    documents: tuple[tuple[str, tuple[str, ...]], ...]

    @property
    def num_requests(self) -> int:
        """Turns and questions together."""
        return sum(map(len, self.chats)) + sum(len(asked) for _, asked in self.documents)

    def distinct_tokens(self, tokenizer: Tokenizer) -> int:
        """Tokens of all prompts, each shared prefix once: the working set."""
        texts = [turn for turns in self.chats for turn in turns]
        texts += [part for text, asked in self.documents for part in (text, *asked)]
        return sum(len(encoded.ids) for encoded in tokenizer.encode_batch(texts))


def make_material(
    num_chats: int, num_turns: int, num_documents: int, num_questions: int
) -> Material:
    """Cuts turns, documents and questions out of the bundled texts; the same on every run."""
    tokenizer = load_tokenizer()
    texts = load_texts(tokenizer)
    rng = random.Random(8)

    def excerpt(limits: tuple[int, int]) -> str:
        num, text = rng.randint(*limits), rng.choice(texts)
        at = rng.randrange(len(text) - num)
        return str(tokenizer.decode(text[at : at + num], skip_special_tokens=False))

    chats = tuple(
        (
            excerpt(_FIRST_TURN_TOKENS),
            *(excerpt(_LATER_TURN_TOKENS) for _ in range(num_turns - 1)),
        )
        for _ in range(num_chats)
    )
    documents = tuple(
        (
            excerpt(_DOCUMENT_TOKENS),
            tuple(excerpt(_QUESTION_TOKENS) for _ in range(num_questions)),
        )
        for _ in range(num_documents)
    )
    return Material(chats, documents)


# ---- the programs ------------------------------------------------------------------------------


@sgl.function  # type: ignore[untyped-decorator]
def chat(s: Any, turns: Sequence[str], rounds: Rounds, who: int) -> None:
    """A conversation; it pauses after each turn until all the others had theirs."""
    for number, said in enumerate(turns):
        rounds.wait(number, who)
        s += sgl.user(said)
        s += sgl.assistant(sgl.gen(f"answer_{number}", max_tokens=NEW_TOKENS, temperature=0))
        _ = s[f"answer_{number}"]  # waits for it
        rounds.arrive()


@sgl.function  # type: ignore[untyped-decorator]
def ask(s: Any, document: str, question: str) -> None:
    """One question on a document."""
    s += sgl.system(document)
    s += sgl.user(question)
    s += sgl.assistant(sgl.gen("answer", max_tokens=NEW_TOKENS, temperature=0))


class Rounds:
    """Lets everybody into turn n + 1 when all are through turn n, in another order each time.

    Thread-safe.

    Args:
        members: the numbers of those who take part, by round.
    """

    def __init__(self, members: Sequence[Sequence[int]]) -> None:
        rng = random.Random(4)
        self._order = [rng.sample(list(who), len(who)) for who in members]
        self._left = [len(who) for who in members]  # guarded by _changed, as all below
        self._now = 0
        self._num_begun = 0
        self._failed = False
        self._changed = threading.Condition()

    def wait(self, number: int, who: int) -> None:
        """Waits for a round to begin, and in it for the participant's place in the order.

        Raises:
            RuntimeError: another participant failed.
        """
        place = self._order[number].index(who)
        with self._changed:
            self._changed.wait_for(
                lambda: (self._now == number and self._num_begun == place) or self._failed
            )
            if self._failed:
                raise RuntimeError("another chat or document failed")
            self._num_begun += 1
            self._changed.notify_all()

    def arrive(self) -> None:
        """Says that one participant is through the present round."""
        with self._changed:
            self._left[self._now] -= 1
            if not self._left[self._now]:
                self._now, self._num_begun = self._now + 1, 0
            self._changed.notify_all()

    def fail(self) -> None:
        """Ends all waiting."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


# ---- measuring ---------------------------------------------------------------------------------


@dataclass
class _Log:
    """What was served; guarded by `lock`."""

    served: list[Served] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class TimedEndpoint(sgl.RuntimeEndpoint):  # type: ignore[misc]
    """The frontend's own backend; streams every answer to see when its first token comes.

    Args:
        url: the server.
        on_served: called after each answer with the number of answers so far.
    """

    def __init__(self, url: str, on_served: Callable[[int], None]) -> None:
        super().__init__(url, chat_template_name=TEMPLATE)
        self._on_served = on_served
        self._log = _Log()
        self._slots = threading.Semaphore(IN_FLIGHT)
        self._tokenizer = load_tokenizer()
        self._audit = ReuseAudit(PAGE_SIZE)

    def generate(self, s: Any, sampling_params: Any) -> tuple[str, dict[str, Any]]:
        """Called by the frontend for each ``sgl.gen``."""
        prompt = self._tokenizer.encode(s.text_).ids
        answer, meta, first_s = "", {}, 0.0
        with self._slots:
            reusable = self._audit.reusable_tokens(prompt)
            start_s = time.perf_counter()
            for text, event in self.generate_stream(s, sampling_params):
                first_s = first_s or time.perf_counter()
                answer, meta = answer + text, event
        self._audit.answered(prompt, [])
        is_chat = s.text_.startswith("<|user|>")
        self._note(
            Served(
                kind="chat" if is_chat else "document",
                turn=s.text_.count("<|assistant|>") - 1 if is_chat else int(reusable > 0),
                ttft_ms=1e3 * (first_s - start_s),
                prompt_tokens=int(meta["prompt_tokens"]),
                reusable=reusable,
                cached=int(meta["cached_tokens"]),
                by_tier=by_tier(meta),
                missed=missed(meta),
                answer=answer,
                sent_s=start_s,
                prompt=tuple(prompt),
                output_tokens=int(meta["completion_tokens"]),
            )
        )
        return answer, meta

    def _note(self, served: Served) -> None:
        with self._log.lock:
            self._log.served.append(served)
            num = len(self._log.served)
        self._on_served(num)

    @property
    def served(self) -> list[Served]:
        """Everything answered so far, in the order of the answers."""
        with self._log.lock:
            return list(self._log.served)


def drive(url: str, material: Material, on_served: Callable[[int], None]) -> list[Served]:
    """Runs all chats and questions on a server.

    Raises:
        RuntimeError: a request failed.
    """
    backend = TimedEndpoint(url, on_served)
    lengths = [len(turns) for turns in material.chats]
    lengths += [len(asked) for _, asked in material.documents]
    rounds = Rounds(
        [
            [who for who, length in enumerate(lengths) if number < length]
            for number in range(max(lengths))
        ]
    )
    with ThreadPoolExecutor(len(lengths), thread_name_prefix="demo") as pool:
        paths = [
            pool.submit(_run_chat, backend, turns, rounds, who)
            for who, turns in enumerate(material.chats)
        ]
        paths += [
            pool.submit(_run_document, backend, text, asked, rounds, who)
            for who, (text, asked) in enumerate(material.documents, start=len(paths))
        ]
        for path in paths:
            path.result()
    return backend.served


def _run_chat(backend: TimedEndpoint, turns: Sequence[str], rounds: Rounds, who: int) -> None:
    with _failing(rounds):
        _check(chat.run(turns=turns, rounds=rounds, who=who, backend=backend))


def _run_document(
    backend: TimedEndpoint, text: str, asked: Sequence[str], rounds: Rounds, who: int
) -> None:
    with _failing(rounds):
        for number, question in enumerate(asked):
            rounds.wait(number, who)
            _check(ask.run(document=text, question=question, backend=backend))
            rounds.arrive()


@contextmanager
def _failing(rounds: Rounds) -> Iterator[None]:
    """Sees to it that one failure ends all, instead of leaving the others to wait."""
    try:
        yield
    except BaseException:
        rounds.fail()
        raise


def _check(state: Any) -> None:
    error = state.error()
    if error is not None:
        raise RuntimeError(f"a program failed: {error}") from error
