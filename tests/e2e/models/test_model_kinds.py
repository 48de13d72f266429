"""Each kind of rotary embedding and attention on the real server, with dummy weights.

The reference for a hit in DRAM is the same server's own device hit: nothing of the plugin acts on
that path. SGLang's CPU attention backend cannot run DeepSeek's MLA, whose prefills are not absorbed
(it takes rows of the pool for heads), so that is tested on tables and pools in tests/unit/; MiniCPM
3's runs in tests/e2e/remote/test_remote_latent_ranks.py.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from testkit.published_model import copy_tokenizer
from testkit.requests import flush_device
from testkit.server import Server

pytestmark = pytest.mark.e2e

PAGE = 64
LAYERS = 3
PROMPTS = [list(range(100, 330)), [(7 * i) % 4000 + 90 for i in range(400)]]


@dataclass
class Kind:
    """A model configuration and what the plugin should make of it.

    Attributes:
        config: fields over the common ones.
        movable: layers whose rotation is understood; all of them unless given.
        max_correction_share: of all K values saved.
        reason: what the log says of the layers that are kept position-bound.
    """

    config: dict[str, Any]
    movable: int = LAYERS
    max_correction_share: float = 0.004
    reason: str = ""
    args: list[str] = field(default_factory=list)
    # Of K that no rule of rounding gives back within a page's room for corrections.
    is_bound: bool = False


COMMON: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "rope_theta": 10000.0,
}  # fmt: skip


def llama(**rope: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {"rope_theta": 10000.0, **rope},
    }


KINDS: dict[str, Kind] = {
    "llama3-scaling": Kind(
        llama(
            rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=256,
        )
    ),
    "yarn": Kind(llama(rope_type="yarn", factor=4.0, original_max_position_embeddings=512)),
    "linear": Kind(llama(rope_type="linear", factor=4.0)),
    "dynamic": Kind(llama(rope_type="dynamic", factor=2.0)),
    "mqa": Kind({**llama(rope_type="default"), "num_key_value_heads": 1}),
    "qwen3-qk-norm": Kind(
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
    ),
    "phi-partial": Kind(
        {
            "architectures": ["PhiForCausalLM"], "model_type": "phi", "partial_rotary_factor": 0.5,
            "hidden_act": "gelu_new", "layer_norm_eps": 1e-5, "num_key_value_heads": 4,
        }
    ),
    "gpt-j-interleaved": Kind(
        {
            "architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 256,
            "n_head": 4, "n_layer": LAYERS, "n_positions": 2048, "rotary_dim": 32,
            "activation_function": "gelu_new", "n_inner": 512, "num_key_value_heads": 4,
        }
    ),
    "glm4-interleaved-partial": Kind(
        {
            "architectures": ["Glm4ForCausalLM"], "model_type": "glm4",
            "partial_rotary_factor": 0.5, "attention_bias": True,
        }
    ),
    "cohere-interleaved": Kind(
        {
            "architectures": ["CohereForCausalLM"], "model_type": "cohere", "logit_scale": 0.0625,
            "layer_norm_eps": 1e-5, "use_qk_norm": False, "tie_word_embeddings": True,
        }
    ),
    "longrope-bound": Kind(
        {
            "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0,
            "original_max_position_embeddings": 1024,
            "rope_parameters": {
                "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 32,
                "long_factor": [2.0] * 32, "original_max_position_embeddings": 1024,
            },
        },
        movable=0,
        reason="is not a function of the token's index alone",
    ),
    # Windows in two of three layers, of another base, in one pool with the full ones.
    "gemma3-windows": Kind(
        {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
            "sliding_window": 128, "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        args=["--attention-backend", "cpu_extend"],
        is_bound=True,
    ),
    "fp8-e4m3": Kind(
        llama(rope_type="default"),
        movable=0,
        reason="K in 8 bits was rounded behind its rotation",
        args=["--attention-backend", "cpu_extend", "--kv-cache-dtype", "fp8_e4m3"],
    ),
    "fp8-e5m2": Kind(
        llama(rope_type="default"),
        movable=0,
        reason="K in 8 bits was rounded behind its rotation",
        args=["--attention-backend", "cpu_extend", "--kv-cache-dtype", "fp8_e5m2"],
    ),
    "gpt2-absolute-positions": Kind(
        {
            "architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "n_embd": 256, "n_head": 4,
            "n_layer": LAYERS, "n_positions": 2048, "activation_function": "gelu_new",
            "n_inner": 512, "num_key_value_heads": 4, "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
        },
        movable=0,
        reason="no layer of the model has a rotary embedding",
    ),
}  # fmt: skip


def model_folder(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with a configuration and a tokenizer, and no weights."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**COMMON, **config}))
    copy_tokenizer(folder)
    return folder


class Fleet:
    """Servers by kind; while one is tested, the next one starts on the other core."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: dict[str, Server] = {}

    def get(self, kind: str) -> Server:
        names = list(KINDS)
        for name in names[names.index(kind) :][:2]:
            if name not in self._started:
                self._started[name] = self._start(name)
        for name in names[: names.index(kind)]:
            if name in self._started:
                self._started[name].kill()
        return self._started[kind].wait_ready()

    def _start(self, name: str) -> Server:
        model = model_folder(self._folder / name, KINDS[name].config)
        args = [
            "--load-format", "dummy", "--max-total-tokens", "4096", "--page-size", str(PAGE),
            "--enable-hier-kv", "--hier-kv-host-size", "0.05", "--sleep-on-idle",
            *KINDS[name].args,
        ]  # fmt: skip
        log_path = self._folder / f"{name}.log"
        return Server(args, model=model, log_path=log_path, stop="kill").start()

    def close(self) -> None:
        for server in self._started.values():
            server.kill()


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    made = Fleet(tmp_path_factory.mktemp("kinds"))
    yield made
    made.close()


def ask(server: Server, prompt: list[int]) -> tuple[Any, dict[str, int]]:
    reply = server.generate(
        input_ids=prompt,
        sampling_params={"max_new_tokens": 3, "ignore_eos": True},
        return_logprob=True,
    )
    meta = reply["meta_info"]
    details = (meta.get("cached_tokens_details") or {}).get("hier_kv") or {}
    return (reply["output_ids"], [e[:2] for e in meta["output_token_logprobs"]]), details


@pytest.mark.sampled(*(name for name in KINDS if name != "fp8-e5m2"))
@pytest.mark.parametrize("name", KINDS)
def test_dram_hits_equal_device_hits(name: str, fleet: Fleet) -> None:
    kind, server = KINDS[name], fleet.get(name)
    found = re.search(r"the rotation of (\d+) of (\d+) layers is understood", server.log())
    assert found, server.log()[-3000:]
    assert (int(found[1]), int(found[2])) == (kind.movable, LAYERS)
    assert kind.reason in server.log()

    for prompt in PROMPTS:
        ask(server, prompt)
    device = [ask(server, prompt) for prompt in PROMPTS]
    whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in PROMPTS]
    assert [details["device"] for _, details in device] == whole
    for prompt, (expected, _), num_tokens in zip(PROMPTS, device, whole, strict=True):
        flush_device(server)
        answer, details = ask(server, prompt)
        assert details["host"] == num_tokens
        assert answer == expected

    counters = server.get("/server_info")["internal_states"][0]["hier_kv"]["host"]
    saved = counters["saved_pages"]
    assert saved >= sum(whole) // PAGE
    if kind.movable < LAYERS or kind.is_bound:
        assert counters["saved_bound_pages"] == saved
        return
    assert counters["saved_pre_pages"] == saved
    rotated = counters.get("corrections", 0) / (saved * PAGE * LAYERS * k_values_per_token(kind))
    assert rotated <= kind.max_correction_share


def k_values_per_token(kind: Kind) -> int:
    config = {**COMMON, **kind.config}
    return int(config["num_key_value_heads"] * config["head_dim"])


def load_overlaps_ms(log: Path) -> list[float]:
    """How long each batch of loads ran under its forward."""
    lines = log.read_text().splitlines(keepends=True)
    batches = [json.loads(line) for line in lines if line.endswith("\n")]
    return [batch["overlap_ms"] for batch in batches if batch["e"] == "load_batch"]


def test_attention_of_layer_0_begins_before_the_last_layers_copy_ended(
    tmp_path: Path,
) -> None:
    """A deep model with wide KV, a long prefix in DRAM: the load runs under the forward."""
    config = {
        **llama(rope_type="default"), "num_hidden_layers": 16, "num_key_value_heads": 8,
        "num_attention_heads": 8, "head_dim": 128, "hidden_size": 128, "intermediate_size": 128,
        "max_position_embeddings": 4096,
    }  # fmt: skip
    model = model_folder(tmp_path / "model", config)
    events = tmp_path / "events.jsonl"
    args = [
        "--load-format", "dummy", "--max-total-tokens", "8192", "--page-size", str(PAGE),
        "--enable-hier-kv", "--hier-kv-host-size", "0.5", "--hier-kv-event-log", str(events),
    ]  # fmt: skip
    prompt = [(11 * i) % 4000 + 90 for i in range(1500)]
    log_path = tmp_path / "server.log"
    with Server(args, model=model, log_path=log_path, stop="kill") as server:
        ask(server, prompt)
        expected, _ = ask(server, prompt)
        deadline_s = time.monotonic() + 300
        # Logged behind the answers. Where others have the cores a forward may come late for once.
        while max(overlaps := load_overlaps_ms(events), default=0.0) <= 1.0:
            assert time.monotonic() < deadline_s, overlaps
            flush_device(server)
            answer, details = ask(server, prompt)
            assert details["host"] == (len(prompt) - 1) // PAGE * PAGE
            assert answer == expected
