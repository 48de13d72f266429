"""The plugin's ways in and out: flags, YAML, Engine, `sglang serve`, endpoints, metrics.

By default the last of three servers over one folder is started as ever, and the engine runs in a
copy of the process that forks servers; in the long form the one is started by `sglang serve`, and
the other one by Python, which is 20 s of a core more for each.
"""

from __future__ import annotations

import json
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from runtime_cpu import launch
from sglang_ext.admission.miss_reasons import REASONS
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.values import flag_name
from testkit.requests import flush_device
from testkit.server import FORK_SERVERS, TINYLM, Leftovers, Server
from tests.e2e.hier_server import (
    PAGE,
    ask,
    by_tier,
    events,
    hier_args,
    host_gb,
    missed,
    real_prompts,
    settled,
    state,
    tokens_and_logprobs,
)
from tests.long_form import FACTOR
from tests.scripts import run_script

pytestmark = pytest.mark.e2e

LENGTHS = [65, 200, 500, 700, 1100, 1600]


def test_help_names_every_flag(tmp_path: Path) -> None:
    asked = Server(["--help"], log_path=tmp_path / "help.log", stop="kill")
    asked.start()
    deadline_s = time.monotonic() + 600.0
    while asked.alive():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    asked.kill()
    assert "--enable-hier-kv" in asked.log()
    for name in HierKVConfig.__dataclass_fields__:
        assert flag_name(name) in asked.log()


# ---- one folder through three servers: YAML, restart, clear, `sglang serve` ----------------------


@dataclass
class Life:
    """What three servers in a row, over one disk folder, left to look at."""

    prompts: list[list[int]]
    repeats: list[dict[str, Any]] = field(default_factory=list)
    chat: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    first_state: dict[str, Any] = field(default_factory=dict)
    metrics: str = ""
    flushed: list[dict[str, Any]] = field(default_factory=list)
    first_end: tuple[Leftovers, list[str], list[str]] | None = None
    restarted: list[dict[str, Any]] = field(default_factory=list)
    restarted_state: dict[str, Any] = field(default_factory=dict)
    restarted_metrics: str = ""
    cleared: list[dict[str, Any]] = field(default_factory=list)
    clear_answer: Any = None
    pages_after_clear: int = -1
    segments_after_clear: list[Path] = field(default_factory=list)
    served_command: list[str] = field(default_factory=list)
    after_clear_and_restart: list[int] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Life:
    folder = tmp_path_factory.mktemp("life")
    life = Life(list(real_prompts(LENGTHS, seed=5)))
    first_server(folder, life)
    second_server(folder, life)
    with pytest.MonkeyPatch.context() as patch:
        third_server(folder, life, patch)
    life.events = events(folder)
    return life


def first_server(folder: Path, life: Life) -> None:
    """Configured by YAML; fills the tiers, and is ended by SIGTERM right after a request."""
    config = folder / "server.yaml"
    config.write_text(
        f"model-path: {TINYLM}\nenable-hier-kv: true\nhier-kv-host-size: {host_gb(200)}\n"
        f"hier-kv-disk-dir: {folder / 'disk'}\nhier-kv-disk-size: 1.0\n"
        "hier-kv-prefetch-policy: timeout\nhier-kv-prefetch-timeout-ms: 60000\n"
        f"hier-kv-disk-segment-size: 0.03\nhier-kv-event-log: {folder / 'events.jsonl'}\n"
        "max-total-tokens: 16384\nenable-metrics: true\nenable-cache-report: true\n"
    )
    log = folder / "first.log"
    with Server(["--config", str(config)], model=None, log_path=log) as server:
        for prompt in life.prompts:
            ask(server, prompt)
            life.repeats.append(ask(server, prompt))
        flush_device(server)
        life.flushed = [ask(server, prompt) for prompt in life.prompts]
        for _ in range(2):
            life.chat.append(chat(server))
            flush_device(server)
        life.info = server.get("/server_info")
        life.first_state = settled(server)
        life.metrics = metrics_that_show(server, life.first_state["host"]["written_pages"])
        life.log = server.log()
        tree = server.tree()
        left = server.terminate()
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))
        life.first_end = left, [str(p.pid) for p in tree if psutil.pid_exists(p.pid)], files


def metrics_that_show(server: Server, written_pages: int) -> str:
    """Metrics, once these pages are in them: they are published from steps, once a second."""
    series = re.compile(r'^sglang:hier_kv_pages_total\{.*event="written_pages".*\} (\S+)$', re.M)
    deadline_s = time.monotonic() + 300.0
    while True:
        ask(server, [9] * 70)  # the same page each time
        metrics = str(server.get("/metrics"))
        if any(float(value) >= written_pages for value in series.findall(metrics)):
            return metrics
        assert time.monotonic() < deadline_s, metrics
        time.sleep(0.1)


def second_server(folder: Path, life: Life) -> None:
    """Finds the pages of the first; then all tiers are cleared."""
    args = [*hier_args(folder, host_pages=200), "--max-total-tokens", "16384", "--enable-metrics"]
    with Server(args, log_path=folder / "second.log") as server:
        life.restarted = [ask(server, prompt) for prompt in life.prompts]
        life.restarted_metrics = str(server.get("/metrics"))
        life.restarted_state = state(server)
        life.clear_answer = server.post("/hicache/storage-backend/clear")
        flush_device(server)
        after = settled(server)  # the disk deletes what was cleared when it gets to it
        life.pages_after_clear = after["host"]["host_pages"]
        life.segments_after_clear = list((folder / "disk").rglob("seg-*"))
        life.cleared = [ask(server, prompt) for prompt in life.prompts[:2]]
        server.post("/hicache/storage-backend/clear")
        server.terminate()


def third_server(folder: Path, life: Life, patch: pytest.MonkeyPatch) -> None:
    """Must find nothing of what was cleared; started by `sglang serve` in the long form."""

    def serve(given: list[str]) -> list[str]:
        command = [str(Path(sys.executable).with_name("sglang")), "serve"]
        return [*command, *launch.arguments(given)]

    if FACTOR:
        patch.setattr(launch, "command", serve)
        patch.delenv(FORK_SERVERS, raising=False)  # a forked server runs no command
    args = [*hier_args(folder, host_pages=200), "--max-total-tokens", "16384"]
    with Server(args, log_path=folder / "third.log", stop="kill") as server:
        life.served_command = psutil.Process(server.pid).cmdline()
        life.after_clear_and_restart = [cached(ask(server, prompt)) for prompt in life.prompts]
        assert "hier_kv" in server.get("/server_info")["internal_states"][0]


def chat(server: Server) -> dict[str, Any]:
    """One chat completion with a long system prompt."""
    words = " ".join(f"register r{n}: {100 + n}" for n in range(40))
    messages = [{"role": "system", "content": words}, {"role": "user", "content": "What is r7?"}]
    body = {"model": "tinylm", "messages": messages, "temperature": 0, "max_tokens": 4}
    answer = server.post("/v1/chat/completions", body)
    assert isinstance(answer, dict)
    return answer


def cached(answer: dict[str, Any]) -> int:
    return int(answer["meta_info"]["cached_tokens"])


def test_yaml_turns_it_on_with_its_settings(life: Life) -> None:
    assert "hier-kv: 200 pages of 64 tokens" in life.log
    assert "Failed to load plugin" not in life.log
    assert life.info["page_size"] == PAGE  # nobody set one
    assert life.first_state["host"]["host_capacity_pages"] == 200
    assert life.first_state["disk"]["max_bytes"] == 1 << 30


def test_flush_cache_drops_the_device_tier_alone(life: Life) -> None:
    for prompt, flushed, repeat in zip(life.prompts, life.flushed, life.repeats, strict=True):
        num_whole = (len(prompt) - 1) // PAGE * PAGE
        assert by_tier(repeat) == {"device": num_whole, "host": 0, "disk": 0, "remote": 0}
        assert by_tier(flushed) == {"device": 0, "host": num_whole, "disk": 0, "remote": 0}
        assert tokens_and_logprobs(flushed) == tokens_and_logprobs(repeat)


def test_chat_completions_report_cached_tokens(life: Life) -> None:
    first, again = life.chat
    assert first["choices"][0]["message"]["content"] == again["choices"][0]["message"]["content"]
    usage = again["usage"]
    num_whole = (usage["prompt_tokens"] - 1) // PAGE * PAGE
    assert usage["prompt_tokens_details"]["cached_tokens"] == num_whole > 0


def test_metrics_show_events_and_pages(life: Life) -> None:
    values = {}
    for line in life.metrics.splitlines():
        if line.startswith("sglang:hier_kv"):
            name, _, value = line.rpartition(" ")
            values[name] = float(value)
    written = life.first_state["host"]["written_pages"]

    def of(series: str, label: str) -> float:
        found = [v for name, v in values.items() if name.startswith(series) and label in name]
        assert len(found) == 1, (series, label, sorted(values))
        return found[0]

    # The request that had the metrics published adds a page, written before or after that.
    assert 0 < written <= of("sglang:hier_kv_pages_total", 'event="written_pages"') <= written + 1
    assert of("sglang:hier_kv_pages_total", 'event="loaded_pages"') > 0
    assert of("sglang:hier_kv_pages_total", 'event="damaged_pages"') == 0
    assert of("sglang:hier_kv_held_pages", 'of="host_capacity_pages"') == 200
    assert 0 < of("sglang:hier_kv_held_pages", 'of="host_pages"') <= 200
    assert of("sglang:hier_kv_bytes_total", 'event="disk_bytes_written"') >= written * 262_144
    requested = of("sglang:hier_kv_tokens_total", 'event="requested_tokens"')
    by = {
        tier: of("sglang:hier_kv_tokens_total", f'event="reused_{tier}_tokens"')
        for tier in ("device", "host", "disk", "remote")
    }
    assert by["device"] > 0 < by["host"]
    assert by["disk"] == by["remote"] == 0
    missed = [v for name, v in values.items() if 'event="missed_' in name and "_tokens" in name]
    assert len(missed) == len(REASONS)  # from the start on, so that rates see the first
    new = of("sglang:hier_kv_tokens_total", 'event="missed_never_stored_tokens"')
    assert 0 < new <= requested - sum(by.values())
    for what in ("save", "load"):
        label = f'of="{what}"'
        num = of("sglang:hier_kv_duration_seconds_count", label)
        assert num > 0
        buckets = [v for name, v in values.items() if "_seconds_bucket" in name and label in name]
        assert max(buckets) == num  # the last one is open
        assert 0 < of("sglang:hier_kv_duration_seconds_sum", label) < 60 * num
    assert all('model_name="' in name and 'model_name="None"' not in name for name in values)


def test_sglangs_own_metric_counts_the_disk_as_storage(life: Life) -> None:
    sources = {}
    for line in life.restarted_metrics.splitlines():
        if line.startswith("sglang:cached_tokens_total{"):
            name, _, value = line.rpartition(" ")
            sources[name.partition('cache_source="')[2].partition('"')[0]] = float(value)
    from_disk = sum(by_tier(answer)["disk"] for answer in life.restarted)
    assert sources == {"storage": from_disk}
    details = [answer["meta_info"]["cached_tokens_details"] for answer in life.restarted]
    assert sum(one["storage"] for one in details) == from_disk > 0
    assert {one["storage_backend"] for one in details} == {"hier_kv"}


def test_sigterm_leaves_nothing_behind(life: Life) -> None:
    assert life.first_end is not None
    left, processes, files = life.first_end
    assert left.exit_code == 0
    assert left.clean, left
    assert processes == []
    assert not [name for name in files if name.endswith(".tmp")]
    assert [name for name in files if "/seg-" in name]
    closed = [event for event in life.events if event["e"] == "closed"]
    assert [event["counters"].get("shutdown_lost_pages", 0) for event in closed] == [0, 0]


def test_everything_saved_was_on_disk_when_it_ended(life: Life) -> None:
    log = life.events
    end = next(place for place, event in enumerate(log) if event["e"] == "closed")
    saved = {page for event in log[:end] if event["e"] == "saved" for page in event["pages"]}
    written = {page for event in log[:end] if event["e"] == "written" for page in event["pages"]}
    assert saved
    assert saved == written
    assert life.restarted_state["disk"]["records_recovered"] == len(written)


def test_a_restart_finds_its_pages_on_disk_bit_for_bit(life: Life) -> None:
    for prompt, found, repeat in zip(life.prompts, life.restarted, life.repeats, strict=True):
        num_whole = (len(prompt) - 1) // PAGE * PAGE
        assert by_tier(found) == {"device": 0, "host": 0, "disk": num_whole, "remote": 0}
        assert tokens_and_logprobs(found) == tokens_and_logprobs(repeat)


def test_clear_empties_dram_and_disk_for_good(life: Life) -> None:
    assert life.pages_after_clear == 0
    assert life.segments_after_clear == []
    assert [cached(answer) for answer in life.cleared] == [0, 0]
    for prompt, answer in zip(life.prompts, life.cleared, strict=False):  # and says why
        assert missed(answer) == {"cleared": (len(prompt) - 1) // PAGE * PAGE}
    assert life.after_clear_and_restart == [0] * len(life.prompts)


@pytest.mark.long
def test_sglang_serve_takes_the_flags(life: Life) -> None:
    command = " ".join(life.served_command)
    assert "sglang serve" in command
    assert "--enable-hier-kv" in command


# ---- sglang.Engine -------------------------------------------------------------------------------

ENGINE = """
import json, sys
import sglang


def cached(engine, ids):
    answer = engine.generate(input_ids=ids, sampling_params={"max_new_tokens": 4, "temperature": 0})
    meta = answer["meta_info"]
    return meta["cached_tokens"], meta.get("cached_tokens_details"), answer["output_ids"]

if __name__ == "__main__":  # SGLang's child processes import this file
    folder, model = sys.argv[1:]
    prompts = json.load(sys.stdin)
    # In float32 rounding does not decide between two tokens, computed and behind a prefix.
    plain = dict(model_path=model, device="cpu", attention_backend="torch_native", dtype="float32",
                 sampling_backend="pytorch", max_total_tokens=2048, log_level="warning")
    errors = []
    for bad in (dict(hier_kv_host_size=1.0), dict(enable_hier_kv=True, hier_kv_nonsense=1),
                dict(enable_hier_kv=True, hier_kv_rope="post")):
        try:
            sglang.Engine(**plain, **bad)
        except ValueError as error:
            errors.append(str(error))
    engine = sglang.Engine(**plain, page_size=32, enable_hier_kv=True, hier_kv_host_size=0.1,
                           hier_kv_event_log=folder + "/events.jsonl")
    runs = [[cached(engine, ids) for ids in prompts] for _ in range(2)]
    page_size = engine.server_args.page_size
    engine.shutdown()
    print("\\n" + json.dumps({"errors": errors, "runs": runs, "page_size": page_size}))
"""


def test_engine_reuses_what_its_pool_evicted(tmp_path: Path) -> None:
    prompts = list(real_prompts([900] * 5, seed=7))  # two fit into the pool
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    prompt_ids, fork = json.dumps(prompts), not FACTOR
    done = run_script(script, str(tmp_path), str(TINYLM), stdin=prompt_ids, fork=fork)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    alone, unknown, bad = found["errors"]
    assert "hier_kv_host_size was given without enable_hier_kv=True" in alone
    assert "unknown setting hier_kv_nonsense" in unknown
    assert "--hier-kv-rope must be one of pre, delta, got 'post'" in bad
    assert found["page_size"] == 32  # the user's own
    first, again = found["runs"]
    assert [run[0] for run in first] == [0] * 5
    for (num_cached, details, output), (_, _, output_before) in zip(again, first, strict=True):
        assert num_cached == 896
        assert details["hier_kv"]["host"] == 896
        assert output == output_before
    evicted = {event["e"] for event in events(tmp_path)}
    assert "loaded" in evicted
