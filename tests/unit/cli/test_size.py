"""`hier-kv size`: what the model says, what traffic is made of, and what the screen shows."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_ext.cli import main
from sglang_ext.cli.progress import Sizes
from sglang_ext.cli.size import _CHATS, _table
from sglang_ext.simulator.engine import run
from sglang_ext.simulator.model_config import read_model
from sglang_ext.simulator.sizing import (
    GIB,
    Prediction,
    Size,
    _system,
    choose,
    sizes_for,
    slot_bytes,
)
from sglang_ext.simulator.traffic import Chats, of_chats
from testkit.server import ROOT, TINYLM
from tests.command_workers import start_with_workers

SMALL = ["--chats-per-hour", "60", "--turns", "3", "--first-tokens", "200", "--turn-tokens", "100",
         "--answer-tokens", "50", "--think-s", "10"]  # fmt: skip
KV = 4096  # of tinylm
PAGE_GB = slot_bytes(64, KV) / GIB


def write(path: Path, **config: Any) -> Path:
    base = {"num_hidden_layers": 10, "num_attention_heads": 8, "hidden_size": 512}
    (path / "config.json").write_text(json.dumps(base | config))
    return path


def trace(path: Path, prompts: list[list[int]]) -> str:
    lines = [
        {"timestamp": 1000 * n, "input_length": 64 * len(ids), "output_length": 4, "hash_ids": ids}
        for n, ids in enumerate(prompts)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


@pytest.mark.parametrize(
    ("config", "ranks", "expected"),
    [
        ({"dtype": "bfloat16"}, 1, 10 * 8 * 2 * 64 * 2),
        ({"torch_dtype": "float32", "num_key_value_heads": 2}, 1, 10 * 2 * 2 * 64 * 4),
        ({"num_key_value_heads": 2, "head_dim": 128}, 4, 10 * 4 * 2 * 128 * 2),  # once a rank
        ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 2, 10 * 576 * 2),
        ({"text_config": {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}}, 1,
         2 * 8 * 2),
    ],
)  # fmt: skip
def test_kv_of_a_token(tmp_path: Path, config: dict[str, Any], ranks: int, expected: int) -> None:
    assert read_model(write(tmp_path, **config), num_ranks=ranks).bytes_per_token == expected
    half = read_model(tmp_path / "config.json", "fp8_e4m3", ranks).bytes_per_token
    assert half == expected // (4 if config.get("torch_dtype") == "float32" else 2)


@pytest.mark.parametrize(
    ("config", "with_index"),
    [
        ({}, 10),
        ({"indexer_types": ["full", "shared"] * 5}, 5),
        ({"index_topk_pattern": "FSS" * 4}, 4),
        ({"index_topk_freq": 4}, 4),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, 4),
    ],
)
def test_rows_of_an_index_are_counted(
    tmp_path: Path, config: dict[str, Any], with_index: int
) -> None:
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    write(tmp_path, **latent, index_topk=2048, index_head_dim=128, **config)
    index_bytes = with_index * (128 + 4)
    assert read_model(tmp_path).bytes_per_token == 10 * 576 * 2 + index_bytes
    # In fp8 SGLang's rows of such models have scales, and what is rotated in bfloat16.
    assert read_model(tmp_path, "fp8_e4m3").bytes_per_token == 10 * 656 + index_bytes


@pytest.mark.parametrize(
    "config",
    [
        {"full_attention_interval": 5},
        {"attn_layer_period": 5, "attn_layer_offset": 4},
        {"hybrid_override_pattern": "M-M*M-M*M-"},
    ],
)
def test_hybrids_that_list_no_kinds_store_kv_in_layers_with_attention(
    tmp_path: Path, config: dict[str, Any]
) -> None:
    model = read_model(write(tmp_path, **config))
    assert model.bytes_per_token == 2 * 8 * 2 * 64 * 2
    assert "states of 8 layers" in model.note


@pytest.mark.parametrize(
    "config",
    [
        {"num_key_value_heads": "2"},
        {"num_key_value_heads": [2] * 10},
        {"head_dim": -64},
        {"head_dim": "64"},
        {"kv_lora_rank": 512, "qk_rope_head_dim": "64"},
        {"hidden_size": 4},
        {"num_hidden_layers": 10**400},
        {"num_hidden_layers": 10**400, "kv_lora_rank": 512, "index_topk": 4, "index_head_dim": 128},
    ],
)
def test_numbers_that_cannot_be_are_refused(tmp_path: Path, config: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give --kv-bytes-per-token"):
        read_model(write(tmp_path, **config))


def test_a_nested_config_has_the_dtype_of_what_is_around_it(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": 8}
    write(tmp_path, text_config=text, torch_dtype="torch.float32", layer_types=[1, 2])
    assert read_model(tmp_path).bytes_per_token == 8 * 2 * 4


def test_layers_that_store_no_kv_of_every_token_are_named(tmp_path: Path) -> None:
    kinds = ["linear_attention"] * 6 + ["full_attention"] * 3 + ["sliding_attention"]
    model = read_model(write(tmp_path, layer_types=kinds))
    assert model.bytes_per_token == 4 * 8 * 2 * 64 * 2
    assert "states of 6 layers" in model.note
    assert "window" in model.note


def test_the_bundled_model_has_the_size_that_servers_store() -> None:
    assert read_model(TINYLM).bytes_per_token == KV
    assert slot_bytes(64, KV) == 266_240


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "give either a model's folder or config.json, or --kv-bytes-per-token"),
        ([str(TINYLM)], "give either --chats-per-hour and lengths of chats, or --trace FILE"),
        ([str(TINYLM), "--trace", "x", "--turns", "3"], "give either --chats-per-hour"),
        ([str(TINYLM), *SMALL, "--turns", "0.5"], "--turns must be a number of at least 1"),
        ([str(TINYLM), *SMALL, "--think-s", "nan"], "--think-s must be a number"),
        ([str(TINYLM), *SMALL, "--host-size", "-1"], "--host-size must be GiB, 0 or more, got -1"),
        ([str(TINYLM), *SMALL, "--host-size", "0.0001"], "--host-size must be from 0.0"),
        ([str(TINYLM), *SMALL, "--host-size", "1e300"], "GiB with these pages"),
        ([str(TINYLM), *SMALL, "--host-size", "1", "--disk-size", "1e-5"], "--disk-size must be "),
        ([str(TINYLM), *SMALL, "--think-s", "-1"], "--think-s must be a number of at least 0"),
        ([str(TINYLM), *SMALL, "--first-tokens", "0"], "--first-tokens must be a number of at le"),
        ([str(TINYLM), "--chats-per-hour", "1e300"], "--chats-per-hour must be from 1e-06 to"),
        (["--kv-bytes-per-token", "4096", *SMALL, "--tp-size", "2"], "leave --tp-size and --kv"),
        ([str(TINYLM), "--chats-per-hour", "1e-12"], "--chats-per-hour must be from 1e-06 to"),
        ([str(TINYLM), *SMALL, "--think-s", "1e300"], "a chat would last 3e+300 s, at most 1e+09"),
        ([str(TINYLM), *SMALL, "--answer-tokens", "1e12"], "larger --decode-tokens-per-s"),
        ([str(TINYLM), *SMALL, "--turns", "1e7"], "give shorter chats"),
        ([str(TINYLM), *SMALL, "--first-tokens", "1e12"], "give shorter chats"),
        ([str(TINYLM), *SMALL, "--disk-size", "4"], "--disk-size needs --host-size"),
        ([str(TINYLM), *SMALL, "--tp-size", "0"], "--tp-size must be from 1 to 1,024, got 0;"),
        ([str(TINYLM), *SMALL, "--disk-gb-s", "0"], "--disk-gb-s must be from 0.001 to 1,000"),
        ([str(TINYLM), *SMALL, "--disk-gb-s", "3500"], "to 1,000, got 3500; give 10^9 bytes"),
        ([str(TINYLM), *SMALL, "--disk-gb-s", "nan"], "to 1,000, got nan; give"),
        ([str(TINYLM), *SMALL, "--prefill-tokens-per-s", "inf"], "must be from 0.001 to 1,000,000"),
        ([str(TINYLM), *SMALL, "--decode-tokens-per-s", "-2"], "got -2; leave it out for 50"),
        ([str(TINYLM), *SMALL, "--page-size", "-1"], "--page-size must be from 2 to 1,048,576"),
        ([str(TINYLM), *SMALL, "--page-size", "1"], "got 1; leave it out for 64"),
        ([str(TINYLM), *SMALL, "--page-size", "1000000"], "give a smaller --page-size"),
        (["--kv-bytes-per-token", "99999999", *SMALL], "a page must take at most 268,427,264 byte"),
        ([str(TINYLM), "--trace", "x", "--page-size", "32"], "changes nothing of a --trace"),
        ([str(TINYLM), "--chats-per-second", "-1"], "--chats-per-second must be from "),
        (["", *SMALL], "got an empty text"),
        (
            [str(TINYLM), *SMALL, "--page-size", "4096", "--host-size", "0.05"],
            "got 0.05; give another, or a smaller --page-size",
        ),
        ([str(TINYLM), *SMALL, "--kv-dtype", "int3"], "--kv-dtype must be one of"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_one_sentence(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["size", *given]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["/nowhere", *SMALL], "cannot be read as a model's config.json"),
        ([str(ROOT / "tests"), *SMALL], "cannot be read as a model's config.json"),
        ([str(TINYLM), "--trace", "/nowhere"], "the trace /nowhere cannot be read"),
        ([str(TINYLM), *SMALL, "--prefill-tokens-per-s", "1"], "the GPU cannot serve this: load "),
    ],
)
def test_what_cannot_be_done_ends_otherwise(
    capsys: pytest.CaptureFixture[str], given: list[str], said: str
) -> None:
    assert main(["size", *given]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ((0, float("inf"), [1]), "10^15"),
        ((0, 9, [9e99]), "hash_ids"),
        ((0, 9, [2**63]), "2^48"),
        (None, "expected a JSON object"),
    ],
)
def test_a_trace_with_what_no_number_holds_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: tuple[Any, ...] | None, said: str
) -> None:
    text = "[" * 100_000
    if line is not None:
        names = ("timestamp", "input_length", "hash_ids")
        text = json.dumps(dict(zip(names, line, strict=True)) | {"output_length": 1})
    (tmp_path / "trace").write_text(text)
    assert main(["size", str(TINYLM), "--trace", str(tmp_path / "trace")]) == 1
    assert said in capsys.readouterr().err


def test_the_sizes_that_are_looked_at_by_default_can_be_simulated() -> None:
    tiny = Chats(1_000_000, turns=1, first_tokens=1, answer_tokens=1)
    for chats in (Chats(0.001), tiny):
        traffic = of_chats(chats, 64, 50.0)
        for size in sizes_for(traffic, KV):
            system = _system(traffic, KV, size, 3.0)
            assert run(traffic.workload[:20], system, "lookahead").num_turns


def test_a_trace_is_replayed_through_the_page_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chats = [[10 * who + page for page in range(8)] for who in range(8)]
    file = trace(tmp_path / "trace.jsonl", chats + chats)
    command = [
        "size",
        str(TINYLM),
        "--trace",
        file,
        "--block-tokens",
        "64",
        "--json",
        "--host-size",
    ]
    assert main([*command, str(200.5 * PAGE_GB)]) == 0
    [all_fit] = json.loads(capsys.readouterr().out)["sizes"]
    # Half of the prompts came before; the last token of each is computed.
    expected = 8 * (8 * 64 - 1) / (16 * 8 * 64)
    assert all_fit["hit_rate"] == pytest.approx(expected)
    assert all_fit["possible"] == pytest.approx(expected)
    assert all_fit["from_host"] == pytest.approx(expected)
    assert all_fit["load"] == pytest.approx(0.5 * (1 - expected))  # half of the time without reuse
    assert main([*command, str(20.5 * PAGE_GB)]) == 0
    [few_fit] = json.loads(capsys.readouterr().out)["sizes"]
    assert few_fit["hit_rate"] < 0.5 * expected
    assert main([*command, str(20.5 * PAGE_GB), "--disk-size", "1"]) == 0
    [with_disk] = json.loads(capsys.readouterr().out)["sizes"]
    assert with_disk["size"] == {"host_gib": 20.5 * PAGE_GB, "disk_gib": 1}
    assert with_disk["hit_rate"] == pytest.approx(expected)
    assert with_disk["from_disk"] > 0


def test_the_screen_says_what_to_do_next(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", str(TINYLM), *SMALL, "--host-size", "0.5"]) == 0
    text = capsys.readouterr().out
    assert "tinylm: 4,096 bytes of KV a token" in text
    assert "<-" in text
    assert "hier-kv doctor --hier-kv-host-size 0.5 " in text
    assert "--enable-hier-kv --hier-kv-host-size 0.5" in text
    assert "hier-kv stats" in text


def test_many_chats_are_simulated_by_fewer_with_less_memory() -> None:
    few, many = (of_chats(Chats(n), 64, 50.0) for n in (60, 60_000))
    assert few.scale == 1.0
    assert many.tokens == pytest.approx(1000 * few.tokens)
    assert many.scale < 0.2
    assert len(many.workload) < 2000
    by_size = [size.host_gib for size in sizes_for(many, KV) if not size.disk_gib]
    assert by_size == sorted(by_size)
    whole = many.tokens / 64 * PAGE_GB
    assert by_size[0] < whole < by_size[-1]


def test_the_least_dram_near_the_best_is_chosen() -> None:
    rows = [made(1, 0, 0.3), made(8, 0, 0.9), made(1, 8, 0.87), made(1, 16, 0.89)]
    assert choose(rows) is rows[3]
    assert choose(rows[:2]) is rows[1]


def made(host: float, disk: float, hit_rate: float, load: float = 0.5) -> Prediction:
    return Prediction(Size(host, disk), hit_rate, 0.9, 0.0, 0.0, 10, load)


def test_a_size_that_cannot_keep_up_is_said_to_be_too_slow() -> None:
    traffic, model = of_chats(Chats(60), 64, 50.0), read_model(TINYLM)
    slow, fast = made(1, 0, 0.5, 1.25), made(2, 0, 0.51, 0.9)
    assert choose([slow, fast]) is fast
    text = "\n".join(_table(model, traffic, [slow, fast], fast))
    assert "too slow: load 1.25\n" in text
    assert "hier-kv doctor --hier-kv-host-size 2 " in text
    assert choose([slow]) is slow
    text = "\n".join(_table(model, traffic, [slow], slow))
    assert "next: no size here keeps up" in text
    assert "hier-kv doctor" not in text


def test_room_that_is_not_used_as_computing_is_quicker_is_told() -> None:
    traffic, model = of_chats(Chats(60), 64, 50.0), read_model(TINYLM)
    little, much = made(1 / 1024, 0, 0.05), made(64, 0, 0.1)
    assert "There is room and little is reused" in "\n".join(
        _table(model, traffic, [little, much], much)
    )
    for sizes in ([little], [little, made(64, 0, 0.85)]):
        assert "There is room" not in "\n".join(_table(model, traffic, sizes, sizes[-1]))


def test_what_the_gpu_has_to_compute_is_told_from_the_traffic() -> None:
    chats = Chats(3600, turns=1, first_tokens=1000)
    demand = of_chats(chats, 64, 50.0).demand
    assert demand.prompt_tokens_per_s == pytest.approx(1000, rel=0.1)
    assert demand.load(2000, hit_rate=0.5) == pytest.approx(0.25, rel=0.1)
    shared = of_chats(replace(chats, system_tokens=6400), 64, 50.0)
    assert shared.demand.new_tokens_per_s == pytest.approx(demand.new_tokens_per_s)
    assert shared.demand.prompt_tokens_per_s == pytest.approx(7400, rel=0.02)


@pytest.mark.parametrize(
    "chats",
    [
        Chats(2000, first_tokens=30_000, think_s=90),
        Chats(20, first_tokens=1_000_000),
        Chats(100, turns=60, first_tokens=2000, turn_tokens=1500, answer_tokens=500, think_s=3),
    ],
    ids=["documents", "books", "agents"],
)
def test_long_prompts_are_simulated_in_bounded_time(chats: Chats) -> None:
    traffic = of_chats(chats, 64, 50.0, kv_bytes_per_token=327_680)
    prompts = traffic.demand.prompt_tokens_per_s / (chats.per_hour / 3600) * len(traffic.workload)
    assert prompts / traffic.page_tokens < 1.3 * 600_000
    assert 40 <= len(traffic.workload) <= 350
    mean = traffic.demand.prompt_tokens_per_s / (chats.per_hour / 3600) / chats.turns
    assert traffic.page_tokens == 64 or traffic.page_tokens < mean / 50
    for size in sizes_for(traffic, 327_680):
        _system(traffic, 327_680, size, 3.0)  # which refuses what it cannot be


def _simulating() -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A command that simulates for long, and the processes that do it for the command."""
    many = ["--chats-per-second", "20", "--host-size", "0.5", "1"]
    return start_with_workers(["size", str(TINYLM), *many])


def test_what_simulates_ends_with_who_started_it() -> None:
    """SIGTERM ends the command at once, as `timeout` and service managers do."""
    process, workers = _simulating()
    process.terminate()
    process.communicate()
    assert not psutil.wait_procs(workers, timeout=120)[1]


def test_an_interrupt_waits_for_nothing_that_is_simulated() -> None:
    process, workers = _simulating()
    for worker in workers:
        worker.suspend()
    process.send_signal(signal.SIGINT)
    try:
        _, told = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in told
    assert not psutil.wait_procs(workers, timeout=120)[1]


def test_it_needs_neither_torch_nor_sglang() -> None:
    code = (
        "import sys\n"
        "for name in ('torch', 'sglang', 'transformers'): sys.modules[name] = None\n"
        "from sglang_ext.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    command = ["size", str(TINYLM), *SMALL, "--host-size", "0.5", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    assert 0 < json.loads(done.stdout)["sizes"][0]["hit_rate"] < 1
    shown = done.stderr.splitlines()
    assert shown[0].startswith("simulated 0% of 1 size (a first run")
    assert "simulated 100% of 1 size, about 0 s left" in shown
    assert re.fullmatch(r"DRAM \S+ GiB, disk \S+ GiB: hit rate \d+\.\d%", shown[-1])


def test_no_time_is_told_before_there_is_a_measure_of_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    tell = Sizes(2)
    for share in (0.25, 1.0):
        tell(share)
    assert capsys.readouterr().err.splitlines() == [
        "simulated 25% of 2 sizes",
        "simulated 100% of 2 sizes, about 0 s left",
    ]


def test_help_has_the_defaults_that_chats_have() -> None:
    defaults = {each.name: each.default for each in fields(Chats)}
    for name, _, text in _CHATS:
        assert text.endswith(f" ({defaults[name.replace('-', '_')]:g})")
