"""Interleaved chats and documents over a small device pool: what is reused, and from where.

The device pool holds 1/8 of the working set, DRAM 1/4, the disk all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median
from typing import Any, NamedTuple

import pytest

from testkit.server import Server
from testkit.workload import (
    MAX_PROMPT_TOKENS,
    MIN_PROMPT_TOKENS,
    Sample,
    Workload,
    drive,
    hit_rate,
    make_workload,
)
from tests.e2e.hier_server import PAGE, events, hier_args, send_to, settled

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

NUM_CHATS, NUM_DOCUMENTS = 12, 3
IN_FLIGHT = 5
# A line of the log gets its time after the lock that guards its fact was given back, as soon as the
# thread has the core again.
LOG_SLACK_S = 10.0


class Run(NamedTuple):
    """One run of the workload, with and without the plugin."""

    workload: Workload
    samples: list[Sample]
    plain: list[Sample]
    events: list[dict[str, Any]]
    state: dict[str, Any]
    pool_tokens: int


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    workload = make_workload(num_chats=NUM_CHATS, num_documents=NUM_DOCUMENTS, max_new_tokens=6)
    folder = tmp_path_factory.mktemp("reuse")
    pool_tokens = workload.working_set_tokens // 8 // PAGE * PAGE
    host_pages = workload.working_set_tokens // 4 // PAGE
    # Nothing here is about bits. SGLang's own backend computes a cached prefix's attention again.
    pool = ["--max-total-tokens", str(pool_tokens), "--attention-backend", "cpu_extend"]
    hier = hier_args(folder, host_pages=host_pages)
    with Server([*hier, *pool], log_path=folder / "hier.log", stop="kill") as server:
        samples = drive(workload, send_to(server, "hier"), in_flight=IN_FLIGHT)
        found = settled(server)
    with Server(pool, log_path=folder / "plain.log", stop="kill") as server:
        plain = drive(workload, send_to(server, "plain"), in_flight=IN_FLIGHT)
    return Run(workload, samples, plain, events(folder), found, pool_tokens)


def test_the_workload_is_what_it_claims(run: Run) -> None:
    kinds = Counter(path.kind for path in run.workload.paths)
    assert kinds == {"chat": NUM_CHATS, "document": NUM_DOCUMENTS}
    assert len(run.samples) == NUM_CHATS * 4 + NUM_DOCUMENTS * 5
    lengths = [len(sample.prompt) for sample in run.samples]
    assert min(lengths) >= MIN_PROMPT_TOKENS
    assert max(lengths) <= MAX_PROMPT_TOKENS
    # The prompts as served hold the answers as served, so this is the real working set.
    prefixes = {
        sample.prompt[: end + PAGE]
        for sample in run.samples
        for end in range(0, len(sample.prompt) - PAGE + 1, PAGE)
    }
    assert run.pool_tokens <= 1.15 * len(prefixes) * PAGE / 8
    assert median(sample.num_in_flight for sample in run.samples[IN_FLIGHT:]) >= 4


def test_reuses_97_percent_of_what_can_be_reused(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    rate, plain_rate = hit_rate(run.samples), hit_rate(run.plain)
    reusable = sum(sample.reusable_tokens for sample in run.samples)
    with capsys.disabled():
        print(
            f"\nreuse of {reusable} reusable prompt tokens: {rate:.2%} with the plugin,"
            f" {plain_rate:.2%} without; tiers {dict(_reported(run.samples))};"
            f" {sum(sample.reply.seconds for sample in run.samples) / len(run.samples):.3f} s a"
            f" request, {sum(s.reply.seconds for s in run.plain) / len(run.plain):.3f} s without"
        )
    short = [
        (sample.path, sample.turn, sample.reusable_tokens, sample.reused_tokens)
        for sample in run.samples
        if sample.reused_tokens < sample.reusable_tokens
    ]
    # A turn whose room in DRAM does not come within eight attempts goes on without it: how often
    # that happens is up to the pace of the machine, and the server tells of it.
    host = run.state["host"]
    no_room = host.get("missed_no_room_tokens", 0)
    assert rate + no_room / reusable >= 0.97, f"{short} {host}"
    assert rate >= 0.85, f"{short} {host}"
    assert plain_rate < 0.5, "the device pool must not hold the working set"


def test_all_tiers_take_part(run: Run) -> None:
    tiers = _reported(run.samples)
    assert tiers["host"] > 0
    assert tiers["disk"] > tiers["host"], tiers  # DRAM holds a quarter
    assert tiers["remote"] == 0


def test_every_reused_token_has_its_tier(run: Run) -> None:
    for sample in run.samples:
        tiers = sample.reply.by_tier
        if sample.reply.cached_tokens:
            assert sum(tiers.values()) == sample.reply.cached_tokens, sample
            assert min(tiers.values()) >= 0
        else:
            assert not any(tiers.values()), sample


def test_reports_agree_with_the_stores_log(run: Run) -> None:
    """Per request: the report follows from where the log says its pages lay and came from."""
    enqueued, admitted = _last_by_request(run.events, "enqueued"), _admitted(run.events)
    samples = _run_once(run)
    assert len(samples) > 0.9 * len(run.samples)
    for rid, sample in samples.items():
        num_pages = sample.reply.cached_tokens // PAGE
        assert num_pages * PAGE == sample.reply.cached_tokens
        load = admitted.get(rid)
        start = load["position"] // PAGE if load else num_pages
        loaded = len(load["pages"]) if load else 0
        assert start + loaded == num_pages, (rid, load)  # from the device, then from DRAM
        expected = Counter(_origins(enqueued.get(rid), num_pages, start))
        reported = {name: num // PAGE for name, num in sample.reply.by_tier.items() if num}
        assert reported == dict(expected), (rid, enqueued.get(rid), load)


def test_the_log_agrees_with_itself_and_the_counters(run: Run) -> None:
    host = run.state["host"]
    total = Counter[str]()
    for event in run.events:
        total[event["e"]] += len(event.get("pages", ()))
    assert total["loaded"] == total["admitted"] + total["restored"] == host["loaded_pages"]
    for name in ("saved", "written", "promoted", "evicted"):
        assert total[name] == host.get(f"{name}_pages", 0), name
    assert total["rejected"] == 0
    assert total["lost"] == 0, "the disk holds everything"
    # Everything in DRAM came by a save or a promotion and is there or was evicted.
    assert total["saved"] + total["promoted"] - total["evicted"] == host["host_pages"]


def test_every_disk_page_was_promoted_while_its_request_waited(run: Run) -> None:
    when = _times_by_page(run.events)
    enqueued, admitted = _last_by_request(run.events, "enqueued"), _admitted(run.events)
    samples = _run_once(run)
    num_disk_pages = 0
    for rid, load in admitted.items():
        if rid not in samples:
            continue
        for page in load["pages"]:
            arrivals = when["saved"].get(page, []) + when["promoted"].get(page, [])
            assert any(t <= load["t"] + LOG_SLACK_S for t in arrivals), "loaded before it came"
        entry = enqueued.get(rid)
        if entry is None:
            continue
        for page in {entry["pages"][at] for at in entry["on_disk"]} & set(load["pages"]):
            num_disk_pages += 1
            window = (entry["t"] - LOG_SLACK_S, load["t"] + LOG_SLACK_S)
            assert any(t <= window[1] for t in when["written"].get(page, []))
            promoted = when["promoted"].get(page, [])
            assert any(window[0] <= t <= window[1] for t in promoted), (rid, page, window)
    assert num_disk_pages * PAGE == _reported(list(samples.values()))["disk"]


def _run_once(run: Run) -> dict[str, Sample]:
    """What was served, by request, without the requests that SGLang retracted.

    It reports the reuse of their first run, and their last lines of the log are of the last.
    """
    return {
        f"hier-{run.workload.paths[sample.path].kind}-{sample.path}-{sample.turn}": sample
        for sample in run.samples
        if not sample.reply.num_retractions
    }


def _reported(samples: list[Sample]) -> Counter[str]:
    total = Counter[str]()
    for sample in samples:
        total.update(sample.reply.by_tier)
    return total


def _origins(entry: dict[str, Any] | None, num_pages: int, start: int) -> Iterator[str]:
    """The tier of each reused page: where it lay at enqueue, else where it came from."""
    for page in range(num_pages):
        known = entry["device"] if entry else 0
        if entry and page < known:
            yield "device"
        elif entry and page < known + len(entry["pages"]):
            yield "disk" if page - known in entry["on_disk"] else "host"
        else:
            yield "host" if page >= start else "device"


def _last_by_request(log: list[dict[str, Any]], event: str) -> dict[str, dict[str, Any]]:
    return {line["rid"]: line for line in log if line["e"] == event}


def _admitted(log: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return _last_by_request(log, "admitted")


def _times_by_page(log: list[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    when: dict[str, dict[str, list[float]]] = {"saved": {}, "written": {}, "promoted": {}}
    for line in log:
        if line["e"] in when:
            for page in line["pages"]:
                when[line["e"]].setdefault(page, []).append(line["t"])
    return when
