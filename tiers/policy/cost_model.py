"""What loading and computing a request's pages take, by what was measured; what costs less wins.

Before its turn a request may have pages brought from disk to DRAM; at its turn it may wait for
them, while others run; what has not come is computed. `CostModel.judge` chooses how many leading
pages to ask for, `CostModel.is_worth_waiting` whether to go on waiting, and `CostModel.judge_dram`
how many of those that are in DRAM then are copied to the device. All weigh the time that moving
takes against the time that computing takes; none has a setting. The formulae and why they are
right: docs/cost-model.md.

Pure: clock, queue and layout are arguments. Thread-safe: one lock guards the estimators, every
method but `judge` is O(1), and `judge` is linear in the request's own pages.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sglang_ext.tiers.policy.speed_estimators import (
    PACE_WINDOW,
    PrefillEstimator,
    StepEstimator,
    TransferEstimator,
)

PROBE_SHARE = 0.05
"""A probe may take the disk for this part of the time that recomputing takes."""

PROBE_BYTES = 8 << 20
"""The largest probe."""

# The most tokens that are computed to learn how long computing takes.
_COMPUTE_PROBE_TOKENS = 2048

# A prefill is that of so many times the tokens of the largest that was measured, or fewer, or its
# expected time is a guess: what a small batch takes is mostly the same for every batch. So is what
# a small load takes.
_MAX_EXTRAPOLATION = 4.0

# Pages in DRAM are computed where loading all of them takes so many times as long, and so many
# seconds more: less than that may be noise, and spares the device nothing.
_DRAM_MARGIN = 1.25
_DRAM_GAIN_S = 0.005

# So many requests in a row load nothing of DRAM before one loads a little to measure it.
_DRAM_PROBE_EVERY = 16

OTHERS_WEIGHT = 1.0
"""So many times more a prefill's time counts while others decode or wait: it holds them up, too."""

# What is in flight counts as late when it takes this many times the expected.
_STALL_FACTOR = 2.0

Array = npt.NDArray[np.float64]


class LoadChoice(enum.StrEnum):
    """What a request does about its pages on disk and in the remote store."""

    NONE = "none"  # it has none there: nothing to decide
    LOAD = "load"  # asks for all of them
    PARTIAL = "partial"  # asks for a leading part
    RECOMPUTE = "recompute"  # asks for none


@dataclass(frozen=True)
class Prefix:
    """What a request could reuse of the tiers below the device, in page order.

    Attributes:
        prompt_tokens: tokens of the whole prompt.
        device_tokens: leading tokens whose KV is on the device.
        page_tokens: P.
        read_bytes: i64 `[K]`, bytes to read from disk for each page behind the device's that is
            stored; 0 for a page in DRAM or on its way there.
        decode_bytes: i64 `[K]`, raw bytes to be decoded for each; 0 where it is stored raw.
        is_coming: bool `[K]`, pages on their way for somebody else.
        load_bytes_per_page: bytes from DRAM to the device for one page.
        remote_bytes: i64 `[K]`, bytes to fetch from the remote store for each; None: none.
    """

    prompt_tokens: int
    device_tokens: int
    page_tokens: int
    read_bytes: npt.NDArray[np.int64]
    decode_bytes: npt.NDArray[np.int64]
    is_coming: npt.NDArray[np.bool_]
    load_bytes_per_page: int
    remote_bytes: npt.NDArray[np.int64] | None = None

    @property
    def fetch_bytes(self) -> npt.NDArray[np.int64]:
        """`remote_bytes`, as zeros where there is none."""
        return np.zeros_like(self.read_bytes) if self.remote_bytes is None else self.remote_bytes


@dataclass(frozen=True)
class TransferBacklog:
    """What the disk, or the remote store, has to do before it comes to a request.

    Attributes:
        bytes_ahead: bytes queued or being read.
        decode_bytes_ahead: raw bytes to be decoded of them.
        stalled_bytes: bytes in flight, if nothing has arrived for `stalled_s`.
        stalled_s: seconds since the last arrival, or since the disk began to work.
    """

    bytes_ahead: int = 0
    decode_bytes_ahead: int = 0
    stalled_bytes: int = 0
    stalled_s: float = 0.0


_IDLE = TransferBacklog()


@dataclass(frozen=True)
class LoadDecision:
    """A decision about a request.

    Attributes:
        choice: what to do.
        pages: leading stored pages to use, wherever they lie now.
        probe_pages: pages behind them to read as a measurement, which nobody waits for.
        expected_s: seconds from now until its prefill is done, if all goes as expected; None where
            a speed was never measured.
        recompute_s: the same without reading anything from disk.
        read_s: seconds until the pages asked for are in DRAM.
        left_out_pages: pages behind them that are computed to learn how long that takes, although
            having them read seems quicker.
    """

    choice: LoadChoice
    pages: int
    probe_pages: int = 0
    expected_s: float | None = None
    recompute_s: float | None = None
    read_s: float | None = None
    left_out_pages: int = 0


@dataclass(frozen=True)
class DramDecision:
    """A decision about pages that are in DRAM, made when a request is about to run.

    Attributes:
        pages: leading ones to copy to the device; the others are computed.
        is_probe: these are copied as a measurement, though computing all seems quicker.
    """

    pages: int
    is_probe: bool = False


class CostModel:
    """Speeds of this machine now, and what follows from them.

    It has many methods because each kind of measurement, and each question about them, is one; they
    share the estimators and their lock.

    Args:
        unmeasured_wait_s: the longest wait while it is not known how long computing takes.
    """

    def __init__(self, unmeasured_wait_s: float) -> None:
        self.unmeasured_wait_s = unmeasured_wait_s
        self._lock = threading.Lock()
        # All guarded by _lock.
        self._prefill = PrefillEstimator()
        self._read = TransferEstimator()
        self._write = TransferEstimator()
        self._fetch = TransferEstimator()
        self._decode = TransferEstimator()
        self._load = TransferEstimator()
        self._step = StepEstimator()
        self._probed_at_tokens = 0.0  # the largest prefill when pages were last left out
        self._num_passed_over = 0  # requests that loaded nothing of DRAM since a load was measured

    # ---- measurements ----

    def note_prefill(
        self, work: Sequence[tuple[int, int]], seconds: float, load_s: float = 0.0
    ) -> None:
        """A prefill's result is there.

        Args:
            work: (new tokens, tokens before them) of each request of the batch.
            seconds: from its start, or the end of the one before, until its result.
            load_s: seconds that the copies from DRAM took which ran beside it, layer by layer. How
                much of them the forward waited for is not known, so then the measurement only
                bounds the time that computing takes.
        """
        with self._lock:
            if load_s > 0:
                expected = self._prefill.batch_seconds(work)
                if expected is None:
                    return
                seconds = min(max(expected, seconds - load_s), seconds)
            self._prefill.add(work, seconds)

    def note_left_out(self) -> None:
        """A request runs that computes pages to learn how long that takes.

        There is no other before it has shown a prefill of twice the tokens.
        """
        with self._lock:
            self._probed_at_tokens = self._prefill.most_tokens

    def note_step(self, seconds: float) -> None:
        """A decode step took this long."""
        with self._lock:
            self._step.add(seconds)

    def note_read(
        self, num_bytes: int, read_s: float, decode_bytes: int = 0, decode_s: float = 0.0
    ) -> None:
        """The disk was busy reading for some time, and decoding for some.

        Args:
            num_bytes: bytes that arrived.
            read_s: seconds of reading while at least one read was under way, however many were.
            decode_bytes: raw bytes that came out of decoding.
            decode_s: seconds of decoding, in the same sense.
        """
        with self._lock:
            self._read.add(num_bytes, read_s)
            if decode_bytes:
                self._decode.add(decode_bytes, decode_s)

    def note_write(self, num_bytes: int, seconds: float) -> None:
        """Pages of DRAM went to disk; `num_bytes` as they lay in DRAM."""
        with self._lock:
            self._write.add(num_bytes, seconds)

    def note_fetch(self, num_bytes: int, seconds: float) -> None:
        """Bytes came from the remote store in a time during which some were always under way."""
        with self._lock:
            self._fetch.add(num_bytes, seconds)

    def note_load(self, num_bytes: int, seconds: float) -> None:
        """A batch of copies from DRAM to the device took this long."""
        with self._lock:
            self._load.add(num_bytes, seconds)
            self._num_passed_over = 0

    def note_passed_over(self) -> None:
        """A request runs that computes all of its pages in DRAM, as that seemed quicker."""
        with self._lock:
            self._num_passed_over += 1

    # ---- estimates ----

    def prefill_s(self, new_tokens: int, prefix_tokens: int) -> float | None:
        """Expected seconds of a prefill; None before the first was measured."""
        with self._lock:
            return self._prefill.seconds(new_tokens, prefix_tokens)

    def batch_s(self, work: Sequence[tuple[int, int]]) -> float | None:
        """Expected seconds of a batch: (new tokens, tokens before them) of each request."""
        with self._lock:
            return self._prefill.batch_seconds(work)

    def read_s(self, queue: TransferBacklog) -> float | None:
        """Expected seconds until all that is queued is in DRAM and decoded.

        None while the disk was never measured and shows no sign of being slow.
        """
        if not queue.bytes_ahead:
            return 0.0
        with self._lock:
            per_decoded = self._decode.seconds_per_byte or 0.0
            seconds = _moving_s(self._read, queue, queue.bytes_ahead)
        return None if seconds is None else float(seconds) + per_decoded * queue.decode_bytes_ahead

    def load_s(self, num_bytes: int) -> float | None:
        """Expected seconds of a batch of copies from DRAM to the device; None if never measured."""
        with self._lock:
            return self._load.seconds(num_bytes)

    def write_s(self, num_bytes: int) -> float | None:
        """Expected seconds until so many bytes of DRAM are on disk; None if never measured."""
        with self._lock:
            return self._write.seconds(num_bytes)

    def fetch_s(self, queue: TransferBacklog) -> float | None:
        """`read_s` for the remote store."""
        if not queue.bytes_ahead:
            return 0.0
        with self._lock:
            seconds = _moving_s(self._fetch, queue, queue.bytes_ahead)
        return None if seconds is None else float(seconds)

    def computes_sooner(
        self, num_tokens: int, prefix_tokens: int, read_bytes: int, decode_bytes: int = 0
    ) -> bool:
        """Whether this machine computes tokens in less time than the disk takes to bring their KV.

        What every batch and every read take whatever their size is left out. False while computing
        or the disk was never measured.

        Args:
            num_tokens: tokens to compute.
            prefix_tokens: tokens before them.
            read_bytes: bytes of their records.
            decode_bytes: raw bytes that come out of decoding those.
        """
        with self._lock:
            prefill = self._prefill.coefficients
            per_read, per_decoded = self._read.seconds_per_byte, self._decode.seconds_per_byte
        if prefill is None or per_read is None:
            return False
        pairs = num_tokens * (prefix_tokens + num_tokens / 2)
        compute_s = prefill[1] * num_tokens + prefill[2] * pairs
        return compute_s < per_read * read_bytes + (per_decoded or 0.0) * decode_bytes

    # ---- decisions ----

    def judge(
        self,
        prefix: Prefix,
        queue: TransferBacklog,
        turn_in_s: float = 0.0,
        remote: TransferBacklog = _IDLE,
        *,
        has_others: bool = False,
    ) -> LoadDecision:
        """Chooses how many leading pages to use, so that the prefill is done earliest.

        While others decode or wait, it may be done later by as much as it is shorter for that: a
        prefill holds them all up, and a read only this request.

        Args:
            prefix: the request's pages.
            queue: what the disk has to do before.
            turn_in_s: expected seconds until the scheduler would admit it; reading goes on
                meanwhile and costs nothing.
            remote: what the remote store has to do before.
            has_others: others decode or wait.
        """
        num = len(prefix.read_bytes)
        moves = (prefix.read_bytes > 0) | (prefix.fetch_bytes > 0) | prefix.is_coming
        if not moves.any():
            return LoadDecision(LoadChoice.NONE, num)
        first = int(np.argmax(moves))  # pages before it are in DRAM: used in any case
        running, arrival = self._times(prefix, queue, remote)
        if running is None or arrival is None:
            return LoadDecision(LoadChoice.LOAD, num)  # nothing measured yet: load, and learn
        done = np.maximum(arrival, turn_in_s) + running
        costs = done + _others_weight(has_others) * running
        # Of prefixes that are equally good the longest: it computes least on the device.
        wanted = num - int(np.argmin(costs[::-1][: num - first + 1]))
        left_out = 0
        if not (turn_in_s or queue.bytes_ahead or remote.bytes_ahead):
            left_out = self._left_out_pages(prefix, first, wanted, float(arrival[wanted]))
            wanted -= left_out
        choice = LoadChoice.LOAD if wanted == num else LoadChoice.PARTIAL
        if not moves[:wanted].any():
            choice = LoadChoice.RECOMPUTE
        probe = 0
        if choice is not LoadChoice.LOAD and not (queue.bytes_ahead or remote.bytes_ahead):
            probe = self._probe_pages(prefix, wanted, float(done[first]) - turn_in_s)
        return LoadDecision(
            choice, wanted, probe, float(done[wanted]), float(done[first]), float(arrival[wanted]),
            left_out,
        )  # fmt: skip

    def judge_dram(
        self,
        *,
        prompt_tokens: int,
        device_tokens: int,
        num_pages: int,
        page_tokens: int,
        page_bytes: int,
    ) -> DramDecision:
        """Chooses how many leading pages of DRAM to copy to the device, when a request is to run.

        All of them before both speeds are known for such sizes, and where that is not clearly
        slower. Else as many as have the prefill done earliest.

        Args:
            prompt_tokens: tokens of the whole prompt.
            device_tokens: leading tokens whose KV is on the device.
            num_pages: pages behind those that are in DRAM.
            page_tokens: P.
            page_bytes: bytes to copy for each.
        """
        with self._lock:
            prefill, loading = self._prefill, self._load
            coefficients = prefill.coefficients
            load = loading.latency_s, loading.seconds_per_byte
            is_known = (
                min(prefill.num_samples, loading.num_samples) >= PACE_WINDOW
                and prompt_tokens - device_tokens <= _MAX_EXTRAPOLATION * prefill.most_tokens
                and num_pages * page_bytes <= _MAX_EXTRAPOLATION * loading.most_bytes
            )
            probes = self._num_passed_over >= _DRAM_PROBE_EVERY
        if not is_known or coefficients is None or not num_pages:
            return DramDecision(num_pages)
        done = _running_s(
            coefficients, load, num_pages, prompt_tokens, device_tokens, page_tokens, page_bytes
        )
        # Of prefixes that are equally fast the longest: it computes least on the device.
        best, whole = num_pages - int(np.argmin(done[::-1])), float(done[-1])
        best_s = float(done[best])
        if whole < _DRAM_MARGIN * best_s or whole - best_s < _DRAM_GAIN_S:
            return DramDecision(num_pages)
        if best or not probes:
            return DramDecision(best)
        pages = max(1, int(np.flatnonzero(done <= (1 + PROBE_SHARE) * best_s)[-1]))
        return DramDecision(pages, is_probe=True)

    def is_worth_waiting(
        self,
        *,
        waited_s: float,
        budget_s: float | None,
        saving_s: float | None,
        read_s: float | None,
        decoding: bool = False,
        has_others: bool = False,
    ) -> bool:
        """Whether a request whose turn has come should go on waiting for its pages.

        Args:
            waited_s: seconds since its turn came.
            budget_s: what all of its pages would have saved when its turn came; see `saving_s`.
            saving_s: what those that have not come yet would save; None if never measured.
            read_s: expected seconds until they are there; None if never measured.
            decoding: others decode meanwhile, so it is admitted between two of their steps.
            has_others: others decode or wait; what is saved is saved for them, too.
        """
        if budget_s is None or saving_s is None:
            return waited_s < self.unmeasured_wait_s
        if waited_s >= self.longest_wait_s(budget_s, has_others=has_others):
            return False
        with self._lock:
            step = self._step.seconds if decoding else None
        return (read_s or 0.0) + (step or 0.0) / 2 < (1 + _others_weight(has_others)) * saving_s

    def longest_wait_s(self, budget_s: float | None, *, has_others: bool) -> float:
        """The longest for which a request whose turn has come may wait; see `is_worth_waiting`."""
        if budget_s is None:
            return self.unmeasured_wait_s
        return (1 + _others_weight(has_others)) * budget_s

    def saving_s(self, prompt_tokens: int, ready_tokens: int, more_tokens: int) -> float | None:
        """Seconds of prefill that more pages save; None before the first prefill was measured.

        Args:
            prompt_tokens: tokens of the whole prompt.
            ready_tokens: leading tokens that are there.
            more_tokens: tokens behind them.
        """
        end = ready_tokens + more_tokens
        with self._lock:
            now = self._prefill.seconds(max(1, prompt_tokens - ready_tokens), ready_tokens)
            then = self._prefill.seconds(max(1, prompt_tokens - end), end)
        return None if now is None or then is None else max(0.0, now - then)

    def prefers_raw(self, coded_share: float) -> bool:
        """Whether a page comes back sooner from disk when it is stored as it is than coded.

        A coded page is read faster and has to be decoded: per raw byte `share / B + 1 / D` against
        `1 / B`. False while the disk or the decoder was never measured.

        Args:
            coded_share: coded bytes over raw bytes.
        """
        with self._lock:
            read, decode = self._read.seconds_per_byte, self._decode.seconds_per_byte
        if read is None or not decode:
            return False
        return coded_share * read + decode > read

    def state(self) -> dict[str, Any]:
        """The estimates, as plain values for the state dump."""
        with self._lock:
            prefill = {
                f"prefill_{tokens}_tokens_ms": _scaled(self._prefill.seconds(tokens, 0), 1e3)
                for tokens in (1024, 8192)
            }
            a, b, c = self._prefill.coefficients or (None, None, None)
            return {
                **prefill,
                "prefill_batch_ms": _scaled(a, 1e3),
                "prefill_token_us": _scaled(b, 1e6),
                "prefill_pair_ns": _scaled(c, 1e9),
                "prefill_samples": self._prefill.num_samples,
                "decode_step_ms": _scaled(self._step.seconds, 1e3),
                "disk_read_mb_s": _speed(self._read),
                "disk_latency_ms": _scaled(self._read.latency_s, 1e3),
                "disk_samples": self._read.num_samples,
                "remote_read_mb_s": _speed(self._fetch),
                "remote_latency_ms": _scaled(self._fetch.latency_s, 1e3),
                "remote_samples": self._fetch.num_samples,
                "codec_decode_mb_s": _speed(self._decode),
                "device_load_mb_s": _speed(self._load),
                "device_load_latency_ms": _scaled(self._load.latency_s, 1e3),
            }

    # ---- parts of a decision ----

    def _times(
        self, prefix: Prefix, queue: TransferBacklog, remote: TransferBacklog
    ) -> tuple[Array | None, Array | None]:
        """How long the prefill takes, and when the pages are there, by number of pages used."""
        num = len(prefix.read_bytes)
        own, decoded, fetched = (
            np.concatenate([[0], np.cumsum(column)])
            for column in (prefix.read_bytes, prefix.decode_bytes, prefix.fetch_bytes)
        )
        coming = np.concatenate([[False], np.logical_or.accumulate(prefix.is_coming)])
        # A page on its way for others counts on each busy link, and on the disk if none is busy.
        reads = (own > 0) | (coming & (queue.bytes_ahead > 0 or not remote.bytes_ahead))
        fetches = (fetched > 0) | (coming & (remote.bytes_ahead > 0))
        with self._lock:
            prefill = self._prefill.coefficients
            # A link that has nothing to bring may be unmeasured.
            reading: Any = 0.0
            if reads.any():
                reading = _moving_s(self._read, queue, queue.bytes_ahead + own)
            fetching: Any = 0.0
            if fetches.any():
                fetching = _moving_s(self._fetch, remote, remote.bytes_ahead + fetched)
            per_decoded = self._decode.seconds_per_byte or 0.0
            load = self._load.latency_s, self._load.seconds_per_byte
        if prefill is None or reading is None or fetching is None:
            return None, None
        arrival = reads * (reading + per_decoded * (queue.decode_bytes_ahead + decoded))
        arrival = np.maximum(arrival, fetches * fetching)  # both links work at once
        running = _running_s(
            prefill, load, num, prefix.prompt_tokens, prefix.device_tokens, prefix.page_tokens,
            prefix.load_bytes_per_page,
        )  # fmt: skip
        return running, arrival

    def _left_out_pages(self, prefix: Prefix, first: int, wanted: int, read_s: float) -> int:
        """Pages to compute so that computing is measured, where it is known of small prefills only.

        Where every prompt is stored, as behind a restart, only the ends of prompts are computed. If
        they made computing look slow, a disk slower than it would be read from for ever. What is
        read in less time than the largest of them took is not worth the question.

        Args:
            prefix: the request's pages.
            first: pages that are in DRAM.
            wanted: pages that seem worth having.
            read_s: seconds until those are in DRAM.
        """
        with self._lock:
            most, probed_at = self._prefill.most_tokens, self._probed_at_tokens
            took_s = self._prefill.seconds(int(most), 0) or 0.0
        limit = _MAX_EXTRAPOLATION * most
        before = prefix.device_tokens + np.array([first, wanted]) * prefix.page_tokens
        without, now = (
            prefix.prompt_tokens - np.minimum(before, prefix.prompt_tokens - 1)
        ).tolist()
        is_known = limit >= min(without, _COMPUTE_PROBE_TOKENS)
        will_be = now >= 2 * most  # what is computed in any case says more than was known
        if is_known or will_be or read_s <= took_s or most < 2 * probed_at:
            return 0
        pages = max(1, int(limit - now) // prefix.page_tokens)
        return min(pages, wanted - first)

    def _probe_pages(self, prefix: Prefix, pages: int, recompute_s: float) -> int:
        """Pages to read so that a disk, or a remote store, that has become fast is noticed."""
        with self._lock:
            per_read = self._read.seconds_per_byte or 0.0
            per_fetched = self._fetch.seconds_per_byte or 0.0
        read, fetched = prefix.read_bytes[pages:], prefix.fetch_bytes[pages:]
        fits = np.cumsum(read + fetched) <= PROBE_BYTES
        fits &= np.cumsum(per_read * read + per_fetched * fetched) <= PROBE_SHARE * recompute_s
        return min(len(fits), max(1, int(fits.sum())))


def _others_weight(has_others: bool) -> float:
    return OTHERS_WEIGHT if has_others else 0.0


def _running_s(
    prefill: Sequence[float],
    load: tuple[float | None, float | None],
    num_pages: int,
    prompt_tokens: int,
    device_tokens: int,
    page_tokens: int,
    page_bytes: int,
) -> Array:
    """Seconds of a prefill from its turn on, f64 `[num_pages + 1]`, by pages that it loads.

    Copies to the device run beside the forward, layer by layer, so only what exceeds it shows. What
    every load takes is before the first layer.

    Args:
        prefill: coefficients of the prefill's features.
        load: seconds of any load, and of a byte; None where never measured.
        num_pages: pages in DRAM by then.
        prompt_tokens: tokens of the whole prompt.
        device_tokens: leading tokens whose KV is on the device.
        page_tokens: P.
        page_bytes: bytes to copy for each page.
    """
    pages = np.arange(num_pages + 1)
    before = np.minimum(device_tokens + pages * page_tokens, prompt_tokens - 1)
    new = prompt_tokens - before
    compute = prefill[0] + prefill[1] * new + prefill[2] * new * (before + new / 2)
    copies = (load[1] or 0.0) * page_bytes * pages
    done: Array = (load[0] or 0.0) * (pages > 0) + np.maximum(compute, copies)
    return done


def _moving_s(link: TransferEstimator, queue: TransferBacklog, num_bytes: Any) -> Any:
    """Seconds until a link has moved bytes, those ahead among them; None if never measured."""
    latency, per_byte = link.latency_s, link.seconds_per_byte
    flying, stalled_s = queue.stalled_bytes, queue.stalled_s
    if latency is None or per_byte is None:
        return stalled_s / flying * num_bytes if flying else None
    expected = latency + per_byte * num_bytes - (stalled_s if flying else 0.0)
    if flying and stalled_s > _STALL_FACTOR * (latency + per_byte * flying):
        # What is in flight is late, so the speed that was measured does not hold any more.
        expected = np.maximum(expected, stalled_s / flying * num_bytes)
    return np.maximum(expected, 0.0)


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else round(factor * value, 4)


def _speed(transfer: TransferEstimator) -> float | None:
    per_byte = transfer.seconds_per_byte
    return round(1e-6 / per_byte, 1) if per_byte else None
