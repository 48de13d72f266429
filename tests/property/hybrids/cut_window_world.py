"""`window_world` with conversations over their context, whose rows say what they were computed on.

A row says its token and what the row before it says, as read from the pool when it was computed. So
it names every token that its KV rests on, dropped ones included. K carries a rotation besides, by
the position of its row. A brute-force model says what the rows of a request may say: of an exact
one a single thing a token, of a cut one what its own conversation gives, whole or from one of its
cuts on.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from sglang_ext.device.layout import ROPE_NAMES, ROPE_PRE
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.device.windows.window_layers import group_hashes
from sglang_ext.identity.tenancy import note_tenant, tenant_of
from sglang_ext.kernels.rope import RopeSpec
from sglang_ext.provenance.request_state import state_of, wants_exact
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import parse_header
from sglang_ext.truncation.lineage import CutLineage, QuoteLineage, attach_lineage, lineage_of
from tests.property.worlds import window_world
from tests.property.worlds.taint_world import ready_slots
from tests.property.worlds.truncation_world import (
    CONTEXT,
    CutPrompts,
    Cuttable,
    QuoteModel,
    make_truncator,
)
from tests.property.worlds.window_world import FULL, PAGE, Request, WindowWorld, WrongKVError

ROOM = 6
LONGEST = 200  # tokens of a conversation
_ROTATED = 12  # the first column that is rotated, of 4
_TAG = 8  # the column that says which layer it is
_CLOSE = 0.06
_MASK = (1 << 32) - 1
# Radians a token, of both pairs of columns.
_SPEED = {False: (0.7, 0.31), True: (0.9, 0.23)}


def _spec(*, is_window: bool) -> RopeSpec:
    angles = np.arange(2 * LONGEST)[:, None] * np.array(_SPEED[is_window])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return RopeSpec(cos, sin, 4, _ROTATED, False, "eager")


SPECS = {is_window: _spec(is_window=is_window) for is_window in (False, True)}


def rotated(first: int, num: int, *, is_window: bool) -> torch.Tensor:
    """What rows at positions from `first` on have in their rotated columns, fp32 `[num, 4]`."""
    spec, span = SPECS[is_window], slice(first, first + num)
    return torch.from_numpy(np.concatenate([spec.cos[span], spec.sin[span]], 1))


def print_after(before: int, token: int) -> int:
    """What a row says behind one that says `before`; 64 bits."""
    value = token.to_bytes(4, "little")
    print_ = zlib.crc32(value, before >> 32)
    return print_ << 32 | (zlib.adler32(value, before & _MASK) ^ print_ >> 7) & _MASK


def prints_behind(before: int, tokens: Sequence[int]) -> list[int]:
    """What rows of tokens say that follow one another."""
    out = []
    for token in tokens:
        before = print_after(before, token)
        out.append(before)
    return out


def as_columns(prints: Sequence[int]) -> torch.Tensor:
    """Those as a row's first columns, bfloat16 `[N, 8]`."""
    numbers = np.array(prints, "<u8").view(np.uint8).reshape(-1, _TAG)
    return torch.from_numpy(numbers).to(torch.bfloat16)


def from_columns(rows: torch.Tensor) -> list[int]:
    """What rows say, by their first columns `[N, 8]`; what nobody wrote is none of these."""
    numbers = rows.to(torch.float32).numpy()
    if ((numbers < 0) | (numbers > 255)).any():
        raise WrongKVError("rows that nobody computed")
    out: list[int] = np.ascontiguousarray(numbers.astype(np.uint8)).view("<u8").reshape(-1).tolist()
    return out


@dataclass
class CutRequest(Cuttable, Request):
    """A request whose prompt the truncator may cut."""

    finished_reason: None = None
    to_finish: None = None
    mode: str = "overflow"

    def __post_init__(self) -> None:
        super().__post_init__()
        custom: dict[str, Any] = {"hier_kv_truncation": self.mode, "hier_kv_exact": self.exact}
        self.sampling_params = SimpleNamespace(custom_params=custom, max_new_tokens=ROOM)
        self._hier_kv_not_cut = ""

    @property
    def seqlen(self) -> int:
        """As SGLang's."""
        return len(self.tokens)


class CutWindowWorld(CutPrompts, WindowWorld):
    """One server's cache; conversations that grow, fork, quote one another and overflow."""

    exact_only = False

    def __init__(
        self,
        folder: Path,
        patch: pytest.MonkeyPatch,
        seed: int,
        *,
        head_tokens: int | None = None,
        **options: Any,
    ) -> None:
        patch.setattr(window_world, "MAX_TOKENS", 2 * CONTEXT)
        sizes = {"device_pages": 110, "window_pages": 80, "host_pages": 300}
        super().__init__(folder, patch, seed, **{**sizes, **options})
        if head_tokens is None:
            head_tokens = self.rng.choice((0, 3, 8))
        self.truncator = make_truncator(head_tokens, seed, parts_exact=lambda: True)
        scheduler: Any = self
        self.cache.bind_scheduler(scheduler, self.truncator)
        assert self.cache.truncated.is_movable()
        self.quotes = QuoteModel(lambda tokens, before: prints_behind(before, tokens))
        self.talks: list[tuple[list[int], str | None]] = []
        # What pages say when all is computed, by namespace and key.
        self.own_pages: dict[tuple[bytes, bytes], list[int]] = {}
        self.num_cut = self.num_exact_cut = self.num_quoting = 0

    def ropes_of(self, pool: DevicePool) -> list[LayerRope]:
        spec = SPECS[pool.num_slots == self.kv_pool.swa_kv_pool.k_buffer[0].shape[0]]
        return [LayerRope(spec, movable=True) for _ in range(pool.num_layers)]

    # ---- prompts ----

    def talk(self) -> tuple[list[int], str | None]:
        """The next prompt: a conversation goes on, forks, or quotes another."""
        rng, talks = self.rng, self.talks
        kind = rng.choices(("new", "on", "fork", "quote", "twin"), (1, 14, 3, 8, 2))[0]
        if not talks or kind == "new":
            tokens, key = self.tokens() + self.tokens(), rng.choice((None, "a", "a"))
        else:
            old, key = rng.choice(talks)
            tokens = list(old)
            if kind == "fork":
                tokens = tokens[: rng.randint(1, len(tokens))]
            elif kind == "quote":  # the head and a tail, as a client would cut it
                at = rng.randint(0, len(tokens))
                tokens = [*self.head(tokens), *old[max(at, len(old) - 40) :]]
            elif kind == "twin" and len(tokens) > 12:  # equal head and tail, another token between
                tokens[rng.randint(5, len(tokens) // 2)] ^= 64
        tokens += [1 + rng.randrange(3) for _ in range(rng.randint(1, 24))]
        talks.append((tokens[: 20 if len(tokens) > LONGEST else None], key))
        if len(talks) > 4:
            talks.pop(rng.randrange(len(talks)))
        return list(talks[-1][0]), key

    def arrive(self) -> None:
        tokens, key = self.talk()
        num_new, exact = self.rng.choice((0, 1, 3, ROOM)), self.rng.random() < 0.2
        mode = self.rng.choice(("overflow", "all", "all"))
        self.send(tokens, num_new, key=key, exact=exact, mode=mode)

    def send(
        self, tokens: list[int], num_new: int, *, key: str | None = "a", exact: bool = False,
        mode: str = "overflow",
    ) -> CutRequest:  # fmt: skip
        """A request comes, and is cut where it must be."""
        req = CutRequest(
            f"r{self._next}", list(tokens), num_new, extra_key=key, exact=exact, mode=mode
        )
        self._next += 1
        message = {"extra_key": key, "cache_salt": None, "session_id": None, "session_params": None}
        note_tenant(req, SimpleNamespace(**message))
        lineage = self.truncator.cut(req)
        if lineage is not None:
            attach_lineage(req, lineage)
            self.num_cut += 1
            self.num_exact_cut += req.exact
        self.enqueue(req)
        return req

    def serve(self, tokens: list[int], num_new: int, **wishes: Any) -> CutRequest:
        """One request from its arrival to its end; what it leaves on the device stays there."""
        req = self.send(tokens, num_new, **wishes)
        while not req.done:
            self.cache.check_hicache_events()
            if req in self.waiting:
                self.admit(req)
            else:
                self.go_on(req)
        return req

    # ---- the model ----

    def seed(self, req: Request) -> int:
        """What is said before a request's first row."""
        lineage, key = lineage_of(req), req.extra_key
        if isinstance(lineage, CutLineage | QuoteLineage):
            key = lineage.extra_key
        print_ = zlib.crc32(repr((self.identity.weights, key)).encode())
        return print_ << 32 | print_ ^ 0x5A5A5A5A

    def prints_behind(self, before: int, tokens: Sequence[int]) -> list[int]:
        """See `CutPrompts`."""
        return prints_behind(before, tokens)

    def forward(self, req: Request, start: int, end: int) -> None:
        self.check_attended(req, start)
        rows, before = self.rows_of(req, 0, end), self.seed(req)
        if start:
            before = self.said(rows[start - 1 : start], self.first_buffer)[0]
        prints = prints_behind(before, req.tokens[start:end])
        lineage = lineage_of(req)
        if isinstance(lineage, QuoteLineage):
            tokens, seed = req.tokens[:end], self.seed(req)
            self.quotes.note_computed(self.whose(req), lineage.run, tokens, seed, prints)
        for layer, is_window, buffer, kind in self.layer_rows():
            at = self.window_rows(rows[start:]) if is_window else rows[start:]
            if is_window and bool((at < PAGE).any()):
                raise WrongKVError(f"{req.rid} writes to the padding page")
            out = self.row(as_columns(prints), layer, kind, buffer.shape[1:])
            if not kind:
                out[..., _ROTATED:] = rotated(start, end - start, is_window=is_window)[:, None]
            buffer[at] = out

    @property
    def first_buffer(self) -> torch.Tensor:
        """K of the first full layer."""
        index, _ = self.kv_pool.layers_mapping[FULL[0]]
        buffer: torch.Tensor = self.kv_pool.full_kv_pool.k_buffer[index]
        return buffer

    @staticmethod
    def said(rows: torch.Tensor, buffer: torch.Tensor) -> list[int]:
        """What rows of a buffer say."""
        return from_columns(buffer[rows][:, 0, :_TAG])

    # ---- checks ----

    def check_attended(self, req: Request, end: int) -> None:
        if not end:
            return
        rows, allowed = self.rows_of(req, 0, end), self.allowed(req, end)
        own, moved = prints_behind(self.seed(req), req.tokens[:end]), False
        for layer, is_window, buffer, kind in self.layer_rows():
            first = max(0, end - self.window) if is_window else 0
            at = self.window_rows(rows[first:]) if is_window else rows
            found = self.said(at, buffer)
            where = f"{req.rid}, layer {layer}, tokens {first} to {end}"
            self.check_layer(buffer[at], layer, kind, first, where, is_window=is_window)
            if isinstance(lineage_of(req), QuoteLineage):
                self.check_quote(req, end, found)
            elif not all(v in one for v, one in zip(found, allowed[first:], strict=True)):
                raise WrongKVError(f"{where}: rows of others")
            moved |= found != own[first:]
        if lineage_of(req) is None and state_of(req).taint != Quality.EXACT:
            raise WrongKVError(f"{req.rid} is no cut prompt, and was given what is not exact")
        if moved and wants_exact(req):
            raise WrongKVError(f"{req.rid} asked for exact KV and attends to other")
        if moved and state_of(req).taint < Quality.APPROXIMATED:
            raise WrongKVError(f"{req.rid} attends to moved KV and does not know")

    @staticmethod
    def check_layer(
        rows: torch.Tensor, layer: int, kind: int, first: int, where: str, *, is_window: bool
    ) -> None:
        """Rows are of their layer, and K of its position."""
        if not (rows[..., _TAG] == 2 * layer + kind + 1).all():
            raise WrongKVError(f"{where}: rows of another layer")
        if kind:
            return
        wanted = rotated(first, len(rows), is_window=is_window)
        apart = (rows[:, 0, _ROTATED:].float() - wanted).abs().max(1).values
        if bool((apart > _CLOSE).any()):
            raise WrongKVError(f"{where}: K of another position, {apart.tolist()}")

    def check_quote(self, req: Request, end: int, found: list[int]) -> None:
        """Rows of a prompt that quotes, up to `end`, are of what it quotes."""
        lineage, tenant = lineage_of(req), tenant_of(req)
        assert isinstance(lineage, QuoteLineage)
        if tenant is None or not tenant.is_named or wants_exact(req):
            raise WrongKVError(f"{req.rid} quotes, and is nobody's or declined")
        tokens, seed = req.tokens[:end], self.seed(req)
        if not self.quotes.allows(self.whose(req), lineage.run, tokens, seed, found):
            raise WrongKVError(f"rows of {req.rid} are another's, or of other text")

    def note_pages(self, req: Request) -> None:
        """Remembers what every page of a request would say that was computed as a whole."""
        own = prints_behind(self.seed(req), req.tokens)
        keys = self.keys(req.tokens, req.extra_key, req.cache_salt)
        pages = [bytes.fromhex(key) for key in keys]
        hashes = np.frombuffer(b"".join(pages), np.uint8).reshape(-1, 32)
        for number, digest in enumerate(hashes):
            of_groups = [group_hashes(digest, group) for group in range(self.num_groups)]
            for each in (digest, *of_groups):
                self.own_pages[self.identity.digest, each.tobytes()] = own[
                    number * PAGE : (number + 1) * PAGE
                ]

    def check_store(self) -> None:
        """Pages in DRAM are of their layers and at their positions, and know what they are."""
        for slot in ready_slots(self.store):
            meta, _ = parse_header(slot)
            parts = [part for part in self.parts if self.is_of(slot, part)]
            if len(parts) != 1:
                raise WrongKVError(f"a page of {len(parts)} parts")
            assert meta.rope == ROPE_NAMES[ROPE_PRE], meta
            own = self.own_pages.get((meta.namespace, meta.page_hash))
            for _, _, shape, offset in parts[0]:
                said = from_columns(self.values(slot, shape, offset)[:, 0, :_TAG])
                if own is not None and said != own and meta.quality < Quality.APPROXIMATED:
                    raise WrongKVError(f"a page that rests on moved KV and does not know: {meta}")
            for layer, kind, shape, offset in parts[0]:
                if not kind:
                    values = self.values(slot, shape, offset)[:, 0, _ROTATED:].float()
                    wanted = rotated(0, 1, is_window=layer not in FULL)
                    assert bool(((values - wanted).abs() < _CLOSE).all()), values

    @staticmethod
    def values(slot: Any, shape: Sequence[int], offset: int) -> torch.Tensor:
        """A block of a page, `[P, *shape]`."""
        num_bytes = PAGE * int(np.prod(shape)) * 2
        block = torch.from_numpy(slot[offset : offset + num_bytes].copy())
        return block.view(torch.bfloat16).view(PAGE, *shape)

    def is_of(self, slot: Any, part: Sequence[tuple[int, int, Sequence[int], int]]) -> bool:
        """Whether a page is one of this part."""
        return all(
            bool((self.values(slot, shape, offset)[..., _TAG] == 2 * layer + kind + 1).all())
            for layer, kind, shape, offset in part
        )

    def finish(self, req: Request) -> None:
        if (
            lineage_of(req) is None
            and tenant_of(req) is not None
            and req.sampling_params.custom_params["hier_kv_truncation"] == "all"
        ):
            tokens = array("q", req.tokens[: req.prefix_len])
            hashes = self.truncator.hash_of(tokens, req.extra_key, req.cache_salt)
            self.quotes.note_stored(self.whose(req), tokens, hashes)
        self.num_quoting += isinstance(lineage_of(req), QuoteLineage)
        super().finish(req)

    def _do_steer(self) -> bool:
        return False
