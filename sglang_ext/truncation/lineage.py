"""What a truncated request remembers of the prompt it was cut from, and whose KV it may share.

When the KV of a kept token was computed, the token attended to tokens that are dropped now. So two
requests may share such KV only if their whole prompts are equal up to where the tail begins, and
were cut at the same places. Such requests are a lineage. The name of a lineage is an HMAC, under a
secret of the server, of these tokens, of the places, and of what keeps tenants apart. So no client
can make a name. The name is put in front of the request's `extra_key`.

A name says which text KV rests on, not which stored pages were in front of it when it was computed:
pages come and go, so a lineage's page may follow one that was computed on others than it was.

Pure: stdlib and numpy only.
"""

from __future__ import annotations

import hashlib
import hmac
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_ext.device.composition import Bools, Composition, Hashes
from sglang_ext.identity.tenancy import OF_LINEAGE
from sglang_ext.truncation.cut import Cut
from sglang_ext.truncation.extents import Source
from sglang_ext.truncation.keyed_names import encode_parts
from sglang_ext.truncation.quotes import StoredRun

_ATTRIBUTE = "_hier_kv_lineage"
# So many earlier cuts of a prompt are searched for stored pages, the newest first.
MAX_ANCESTORS = 8

UsableOf = Callable[[Hashes], Bools]
ChainHash = Callable[["array[int]", str | None, str | None], Hashes]


def names_of(
    secret: bytes,
    tokens: array[int],
    cut: Cut,
    *,
    extra_key: str | None,
    salt: str | None,
    is_exact: bool = False,
) -> dict[int, str]:
    """Names of the lineages that a prompt passed through, by where their tail begins.

    Args:
        secret: of the server.
        tokens: the whole prompt.
        cut: where it is cut.
        extra_key: of the client and the adapter (`tenancy.tree_key`).
        salt: the client's.
        is_exact: for requests that want exact KV, apart from all others.
    """
    parts = encode_parts("exact cut" if is_exact else "cut", extra_key, salt, cut.head)
    digest = hmac.new(secret, parts, hashlib.sha256)
    names: dict[int, str] = {}
    view, done = memoryview(tokens).cast("B"), 0
    for number, start in enumerate(cut.starts, start=1):
        digest.update(view[done * tokens.itemsize : start * tokens.itemsize])
        done = start
        named = digest.copy()
        # The number is last, so that these bytes divide into tokens and places in one way only.
        named.update(np.array([*cut.starts[:number], number], "<i8").tobytes())
        names[start] = OF_LINEAGE + named.hexdigest() + ":"
    return names


@dataclass
class Lineage(ABC):
    """A request whose KV is shared within a lineage only.

    Attributes:
        tokens: the whole prompt, as the client sent it.
        composition: what the last match found to load, if anything.
        loaded: what was loaded for it since it was admitted.
        num_moved: tokens of `loaded` whose position is not the one they were computed at.
    """

    tokens: array[int]
    composition: Composition | None = field(default=None, init=False)
    loaded: Composition | None = field(default=None, init=False)
    num_moved: int = field(default=0, init=False)

    @property
    @abstractmethod
    def key(self) -> str:
        """The request's `extra_key`: its lineage's name, then that of the client and adapter."""

    @property
    def num_dropped(self) -> int:
        """Tokens of the prompt that the server left out."""
        return 0

    @abstractmethod
    def sources(self, end: int, usable_of: UsableOf) -> list[Source]:
        """Chains of other prompts that hold tokens of this one, the best first.

        Args:
            end: of the positions wanted.
            usable_of: which pages can be had.
        """

    def begin_admission(self) -> None:
        """A request that holds no KV is matched: forgets what was loaded for it before."""
        self.loaded, self.num_moved = None, 0

    def note_loaded(self, composition: Composition) -> None:
        """Pages were queued for loading."""
        self.loaded, self.num_moved = composition, composition.num_moved


@dataclass
class CutLineage(Lineage):
    """Of a prompt that was cut.

    Attributes:
        cut: what of the prompt is kept.
        extra_key: of the client and the adapter (`tenancy.tree_key`).
        salt: the client's.
        names: see `names_of`.
        hash_of: page hashes of (tokens, extra_key, salt), u8 `[N, 32]`.
    """

    cut: Cut
    extra_key: str | None
    salt: str | None
    names: dict[int, str]
    hash_of: ChainHash
    _chains: dict[int, Hashes] = field(default_factory=dict, init=False)

    @property
    def kept(self) -> array[int]:
        """The prompt after the cut."""
        return array("q", self.cut.keep(self.tokens))

    @property
    def key(self) -> str:
        """See `Lineage`."""
        return self.key_of(self.cut.tail_start) or ""

    @property
    def num_dropped(self) -> int:
        """See `Lineage`."""
        return self.cut.num_dropped

    def key_of(self, start: int) -> str | None:
        """`extra_key` of the lineage whose tail begins at `start`; without one the client's own."""
        name = self.names.get(start)
        return self.extra_key if name is None else name + (self.extra_key or "")

    def sources(self, end: int, usable_of: UsableOf) -> list[Source]:
        """The prompt's pages as its earlier cuts had them, the newest first, then as uncut.

        Last comes the head of the uncut prompt, whose pages stand where they were.
        """
        head, before = self.cut.head, self.cut.ancestors()
        whole = before.pop()
        found = []
        for start in [*before[:MAX_ANCESTORS], whole]:
            shift = self.cut.tail_start - start
            found.append(Source(shift, head, end, self.chain_of(start), usable_of))
        found.append(Source(0, 0, min(head, end), self.chain_of(whole), usable_of))
        return found

    def chain_of(self, start: int) -> Hashes:
        """Page hashes of this prompt, cut as an earlier turn cut it, u8 `[N, 32]`.

        Args:
            start: where the tail of that cut begins: one of `Cut.ancestors()`.
        """
        if start not in self._chains:
            head = self.cut.head
            tokens = self.tokens
            if start in self.names:
                tokens = self.tokens[:head] + self.tokens[start:]
            self._chains[start] = self.hash_of(tokens, self.key_of(start), self.salt)
        return self._chains[start]


@dataclass
class QuoteLineage(Lineage):
    """Of a prompt that fits and whose head and tail both stand in one stored conversation.

    The client left out what is between the two.

    Attributes:
        run: the tail, and where it stands in the stored conversation.
        head: tokens of the prompt's head.
        page_size: P.
        name: see `quote_name`; it is put in front of `extra_key`.
        extra_key: of the client and the adapter (`tenancy.tree_key`).
    """

    run: StoredRun
    head: int
    page_size: int
    name: str
    extra_key: str | None

    @property
    def key(self) -> str:
        """See `Lineage`."""
        return self.name + (self.extra_key or "")

    def sources(self, end: int, usable_of: UsableOf) -> list[Source]:
        """The stored conversation's tail, and its head."""
        run = self.run
        shift = run.position - run.start
        before = np.zeros((run.position // self.page_size, 32), np.uint8)
        chain = np.concatenate([before, run.hashes])
        return [
            Source(shift, run.start, min(end, run.start + run.length), chain, usable_of),
            Source(0, 0, min(self.head, end), run.head_hashes, usable_of),
        ]


def quote_name(secret: bytes, whose: int, run: StoredRun) -> str:
    """Name of the lineage of all prompts that quote one stored conversation from one place on.

    The name is made of `whose`, the place and the hash of the run's first page. That hash covers
    the conversation up to the page's end, with the tokens that the client left out, and the
    adapter. The model's namespace may differ from rank to rank and is no part of the name, so all
    ranks make the same one.

    Args:
        secret: of the server.
        whose: a number that stands for all who may share it; see `rolling.group_id`.
        run: what is quoted.
    """
    parts = encode_parts("quote", whose, run.position, run.hashes[0].tobytes())
    return OF_LINEAGE + hmac.new(secret, parts, hashlib.sha256).hexdigest() + ":"


def lineage_of(req: Any) -> Lineage | None:
    """The lineage of a request; None unless it was truncated."""
    return getattr(req, _ATTRIBUTE, None)


def attach_lineage(req: Any, lineage: Lineage) -> None:
    """Gives a request the key of its lineage; a prompt that is cut keeps only its kept tokens."""
    setattr(req, _ATTRIBUTE, lineage)
    req.extra_key = lineage.key
    if isinstance(lineage, CutLineage):
        req.origin_input_ids = lineage.kept
        req.origin_input_ids_unpadded = req.origin_input_ids
