"""What the KV of a streaming session is worth: it passes from turn to turn outside the tree."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_ext.provenance.request_state import find_state, state_of, wants_exact
from sglang_ext.tiers.records.quality import Quality
from sglang_ext.tiers.store.types import StoreCounters

_TAINT = "_hier_kv_taint"
_SESSION_KEY = "_hier_kv_key"
_RUNNING_TURN = "_hier_kv_running_turn"
_SESSION_IS_BUSY = "Streaming session already has an active request."  # as SGLang says it


class SessionTurns:
    """The turns of one cache's sessions. Scheduler's thread only.

    Args:
        sessions: SGLang's `StreamingSession`.
        counters: of the page store.
    """

    def __init__(self, sessions: Any, counters: StoreCounters) -> None:
        self._sessions = sessions
        self._counters = counters

    def meet(self, req: Any) -> None:
        """A turn is about to be matched: it will go on with the KV of the turns before it.

        If the turn asks for exact KV and the session's is not, the session's KV is given up and the
        prompt is computed, as SGLang does with KV that cannot be used. The same if the turn has
        another adapter, `extra_key` or salt than the turns before it: SGLang would go on with their
        KV, and keep it under this turn's key if the turn is aborted.
        """
        slot = self._sessions.slots.get(req.session.session_id)
        if getattr(slot, _RUNNING_TURN, None) not in (None, req):
            # `part_from_another_turn` lets none come so far: the rows are being written.
            req.session._inflight = True
            req.to_finish = FINISH_ABORT(
                _SESSION_IS_BUSY, HTTPStatus.BAD_REQUEST, "BadRequestError"
            )
            req.release_mm_inputs_on_abort()
            req.session = None
            self._counters.add("refused_session_turns")
            return
        if not _goes_on(req, slot):
            return
        taint = getattr(slot, _TAINT, Quality.EXACT)
        own_key = _session_key(req)
        is_another = getattr(slot, _SESSION_KEY, own_key) != own_key
        if is_another or (taint > Quality.EXACT and wants_exact(req)):
            self._sessions.release_session(req.session.session_id)
        elif taint > Quality.EXACT:
            state_of(req).note_reused(int(taint))

    def begin(self, req: Any) -> None:
        """A request was given rows; those of a session's turn are the session's until it ends."""
        slot = self._sessions.borrowed_slot(req)
        if slot is not None:
            setattr(slot, _RUNNING_TURN, req)

    def end(self, req: Any) -> None:
        """A turn ends or is retracted; its session may keep its KV."""
        slot = self._sessions.borrowed_slot(req)
        if slot is None:
            return
        setattr(slot, _RUNNING_TURN, None)
        setattr(slot, _SESSION_KEY, _session_key(req))
        state = find_state(req)
        if state is not None and state.taint > Quality.EXACT:
            setattr(slot, _TAINT, state.taint)

    def keep_busy(self, req: Any) -> None:
        """SGLang took the turn's rows over; with one that is retracted the session stays busy.

        SGLang takes the session's mark off all the same. The next turn would go on from the token
        arrays of the waiting one, and write behind them.
        """
        session = req.session
        if session is not None and session.streaming and not req.finished():
            session._inflight = True

    def give_up_unread(self, req: Any) -> None:
        """Its session keeps no rows of a turn whose load failed: in some is what others left there.

        SGLang ends such a turn with an error, and the session with it gives up what it has. One
        that was retracted before is not ended yet, and never is if its client aborts it where it
        waits.
        """
        if req.discard_output_reason is not None:
            self._sessions.release_session(req.session.session_id)


def part_from_another_turn(scheduler: Any, req: Any) -> None:
    """Takes a turn out of its session as it is made, while another turn waits or runs there.

    SGLang refuses such a turn in the end. But on its way there, and wherever else it may be refused
    before (a full queue, a priority), SGLang clears the session's mark of a turn under way, which
    is the other one's: then a third turn would run on the same rows, and closing the session would
    free them. A turn without a session can do neither.

    Args:
        scheduler: SGLang's.
        req: the turn; SGLang marks it as refused next.
    """
    session = req.session
    if session is not None and session.streaming and session._inflight:
        req.session = None
        scheduler.tree_cache.store.counters.add("refused_session_turns")


def _goes_on(req: Any, slot: Any) -> bool:
    """Whether SGLang lets a turn go on in its session's rows."""
    if not req.session.streaming or req.to_finish is not None:
        return False
    return slot is not None and bool(slot.kv.holds_kv)


def _session_key(req: Any) -> tuple[str | None, str | None, str | None]:
    """What must be equal for one turn to go on with the KV of another."""
    return req.lora_id, req.extra_key, req.cache_salt
