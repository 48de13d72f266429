"""Finds stored KV for the kept part of a truncated prompt, and tells which pages need no save.

Runs on the scheduler's thread and only looks things up. The copying is the linker's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.admission import Admission
from sglang_ext.admission.waiting_request import CutPrompt, ReusablePrefix
from sglang_ext.device.composition import Composition
from sglang_ext.device.transfers import Hashes, Place
from sglang_ext.provenance.request_state import HitTier, max_quality_of, state_of
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store import KeySpace, PageStore
from sglang_ext.tiers.store.types import ON_DISK, READY
from sglang_ext.truncation.extents import Source, agree_on, compose
from sglang_ext.truncation.lineage import CutLineage, Lineage, lineage_of

Bools = npt.NDArray[np.bool_]
_KNOWN = 0xFF  # in DRAM, on disk, or on its way


class Windows(Protocol):
    """Where prompts of a model with window layers in a pool of their own can be gone on behind."""

    def resumable_part(
        self, space: KeySpace, made: Composition, states: int, max_quality: int
    ) -> Composition | None:
        """What of a composition of full layers' pages can be gone on behind, if anything."""

    def keys_of(self, made: Composition) -> Hashes:
        """Keys of all that a composition is made of, its window with it."""


class TruncatedReuse:
    """Compositions of truncated requests, for one cache.

    Of several ranks each has other pages ready. So they agree on what a prompt is made of when it
    enters the queue, on pages that all of them have, and on how much of that all have brought.

    Args:
        store: DRAM and disk.
        admission: of the waiting requests.
        page_size: P.
        is_movable: whether K can be moved to other positions. Where it cannot, cut prompts are not
            made of pages of others: they are prompts like any other, and none come here.
        windows: of a model that has some; None of any other.
    """

    def __init__(
        self,
        store: PageStore,
        admission: Admission,
        *,
        page_size: int,
        is_movable: Callable[[], bool],
        windows: Windows | None = None,
    ) -> None:
        self._store = store
        self._admission = admission
        self._page_size = page_size
        self.is_movable = is_movable
        self._windows = windows

    # ---- matches ----

    def ready_pages(
        self, req: Any, lineage: Lineage, space: KeySpace, device_len: int, tail: Hashes
    ) -> int:
        """Number of pages behind the device's that can be loaded now; noted for the load.

        Args:
            req: SGLang's request.
            lineage: its own.
            space: of its pages.
            device_len: tokens of it on the device, a multiple of the page size.
            tail: u8 `[N, 32]`, hashes of its pages from there on.
        """
        admission, handle = self._admission, req.cache_request_handle
        if admission.decides_alone:
            found = self._compose(req, lineage, space, device_len, tail, READY)
            num_ready = 0 if found is None else found.num_pages
            num = admission.num_worth(handle, device_len, num_ready)
            if found is not None and num < found.num_pages:
                found = found.part(0, num) if num else None
            lineage.composition = found
            return num
        first_page = device_len // self._page_size
        num = admission.num_loadable(handle, space, first_page, tail, max_quality_of(req))
        lineage.composition = admission.composition(handle, first_page, num)
        return num

    def enqueue(
        self,
        req: Any,
        lineage: Lineage,
        space: KeySpace,
        device_pages: int,
        hashes: Hashes,
        key: Any = None,
    ) -> None:
        """A truncated request enters the queue: notes where its pages lie, waits for them.

        Args:
            req: SGLang's request.
            lineage: its own.
            space: of its pages.
            device_pages: pages of it on the device.
            hashes: u8 `[N, 32]`, of its pages from the root on.
            key: SGLang's key of these pages; needed where several ranks decide.
        """
        handle, size = req.cache_request_handle, self._page_size
        tail = hashes[device_pages:]
        found = self._compose(req, lineage, space, device_pages * size, tail, _KNOWN)
        self._note_tiers(req, space, device_pages, found)
        if found is not None:
            self._leave_behind(req, lineage, space)
        if not self._admission.decides_alone:
            prefix = self._agreed_prefix(req, lineage, space, device_pages, hashes, found)
            self._admission.enter(handle, prefix, key)
        elif found is None:
            self._admission.leave(handle)
        else:
            prefix = self._prefix_of(req, space, device_pages, hashes, found)
            self._admission.enter(handle, prefix, key)

    def _agreed_prefix(
        self,
        req: Any,
        lineage: Lineage,
        space: KeySpace,
        device_pages: int,
        hashes: Hashes,
        found: Composition | None,
    ) -> ReusablePrefix:
        """What all ranks would load; of its own pages alone they agree as of any prompt's.

        Args:
            req: SGLang's request.
            lineage: its own.
            space: of its pages.
            device_pages: pages of it on the device.
            hashes: u8 `[N, 32]`, of its pages from the root on.
            found: what all ranks have for it.
        """
        size = self._page_size

        def again(num_on_device: int) -> ReusablePrefix:
            tail = hashes[num_on_device:]
            now = self._compose(req, lineage, space, num_on_device * size, tail, _KNOWN)
            return self._agreed_prefix(req, lineage, space, num_on_device, hashes, now)

        if found is not None and found.stored.all():
            found = None
        prefix = self._prefix_of(req, space, device_pages, hashes, found)
        return replace(prefix, cut=CutPrompt(found, len(hashes), again))

    def _prefix_of(
        self,
        req: Any,
        space: KeySpace,
        device_pages: int,
        hashes: Hashes,
        composition: Composition | None,
    ) -> ReusablePrefix:
        """What a cut prompt could reuse: pages that it is made of, else those stored as its own."""
        size, limit = self._page_size, max_quality_of(req)
        num_tokens = max(len(hashes) * size, len(req.full_untruncated_fill_ids))
        if composition is None:
            num_on_device = min(device_pages, len(hashes))
            return ReusablePrefix(space, hashes, num_on_device, limit, prompt_tokens=num_tokens)
        keys = composition.hashes
        if self._windows is not None:
            keys = self._windows.keys_of(composition)
        return ReusablePrefix(
            space, keys, 0, limit,
            prompt_tokens=num_tokens, tokens_before=device_pages * size,
        )  # fmt: skip

    def _note_tiers(
        self, req: Any, space: KeySpace, device_pages: int, found: Composition | None
    ) -> None:
        """Records where a request's pages lie as it enters the queue, for its report."""
        tiers = [(HitTier.DEVICE, device_pages)]
        if found is not None:
            flags, _ = self._store.page_states(space, found.hashes)
            on_disk_only = ((flags & READY) == 0) & ((flags & ON_DISK) != 0)
            from_disk = found.worst_of(on_disk_only.astype(np.uint8))
            tiers += [(HitTier.DISK if disk else HitTier.HOST, 1) for disk in from_disk]
        state_of(req).note_enqueued(self._page_size, tiers)

    def _leave_behind(self, req: Any, lineage: Lineage, space: KeySpace) -> None:
        """Tells the placement policy which stored pages the conversation goes on without."""
        lookahead = self._store.lookahead
        if lookahead is None or not _may_take_others(req) or not isinstance(lineage, CutLineage):
            return
        size = self._page_size
        for source in lineage.sources(0, _none_usable):
            first, end = -(-source.begin // size), (source.begin + source.shift) // size
            if first < end:
                lookahead.leave_behind(space, source.hashes, first, end)

    def _compose(
        self,
        req: Any,
        lineage: Lineage,
        space: KeySpace,
        device_len: int,
        tail: Hashes,
        need: int,
    ) -> Composition | None:
        """The pages behind the device's, composed of stored pages with any of the flags `need`.

        With several ranks all of them come here alike, and it is of pages that all have.
        """
        size, limit = self._page_size, max_quality_of(req)

        def usable_of(hashes: Hashes) -> Bools:
            if not self._store.keeps_pages:  # the rank that keeps the pages of all says so
                return np.ones(len(hashes), np.bool_)
            flags, quality = self._store.page_states(space, hashes)
            usable: Bools = ((flags & np.uint8(need)) != 0) & (quality <= limit)
            return usable

        before = np.zeros((device_len // size, 32), np.uint8)
        end = device_len + len(tail) * size
        own = Source(0, 0, end, np.concatenate([before, tail]), usable_of)
        others = lineage.sources(end, usable_of) if _may_take_others(req) else []
        if not self._admission.decides_alone:
            agree_on([own, *others], device_len, end, size, self._admission.everywhere)
        found = compose(device_len, end, size, own, others)
        if found is None or self._windows is None:
            return found
        return self._windows.resumable_part(space, found, need, limit)

    # ---- saves ----

    def stored_path(self, req: Any, hashes: Hashes) -> Hashes:
        """Hashes of the pages that a request used, as they are stored.

        Args:
            req: SGLang's request; any.
            hashes: u8 `[N, 32]`, its own pages.
        """
        lineage = lineage_of(req)
        if lineage is None or lineage.loaded is None:
            return hashes
        start = lineage.loaded.start // lineage.loaded.page_size
        end = start + lineage.loaded.num_pages
        return np.concatenate([hashes[:start], lineage.loaded.hashes, hashes[end:]])

    def place_of_save(self, req: Any, place: Place, num_pages: int) -> Place:
        """Adds to a save's place which pages not to store, and which others to keep young.

        Pages made of others are not stored again: the next turn makes them again. In exchange the
        pages that they are made of are kept as young as the lineage's own.

        Args:
            req: SGLang's request; any.
            place: of pages in its path.
            num_pages: their number.
        """
        lineage = lineage_of(req)
        if lineage is None or lineage.loaded is None:
            return place
        loaded = lineage.loaded
        first, start = place.position // self._page_size, loaded.start // loaded.page_size
        aliased = np.zeros(num_pages, np.bool_)
        begin, stop = max(first, start), min(first + num_pages, start + loaded.num_pages)
        if begin < stop:
            aliased[begin - first : stop - first] = ~loaded.stored[begin - start : stop - start]
        sources = loaded.sources_of(start, max(0, first - start))
        return replace(
            place,
            ancestors=np.concatenate([sources, place.ancestors]),
            aliased=aliased if aliased.any() else None,
        )


def _may_take_others(req: Any) -> bool:
    """Whether a truncated request may be given pages of other prompts; exact KV is never moved."""
    return max_quality_of(req) >= Quality.APPROXIMATED


def _none_usable(hashes: Hashes) -> Bools:
    return np.zeros(len(hashes), np.bool_)
