"""What SGLang's traces say of a request's prefix, as a collector of OpenTelemetry gets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_ext.tiers.disk.segments.layout import segment_file_bytes
from testkit.remote.otlp import Span, TraceCollector
from testkit.requests import flush_device
from testkit.server import Server
from testkit.slow import ENV_SPEED_FILE
from tests.e2e.hier_server import (
    GIB,
    PAGE,
    SLOT_BYTES,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
    state,
)
from tests.e2e.updates.weight_models import noisy, variant

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGES = 6
HOST_PAGES = 3 * PAGES
SEGMENT_PAGES, NUM_SEGMENTS = 16, 5
REUSED = "hier_kv.reused."
MISSED = "hier_kv.missed."
SLOW_MB_S = 4.0


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    with TraceCollector() as collector:
        yield collector


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("traces")


@pytest.fixture(scope="module")
def server(collector: TraceCollector, folder: Path) -> Iterator[Server]:
    segment_bytes = segment_file_bytes(SEGMENT_PAGES, SLOT_BYTES)
    disk_gb = NUM_SEGMENTS * segment_bytes / GIB
    args = hier_args(folder, host_pages=HOST_PAGES, disk_gb=disk_gb, policy="wait_complete")
    args += ["--hier-kv-disk-segment-size", f"{(segment_bytes + 1) / GIB:.9f}"]
    env = {**collector.environment(), ENV_SPEED_FILE: str(folder / "speed")}
    all_args = [*args, *collector.args()]
    with Server(all_args, env=env, log_path=folder / "server.log", stop="kill") as server:
        yield server


def named(trace: list[Span], name: str) -> list[Span]:
    return [span for span in trace if span.name == name]


def told(trace: list[Span], prefix: str) -> dict[str, object]:
    """Attributes of the scheduler's span, by what stands behind a prefix."""
    [span] = [span for span in trace if f"{REUSED}device_tokens" in span.attributes]
    assert "scheduler" in span.name.lower()
    assert span.parent_id == trace[0].span_id
    return {
        name.removeprefix(prefix): value
        for name, value in span.attributes.items()
        if name.startswith(prefix)
    }


def overlap(one: Span, other: Span) -> bool:
    return max(one.began_ns, other.began_ns) <= min(one.ended_ns, other.ended_ns)


def reused(**tokens: int) -> dict[str, int]:
    tiers = ("device", "host", "disk", "remote")
    return {f"{tier}_tokens": tokens.get(tier, 0) for tier in tiers}


def test_a_prompt_that_was_never_seen_missed_all_its_pages(
    server: Server, collector: TraceCollector
) -> None:
    (prompt,) = real_prompts([PAGES * PAGE + 20], seed=1)
    ask(server, prompt, rid="new")
    trace = collector.trace_of("new")
    assert told(trace, REUSED) == reused()
    wanted = {"never_stored_tokens": PAGES * PAGE, "first_reason": "never_stored"}
    assert told(trace, MISSED) == wanted
    assert named(trace, "hier_kv.wait") + named(trace, "hier_kv.load") == []
    ask(server, prompt, rid="again")
    trace = collector.trace_of("again")
    assert told(trace, REUSED) == reused(device=PAGES * PAGE)
    assert told(trace, MISSED) == {}
    assert named(trace, "hier_kv.wait") + named(trace, "hier_kv.load") == []


def test_a_prompt_on_a_slow_disk_waits_and_is_loaded(
    server: Server, collector: TraceCollector, folder: Path
) -> None:
    prompt, *others = real_prompts([PAGES * PAGE + 20] * 5, seed=2)
    for each in (prompt, *others):
        ask(server, each)
        settled(server)
    flush_device(server)
    (folder / "speed").write_text(f"{SLOW_MB_S}")
    before_us = state(server)["host"].get("held_disk_us", 0)
    answer = ask(server, prompt, rid="late")
    (folder / "speed").unlink()
    assert by_tier(answer)["disk"] == PAGES * PAGE
    trace = collector.trace_of("late")
    assert told(trace, REUSED) == reused(disk=PAGES * PAGE)
    [wait], [load] = named(trace, "hier_kv.wait"), named(trace, "hier_kv.load")
    [prefill] = named(trace, "prefill_forward")
    assert load.parent_id == prefill.span_id
    assert overlap(prefill, load)
    assert load.attributes["hier_kv.load.tokens"] == PAGES * PAGE
    [waiting] = named(trace, "prefill_waiting")
    assert wait.parent_id == waiting.parent_id
    assert overlap(waiting, wait)
    assert wait.attributes == {"hier_kv.wait.of": "disk", "hier_kv.wait.gave_up": False}
    # The disk alone takes so long; the counter of held requests goes on until it is admitted.
    held_s = (state(server)["host"]["held_disk_us"] - before_us) / 1e6
    assert 0.2 < (wait.ended_ns - wait.began_ns) / 1e9 <= held_s + 0.001


def test_a_prompt_in_dram_is_loaded_at_once(server: Server, collector: TraceCollector) -> None:
    (prompt,) = real_prompts([PAGES * PAGE + 20], seed=3)
    ask(server, prompt)
    settled(server)
    flush_device(server)
    ask(server, prompt, rid="soon")
    trace = collector.trace_of("soon")
    assert told(trace, REUSED) == reused(host=PAGES * PAGE)
    assert named(trace, "hier_kv.wait") == []
    assert len(named(trace, "hier_kv.load")) == 1


def test_a_prompt_that_left_the_disk_says_so(server: Server, collector: TraceCollector) -> None:
    """Others came in its place, in DRAM and on the disk, as neither has room for all."""
    num_others = (HOST_PAGES + 2 * NUM_SEGMENTS * SEGMENT_PAGES) // PAGES
    prompt, *others = real_prompts([PAGES * PAGE + 20] * (1 + num_others), seed=4)
    for each in (prompt, *others):
        ask(server, each)
        settled(server)
    flush_device(server)
    ask(server, prompt, rid="gone")
    trace = collector.trace_of("gone")
    assert told(trace, REUSED) == reused()
    wanted = {"evicted_disk_tokens": PAGES * PAGE, "first_reason": "evicted_disk"}
    assert told(trace, MISSED) == wanted
    assert named(trace, "hier_kv.wait") + named(trace, "hier_kv.load") == []


def test_a_prompt_that_is_stored_for_other_weights_says_so(
    server: Server, collector: TraceCollector, folder: Path
) -> None:
    """Comes last, as it changes the server's."""
    (prompt,) = real_prompts([PAGES * PAGE + 20], seed=5)
    ask(server, prompt)
    settled(server)
    other = variant(folder / "other", noisy(5))
    assert server.post("/update_weights_from_disk", {"model_path": str(other)})["success"]
    ask(server, prompt, rid="changed")
    trace = collector.trace_of("changed")
    assert told(trace, REUSED) == reused()
    wanted = {"other_namespace_tokens": PAGES * PAGE, "first_reason": "other_namespace"}
    assert told(trace, MISSED) == wanted
