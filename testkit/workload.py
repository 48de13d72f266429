"""Multi-turn chats and questions on documents, from real text, for tests, benches and the demo.

A path is one conversation or one document. A turn of a conversation is the prompt before it, the
answer that the server gave, and new text; a question on a document is the document and the
question. Prompts are token ids, so that what was served comes back token for token.

    workload = make_workload(tokenizer=Tokenizer.from_file(...), texts=load_texts())
    samples = drive(workload, send, in_flight=10)

The order is by rounds (each path's next turn, shuffled), so that between two turns of a path most
of the other paths have run. A path's next turn is sent when its last one has been answered.
"""

from __future__ import annotations

import functools
import hashlib
import random
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tokenizers import Tokenizer

from testkit.requests import by_tier

ASSETS = Path(__file__).resolve().parent.parent / "tests" / "assets"

MIN_PROMPT_TOKENS = 300
MAX_PROMPT_TOKENS = 1800

_FIRST_TURN_TOKENS = (300, 600)
_LAST_TURN_TOKENS = (1000, 1780)
_DOCUMENT_TOKENS = (320, 1700)
_QUESTION_TOKENS = (24, 72)
_MIN_TEXT_TOKENS = 4000


@dataclass(frozen=True)
class WorkPath:
    """A conversation, or a document with its questions.

    Attributes:
        kind: "chat": each turn continues the one before; "document": all begin with `head`.
        head: token ids that every prompt of the path begins with; empty for a chat.
        turns: token ids that each turn adds.
        max_new_tokens: answer length; the server is told to ignore the end token.
    """

    kind: Literal["chat", "document"]
    head: tuple[int, ...]
    turns: tuple[tuple[int, ...], ...]
    max_new_tokens: int

    def prompt(self, turn: int, before: Sequence[int]) -> list[int]:
        """The prompt of a turn.

        Args:
            turn: its number, from 0.
            before: prompt and answer of the turn before; ignored by documents.
        """
        start = before if self.kind == "chat" and turn else self.head
        return [*start, *self.turns[turn]]

    @property
    def distinct_tokens(self) -> int:
        """Tokens of all prompts and answers of the path, each shared prefix once."""
        answers = len(self.turns) * self.max_new_tokens
        return len(self.head) + sum(map(len, self.turns)) + answers


@dataclass(frozen=True)
class Workload:
    """Paths, and the order in which their turns are sent."""

    paths: tuple[WorkPath, ...]
    order: tuple[tuple[int, int], ...]

    @property
    def working_set_tokens(self) -> int:
        """Tokens of all distinct prefixes."""
        return sum(path.distinct_tokens for path in self.paths)


@dataclass(frozen=True)
class Reply:
    """What the server answered.

    Attributes:
        output_ids: the answer.
        cached_tokens: prompt tokens that were not computed.
        by_tier: the same by tier, as the plugin reports them; empty from plain SGLang.
        seconds: time to the whole answer.
        num_retractions: how often SGLang took its rows away while it ran, and ran it anew.
    """

    output_ids: tuple[int, ...]
    cached_tokens: int
    by_tier: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    num_retractions: int = 0


@dataclass(frozen=True)
class Sample:
    """One turn that was served.

    Attributes:
        reusable_tokens: prompt tokens in whole pages that an earlier, answered request of the run
            had computed, short of the last token of the prompt.
        num_in_flight: requests in flight when it was sent, itself among them.
    """

    path: int
    turn: int
    prompt: tuple[int, ...]
    reply: Reply
    reusable_tokens: int
    num_in_flight: int

    @property
    def reused_tokens(self) -> int:
        """The part of the reusable tokens that was reused."""
        return min(self.reply.cached_tokens, self.reusable_tokens)


def hit_rate(samples: Iterable[Sample]) -> float:
    """Reused over reusable tokens; 0.0 when there are none."""
    pairs = [(sample.reused_tokens, sample.reusable_tokens) for sample in samples]
    reusable = sum(pair[1] for pair in pairs)
    return sum(pair[0] for pair in pairs) / reusable if reusable else 0.0


# ---- making one ----------------------------------------------------------------------------------


def load_texts(tokenizer: Tokenizer, folder: Path = ASSETS / "text") -> list[list[int]]:
    """Token ids of the bundled documents that are long enough, in name order."""
    return [list(ids) for ids in _encoded(tokenizer, folder)]


@functools.cache
def _encoded(tokenizer: Tokenizer, folder: Path) -> tuple[array[int], ...]:
    """As `load_texts`. Many tests of a process want texts, and encoding all takes a second."""
    files = sorted(path for path in folder.rglob("*.*") if path.name != "COPYRIGHT")
    encoded = [tokenizer.encode(path.read_text(encoding="utf-8")).ids for path in files]
    return tuple(array("q", ids) for ids in encoded if len(ids) >= _MIN_TEXT_TOKENS)


@functools.cache
def load_tokenizer(folder: Path = ASSETS / "tinylm") -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def make_workload(
    *,
    num_chats: int = 40,
    num_turns: int = 4,
    num_documents: int = 10,
    num_questions: int = 5,
    max_new_tokens: int = 24,
    seed: int = 0,
    tokenizer: Tokenizer | None = None,
) -> Workload:
    """Makes a workload of real text with prompts of 300 to 1,800 tokens.

    Args:
        num_chats: conversations.
        num_turns: turns of each.
        num_documents: documents.
        num_questions: questions on each.
        max_new_tokens: answer length.
        seed: fixes lengths, excerpts and order.
        tokenizer: the bundled model's when None.
    """
    rng = random.Random(seed)
    encoder = _Encoder(tokenizer or load_tokenizer(), rng)
    paths = [encoder.chat(num_turns, max_new_tokens) for _ in range(num_chats)]
    paths += [encoder.document(num_questions, max_new_tokens) for _ in range(num_documents)]
    order: list[tuple[int, int]] = []
    for turn in range(max(len(path.turns) for path in paths)):
        round_ = [(index, turn) for index, path in enumerate(paths) if turn < len(path.turns)]
        rng.shuffle(round_)
        order += round_
    return Workload(tuple(paths), tuple(order))


class _Encoder:
    """Cuts excerpts out of the bundled texts and puts them into the model's chat format."""

    def __init__(self, tokenizer: Tokenizer, rng: random.Random) -> None:
        self._rng = rng
        self._texts = load_texts(tokenizer)
        self._user = tokenizer.encode("<|user|>").ids
        self._answer = tokenizer.encode("<|end|><|assistant|>").ids
        self._end = tokenizer.encode("<|end|>").ids
        self._system = tokenizer.encode("<|system|>Answer from this page.\n").ids
        self._ask = tokenizer.encode("<|end|><|user|>What does the page say about this?\n").ids

    def chat(self, num_turns: int, max_new_tokens: int) -> WorkPath:
        first = self._rng.randint(*_FIRST_TURN_TOKENS)
        last = self._rng.randint(*_LAST_TURN_TOKENS)
        step = (last - first) // max(1, num_turns - 1)
        turns = [self._message(self._user, first)]
        start = [*self._end, *self._user]
        turns += [self._message(start, step - max_new_tokens) for _ in range(num_turns - 1)]
        return WorkPath("chat", (), tuple(turns), max_new_tokens)

    def document(self, num_questions: int, max_new_tokens: int) -> WorkPath:
        head = (*self._system, *self._excerpt(self._rng.randint(*_DOCUMENT_TOKENS)))
        lengths = [self._rng.randint(*_QUESTION_TOKENS) for _ in range(num_questions)]
        turns = tuple(self._message(self._ask, length) for length in lengths)
        return WorkPath("document", head, turns, max_new_tokens)

    def _message(self, start: list[int], num_tokens: int) -> tuple[int, ...]:
        """Start, an excerpt and the request for an answer, `num_tokens` together."""
        room = num_tokens - len(start) - len(self._answer)
        return (*start, *self._excerpt(max(1, room)), *self._answer)

    def _excerpt(self, num_tokens: int) -> list[int]:
        text = self._rng.choice(self._texts)
        at = self._rng.randrange(len(text) - num_tokens)
        return text[at : at + num_tokens]


# ---- driving a server ----------------------------------------------------------------------------


class ReuseAudit:
    """What a perfect cache of whole pages could reuse. Thread-safe."""

    def __init__(self, page_size: int = 64) -> None:
        self._page_size = page_size
        self._known: set[bytes] = set()  # prefixes of answered requests; guarded by _lock
        self._lock = threading.Lock()

    def answered(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Notes that the KV of a prompt and its answer exists; the last token has none."""
        chain = self._chain([*prompt, *output][:-1])
        with self._lock:
            self._known.update(chain)

    def reusable_tokens(self, prompt: Sequence[int]) -> int:
        """Tokens of a prompt that are known now; its last token is always computed."""
        num_pages = 0
        with self._lock:
            for digest in self._chain(prompt[:-1]):
                if digest not in self._known:
                    break
                num_pages += 1
        return num_pages * self._page_size

    def _chain(self, tokens: Sequence[int]) -> list[bytes]:
        """One digest a whole page, each over everything before it too."""
        digest = b""
        chain = []
        for start in range(0, len(tokens) - self._page_size + 1, self._page_size):
            page = repr(tuple(tokens[start : start + self._page_size])).encode()
            digest = hashlib.blake2b(digest + page, digest_size=16).digest()
            chain.append(digest)
        return chain


Send = Callable[[str, list[int], int], Reply]


def drive(
    workload: Workload,
    send: Send,
    *,
    in_flight: int = 10,
    page_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Sends every turn of a workload, `in_flight` at a time, and returns what was served.

    Args:
        workload: what to send.
        send: sends one prompt and waits for the answer; gets a name for the request that is unique
            in the run, the prompt, and the answer's length. Called from several threads.
        in_flight: number of requests that are kept in flight.
        page_size: tokens in a page, for what counts as reusable.
        progress: called with the numbers of answered and of all turns.
    """
    run = _Run(workload, send, page_size, progress)
    with ThreadPoolExecutor(in_flight, thread_name_prefix="client") as pool:
        for worker in [pool.submit(run.work) for _ in range(in_flight)]:
            worker.result()
    return run.samples


class _Run:
    """State of `drive`; everything is guarded by `_changed`."""

    def __init__(
        self,
        workload: Workload,
        send: Send,
        page_size: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.samples: list[Sample] = []
        self._paths = workload.paths
        self._send = send
        self._progress = progress
        self._audit = ReuseAudit(page_size)
        self._waiting = list(workload.order)
        self._num_all = len(workload.order)
        self._done: dict[int, tuple[int, list[int]]] = {}  # path -> next turn, tokens so far
        self._in_flight = 0
        self._failed = False
        self._changed = threading.Condition()

    def work(self) -> None:
        """Sends turns until none is left. One of several threads."""
        while (item := self._take()) is not None:
            try:
                self._serve(*item)
            except BaseException:
                with self._changed:
                    self._failed = True
                    self._changed.notify_all()
                raise

    def _take(self) -> tuple[int, int, list[int], int] | None:
        """The first turn in order whose path has come so far, its prompt, requests in flight."""
        with self._changed:
            while self._waiting and not self._failed:
                for place, (path, turn) in enumerate(self._waiting):
                    next_turn, before = self._done.get(path, (0, []))
                    if next_turn == turn:
                        del self._waiting[place]
                        self._in_flight += 1
                        prompt = self._paths[path].prompt(turn, before)
                        return path, turn, prompt, self._in_flight
                self._changed.wait()
            return None

    def _serve(self, path: int, turn: int, prompt: list[int], num_in_flight: int) -> None:
        reusable = self._audit.reusable_tokens(prompt)
        name = f"{self._paths[path].kind}-{path}-{turn}"
        reply = self._send(name, prompt, self._paths[path].max_new_tokens)
        self._audit.answered(prompt, reply.output_ids)
        sample = Sample(path, turn, tuple(prompt), reply, reusable, num_in_flight)
        with self._changed:
            self._in_flight -= 1
            self._done[path] = (turn + 1, [*prompt, *reply.output_ids])
            self.samples.append(sample)
            self._changed.notify_all()
            num_done = len(self.samples)
        if self._progress is not None:
            self._progress(num_done, self._num_all)


def reply_of(answer: dict[str, Any], seconds: float = 0.0) -> Reply:
    """Reads an answer of SGLang's ``/generate``."""
    meta = answer["meta_info"]
    return Reply(
        tuple(answer["output_ids"]),
        int(meta["cached_tokens"]),
        by_tier(meta),
        seconds,
        int(meta["num_retractions"]),
    )
