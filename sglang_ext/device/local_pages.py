"""What a page must be here: by the local model, its layout, its rotations and its flags.

Nothing that a record says of itself is believed because its checksum is right. A field either has
one value that it can have here, or a range that is compared before the field is used.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.device.layout import (
    HEADER_BYTES,
    ROPE_BOUND,
    ROPE_DELTA,
    ROPE_NAMES,
    ROPE_PRE,
    PageLayout,
    PageTails,
    read_tails,
)
from sglang_ext.device.rope_discovery import LayerRope, bind_pages, num_positions
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.records.record import (
    RAW_CODEC,
    ByteArray,
    RecordError,
    RecordMeta,
    parse_header,
)

_FIRST = np.zeros(1, np.int64)
# Of models without any table; positions are i64 everywhere behind this check.
_NO_TABLE = 1 << 40


class LocalPages(PageRules):
    """The rules of one model in one process.

    Args:
        layout: of its pages.
        ropes: one a layer; a shared list, which changes when a layer is bound later.
        mode: `pre` or `delta`.
        exact_only: whether a page that says of itself that it is not exact is none here.
    """

    def __init__(
        self,
        layout: PageLayout,
        ropes: list[LayerRope],
        mode: str,
        *,
        exact_only: bool = False,
    ) -> None:
        self._layout = layout
        self._exact_only = exact_only
        self._ropes = ropes
        self._pre = mode == "pre"

    @property
    def saved_state(self) -> int:
        """How K is stored here. One layer that is bound to its position binds the page.

        A layer that is kept as it is in every page, as a draft's, does not: what is said of K is
        said of the others.
        """
        if bind_pages(self._ropes):
            return ROPE_BOUND
        return ROPE_PRE if self._pre else ROPE_DELTA

    @property
    def states(self) -> tuple[int, ...]:
        """The ways in which a page's K may be stored; in `pre` mode a page may also be bound."""
        state = self.saved_state
        return (ROPE_PRE, ROPE_BOUND) if state == ROPE_PRE else (state,)

    @property
    def max_position(self) -> int:
        """The last position at which a page may begin: behind it the rotary tables end."""
        known = [rows for rope in self._ropes if (rows := num_positions(rope)) is not None]
        return min(known, default=_NO_TABLE) - self._layout.page_size

    def sound_tails(self, tails: PageTails) -> npt.NDArray[np.bool_]:
        """Which tails are valid: a known way of storing K, and a position within the rotary tables.

        Values are listed for position-free K alone. A load parts pages by how they store K, and
        takes what is listed for those that it embeds.

        Returns:
            Bool `[n]`.
        """
        allowed = np.isin(tails.rope_state, self.states)
        lists = np.bincount(tails.page, minlength=len(tails.rope_state)) > 0
        allowed &= (tails.rope_state == ROPE_PRE) | ~lists
        return allowed & (tails.position >= 0) & (tails.position <= self.max_position)

    def admits_header(self, meta: RecordMeta, payload_bytes: int) -> bool:
        """See `PageRules.admits_header`."""
        size = self._layout.page_size
        is_placed = 0 <= meta.position <= self.max_position and not meta.position % size
        is_known = meta.rope in [ROPE_NAMES[state] for state in self.states]
        if not is_placed or not is_known or meta.num_tokens != size:
            return False
        if self._exact_only and meta.quality != Quality.EXACT:
            return False
        if meta.codec != RAW_CODEC:
            return payload_bytes <= self._layout.slot_bytes - HEADER_BYTES
        least = self._layout.payload_bytes(0)
        most = self._layout.payload_bytes(self._layout.max_corrections)
        return not meta.level and not meta.profile and least <= payload_bytes <= most

    def admits_page(self, slot: ByteArray) -> bool:
        """See `PageRules.admits_page`."""
        try:
            meta, payload_bytes = parse_header(slot)
        except RecordError:
            return False
        if meta.codec != RAW_CODEC or not self.admits_header(meta, payload_bytes):
            return False
        if slot.size != self._layout.slot_bytes:
            return False
        tails = read_tails(slot[None], _FIRST, self._layout)
        if tails is None or not self.sound_tails(tails).all():
            return False
        state, position = ROPE_NAMES[int(tails.rope_state[0])], int(tails.position[0])
        whole = payload_bytes == self._layout.payload_bytes(len(tails.page))
        if (state, position) != (meta.rope, meta.position) or not whole:
            return False
        slot[HEADER_BYTES + payload_bytes :] = 0
        return True
