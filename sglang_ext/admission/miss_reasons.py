"""Why pages of a prompt were computed though somebody may have computed them before.

What is stored nowhere is so for a reason that the page store remembers (`Absence`). What is stored
and was not reused all the same is so because of what became of the waiting request (`Shortfall`).

Scheduler's thread only; looks up the pages behind the reused ones once a request.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sglang_ext.admission.waiting_request import Remote, Shortfall, WaitingRequest
from sglang_ext.tiers.store import Absence, KeySpace, PageStore
from sglang_ext.tiers.store.types import Hashes

NEVER_STORED = Absence.NEVER_STORED.name.lower()
BARRED = "barred"
"""Of prompts that may neither be stored nor reused: not of tokens alone, a session's, cut ones."""
_OF_REQUEST = 16  # codes of `Shortfall` lie from here on, behind those of `Absence`
_NAMES = {int(one): one.name.lower() for one in Absence} | {
    _OF_REQUEST + int(one): one.name.lower() for one in Shortfall
}
REASONS = (*(name for name in _NAMES.values() if name != "stored"), BARRED)
"""All that can be said of a miss."""


def missed_pages(
    store: PageStore,
    space: KeySpace,
    path: Hashes,
    num_reused: int,
    waiting: WaitingRequest,
    resumable: int | None = None,
) -> dict[str, int]:
    """How many of a prompt's pages were missed, by reason.

    A page that is stored behind one that is not cannot be reused: it counts for that one's reason.

    Args:
        store: DRAM and disk.
        space: the request's, as of now.
        path: u8 `[N, 32]`, its pages from the root on, as far as they could be reused.
        num_reused: leading pages that were.
        waiting: the request as it entered the queue.
        resumable: pages behind which the prompt could go on, where it cannot behind any; or None.

    Returns:
        By reason, that of the first missed page first; empty where nothing was missed.
    """
    missed = path[num_reused:]
    if not len(missed):
        return {}
    codes = store.absences(space, missed, waiting.prefix.max_quality).astype(np.int64)
    records = waiting.records()
    waiting = records[-1]
    shortfall = waiting.shortfall()
    if resumable is not None and num_reused >= max(resumable, waiting.prefix.resumes_at or 0):
        shortfall = Shortfall.NOT_RESUMABLE
    of_request = _OF_REQUEST + int(shortfall)
    codes[_in_remote_store(waiting, num_reused, len(missed)) & (codes != 0)] = of_request
    for record in records:
        if record.remote is Remote.FAILED:
            found = _in_remote_store(record, num_reused, len(missed))
            codes[found & (codes != 0)] = _OF_REQUEST + Shortfall.FAILED
    if any(record.remote is Remote.UNANSWERED for record in records):
        codes[codes == Absence.NEVER_STORED] = _OF_REQUEST + Shortfall.UNANSWERED
    stored = codes == 0
    lead = len(codes) if stored.all() else int(np.argmin(stored))
    codes[:lead] = of_request
    # Each stored page behind takes the reason of the last one before it that is missing.
    before = np.maximum.accumulate(np.where(codes == 0, -1, np.arange(len(codes))))
    codes = codes[before]
    order = [int(codes[0]), *sorted({*codes.tolist()} - {int(codes[0])})]
    return {_NAMES[code]: int((codes == code).sum()) for code in order}


def _in_remote_store(waiting: WaitingRequest, first: int, num: int) -> npt.NDArray[np.bool_]:
    """Which of `num` pages from `first` on the remote store said it has."""
    has, lookup = np.zeros(num, np.bool_), waiting.answer()
    if lookup is None:
        return has
    sizes, at = lookup.sizes, lookup.first_page - first
    begin, end = max(0, at), min(num, at + len(sizes))
    if waiting.prefix.resumes_at is not None:  # what was asked for behind that is no page
        end = min(end, waiting.prefix.resumes_at - first)
    if begin < end:
        has[begin:end] = np.asarray(sizes[begin - at : end - at]) > 0
    return has
