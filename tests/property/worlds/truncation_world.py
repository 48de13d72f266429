"""`taint_world` with prompts that are too long, and whose KV a row holds written in the row.

A row's fingerprint is made of its token and of the fingerprint in the row before it, as read from
the pool when the row is computed. So it names every token that the row's KV rests on, dropped ones
included, whatever the request's own prompt looks like by now. A brute-force model says which
fingerprints a request may meet: for an exact one a single one a token, for a truncated one those of
its own conversation, whole or from one of its cuts on, and for one that quotes see `QuoteModel`.
"""

from __future__ import annotations

import random
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_ext.device.composition import Hashes
from sglang_ext.identity.tenancy import Tenant, note_tenant, tenant_of
from sglang_ext.provenance.request_state import state_of, wants_exact
from sglang_ext.seam.page_hash import page_hasher
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.truncation.lineage import CutLineage, QuoteLineage, attach_lineage, lineage_of
from sglang_ext.truncation.quotes import StoredRun
from sglang_ext.truncation.truncator import Truncator
from tests.property.worlds import taint_world
from tests.property.worlds.taint_world import (
    DIM,
    EXACT_BIT,
    HEADS,
    IDENTITY,
    PAGE,
    Request,
    TextScheduler,
    World,
    Wrong,
)

CONTEXT = 80
ROOM = 2
_BITS = (1 << 28) - 1
KEYS: tuple[tuple[str | None, str | None], ...] = (
    (None, None), ("team", None), (None, "salt"), ("hier-kv-truncated:00:", None),
)  # fmt: skip
_OFTEN_NAMED = (0, 1, 1, 2, 2, 3)


class Cuttable:
    """What of SGLang's `Req` a cut changes."""

    tokens: list[int]
    prompt_len: int

    @property
    def origin_input_ids(self) -> array[int]:
        """As SGLang's."""
        return array("q", self.tokens[: self.prompt_len])

    @origin_input_ids.setter
    def origin_input_ids(self, tokens: Sequence[int]) -> None:
        self.tokens = list(tokens)
        self.prompt_len = len(self.tokens)


@dataclass
class CutRequest(Cuttable, Request):
    """A request whose prompt the truncator may cut."""

    finished_reason: None = None
    to_finish: None = None
    mode: str = "overflow"
    owner: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        custom = {**(self.sampling_params.custom_params or {}), "hier_kv_truncation": self.mode}
        custom["hier_kv_owner"] = self.owner
        self.sampling_params = SimpleNamespace(custom_params=custom, max_new_tokens=ROOM)
        self._hier_kv_not_cut = ""


def opted_in(req: Request) -> bool:
    """Whether a request may quote, and be quoted."""
    return isinstance(req, CutRequest) and req.mode == "all"


def step_print(before: int, token: int) -> int:
    """Fingerprint of a row from that of the row before it."""
    return zlib.crc32(token.to_bytes(4, "little"), before) & _BITS


def seed_of(extra_key: str | None, salt: str | None) -> int:
    """Fingerprint before the first row: whose prompt it is."""
    return zlib.crc32(repr((extra_key, salt)).encode()) & _BITS


def prints_of(tokens: Sequence[int], before: int) -> list[int]:
    """Fingerprints of rows computed one behind the other."""
    out = []
    for token in tokens:
        before = step_print(before, token)
        out.append(before)
    return out


Whose = tuple[Tenant, tuple[int, ...]]  # and the head


class QuoteModel:
    """What the rows of prompts that quote may say.

    Such a prompt has a row of the stored conversation that it quotes, or one that was computed for
    a prompt like it: of the same tenant, behind the same text that was left out, and with the same
    tokens up to the row. What that one was computed on is left open. Pages come and go one by one,
    so a page of a prompt may have been computed on the conversation's rows and the page in front of
    it, by another request or again, on the head alone. All of it rests on the same text, and is
    known for an approximation of it, as a row of the conversation is itself.

    It goes by the text that was left out, and not by the name under which the pages are kept.

    Args:
        prints_of: what rows of some tokens say behind a row that says something.
    """

    def __init__(self, prints_of: Callable[[Sequence[int], int], list[int]]) -> None:
        self._prints_of = prints_of
        # Conversations, by who may quote them and by each of their pages.
        self._stored: dict[tuple[Whose, bytes], Sequence[int]] = {}
        # Who, what the last row that was left out says, what the prompt's row says where all is
        # computed, and what the row says that was computed.
        self._computed: set[tuple[Whose, int, int, int]] = set()

    def note_stored(self, whose: Whose, tokens: Sequence[int], hashes: Hashes) -> None:
        """A conversation ended, and its tenant may quote it."""
        for digest in hashes:
            self._stored.setdefault((whose, digest.tobytes()), tokens)

    def note_computed(
        self, whose: Whose, run: StoredRun, tokens: Sequence[int], seed: int, values: Sequence[int]
    ) -> None:
        """Rows were computed for a prompt that quotes: of its last tokens."""
        left_out, own = self._left_out(whose, run, seed)[-1], self._prints_of(tokens, seed)
        for value, one in zip(values, own[len(own) - len(values) :], strict=True):
            self._computed.add((whose, left_out, one, value))

    def allows(
        self, whose: Whose, run: StoredRun, tokens: Sequence[int], seed: int, found: Sequence[int]
    ) -> bool:
        """Whether the last rows of some tokens may say this."""
        left_out, own = self._left_out(whose, run, seed)[-1], self._prints_of(tokens, seed)
        quoted = self._prints_of(tokens[run.start :], left_out)
        first = len(tokens) - len(found)
        return all(
            value == (own[at] if at < run.start else quoted[at - run.start])
            or (whose, left_out, own[at], value) in self._computed
            for at, value in enumerate(found, first)
        )

    def _left_out(self, whose: Whose, run: StoredRun, seed: int) -> list[int]:
        """What the rows say of what stands in front of a run in its conversation."""
        tokens = self._stored.get((whose, run.hashes[0].tobytes()))
        if tokens is None:
            raise Wrong("text is quoted that its tenant has not stored")
        return [seed, *self._prints_of(tokens[: run.position], seed)]


def make_truncator(head_tokens: int, seed: int, **options: Any) -> Truncator:
    """One of all modes, for contexts of `CONTEXT` tokens; the seed is in its secret."""
    return Truncator(
        HierKVConfig(truncation="all", truncation_head=head_tokens),
        b"secret" + bytes([seed % 256]),
        context_len=CONTEXT,
        max_req_len=CONTEXT + 1,
        max_input_len=CONTEXT - 2,
        page_size=PAGE,
        hash_of=page_hasher(PAGE),
        tokenizer=None,
        **options,
    )


class CutPrompts:
    """The brute-force model of prompts that were cut: what their rows may say.

    Attributes:
        truncator: cuts them.
    """

    truncator: Truncator

    def seed(self, req: Any) -> int:
        """What is said before a request's first row."""
        raise NotImplementedError

    def prints_behind(self, before: int, tokens: Sequence[int]) -> list[int]:
        """What rows of tokens say that follow one another, behind a row that says `before`."""
        raise NotImplementedError

    def head(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """The tokens that a prompt never loses."""
        return tuple(tokens[: self.truncator.head_of(tokens)])

    def whose(self, req: Any) -> Whose:
        """Who may share what is computed for a prompt that quotes."""
        tenant = tenant_of(req)
        assert tenant is not None
        return tenant, self.head(req.tokens[: req.prompt_len])

    def allowed(self, req: Any, end: int) -> list[set[int]]:
        """What the rows before `end` may say."""
        lineage, seed = lineage_of(req), self.seed(req)
        sets = [{value} for value in self.prints_behind(seed, req.tokens[:end])]
        if not isinstance(lineage, CutLineage) or wants_exact(req):
            return sets
        head, shift = lineage.cut.head, lineage.cut.num_dropped
        whole = [*lineage.tokens, *req.tokens[lineage.cut.num_kept :]]
        for start in (head, *lineage.cut.starts):
            chain = self.prints_behind(seed, [*whole[:head], *whole[start:]])
            for at in range(head, end):
                sets[at].add(chain[at + shift - (start - head)])
        return sets


class TruncationWorld(CutPrompts, World):
    """One server's cache; conversations that grow, fork, quote one another and overflow."""

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        head_tokens: int | None = None,
        **options: Any,
    ) -> None:
        patch.setattr(taint_world, "MAX_TOKENS", 2 * CONTEXT)
        super().__init__(folder, patch, seed, **options)
        if head_tokens is None:
            head_tokens = self.rng.choice((0, 3, 4))
        self.truncator = make_truncator(head_tokens, seed)
        self.cache.bind_scheduler(TextScheduler(), self.truncator)
        self.quotes = QuoteModel(prints_of)
        self.talks: list[tuple[list[int], int]] = []  # (tokens, index of KEYS)
        self.num_served = 0
        self.num_cut = 0
        self.num_exact_cut = 0
        self.num_quoting = 0

    # ---- prompts ----

    def talk(self) -> tuple[list[int], int]:
        """The next prompt: a conversation goes on, forks, or quotes another."""
        rng, talks = self.rng, self.talks
        kind = rng.choices(
            ("new", "on", "fork", "other key", "quote", "twin"), (1, 14, 3, 1, 5, 2)
        )[0]
        if not talks or kind == "new":
            tokens, key = self.tokens() + self.tokens(), rng.choice(_OFTEN_NAMED)
        else:
            old, key = rng.choice(talks)
            tokens = list(old)
            if kind == "fork":
                tokens = tokens[: rng.randint(1, len(tokens))]
            elif kind == "other key":
                key = rng.choice(_OFTEN_NAMED)
            elif kind == "quote":  # the head and a tail, as a client would cut it
                at = rng.randint(0, len(tokens))
                tokens = tokens[: rng.choice((len(self.head(tokens)), 8))]
                tokens += old[max(at, len(old) - 60) :]
            elif kind == "twin" and len(tokens) > 12:  # equal head and tail, another token between
                tokens[rng.randint(5, len(tokens) // 2)] ^= 64
        tokens += [1 + rng.randrange(3) for _ in range(rng.randint(1, 16))]
        if len(tokens) > 230:
            tokens = tokens[:20]
        talks.append((tokens, key))
        if len(talks) > 12:
            talks.pop(rng.randrange(len(talks)))
        return tokens, key

    def arrive(
        self, tokens: list[int] | None = None, *, exact: bool | None = None, num_new: int = 1,
        key: int = 0, mode: str | None = None,
    ) -> Request:  # fmt: skip
        """A request comes; with a `mode` it is nobody's own among those of its tenant."""
        if tokens is None:
            tokens, key = self.talk()
        req = CutRequest(
            f"r{self._next}",
            list(tokens),
            self.rng.randint(0, min(num_new, ROOM)),
            self.rng.random() < 0.3 if exact is None else exact,
            mode=mode or self.rng.choice(("overflow", "all", "all", "all")),
            owner=None if mode else self.rng.choice((None, None, None, None, "me")),
        )
        req.extra_key, req.cache_salt = KEYS[key]
        message = {"extra_key": req.extra_key, "cache_salt": req.cache_salt}
        note_tenant(req, SimpleNamespace(**message, session_id=None, session_params=None))
        self._next += 1
        self.num_served += 1
        lineage = self.truncator.cut(req)
        if lineage is not None:
            attach_lineage(req, lineage)
            self.num_cut += 1
            self.num_exact_cut += wants_exact(req)
        self.enqueue(req)
        self.waiting.append(req)
        return req

    def enqueue(self, req: Request) -> None:
        """Asks for what it reuses; who calls this queues it."""
        self.look_up(req)

    # ---- the model ----

    def seed(self, req: Request) -> int:
        """Fingerprint before a request's first row."""
        lineage = lineage_of(req)
        extra_key = req.extra_key
        if isinstance(lineage, CutLineage | QuoteLineage):
            extra_key = lineage.extra_key
        return seed_of(extra_key, req.cache_salt)

    def prints_behind(self, before: int, tokens: Sequence[int]) -> list[int]:
        """See `CutPrompts`."""
        return prints_of(tokens, before)

    def read_prints(self, rows: torch.Tensor, buffer: torch.Tensor) -> list[int]:
        self.at_rows("attends to", rows, writes=False)
        parts = buffer[:, 0, IDENTITY : IDENTITY + 4][rows].to(torch.int64)
        return [int(a | b << 7 | c << 14 | d << 21) for a, b, c, d in parts.tolist()]

    def forward(self, req: Request, start: int, end: int) -> None:
        rows = self.rows_of(req, 0, end)
        self.check_attended(req, start)
        inexact = start and (self.inexact(rows[:start]) or not self.recomputed(req, start))
        before = self.seed(req)
        if start:
            before = self.read_prints(rows[start - 1 : start], self.kv_pool.k_buffer[0])[0]
        values = prints_of(req.tokens[start:end], before)
        lineage = lineage_of(req)
        if isinstance(lineage, QuoteLineage):
            tokens, seed = req.tokens[:end], self.seed(req)
            self.quotes.note_computed(self.whose(req), lineage.run, tokens, seed, values)
        new = torch.zeros(end - start, HEADS, DIM, dtype=torch.bfloat16)
        new[..., EXACT_BIT] = float(inexact)
        parts = [[value >> shift & 127 for shift in (0, 7, 14, 21)] for value in values]
        new[..., IDENTITY : IDENTITY + 4] = torch.tensor(parts, dtype=torch.bfloat16)[:, None]
        self.at_rows("computes", rows[start:], writes=True)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            buffer[rows[start:]] = new

    # ---- checks ----

    def recomputed(self, req: Request, end: int) -> bool:
        """Whether the rows before `end` are what the request's own prompt gives, computed anew."""
        wanted = prints_of(req.tokens[:end], self.seed(req))
        return self.read_prints(self.rows_of(req, 0, end), self.kv_pool.k_buffer[0]) == wanted

    def check_attended(self, req: Request, end: int) -> None:
        if not end:
            return
        rows, allowed = self.rows_of(req, 0, end), self.allowed(req, end)
        quotes = isinstance(lineage_of(req), QuoteLineage)
        for buffer in (*self.kv_pool.k_buffer, *self.kv_pool.v_buffer):
            found = self.read_prints(rows, buffer)
            if quotes:
                self.check_quote(req, found)
            elif not all(value in one for value, one in zip(found, allowed, strict=True)):
                raise Wrong(f"rows of {req.rid} are another's")
        inexact = self.inexact(rows) or not self.recomputed(req, end)
        if inexact and wants_exact(req):
            raise Wrong(f"{req.rid} asked for exact KV and attends to other")
        if inexact and state_of(req).taint == Quality.EXACT:
            raise Wrong(f"{req.rid} attends to inexact KV and does not know")
        moved = not self.recomputed(req, end)
        if moved and state_of(req).taint < Quality.APPROXIMATED:
            raise Wrong(f"{req.rid} attends to moved KV and does not know")

    def check_quote(self, req: Request, found: list[int]) -> None:
        """Rows of a prompt that quotes are of what it quotes."""
        lineage, tenant = lineage_of(req), tenant_of(req)
        assert isinstance(lineage, QuoteLineage)
        if tenant is None or not tenant.is_named or not opted_in(req):
            raise Wrong(f"{req.rid} quotes, and is nobody's or declined")
        tokens, seed = req.tokens[: len(found)], self.seed(req)
        if not self.quotes.allows(self.whose(req), lineage.run, tokens, seed, found):
            raise Wrong(f"rows of {req.rid} are another's, or of other text")

    def finish(self, req: Request) -> None:
        if lineage_of(req) is None and tenant_of(req) is not None and opted_in(req):
            tokens = array("q", req.tokens[: req.prefix_len])
            hashes = self.truncator.hash_of(tokens, req.extra_key, req.cache_salt)
            self.quotes.note_stored(self.whose(req), tokens, hashes)
        self.num_quoting += isinstance(lineage_of(req), QuoteLineage)
        super().finish(req)

    def check_tree(self) -> None:
        """After every insert would be most of the time; once in a while finds the same."""
        if self.rng.random() < 0.1:
            super().check_tree()

    def check_report(self, req: Request) -> None:
        super().check_report(req)
        told = state_of(req).reused >= Quality.APPROXIMATED
        if req.prefix_len and not told and not self.recomputed(req, req.prefix_len):
            raise Wrong(f"{req.rid} is told that nothing was moved")

    def _do_admit(self) -> bool | None:
        if not self.waiting or len(self.running) >= 6:
            return False
        chunk = self.rng.choice((None, None, None, 8, 12))
        return self.admit(self.rng.choice(self.waiting), chunk)

    def step(self) -> None:
        kinds = ("arrive", "admit", "go_on", "events", "evict", "flush", "retract", "breathe")
        kind = self.rng.choices(kinds, (30, 40, 60, 4, 4, 0.5, 0.7, 0.1))[0]
        if getattr(self, f"_do_{kind}")() is not False:
            self.counts[kind] = self.counts.get(kind, 0) + 1


def world(
    folder: Path,
    patch: pytest.MonkeyPatch,
    seed: int,
    *,
    kind: type[TruncationWorld] = TruncationWorld,
    **options: Any,
) -> TruncationWorld:
    """A world with the options that a seed draws."""
    rng = random.Random(seed)
    drawn: dict[str, Any] = {
        "lossy": rng.random() < 0.5,
        "policy": rng.choice(("write_through", "write_back")),
        "device_pages": rng.choice((100, 140, 200)),
        "host_pages": rng.choice((100, 200, 400)),
    }
    return kind(folder, patch, seed, **{**drawn, **options})
