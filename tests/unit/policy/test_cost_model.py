"""Load or recompute: against brute force over all split points, and in the corners."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.tiers.policy.cost_model import (
    OTHERS_WEIGHT,
    PROBE_BYTES,
    PROBE_SHARE,
    CostModel,
    LoadChoice,
    Prefix,
    TransferBacklog,
)

P = 64
PAGE_BYTES = 1 << 20
NOTHING = TransferBacklog()


def model(
    *,
    token_s: float | None = 40e-6,
    pair_s: float = 4e-9,
    disk_mb_s: float | None = 1000.0,
    disk_latency_s: float = 1e-4,
    load_mb_s: float | None = None,
    decode_mb_s: float | None = None,
    remote_mb_s: float | None = 100.0,
) -> CostModel:
    """A model that has measured exactly these speeds."""
    cost = CostModel(unmeasured_wait_s=2.0)
    for new, before in [(100, 0), (2000, 0), (8000, 0), (64, 8000)] * 3:
        if token_s is not None:
            pairs = new * (before + new / 2)
            cost.note_prefill([(new, before)], 1e-3 + token_s * new + pair_s * pairs)
    for power in (20, 22, 24, 27) * 3:
        size = 1 << power
        if disk_mb_s is not None:
            decoded = size if decode_mb_s else 0
            decode_s = decoded / (1e6 * decode_mb_s) if decode_mb_s else 0.0
            cost.note_read(size, disk_latency_s + size / (1e6 * disk_mb_s), decoded, decode_s)
        if remote_mb_s is not None:
            cost.note_fetch(size, 1e-3 + size / (1e6 * remote_mb_s))
        if load_mb_s is not None:
            cost.note_load(size, size / (1e6 * load_mb_s))
    return cost


def prefix(
    pages: Sequence[str],
    *,
    new_tokens: int = 100,
    device_pages: int = 0,
    page_bytes: int = PAGE_BYTES,
    coded: float = 0.0,
) -> Prefix:
    """Pages by where they lie: `h`ost, `d`isk, `r`emote, `c`oming."""
    kinds = np.array(list(pages))
    read = np.where(kinds == "d", page_bytes, 0).astype(np.int64)
    decoded = np.where(kinds == "d", int(coded * page_bytes), 0).astype(np.int64)
    tokens = (device_pages + len(kinds)) * P + new_tokens
    fetched = np.where(kinds == "r", page_bytes, 0).astype(np.int64)
    coming = kinds == "c"
    return Prefix(tokens, device_pages * P, P, read, decoded, coming, page_bytes, fetched)


def brute_force(
    cost: CostModel,
    what: Prefix,
    queue: TransferBacklog,
    turn_in_s: float,
    remote: TransferBacklog = NOTHING,
) -> list[tuple[float, float]]:
    """Seconds until the prefill is done, and of the prefill, for each split; term by term."""
    state = cost.state()
    spb, latency = 1e-6 / state["disk_read_mb_s"], 1e-3 * state["disk_latency_ms"]
    times = []
    for pages in range(len(what.read_bytes) + 1):
        own = int(what.read_bytes[:pages].sum())
        arrival = 0.0
        if own or what.is_coming[:pages].any():
            arrival = latency + spb * (queue.bytes_ahead + own)
        fetched = int(what.fetch_bytes[:pages].sum())
        if fetched:
            fetch_s = cost.fetch_s(TransferBacklog(remote.bytes_ahead + fetched))
            assert fetch_s is not None
            arrival = max(arrival, fetch_s)
        before = what.device_tokens + pages * what.page_tokens
        before = min(before, what.prompt_tokens - 1)
        compute = cost.prefill_s(what.prompt_tokens - before, before)
        assert compute is not None
        times.append((max(arrival, turn_in_s) + compute, compute))
    return times


# ---- against brute force -------------------------------------------------------------------------

LAYOUTS = st.text(alphabet="hdc", min_size=1, max_size=40)
# With two links a slower disk may make it worth while to fetch more, as there is time for it.
WITH_REMOTE = st.builds(lambda here, num: here + "r" * num, LAYOUTS, st.integers(0, 20))


@settings(max_examples=150, deadline=None)
@given(
    layout=WITH_REMOTE,
    new_tokens=st.integers(1, 4000),
    device_pages=st.integers(0, 20),
    disk=st.sampled_from([1.0, 20.0, 300.0, 900.0, 2500.0, 20000.0]),
    remote=st.sampled_from([1.0, 100.0, 1200.0, 10000.0]),
    queued=st.sampled_from([0, 1 << 20, 50 << 20, 1 << 30]),
    turn=st.sampled_from([0.0, 0.003, 0.05, 0.4, 5.0]),
    has_others=st.booleans(),
)
def test_the_choice_is_the_best_of_all_splits(
    layout: str,
    new_tokens: int,
    device_pages: int,
    disk: float,
    remote: float,
    queued: int,
    turn: float,
    has_others: bool,
) -> None:
    cost = model(disk_mb_s=disk, remote_mb_s=remote)
    what = prefix(layout, new_tokens=new_tokens, device_pages=device_pages)
    queue = TransferBacklog(queued)
    found = brute_force(cost, what, queue, turn)
    times = [done for done, _ in found]
    weight = OTHERS_WEIGHT if has_others else 0.0
    costs = [done + weight * prefill for done, prefill in found]
    verdict = cost.judge(what, queue, turn, has_others=has_others)
    in_dram = next((at for at, kind in enumerate(layout) if kind != "h"), len(layout))
    if in_dram == len(layout):
        assert (verdict.choice, verdict.pages) == (LoadChoice.NONE, len(layout))
        return
    assert verdict.pages >= in_dram  # what is in DRAM is used in any case
    # The state dump's figures are rounded, hence the tolerance.
    assert costs[verdict.pages] <= min(costs[in_dram:]) * 1.002 + 1e-6
    assert verdict.expected_s == pytest.approx(times[verdict.pages], rel=2e-3, abs=1e-6)
    assert verdict.recompute_s == pytest.approx(times[in_dram], rel=2e-3, abs=1e-6)
    assert verdict.expected_s is not None
    assert verdict.recompute_s is not None
    if not has_others:
        assert verdict.expected_s <= verdict.recompute_s
    kinds = {
        LoadChoice.LOAD: verdict.pages == len(layout),
        LoadChoice.PARTIAL: in_dram < verdict.pages < len(layout),
        LoadChoice.RECOMPUTE: verdict.pages == in_dram,
    }
    assert kinds[verdict.choice]


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, new_tokens=st.integers(1, 2000), turn=st.sampled_from([0.0, 0.05, 1.0]))
def test_a_slower_disk_or_a_longer_queue_never_loads_more(
    layout: str, new_tokens: int, turn: float
) -> None:
    what = prefix(layout, new_tokens=new_tokens)
    by_speed = [
        model(disk_mb_s=speed).judge(what, NOTHING, turn).pages for speed in (1, 30, 500, 5000)
    ]
    assert by_speed == sorted(by_speed)
    cost = model(disk_mb_s=500)
    by_queue = [
        cost.judge(what, TransferBacklog(queued), turn).pages
        for queued in (1 << 31, 1 << 26, 1 << 20, 0)
    ]
    assert by_queue == sorted(by_queue)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, disk=st.sampled_from([1.0, 30.0, 500.0, 5000.0]))
def test_a_later_turn_or_a_slower_device_never_loads_less(layout: str, disk: float) -> None:
    what = prefix(layout)
    cost = model(disk_mb_s=disk)
    by_turn = [cost.judge(what, NOTHING, turn).pages for turn in (0.0, 0.01, 0.1, 1.0, 50.0)]
    assert by_turn == sorted(by_turn)
    by_device = [
        model(token_s=token_s, disk_mb_s=disk).judge(what, NOTHING).pages
        for token_s in (1e-6, 1e-5, 1e-4, 1e-3)
    ]
    assert by_device == sorted(by_device)


# ---- the kinds of decisions ----------------------------------------------------------------------


def test_a_fast_disk_loads_and_a_slow_one_recomputes() -> None:
    what = prefix("d" * 32)
    assert model(disk_mb_s=5000).judge(what, NOTHING).choice is LoadChoice.LOAD
    slow = model(disk_mb_s=10).judge(what, NOTHING)
    assert (slow.choice, slow.pages) == (LoadChoice.RECOMPUTE, 0)


def test_while_others_decode_or_wait_more_is_loaded_and_never_less() -> None:
    what, choices = prefix("d" * 32), set()
    for disk_mb_s in (10, 50, 100, 200, 500, 1000, 5000):
        cost = model(disk_mb_s=disk_mb_s)
        alone, beside = (cost.judge(what, NOTHING, has_others=others) for others in (False, True))
        assert beside.pages >= alone.pages
        choices.add((alone.choice, beside.choice))
    assert choices == {
        (LoadChoice.RECOMPUTE, LoadChoice.RECOMPUTE),
        (LoadChoice.RECOMPUTE, LoadChoice.LOAD),
        (LoadChoice.LOAD, LoadChoice.LOAD),
    }


def test_a_queue_gives_time_for_a_part() -> None:
    verdict = model(disk_mb_s=10).judge(prefix("h" * 4 + "d" * 28), NOTHING, turn_in_s=1.0)
    assert verdict.choice is LoadChoice.PARTIAL
    # 10 MB arrive while it waits, behind the 4 pages that are there.
    assert verdict.pages == pytest.approx(4 + 10e6 / PAGE_BYTES, abs=1)


def test_what_others_queued_on_the_disk_counts() -> None:
    cost, what = model(disk_mb_s=2000), prefix("d" * 32)
    assert cost.judge(what, NOTHING).choice is LoadChoice.LOAD
    assert cost.judge(what, TransferBacklog(bytes_ahead=10 << 30)).choice is LoadChoice.RECOMPUTE


def test_decoding_counts() -> None:
    what = prefix("d" * 32, coded=3.0)
    assert model(disk_mb_s=2000, decode_mb_s=5000).judge(what, NOTHING).choice is LoadChoice.LOAD
    assert (
        model(disk_mb_s=2000, decode_mb_s=100).judge(what, NOTHING).choice is LoadChoice.RECOMPUTE
    )


def test_copies_to_the_device_count_where_they_take_longer_than_computing() -> None:
    what = prefix("d" * 32)
    free = model(disk_mb_s=5000, load_mb_s=50_000).judge(what, NOTHING)
    bound = model(disk_mb_s=5000, load_mb_s=400).judge(what, NOTHING)
    assert free.choice is LoadChoice.LOAD
    assert bound.pages < free.pages


def test_with_nothing_on_disk_there_is_nothing_to_decide() -> None:
    assert model().judge(prefix("hhh"), NOTHING).choice is LoadChoice.NONE
    assert model().judge(prefix(""), NOTHING).pages == 0


# ---- cold start and probes -----------------------------------------------------------------------


@pytest.mark.parametrize("unknown", ["token_s", "disk_mb_s"])
def test_before_it_was_measured_it_loads_and_learns(unknown: str) -> None:
    verdict = model(**{unknown: None}).judge(prefix("d" * 8), NOTHING)  # type: ignore[arg-type]
    assert (verdict.choice, verdict.pages, verdict.expected_s) == (LoadChoice.LOAD, 8, None)


def test_a_read_that_does_not_return_is_evidence_before_the_first_measurement() -> None:
    cost = model(disk_mb_s=None)
    stuck = TransferBacklog(bytes_ahead=PAGE_BYTES, stalled_bytes=PAGE_BYTES, stalled_s=5.0)
    assert cost.judge(prefix("d" * 8), stuck).choice is LoadChoice.RECOMPUTE


def test_a_disk_that_is_not_used_is_probed() -> None:
    cost, what = model(disk_mb_s=10), prefix("d" * 32)
    verdict = cost.judge(what, NOTHING)
    assert verdict.recompute_s is not None
    assert verdict.probe_pages >= 1
    num_bytes = verdict.probe_pages * PAGE_BYTES
    assert verdict.probe_pages == 1 or num_bytes / 10e6 <= PROBE_SHARE * verdict.recompute_s * 1.01
    assert cost.judge(what, TransferBacklog(bytes_ahead=1)).probe_pages == 0  # one at a time
    fast = model(disk_mb_s=5000).judge(what, NOTHING)
    assert fast.probe_pages == 0


def test_computing_is_measured_where_only_ends_of_prompts_were_computed() -> None:
    """Behind a restart every prompt is on disk; computing is 20 times as fast as reading."""
    cost, token_s = model(token_s=None, disk_mb_s=100.0), 25e-6
    what, computed = prefix("d" * 200, new_tokens=28), []
    cost.note_prefill([(1, 0)], 0.02)
    for _ in range(3):  # and by chance each of them takes 10 ms longer than it does
        cost.note_prefill([(28, 200 * P)], 0.03)
    for _ in range(8):
        verdict = cost.judge(what, NOTHING)
        if verdict.left_out_pages:
            assert verdict.choice is LoadChoice.PARTIAL
            cost.note_left_out()
        computed.append(what.prompt_tokens - verdict.pages * P)
        cost.note_prefill([(computed[-1], verdict.pages * P)], 0.02 + token_s * computed[-1])
    assert computed == [92] + [what.prompt_tokens] * 7


def test_computing_is_not_measured_again_while_prefills_stay_small() -> None:
    """As where SGLang computes long prompts in small chunks."""
    cost = model(token_s=None, disk_mb_s=100.0)
    cost.note_prefill([(64, 0)], 0.02)
    what, left_out = prefix("d" * 200, new_tokens=28), []
    for _ in range(6):
        left_out.append(cost.judge(what, NOTHING).left_out_pages)
        if left_out[-1]:
            cost.note_left_out()
        cost.note_prefill([(100, 0)], 0.02)
    assert left_out == [3, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("disk_mb_s", "turn_in_s", "queue", "new_tokens"),
    [
        (5e4, 0.0, NOTHING, 28),
        (100.0, 0.1, NOTHING, 28),
        (100.0, 0.0, TransferBacklog(1 << 20), 28),
        (100.0, 0.0, NOTHING, 128),
    ],
    ids=["read-soon", "others-first", "disk-busy", "many-new"],
)
def test_computing_is_measured_only_where_it_matters_and_nobody_waits(
    disk_mb_s: float, turn_in_s: float, queue: TransferBacklog, new_tokens: int
) -> None:
    cost = model(token_s=None, disk_mb_s=disk_mb_s)
    cost.note_prefill([(64, 0)], 0.02)
    verdict = cost.judge(prefix("d" * 200, new_tokens=new_tokens), queue, turn_in_s)
    assert verdict.left_out_pages == 0
    assert verdict.choice is LoadChoice.LOAD


def test_a_probe_is_never_large() -> None:
    what = prefix("d" * 200, page_bytes=4 << 20, new_tokens=100_000)
    verdict = model(disk_mb_s=90).judge(what, NOTHING)
    assert verdict.choice is LoadChoice.RECOMPUTE
    assert 1 <= verdict.probe_pages <= PROBE_BYTES // (4 << 20)


def test_follows_the_disk_within_five_requests_when_it_gets_fast_and_slow() -> None:
    rng = random.Random(4)
    cost = model(disk_mb_s=3000)
    for true_mb_s, expected in [
        (10, LoadChoice.RECOMPUTE),
        (3000, LoadChoice.LOAD),
        (10, LoadChoice.RECOMPUTE),
    ]:
        choices = []
        for _ in range(12):
            verdict = cost.judge(prefix("d" * rng.randint(24, 40)), NOTHING)
            choices.append(verdict.choice)
            num_bytes = (verdict.pages + verdict.probe_pages) * PAGE_BYTES
            if num_bytes:
                cost.note_read(num_bytes, 1e-4 + num_bytes / (1e6 * true_mb_s))
        assert set(choices[5:]) == {expected}


def test_follows_the_device_within_five_requests() -> None:
    cost, what = model(disk_mb_s=800), prefix("d" * 32)
    assert cost.judge(what, NOTHING).choice is LoadChoice.LOAD
    for _ in range(5):
        cost.note_prefill([(2000, 0)], 0.05 * (1e-3 + 40e-6 * 2000 + 4e-9 * 2e6))
    assert cost.judge(what, NOTHING).choice is LoadChoice.RECOMPUTE


# ---- measurements of loads that ran beside a prefill ---------------------------------------------


def test_a_prefill_with_loads_bounds_the_speed_and_no_more() -> None:
    cost = model()
    alone = cost.prefill_s(2000, 0)
    assert alone is not None
    for _ in range(10):  # the forward may have waited for the copies, so nothing is learned
        cost.note_prefill([(2000, 0)], alone + 0.5, load_s=0.6)
    assert cost.prefill_s(2000, 0) == pytest.approx(alone, rel=0.05)
    for _ in range(5):  # the whole took less than computing alone was thought to take
        cost.note_prefill([(2000, 0)], alone / 3, load_s=0.6)
    assert cost.prefill_s(2000, 0) == pytest.approx(alone / 3, rel=0.1)
    for _ in range(5):  # the copies cannot explain it
        cost.note_prefill([(2000, 0)], 4 * alone + 0.01, load_s=0.01)
    assert cost.prefill_s(2000, 0) == pytest.approx(4 * alone, rel=0.15)


def test_before_any_prefill_one_with_loads_says_nothing() -> None:
    cost = CostModel(2.0)
    cost.note_prefill([(2000, 0)], 1.0, load_s=0.5)
    assert cost.prefill_s(2000, 0) is None


# ---- waiting -------------------------------------------------------------------------------------


def wait(cost: CostModel, **given_values: float | None) -> bool:
    values: dict[str, float | None] = {
        "waited_s": 0.0, "budget_s": 0.5, "saving_s": 0.5, "read_s": 0.1, **given_values,
    }  # fmt: skip
    return cost.is_worth_waiting(**values)  # type: ignore[arg-type]


def test_waits_while_what_comes_saves_more_than_it_takes() -> None:
    cost = model()
    assert wait(cost)
    assert wait(cost, read_s=None)  # never measured: load, and learn
    assert not wait(cost, read_s=0.6)
    assert not wait(cost, saving_s=0.05)  # most of it has come meanwhile


def test_never_waits_longer_than_its_pages_save() -> None:
    cost = model()
    assert wait(cost, waited_s=0.499, read_s=0.0)
    assert not wait(cost, waited_s=0.5, read_s=0.0)


def test_beside_others_it_waits_so_much_longer_as_they_have_of_it() -> None:
    cost, limit = model(), 0.5 * (1 + OTHERS_WEIGHT)

    def waits(waited_s: float, read_s: float) -> bool:
        return cost.is_worth_waiting(
            waited_s=waited_s, budget_s=0.5, saving_s=0.5, read_s=read_s, has_others=True
        )

    assert waits(limit - 0.001, 0.0)
    assert not waits(limit, 0.0)
    assert waits(0.0, limit - 0.001)
    assert not waits(0.0, limit)


def test_waits_a_fixed_time_while_nothing_is_known_of_prefills() -> None:
    cost = model(token_s=None)
    assert wait(cost, budget_s=None, saving_s=None, waited_s=1.99, read_s=9.0)
    assert not wait(cost, budget_s=None, saving_s=None, waited_s=2.0, read_s=0.0)


def test_a_wait_among_decoding_requests_ends_between_their_steps() -> None:
    cost = model()
    cost.note_step(0.3)
    assert cost.is_worth_waiting(waited_s=0, budget_s=0.5, saving_s=0.2, read_s=0.1)
    assert not cost.is_worth_waiting(
        waited_s=0, budget_s=0.5, saving_s=0.2, read_s=0.1, decoding=True
    )


@settings(max_examples=60, deadline=None)
@given(
    pages=st.integers(1, 60),
    ready=st.integers(0, 20),
    new_tokens=st.integers(1, 3000),
    promised_mb_s=st.sampled_from([20.0, 300.0, 4000.0]),
    true_mb_s=st.sampled_from([0.1, 20.0, 300.0, 4000.0]),
    step_s=st.sampled_from([1e-4, 3e-3]),
)
def test_no_wait_is_longer_than_recomputing_whatever_the_disk_does(
    pages: int, ready: int, new_tokens: int, promised_mb_s: float, true_mb_s: float, step_s: float
) -> None:
    """Polls a request from its turn on, with a disk that may be slower than the model believes."""
    cost = model(disk_mb_s=promised_mb_s)
    tokens = (ready + pages) * P + new_tokens
    budget = cost.saving_s(tokens, ready * P, pages * P)
    recompute = cost.prefill_s(tokens - ready * P, ready * P)
    assert budget is not None
    assert recompute is not None
    now = 0.0
    while True:
        arrived = min(pages, int(now * true_mb_s * 1e6 / PAGE_BYTES))
        left = pages - arrived
        queue = TransferBacklog(left * PAGE_BYTES, 0, left * PAGE_BYTES, now)
        done = not left or not cost.is_worth_waiting(
            waited_s=now,
            budget_s=budget,
            saving_s=cost.saving_s(tokens, (ready + arrived) * P, left * P),
            read_s=cost.read_s(queue),
        )
        if done:
            break
        now += step_s
    assert now <= recompute + step_s


def test_a_stalled_disk_is_noticed_before_the_budget_is_spent() -> None:
    cost = model(disk_mb_s=3000)
    expected = cost.read_s(TransferBacklog(32 << 20, 0, 8 << 20, 0.0))
    stalled = cost.read_s(TransferBacklog(32 << 20, 0, 8 << 20, 0.1))
    assert expected == pytest.approx((32 << 20) / 3e9, rel=0.05)
    assert stalled == pytest.approx(0.4, rel=0.05)


def test_the_state_dump_says_what_is_known() -> None:
    state = model(load_mb_s=8000).state()
    assert state["disk_read_mb_s"] == pytest.approx(1000, rel=0.02)
    assert state["device_load_mb_s"] == pytest.approx(8000, rel=0.02)
    assert state["codec_decode_mb_s"] is None
    assert state["prefill_8192_tokens_ms"] > 8 * state["prefill_1024_tokens_ms"]
    assert all(
        value is None for name, value in CostModel(2.0).state().items() if "samples" not in name
    )


# ---- pages in DRAM -------------------------------------------------------------------------------


def dram(cost: CostModel, pages: int, *, new_tokens: int = 100, device_pages: int = 0) -> Any:
    return cost.judge_dram(
        prompt_tokens=(device_pages + pages) * P + new_tokens,
        device_tokens=device_pages * P,
        num_pages=pages,
        page_tokens=P,
        page_bytes=PAGE_BYTES,
    )


def loads(cost: CostModel, mb_s: float, *, fixed_s: float = 0.0, times: int = 5) -> None:
    """Teaches a model of loads of many sizes."""
    for power in (20, 22, 24, 27) * times:
        cost.note_load(1 << power, fixed_s + (1 << power) / (1e6 * mb_s))


def test_dram_is_loaded_where_that_is_quicker() -> None:
    cost = model(load_mb_s=20_000)
    for pages in (1, 5, 60, 110):
        for device_pages in (0, 7):
            found = dram(cost, pages, device_pages=device_pages)
            assert (found.pages, found.is_probe) == (pages, False)


@settings(max_examples=100, deadline=None)
@given(
    pages=st.integers(1, 120),
    new_tokens=st.integers(1, 300),
    device_pages=st.integers(0, 20),
    mb_s=st.sampled_from([3.0, 30.0, 100.0, 400.0, 2000.0]),
    fixed_s=st.sampled_from([0.0, 1e-3, 0.05, 0.5]),
)
def test_of_dram_the_best_split_is_loaded_or_all_where_that_is_about_as_quick(
    pages: int, new_tokens: int, device_pages: int, mb_s: float, fixed_s: float
) -> None:
    cost = model()
    loads(cost, mb_s, fixed_s=fixed_s)
    load_s = [cost.load_s(num * PAGE_BYTES) for num in range(pages + 1)]
    fixed = 1e-3 * cost.state()["device_load_latency_ms"]
    times = []
    for num in range(pages + 1):
        before = (device_pages + num) * P
        compute_s = cost.prefill_s((pages - num) * P + new_tokens, before)
        seconds = load_s[num]
        assert compute_s is not None
        assert seconds is not None
        times.append(max(compute_s, seconds - fixed) + fixed if num else compute_s)
    found = dram(cost, pages, new_tokens=new_tokens, device_pages=device_pages)
    best_s = min(times)
    if found.pages == pages:
        assert times[pages] <= max(1.25 * best_s, best_s + 0.005) * 1.002 + 1e-6
    else:
        assert times[pages] >= max(1.25 * best_s, best_s + 0.005) * 0.998 - 1e-6
        assert times[found.pages] <= best_s * 1.002 + 1e-6


def test_without_a_measurement_of_both_speeds_dram_is_loaded() -> None:
    never = model(load_mb_s=None)
    assert dram(never, 50).pages == 50
    uncomputed = model(token_s=None)
    loads(uncomputed, 1.0)
    assert dram(uncomputed, 50).pages == 50


def test_few_measurements_or_those_of_small_sizes_say_nothing_of_dram() -> None:
    cost = model()
    for _ in range(4):
        cost.note_load(64 * PAGE_BYTES, 100.0)
    assert dram(cost, 50).pages == 50  # four are too few
    cost.note_load(64 * PAGE_BYTES, 100.0)
    assert dram(cost, 50).pages == 0
    small = model()
    for _ in range(10):
        small.note_load(PAGE_BYTES, 0.1)  # most of which every load may take
    assert dram(small, 4).pages == 0
    assert dram(small, 5).pages == 5
    unknown = CostModel(2.0)
    loads(unknown, 1.0)
    for _ in range(10):
        unknown.note_prefill([(64, 0)], 1e-3)
    assert dram(unknown, 2).pages == 0  # 228 tokens
    assert dram(unknown, 3).pages == 3  # 292


def test_small_differences_do_not_have_dram_computed() -> None:
    cost = model(token_s=1e-6, pair_s=0.0)  # 1 ms a batch
    loads(cost, 1e6, fixed_s=0.003)
    compute_s, rest_s = cost.prefill_s(P + 100, 0), cost.prefill_s(100, P)
    assert compute_s is not None
    assert rest_s is not None
    assert 0.003 + rest_s > 1.25 * compute_s
    assert dram(cost, 1).pages == 1  # three times the time, but a few milliseconds


def test_a_short_hit_may_be_computed_where_a_long_one_is_loaded() -> None:
    cost = model()
    loads(cost, 20_000, fixed_s=0.05)
    assert dram(cost, 1).pages == 0
    assert dram(cost, 100).pages == 100


def test_a_load_as_slow_as_computing_takes_the_leading_part() -> None:
    cost = model()
    loads(cost, 150)
    found = dram(cost, 100)
    assert 0 < found.pages < 100
    copies_s = found.pages * PAGE_BYTES / 150e6
    left = (100 - found.pages) * P + 100
    assert copies_s == pytest.approx(cost.prefill_s(left, found.pages * P), rel=0.05)


def test_a_wrong_belief_of_loads_corrects_itself() -> None:
    cost = model()
    loads(cost, 20_000, fixed_s=10.0)
    num_before, probes = 0, 0
    while dram(cost, 50).pages < 50:
        found = dram(cost, 50)
        if found.pages:
            assert found.is_probe
            assert found.pages < 5
            probes += 1
            cost.note_load(found.pages * PAGE_BYTES, 1e-3)
        else:
            cost.note_passed_over()
            num_before += 1
        assert num_before < 200
    assert 1 <= probes <= 8
    assert num_before == 16 * probes


def test_one_slow_load_among_many_does_not_change_the_choice() -> None:
    cost = model()
    loads(cost, 20_000)
    for _ in range(2):
        cost.note_load(64 * PAGE_BYTES, 30.0)
        assert dram(cost, 50).pages == 50
