"""What the simulator takes and gives: workloads, the system, the outcome of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.tiers.store import DEFAULT_POLICY

Ids = npt.NDArray[np.int64]
DRAM_GB_S = 26.0  # the paper's
CHUNK_TOKENS = 8192
"""SGLang's `--chunked-prefill-size` of GPUs of 60 to 90 GB; larger ones have up to twice that."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of a conversation.

    Attributes:
        new_tokens: tokens that the user adds.
        output_tokens: length of the answer.
        think_s: after the answer, before the next turn arrives.
    """

    new_tokens: int
    output_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """A closed loop: each turn arrives its think time after the answer before it.

    Attributes:
        start_s: arrival of the first turn.
        turns: the turns.
        prefix_id: conversations with the same id, from 0 on, begin with the same tokens; -1: none.
        prefix_tokens: length of that prefix, in front of the first turn's new tokens. On overflow
            it stays.
    """

    start_s: float
    turns: tuple[Turn, ...]
    prefix_id: int = -1
    prefix_tokens: int = 0


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """An open-loop request whose pages are known.

    Attributes:
        arrival_s: when it arrives, whatever happened to others.
        page_ids: i64[N], one id for each page of its prompt; equal id: equal page with an equal
            prefix.
        input_tokens: length of the prompt; the last page may be partial.
        output_tokens: length of the answer; its pages are not in the trace and are not stored.
    """

    arrival_s: float
    page_ids: Ids
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class System:
    """The machine and the model. Bytes are bytes, GB/s are 10^9 bytes a second.

    Attributes:
        page_tokens: tokens of a page.
        kv_bytes_per_token: KV of one token.
        dram_bytes: host tier.
        disk_bytes: disk tier; 0 for none.
        prefill_tokens_per_s: one prefill runs at a time and holds up decoding.
        decode_tokens_per_s: of each running request, while no prefill runs.
        dram_gb_s: from DRAM to the device.
        disk_gb_s: from disk to DRAM.
        disk_write_gb_s: from DRAM to disk.
        batch: requests that run together, the one in prefill included.
        context_window: tokens of prompt and answer; conversations only.
        truncation: on overflow the kept tail is reused (position-free KV); otherwise everything
            behind the cut is computed anew.
        truncation_ratio: share of the window that an overflow drops, oldest first.
        overlap_load: a load from DRAM runs beside the prefill, layer by layer; otherwise before it.
        chunk_tokens: most tokens of a prompt that are computed at once, and saved, as SGLang's
            `--chunked-prefill-size` has it.
        write_policy: when pages are written to disk, as `--hier-kv-write-policy` has it.
        prefetch_policy: what requests load and wait for, as `--hier-kv-prefetch-policy` has it.
    """

    page_tokens: int
    kv_bytes_per_token: float
    dram_bytes: float
    disk_bytes: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    dram_gb_s: float = DRAM_GB_S
    disk_gb_s: float = 5.0
    disk_write_gb_s: float = 5.0
    batch: int = 24
    context_window: int = 4096
    truncation: bool = True
    truncation_ratio: float = 0.5
    overlap_load: bool = True
    chunk_tokens: int = CHUNK_TOKENS
    write_policy: str = DEFAULT_POLICY
    prefetch_policy: str = HierKVConfig.prefetch_policy

    def __post_init__(self) -> None:
        for name in (
            "page_tokens", "kv_bytes_per_token", "prefill_tokens_per_s", "decode_tokens_per_s",
            "dram_gb_s", "disk_gb_s", "disk_write_gb_s", "batch", "context_window", "chunk_tokens",
        ):  # fmt: skip
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in ("dram_bytes", "disk_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is 0 or more bytes, got {getattr(self, name)}")
        if not 0 < self.truncation_ratio < 1:
            raise ValueError(
                f"truncation_ratio lies above 0 and below 1, got {self.truncation_ratio}"
            )

    @property
    def page_bytes(self) -> float:
        """KV of one page."""
        return self.page_tokens * self.kv_bytes_per_token

    @property
    def host_pages(self) -> int:
        """Whole pages that DRAM holds."""
        return int(self.dram_bytes / self.page_bytes)

    @property
    def disk_pages(self) -> int:
        """Whole pages that the disk holds."""
        return int(self.disk_bytes / self.page_bytes)


@dataclass(slots=True)
class Request:
    """One turn, as the simulator runs it.

    Attributes:
        number: order of arrival.
        arrival_s: when it arrived.
        prompt_ids: i64[N], pages of the prompt that may be stored already, root first.
        stored_ids: i64[M], pages that are stored when it is done (trace: when it is prefilled).
        prompt_tokens: length of the prompt.
        output_tokens: length of the answer.
        history_tokens: part of the prompt that is history.
        history_pages: pages of it that an unbounded store of position-free KV holds.
        source: index of its conversation, -1 for a trace.
        left_ids: i64[K], pages that its conversation was cut by, root first.
        left_at: pages of the prompt in front of those.
    """

    number: int
    arrival_s: float
    prompt_ids: Ids
    stored_ids: Ids
    prompt_tokens: int
    output_tokens: int
    history_tokens: int = 0
    history_pages: int = 0
    source: int = -1
    left_ids: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    left_at: int = 0


@dataclass(frozen=True)
class Recorded:
    """Every request of a run in its order of arrival, to be replayed open-loop.

    Attributes:
        requests: the requests.
        num_pages: page ids are below this.
        admitted: their numbers in the order in which they were admitted.
        num_waiting: how many requests waited when each was admitted, itself included.
        saved: by admission, numbers of the requests that were saved since the one before.
    """

    requests: list[Request]
    num_pages: int
    admitted: list[int]
    num_waiting: list[int]
    saved: list[list[int]]


@dataclass(frozen=True)
class Outcome:
    """What a run gave, over the measured turns unless said. Tokens, seconds, shares of 1.

    Attributes:
        policy: its name.
        num_turns: measured turns.
        hit_rate: reused / reusable prompt tokens; reusable: what an unbounded store would have
            given, in whole pages.
        turn_hit_rate: mean over all turns of reused / reusable, 0 where nothing is reusable.
        turn_hit_cap: share of turns with anything reusable.
        host_share: share of the reused tokens that lay in DRAM when the request's turn came.
        host_tokens, disk_tokens: reused tokens by where they lay then.
        gpu_s: the GPU was busy: prefill, or decoding without one.
        prefill_gpu_s: part of it.
        wait_load_s: a prefill waited for KV to come from disk.
        makespan_s: from the first measured arrival to the last measured answer.
        prefill_tokens_per_s: prompt tokens / (`prefill_gpu_s` + `wait_load_s`).
        ttft_s: f64[N], arrival to first token, in order of admission.
        queue_mean, queue_max: requests waiting, at admissions.
        load: (`prefill_gpu_s` + `wait_load_s`) / `makespan_s`.
        counters: the store's.
        recorded: all requests of the run.
    """

    policy: str
    num_turns: int
    hit_rate: float
    turn_hit_rate: float
    turn_hit_cap: float
    host_share: float
    host_tokens: int
    disk_tokens: int
    reused_tokens: int
    reusable_tokens: int
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    history_tokens: int
    gpu_s: float
    prefill_gpu_s: float
    wait_load_s: float
    makespan_s: float
    prefill_tokens_per_s: float
    ttft_s: npt.NDArray[np.float64]
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    queue_mean: float
    queue_max: int
    load: float
    counters: dict[str, float]
    recorded: Recorded = field(repr=False)


Workload = Sequence[Conversation] | Sequence[TraceRequest]
