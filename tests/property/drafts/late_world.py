"""Guesses whose verification is heard of one step late, as with SGLang's overlap scheduling.

The scheduler launches the forward of the next step before it processes the result of the last one
(`event_loop_overlap`). So the device knows more tokens of a request than the scheduler does, and
rows of the next guesses are being written while a result has a request inserted, ended or taken
back. What is committed, what is owned and released, and how many rows a step reserves is decided by
SGLang's own functions. Here a forward is in steps: the draft's guesses, the verification, and the
draft's rows anew from what was verified. Any number of them are done only later, at the latest
before rows change hands, as the device's streams would have it; saves are made some steps later.
"""

from __future__ import annotations

import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers import schedule_batch  # noqa: E402
from sglang.srt.managers.schedule_batch import ReqKvInfo  # noqa: E402
from sglang.srt.managers.scheduler_components.batch_result_processor import (  # noqa: E402
    SchedulerBatchResultProcessor,
)
from sglang.srt.mem_cache import common  # noqa: E402
from sglang.srt.mem_cache.allocation_sizing import page_aligned_decode_alloc_lens  # noqa: E402

from sglang_ext.tiers.records.record import parse_header  # noqa: E402
from tests.property.worlds.taint_world import (  # noqa: E402
    DIM,
    HEADS,
    IDENTITY,
    LAYERS,
    PAGE,
    Request,
    TextScheduler,
    World,
    Wrong,
    page_prints,
    page_rows,
    ready_slots,
)

MOST_GUESSES, MOST_NEW = 4, 14
# SGLang reserves that many rows for each of two steps: the guesses and the token before them.
RESERVED = 2 * (MOST_GUESSES + 1)
MOST_HELD = 6  # steps that a save is late
STOPS, OVERLAP_OFF, PROMPTS = 0.08, 0.15, 0.4
NUM_PRINTS = 4
DRAFT = LAYERS - 1  # the layer of the draft
GUESSED = 64  # added to what a row of the draft says of itself while it is from the draft alone

Step = Callable[[], None]


@dataclass
class LateRequest(Request):
    """What of SGLang's `Req` its own release and commit look at, besides.

    Attributes:
        known: tokens that the device knows, those of the results in flight among them.
        fill_end: tokens of the prompt, and of what was answered before a retraction.
        extend_end: tokens whose forward was launched, while that is a prompt's.
    """

    known: list[int] = field(default_factory=list)
    fill_end: int = 0
    extend_end: int = 0
    is_retracted: bool = False
    to_finish: bool = False
    finished_len: int | None = None
    reasoning_tokens: int = 0
    grammar: None = None
    spec_verify_ct: int = 0
    spec_num_correct_drafts: int = 0

    owned_kv_len = schedule_batch.Req.owned_kv_len
    output_ids_through_stop = schedule_batch.Req.output_ids_through_stop
    next_output_finishes_by_length = schedule_batch.Req.next_output_finishes_by_length

    def __post_init__(self) -> None:
        super().__post_init__()
        self.sampling_params.max_new_tokens = max(1, self.num_new)

    @property
    def output_ids(self) -> list[int]:
        """Tokens that the scheduler was told of."""
        return self.tokens[self.prompt_len :]

    def refresh_fill_ids(self) -> None:
        """They are made of `tokens` each time."""

    def update_spec_correct_drafts_histogram(self, num: int) -> None:
        """Nobody looks at it."""


@dataclass
class Launch:
    """A forward whose result was not processed yet.

    Attributes:
        reqs: that it was of; none of a part of a prompt.
        new: the tokens that it found of each: of an answer those that were right and one more.
        is_prompt: whether it was of a prompt.
        guessed: of an answer, all tokens up to the last guess.
    """

    reqs: list[LateRequest]
    new: list[list[int]]
    is_prompt: bool
    guessed: list[list[int]] = field(default_factory=list)


class HeldSaves:
    """Has each save wait until the scheduler has taken some more steps.

    Args:
        save_thread: the linker's, whose `save` is replaced.
        seed: of how many steps.
    """

    def __init__(self, save_thread: Any, seed: int) -> None:
        self._real = save_thread.save
        self._rng = random.Random(seed)
        self._now = 0
        self._open = False
        self._changed = threading.Condition()
        save_thread.save = self._save

    def _save(self, job: Any) -> Any:
        with self._changed:
            due = self._now + self._rng.randint(0, MOST_HELD)
            self._changed.wait_for(lambda: self._open or self._now >= due)
        return self._real(job)

    def tick(self) -> None:
        """The scheduler took a step."""
        with self._changed:
            self._now += 1
            self._changed.notify_all()

    def let_go(self, *, now: bool) -> None:
        """Saves are not held from now on, or they are again."""
        with self._changed:
            self._open = now
            self._changed.notify_all()


class LateWorld(World):
    """A server that guesses, with overlap scheduling; one iteration of its loop is one step.

    It has many methods because `World` has.

    Attributes:
        made: of each page of tokens that were verified, the tokens up to its end, by its key.
        launched: forwards, of which the oldest one's result is the next to be processed.
        late: steps of the last forward that the device has not done yet.
        chunked: the request whose prompt is computed in parts.
        num_rejected: guesses.
        reserved: rows that SGLang reserves behind what is committed.
        may_lag: whether the device and the saves may be behind; not where streams order them.
    """

    reserved = RESERVED
    may_lag = True

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, seed: int, **options: Any) -> None:
        serving = SimpleNamespace(strip_thinking_cache=False)
        for module in (common, schedule_batch):
            patch.setattr(module, "get_serving", lambda: serving)
        patch.setattr(common, "get_spec", lambda: SimpleNamespace(speculative_algorithm="EAGLE"))
        self.made: dict[bytes, list[int]] = {}
        self.launched: deque[Launch] = deque()
        self.late: list[Step] = []
        self.chunked: LateRequest | None = None
        self.num_rejected = 0
        self.saves: HeldSaves | None = None
        super().__init__(folder, patch, seed, lossy=False, **options)
        self.cache.bind_scheduler(TextScheduler())
        if self.may_lag:
            self.saves = HeldSaves(self.cache.hier_linker._saves, seed + 5)

    def count(self, what: str) -> None:
        """It happened once more."""
        self.counts[what] = self.counts.get(what, 0) + 1

    # ---- the model ----

    def layer_values(self, layer: int, tokens: list[int], end: int) -> torch.Tensor:
        """What rows before `end` say: the tokens up to each; of a draft the next one, too."""
        prints, print_ = [], 0
        for at, token in enumerate(tokens[:end]):
            print_ = zlib.crc32(token.to_bytes(4, "little"), print_)
            own = print_
            if layer == DRAFT and self.of_pairs and at + 1 < len(tokens):
                own = zlib.crc32(tokens[at + 1].to_bytes(4, "little"), own)
            prints.append([own >> shift & 63 for shift in (0, 8, 16, 24)])
        return torch.tensor(prints, dtype=torch.bfloat16)

    def put(self, layer: int, rows: torch.Tensor, values: torch.Tensor) -> None:
        """A forward writes rows of a layer."""
        new = torch.zeros(len(rows), HEADS, DIM, dtype=torch.bfloat16)
        new[..., IDENTITY : IDENTITY + NUM_PRINTS] = values[:, None]
        self.at_rows("computes", rows, writes=True)
        for buffers in (self.kv_pool.k_buffer, self.kv_pool.v_buffer):
            buffers[layer][rows] = new

    def require_own(self, req: LateRequest, rows: torch.Tensor) -> None:
        """Rows are those of a request's first tokens, in each layer."""
        if not len(rows):
            return
        self.at_rows("attends to", rows, writes=False)
        for layer in range(LAYERS):
            expected = self.layer_values(layer, req.known, len(rows))
            for buffers in (self.kv_pool.k_buffer, self.kv_pool.v_buffer):
                found = buffers[layer][:, 0, IDENTITY : IDENTITY + NUM_PRINTS][rows]
                if not torch.equal(found, expected):
                    raise Wrong(f"rows of {req.rid} are another's, in layer {layer}")

    def check_attended(self, req: Request, end: int) -> None:
        """See `World`."""
        assert isinstance(req, LateRequest)
        self.require_own(req, self.rows_of(req, 0, end))

    def launch(self, launch: Launch, steps: list[Step]) -> None:
        """A forward is queued; the device does all of its steps at once, some or none."""
        assert not self.late
        num = self.rng.randint(0, len(steps)) if self.may_lag else len(steps)
        for step in steps[:num]:
            step()
        self.late = steps[num:]
        self.launched.append(launch)

    def catch_up(self) -> None:
        """The device does what it has not done yet."""
        late, self.late = self.late, []
        for step in late:
            step()

    def forward(self, req: Request, start: int, end: int) -> None:
        """Launches a prompt or a part of one; the draft sees the token behind it, too."""
        assert isinstance(req, LateRequest)
        is_last = end == req.fill_end
        first = [self.rng.randrange(3)] if is_last else []
        req.known = [*req.tokens, *first]
        req.extend_end = req.kv.kv_committed_len = end
        text, rows = list(req.known), self.rows_of(req, 0, end)

        def compute(layer: int) -> None:
            self.put(layer, rows[start:], self.layer_values(layer, text, end)[start:])

        steps: list[Step] = [lambda: self.require_own(req, rows[:start])]
        steps += [lambda layer=layer: compute(layer) for layer in range(LAYERS)]  # type: ignore[misc]
        self.launch(Launch([req] if is_last else [], [first] if is_last else [], True), steps)

    def guess(self, req: LateRequest) -> tuple[list[int], list[int], list[Step]]:
        """Prepares a verification: what it finds, what was guessed, and the device's steps."""
        before, start = list(req.known), len(req.known) - 1
        guesses = [self.rng.randrange(3) for _ in range(self.rng.randint(0, MOST_GUESSES))]
        self.count("no guesses" if not guesses else "guesses")
        num_right = self.rng.randint(0, len(guesses))
        wrong = guesses[num_right:][:1]
        new = [*guesses[:num_right], (wrong[0] + 1) % 3 if wrong else self.rng.randrange(3)]
        self.num_rejected += len(guesses) - num_right
        guessed, end = [*before, *guesses], start + 1 + len(guesses)
        assert end <= req.kv.kv_allocated_len
        rows = self.rows_of(req, 0, end)
        req.known = right = [*before, *new]

        def draft() -> None:
            values = self.layer_values(DRAFT, guessed, end - 1)[start:]
            self.put(DRAFT, rows[start:-1], values + GUESSED)

        def verify() -> None:
            self.require_own(req, rows[:start])
            for layer in set(range(LAYERS)) - {DRAFT}:
                self.put(layer, rows[start:], self.layer_values(layer, guessed, end)[start:])

        def extend() -> None:
            values = self.layer_values(DRAFT, guessed, end)
            known = self.layer_values(DRAFT, right, start + len(new))
            values[: len(known)] = known
            self.put(DRAFT, rows[start:], values[start:])

        return new, guessed, [draft, verify, extend]

    # ---- checks ----

    def verified(self, req: LateRequest) -> None:
        """All tokens that the scheduler knows of a request may be stored."""
        for page, key in enumerate(self.keys(req.tokens)):
            found = bytes.fromhex(key)
            self._positions[found] = page * PAGE
            self.made[found] = req.tokens[: (page + 1) * PAGE + self.of_pairs]

    def check_store(self) -> None:
        """See `World`; every page in DRAM is of verified tokens, those that its key is of."""
        super().check_store()
        for slot in ready_slots(self.store):
            meta, _ = parse_header(slot)
            if meta.page_hash not in self.made:
                raise Wrong("a stored page is of tokens that were not verified")
            tokens, end = self.made[meta.page_hash], meta.position + PAGE
            for at, values in enumerate(page_rows(slot, self.layout)):
                wanted = self.layer_values(at % LAYERS, tokens, end)[-PAGE:, None]
                found = page_prints(values, NUM_PRINTS)
                if not torch.equal(found, wanted.expand_as(found)):
                    raise Wrong(f"layer {at % LAYERS} of a page has rows of other than {tokens}")

    # ---- the loop ----

    def iterate(self, *, retracts: bool = False) -> None:
        """One iteration of SGLang's loop."""
        self.catch_up()  # what follows is queued behind it
        self.stash()
        if self.launched and self.rng.random() < OVERLAP_OFF:
            self.process()
        num = len(self.launched)
        if retracts or not self.launch_prompt():
            self.launch_answers(retracts=retracts)
        if num:
            self.process()

    def stash(self) -> None:
        """As `stash_chunked_request`: a part of a prompt is inserted before its result is there."""
        req = self.chunked
        if req is None:
            return
        if req.to_finish:  # as `process_pending_chunked_abort`
            self.chunked = None
            req.done = True
            self.running.remove(req)
            self.cache.release_aborted_request(req.cache_request_handle)
            common.release_kv_cache(req, self.cache, checkpoint=False)
        elif req.prefix_len < req.extend_end:
            super().checkpoint(req, req.extend_end)

    def launch_prompt(self) -> bool:
        """Of a request that waits, or the next part of one that began."""
        num = len(self.launched)
        if self.chunked is not None:
            self._launch_part(self.chunked)
        elif self.waiting and len(self.running) < 6 and self.rng.random() < PROMPTS:
            self.admit(self.rng.choice(self.waiting), self.rng.choice((None, 8, 12)))
        return len(self.launched) > num

    def _launch_part(self, req: LateRequest) -> None:
        start = req.prefix_len
        end = min(req.fill_end, (start + 8) // PAGE * PAGE)
        need = -(-end // PAGE) * PAGE - req.kv.kv_allocated_len
        rows = self.allocate(max(0, need))
        if rows is None:
            return
        self.write(req, req.kv.kv_allocated_len, rows)
        req.kv.kv_allocated_len += len(rows)
        self.forward(req, start, end)
        self.checkpoint(req, end)

    def launch_answers(self, *, retracts: bool) -> None:
        """As `update_running_batch`: all that answer, but those whose last token is in flight."""
        queued = self.launched[-1].reqs if self.launched else []
        live: list[Any] = [
            req
            for req in self.running
            if req is not self.chunked
            and not any(req is each and each.next_output_finishes_by_length() for each in queued)
        ]
        if retracts and live:
            self.retract(live.pop(self.rng.randrange(len(live))))
        live = [req for req in live if self._reserve(req)]
        if not live:
            return
        new, guessed, steps = zip(*(self.guess(req) for req in live), strict=True)
        in_order = [step for of_all in zip(*steps, strict=True) for step in of_all]
        self.launch(Launch(live, list(new), False, list(guessed)), in_order)

    def _reserve(self, req: LateRequest) -> bool:
        """Rows for two steps, as the last one's result is not there; False: it is retracted."""
        (start,), (end,), need = page_aligned_decode_alloc_lens(
            [req], reserve=self.reserved, page_size=PAGE
        )
        rows = self.allocate(need)
        if rows is None:
            self.retract(req)
            return False
        self.write(req, start, rows)
        req.kv.kv_allocated_len = max(req.kv.kv_allocated_len, end)
        return True

    def process(self) -> None:
        """As `process_batch_result` of the oldest forward."""
        launch = self.launched.popleft()
        if not self.launched:
            self.await_result()
        new = launch.new if launch.is_prompt else self._commit(launch)
        for req, tokens in zip(launch.reqs, new, strict=True):
            if req.done or req.is_retracted:
                continue
            req.tokens.extend(tokens)
            self.verified(req)
            self._look_for_the_end(req, len(tokens))
            if req.done:
                self.end(req)
            elif launch.is_prompt:
                super().checkpoint(req, req.extend_end)

    def await_result(self) -> None:
        """The device is done with the last forward, of which the result is wanted now."""
        self.catch_up()

    def _commit(self, launch: Launch) -> list[list[int]]:
        """What SGLang takes for committed of a verification; it counts that in the requests."""
        # SGLang's worker adapts it: it is that of this forward, and no other's.
        stride = max(map(len, launch.new))
        padded = [[*tokens, *[0] * (stride - len(tokens))] for tokens in launch.new]
        result = SimpleNamespace(
            next_token_ids=torch.tensor(padded).view(-1),
            accept_lens=torch.tensor([len(tokens) for tokens in launch.new]),
            speculative_output_stride=stride,
            num_non_draft_tokens_per_req=1,
            block_accept_lens=None,
            cap_lens=None,
        )
        processor = SimpleNamespace(
            metrics_reporter=SimpleNamespace(snapshot_spec_decode_metrics=lambda *args: None),
            model_worker=SimpleNamespace(on_verify_complete_cpu=lambda *args, **kwargs: None),
            advance_grammar_fsm=lambda *args: None,
        )
        found: list[list[int]] = SchedulerBatchResultProcessor._resolve_spec_v2_tokens(
            processor, result, launch
        )
        return found

    def _look_for_the_end(self, req: LateRequest, num_new: int) -> None:
        """As `update_finish_state`: an abort, a token that stops among the new ones, or length."""
        num, most = len(req.output_ids), req.sampling_params.max_new_tokens
        if req.to_finish:
            req.done = True
        elif self.rng.random() < STOPS:
            req.finished_len = min(most, num - num_new + self.rng.randint(1, num_new))
            req.done = True
        elif num >= most:
            req.finished_len = most
            req.done = True

    def in_flight(self, req: LateRequest) -> Launch | None:
        """The forward of a request whose result was not processed yet."""
        return next((each for each in self.launched if any(req is r for r in each.reqs)), None)

    def end(self, req: LateRequest) -> None:
        """Its last result was processed; what runs for it meanwhile is for nothing."""
        self.count("ends")
        launch = self.in_flight(req)
        if launch is not None:
            at = next(at for at, each in enumerate(launch.reqs) if each is req)
            was_wrong = launch.new[at][:-1] != launch.guessed[at][len(req.tokens) :]
            self.count("ends with wrong guesses in flight" if was_wrong else "ends in flight")
            if self.late:
                self.count("ends while the device is behind")
        self.running.remove(req)
        common.release_kv_cache(req, self.cache, checkpoint=True)
        self.check_tree()

    # ---- requests ----

    def arrive(
        self,
        tokens: list[int] | None = None,
        *,
        exact: bool | None = None,
        num_new: int = MOST_NEW,
    ) -> Request:
        """See `World`; answers are long."""
        req = LateRequest(
            f"r{self._next}",
            self.tokens() if tokens is None else tokens,
            self.rng.randint(0, num_new),
            self.rng.random() < 0.35 if exact is None else exact,
        )
        self._next += 1
        self.verified(req)
        self.enqueue(req)
        return req

    def allocate(self, num: int) -> torch.Tensor | None:
        """See `World`; rows change hands behind the forward that runs."""
        self.catch_up()
        return super().allocate(num)

    def runs(self, req: Request) -> None:
        """See `World`."""
        assert isinstance(req, LateRequest)
        req.is_retracted = False
        req.fill_end = len(req.tokens)
        req.known = list(req.tokens)

    def checkpoint(self, req: Request, up_to: int) -> None:
        """A forward of a prompt was launched: it is inserted later."""
        assert isinstance(req, LateRequest)
        self.chunked = req if up_to < req.fill_end else None

    def retract(self, req: Request) -> None:
        """As `release_req`; the result in flight is of nobody."""
        assert isinstance(req, LateRequest)
        self.count("retracts")
        if self.in_flight(req) is not None:
            self.count("retracts in flight")
        self.running.remove(req)
        common.release_kv_cache(req, self.cache, checkpoint=False)
        req.kv = ReqKvInfo()
        req.prefix_len, req.last_node, req.lock = 0, None, None
        req.is_retracted = True
        self.enqueue(req)

    # ---- random steps ----

    def step(self) -> None:
        """See `World`."""
        if self.saves is not None:
            self.saves.tick()
        kinds = ("arrive", "iterate", "events", "evict", "flush", "retract", "abort", "breathe")
        kind = self.rng.choices(kinds, (12, 60, 10, 5, 0.3, 2, 2, 3))[0]
        if getattr(self, f"_do_{kind}")() is not False:
            self.count(kind)

    def _do_iterate(self) -> None:
        self.cache.check_hicache_events()
        self.iterate()

    def _do_retract(self) -> bool | None:
        self.iterate(retracts=True)
        return None

    def _do_abort(self) -> bool | None:
        """Of one that runs, which ends with its next result, or of one that waits."""
        found: list[Any] = [*self.running, *self.waiting]
        if not found:
            return False
        req = self.rng.choice(found)
        if any(req is each for each in self.waiting):
            self.waiting.remove(req)
            self.cache.release_aborted_request(req.cache_request_handle)
            req.done = True
        else:
            req.to_finish = True
        return None

    def _do_flush(self) -> bool | None:
        if self.running or self.waiting or self.launched:
            return False
        self._let_saves_go(now=True)
        found = super()._do_flush()
        self._let_saves_go(now=False)
        return found

    def _let_saves_go(self, *, now: bool) -> None:
        if self.saves is not None:
            self.saves.let_go(now=now)

    def drain(self) -> None:
        """See `World`."""
        self._let_saves_go(now=True)
        deadline_s = time.monotonic() + 300
        while self.running or self.waiting or self.launched:
            assert time.monotonic() < deadline_s, "requests do not end"
            self.cache.check_hicache_events()
            self.iterate()
        self.settle()
        self._let_saves_go(now=False)

    def close(self) -> None:
        """See `World`."""
        self._let_saves_go(now=True)
        super().close()
