"""Copies pages between the device pool and DRAM slots, layer by layer, with the rotation fused in.

Save: gather the node's tokens, take the rotation out of K (exactly: what does not survive is listed
as a correction), write K and V into the page. Load: the way back, at the positions asked for. One
object per server; `save` runs on the save thread, `load_layer` on the load thread.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.device.layout import (
    NUM_WORD,
    ROPE_BOUND,
    ROPE_NAMES,
    ROPE_PRE,
    PageLayout,
    PageTails,
    read_tails,
    write_tail,
)
from sglang_ext.device.load_pages import COPY, EMBED, MOVE, LoadPages, PageRun, PageSource
from sglang_ext.device.local_pages import LocalPages
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope, refresh_spec
from sglang_ext.kernels.rope import Corrections, PagedView, RopeSpec

logger = logging.getLogger(__name__)

I64 = npt.NDArray[np.int64]
U8 = npt.NDArray[np.uint8]


class CopyError(RuntimeError):
    """A page cannot be loaded as asked; the load fails and its requests are aborted."""


@dataclass(frozen=True)
class SavedPage:
    """What a save left in a slot.

    Attributes:
        rope_state: how K is stored.
        payload_bytes: length of the payload, for the record's header.
        num_corrections: values listed as corrections.
    """

    rope_state: int
    payload_bytes: int
    num_corrections: int


class PageCopier:
    """Moves pages of one model between its device pool and the arena.

    Args:
        pool: the device pool.
        layout: the pages' layout.
        ropes: one a layer.
        slots: u8 `[num_slots, slot_bytes]`, the arena.
        mode: `pre` or `delta`.
        kernels: module with the functions of `kernels/rope`.
        parallel_loads: copies V of a layer on a thread of its own while K is embedded; ended by
            `close`.

    It has many methods because what a save writes, a load has to read: both ways are kept together.

    Raises:
        ValueError: K of a layer is not bound to its position, and the layout has no room to list
            what that takes.
    """

    def __init__(
        self,
        pool: DevicePool,
        layout: PageLayout,
        ropes: list[LayerRope],
        slots: U8,
        *,
        mode: str,
        kernels: ModuleType | Any,
        parallel_loads: bool = False,
    ) -> None:
        self.pool = pool
        self.ropes = ropes
        self.layout = layout
        self._mode = mode
        self.slots = slots
        self.kernels = kernels
        self.rules = LocalPages(layout, ropes, mode)
        if layout.is_bound and self.rules.saved_state != ROPE_BOUND:
            raise ValueError("pages without room for corrections hold K as the engine has it")
        # A load of K is bound by arithmetic, one of V by memory; on a CPU pool they share no limit.
        self._v_thread: ThreadPoolExecutor | None = None
        if parallel_loads and pool.v:
            self._v_thread = ThreadPoolExecutor(1, "hier-kv-load-v")

    def for_pool(
        self, pool: DevicePool, ropes: list[LayerRope], layout: PageLayout | None = None
    ) -> PageCopier:
        """A copier of other layers into the same slots.

        Args:
            pool: the layers.
            ropes: one a layer.
            layout: of their pages, in the frame of this one's; None where their shapes are those
                of the layers here.
        """
        return PageCopier(
            pool,
            layout or self.layout,
            ropes,
            self.slots,
            mode=self._mode,
            kernels=self.kernels,
            parallel_loads=self._v_thread is not None,
        )

    def close(self) -> None:
        """Ends the copier's own thread; nothing may be loaded any more."""
        if self._v_thread is not None:
            self._v_thread.shutdown()

    def bind(self, layer: int, reason: str) -> None:
        """Stores a layer's K as the engine has it from now on. Before the first save only."""
        logger.warning(
            "hier-kv: K of layer %d is valid at its own position only: %s", layer, reason
        )
        self.ropes[layer] = self.ropes[layer].bound(reason)

    def bind_all(self, reason: str) -> None:
        """Stores every layer's K as the engine has it. Before the first save only."""
        for layer in range(self.pool.num_layers):
            self.ropes[layer] = self.ropes[layer].bound(reason)

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    @property
    def layer_bytes(self) -> list[int]:
        """Bytes that each layer takes in a slot."""
        return [
            self.span(range(layer, layer + 1)).stop - start
            for layer, start in enumerate(self.layout.k_offsets)
        ]

    def span(self, layers: range) -> slice:
        """Bytes of a slot in which neighbouring layers lie."""
        starts = (*self.layout.k_offsets, self.layout.tail_offset)
        return slice(starts[layers.start], starts[layers.stop])

    @property
    def movable(self) -> bool:
        """Whether K of every layer can be loaded at another position than it was saved at."""
        return all(rope.movable for rope in self.ropes)

    def _require_whole_pages(self, token_slots: Any) -> None:
        """Looks at rows of pages with an index, where they can be looked at without a wait.

        Raises:
            CopyError: they are not those of whole pages of the pool.
        """
        if not self.layout.has_index or not isinstance(token_slots, np.ndarray):
            return
        pages = token_slots.reshape(-1, self.layout.page_size)
        first = pages[:, :1]
        are_whole = first % self.layout.page_size == 0
        if not (are_whole.all() and (pages - first == np.arange(pages.shape[1])).all()):
            raise CopyError("rows of an index lie in whole pages of the pool, got others")

    # ---- save ----

    def save(self, token_slots: I64, position: int, page_slots: I64) -> list[SavedPage]:
        """Copies whole pages from the device pool into slots; blocks until the bytes are there.

        Args:
            token_slots: i64 `[n * P]`, rows of the pool.
            position: position of the first token; the others follow.
            page_slots: i64 `[n]`, slots to fill (the header is not touched).

        Returns:
            One entry a page.

        Raises:
            CopyError: the pages have an index, and the rows are not those of whole pages.
        """
        self._require_whole_pages(token_slots)
        positions = position + np.arange(len(token_slots), dtype=np.int64)
        found: list[Corrections] = []
        state = self.rules.saved_state
        for layer in range(self.pool.num_layers):
            spec = refresh_spec(self.ropes[layer]) if state == ROPE_PRE else None
            view = self._k_view(page_slots, layer)
            found.append(self._save_k(layer, token_slots, positions, spec, view))
            if self.layout.v_row_bytes[layer]:
                self.kernels.copy_rows_to_pages(
                    self.pool.v[layer], token_slots, self._v_view(page_slots, layer)
                )
        for gap in self.layout.gaps:  # else bytes of whatever page had the slot before
            self.slots[page_slots, gap] = 0
        return self._write_tails(token_slots, position, page_slots, found, state)

    def _save_k(
        self,
        layer: int,
        token_slots: I64,
        positions: I64,
        spec: RopeSpec | None,
        view: PagedView,
    ) -> Corrections:
        if spec is not None:
            found: Corrections = self.kernels.save_k(
                self.pool.k[layer], token_slots, positions, spec, view
            )
            return found
        self.kernels.copy_rows_to_pages(self.pool.k[layer], token_slots, view)
        return Corrections.none()

    def _write_tails(
        self,
        token_slots: I64,
        position: int,
        page_slots: I64,
        found: list[Corrections],
        saved_state: int,
    ) -> list[SavedPage]:
        num_pages, size = len(page_slots), self.layout.page_size
        counts = np.zeros((num_pages, self.layout.num_listed_layers), np.uint32)
        for layer, corrections in enumerate(found):
            if len(corrections.page):
                counts[:, layer] = np.bincount(corrections.page, minlength=num_pages)
        totals = counts.sum(axis=1)
        entries = _entries_by_page(found, totals)
        saved = []
        for index, slot in enumerate(page_slots.tolist()):
            total, state = int(totals[index]), saved_state
            page_counts, page_entries = counts[index], entries[index]
            if total > self.layout.max_corrections:
                span = slice(index * size, (index + 1) * size)
                self._keep_bound(token_slots[span], page_slots[index : index + 1])
                total, state = 0, ROPE_BOUND
                page_counts, page_entries = np.zeros_like(page_counts), page_entries[:0]
            payload_bytes = write_tail(
                self.slots[slot],
                self.layout,
                rope_state=state,
                position=position + index * size,
                counts=page_counts,
                entries=page_entries,
            )
            saved.append(SavedPage(state, payload_bytes, total))
        return saved

    def _keep_bound(self, token_slots: I64, page_slots: I64) -> None:
        """Stores K position-bound, for a page whose corrections do not fit in its tail."""
        for layer in range(self.pool.num_layers):
            self.kernels.copy_rows_to_pages(
                self.pool.k[layer], token_slots, self._k_view(page_slots, layer)
            )

    # ---- load ----

    def prepare_load(self, page_slots: I64, token_slots: Any, position: int) -> LoadPages:
        """Reads the pages' tails and decides how each is embedded.

        Args:
            page_slots: i64 `[n]`.
            token_slots: i64 `[n * P]`, rows of the pool to write.
            position: position that the first token will have.

        Raises:
            CopyError: a page is not of this layout, is bound to another position, or is
                position-free where a layer has no known rotation.
        """
        self._require_whole_pages(token_slots)
        tails, moved = self._tails(page_slots, position)
        size = self.layout.page_size
        how = np.where(tails.rope_state == ROPE_PRE, EMBED, np.where(moved, MOVE, COPY))
        saved = tails.position[:, None] + np.arange(size)
        return LoadPages(
            page_slots,
            token_slots,
            position + np.arange(len(token_slots), dtype=np.int64),
            how.astype(np.uint8),
            saved.reshape(-1),
            self._corrections_by_layer(tails, moved),
        )

    def prepare_runs(
        self, runs: Sequence[PageRun], token_slots: Any, position: int
    ) -> list[LoadPages]:
        """As `prepare_load`, at token granularity and from wherever the tokens lie.

        A page that is bound to its position because of its values, in a model whose rotations are
        known, is rotated by the difference.

        Args:
            runs: one behind the other, they are the tokens to load.
            token_slots: i64 `[n]`, rows of the pool to write; as many as the runs have tokens.
            position: position that the first token will have.

        Raises:
            CopyError: as `prepare_load` says; K of a layer without a known rotation cannot move.
            ValueError: the runs do not have as many tokens as there are rows.
        """
        parts: list[LoadPages] = []
        done = 0
        for run in runs:
            rows = token_slots[done : done + run.num_tokens]
            parts += self._prepare_run(run, rows, position + done)
            done += run.num_tokens
        if done != len(token_slots):
            raise ValueError(f"runs of {done} tokens for {len(token_slots)} rows")
        return parts

    def _prepare_run(self, run: PageRun, token_slots: Any, position: int) -> list[LoadPages]:
        size, first, end = self.layout.page_size, run.first_row, run.first_row + run.num_tokens
        if not 0 <= first < size or -(-end // size) != len(run.page_slots):
            raise ValueError(f"rows [{first}, {end}) are not of {len(run.page_slots)} pages")
        if self.layout.has_index and (first or end % size):
            raise CopyError(f"rows [{first}, {end}) of pages whose index is one of whole pages")
        self._require_whole_pages(token_slots)
        tails, moved = self._tails(run.page_slots, position - first, may_rotate=self.movable)
        keeps = np.where(moved, MOVE, COPY)
        how = np.where(tails.rope_state == ROPE_PRE, EMBED, keeps).astype(np.uint8)
        saved = (tails.position[:, None] + np.arange(size)).reshape(-1)
        corrections = self._corrections_by_layer(tails, moved)
        pages = LoadPages(
            run.page_slots,
            token_slots,
            position + np.arange(run.num_tokens, dtype=np.int64),
            how,
            saved[first:end],
            corrections,
            first_row=first,
        )
        return list(pages.of_one_kind(size))

    def require_positions(self, job: LoadPages) -> None:
        """Looks at positions before they go to the device, whose kernels cannot.

        Raises:
            CopyError: one lies outside of a rotary table.
        """
        self.require_in_table(job.positions)
        self.require_in_table(job.saved_positions)

    def require_in_table(self, positions: I64) -> None:
        """As `require_positions`, of any.

        Raises:
            CopyError: one lies outside of a rotary table.
        """
        end = self.rules.max_position + self.layout.page_size
        if len(positions) and not 0 <= positions.min() <= positions.max() < end:
            raise CopyError(f"positions of pages must lie in [0, {end})")

    def num_listed(self, page_slots: I64) -> I64:
        """How many corrections the tails of pages count that were just saved."""
        at = self.layout.tail_offset
        words = np.ascontiguousarray(self.slots[page_slots, at : at + 4 * NUM_WORD + 4])
        return words.view(np.uint32)[:, NUM_WORD].astype(np.int64)

    def damaged(self, page_slots: I64) -> I64:
        """Finds the slots that hold no page of this model, as indices into `page_slots`."""
        if self._are_sound(page_slots):
            return np.empty(0, np.int64)
        one = range(len(page_slots))
        bad = [at for at in one if not self._are_sound(page_slots[at : at + 1])]
        return np.array(bad, np.int64)

    def _are_sound(self, page_slots: I64) -> bool:
        tails = read_tails(self.slots, page_slots, self.layout)
        return tails is not None and bool(self.rules.sound_tails(tails).all())

    def unusable(self, page_slots: I64, position: int) -> I64:
        """Returns the indices of pages that cannot be loaded behind a prefix.

        These are the pages that `prepare_load` would refuse, and pages saved at another position: a
        page's key chains all tokens before it, so a page has one position. Pages are verified when
        they come to DRAM, so memory must have corrupted them since.
        """
        try:
            self._tails(page_slots, position, may_move=False)
        except CopyError:
            return np.array(
                [at for at in range(len(page_slots)) if not self._usable(page_slots, position, at)]
            )
        return np.empty(0, np.int64)

    def _usable(self, page_slots: I64, position: int, at: int) -> bool:
        try:
            first = position + at * self.layout.page_size
            self._tails(page_slots[at : at + 1], first, may_move=False)
        except CopyError:
            return False
        return True

    def _tails(
        self, page_slots: I64, position: int, *, may_rotate: bool = False, may_move: bool = True
    ) -> tuple[PageTails, npt.NDArray[np.bool_]]:
        """Decodes the pages' tails, and says which pages were saved at another position.

        Raises:
            CopyError: as `prepare_load` says.
        """
        tails = read_tails(self.slots, page_slots, self.layout)
        if tails is None:
            raise CopyError(f"one of slots {page_slots.tolist()} holds no page of this layout")
        sound = self.rules.sound_tails(tails)
        if not sound.all():
            # The namespace tells ways of storing apart; here it would be K without its rotation, or
            # a look-up behind the end of a rotary table.
            state, saved = tails.rope_state[~sound][0], tails.position[~sound][0]
            raise CopyError(
                f"a page with {ROPE_NAMES[int(state)]} K saved at {saved} is none of this model's"
            )
        size = self.layout.page_size
        moved = tails.position != position + size * np.arange(len(page_slots))
        if moved.any() and not may_move:
            raise CopyError(f"a page of position {tails.position[moved][0]} is not of this prefix")
        keeps_some = any(rope.is_kept for rope in self.ropes)
        if not may_rotate and (moved & (keeps_some | (tails.rope_state == ROPE_BOUND))).any():
            raise CopyError(
                f"a page bound to position {tails.position[moved][0]} cannot be loaded elsewhere"
            )
        return tails, moved

    def _corrections_by_layer(
        self, tails: PageTails, moved: npt.NDArray[np.bool_]
    ) -> list[Corrections | None]:
        """Corrections of the pages that stay at their position."""
        num_layers = self.layout.num_layers
        applies = np.flatnonzero(~moved[tails.page])
        order = applies[np.argsort(tails.layer[applies], kind="stable")]
        ends = np.searchsorted(tails.layer[order], np.arange(num_layers + 1))
        parts = [order[ends[layer] : ends[layer + 1]] for layer in range(num_layers)]
        return [
            Corrections(tails.page[part], tails.element[part], tails.bits[part])
            if len(part)
            else None
            for part in parts
        ]

    def load_layer(self, job: LoadPages, layer: int, source: PageSource | None = None) -> None:
        """Copies one layer of a request's pages into the device pool.

        Args:
            job: the pages.
            layer: which.
            source: where they lie; None: in the arena.
        """
        if source is None:
            source = PageSource(self.slots, job.page_slots)
        v_copy: Future[None] | None = None
        if self._v_thread is not None:
            v_copy = self._v_thread.submit(self._load_v, job, layer, source)
        elif self.pool.v:
            self._load_v(job, layer, source)
        try:
            kinds = np.unique(job.how).tolist()
            if len(kinds) == 1:
                self._load_k(kinds[0], job, layer, source)
                return
            for how in kinds:
                part = job.chosen(np.flatnonzero(job.how == how), self.layout.page_size)
                self._load_k(how, part, layer, PageSource(source.pages, part.page_slots))
        finally:
            if v_copy is not None:
                v_copy.result()

    def _load_v(self, job: LoadPages, layer: int, source: PageSource) -> None:
        if not self.layout.v_row_bytes[layer]:
            return
        view = self._view(source, self.layout.v_offsets[layer])
        self.kernels.copy_pages_to_rows(view, self.pool.v[layer], job.token_slots, job.first_row)

    def _load_k(self, how: int, job: LoadPages, layer: int, source: PageSource) -> None:
        view = self._view(source, self.layout.k_offsets[layer])
        k, kernels = self.pool.k[layer], self.kernels
        spec = None if how == COPY else refresh_spec(self.ropes[layer])
        if spec is None:
            kernels.copy_pages_to_rows(view, k, job.token_slots, job.first_row)
        elif how == EMBED:
            corrections = job.corrections[layer]
            kernels.load_k(
                view, job.positions, spec, k, job.token_slots, corrections, job.first_row
            )
        else:
            kernels.move_k(
                view,
                job.saved_positions,
                job.positions,
                spec,
                k,
                job.token_slots,
                job.first_row,
            )

    def _view(self, source: PageSource, offset: int) -> PagedView:
        return PagedView(
            source.pages, source.index, offset - source.first_byte, self.layout.page_size
        )

    def _k_view(self, page_slots: I64, layer: int) -> PagedView:
        return PagedView(
            self.slots, page_slots, self.layout.k_offsets[layer], self.layout.page_size
        )

    def _v_view(self, page_slots: I64, layer: int) -> PagedView:
        return PagedView(
            self.slots, page_slots, self.layout.v_offsets[layer], self.layout.page_size
        )


def _entries_by_page(
    found: list[Corrections], totals: npt.NDArray[np.integer[Any]]
) -> list[npt.NDArray[np.uint32]]:
    """(element, bits) pairs of each page, sorted by layer."""
    page = np.concatenate([corrections.page for corrections in found])
    order = np.argsort(page, kind="stable")
    pairs = np.empty((len(page), 2), np.uint32)
    pairs[:, 0] = np.concatenate([corrections.element for corrections in found])[order]
    pairs[:, 1] = np.concatenate([corrections.bits for corrections in found])[order]
    return np.split(pairs, np.cumsum(totals)[:-1])
