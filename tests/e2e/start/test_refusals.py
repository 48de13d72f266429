"""Set-ups that cannot work end at start with one sentence; a failing disk is a count in service."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from sglang_ext.codec.calibration.calibrate import profile_from_planes
from sglang_ext.codec.calibration.hf_capture import float_to_bits
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.seam.contract.symbols import SYMBOLS, Symbol
from testkit.drafts.eagle import DRAFTS, TREES
from testkit.published_model import TOKENIZER_FILES
from testkit.rank_requests import ENVIRONMENT
from testkit.requests import flush_device
from testkit.server import ROOT, TINYLM, Server, ServerError
from testkit.sglang_copy import TWENTY, SglangCopy
from tests.e2e.hier_server import (
    NUM_TOKENS,
    PAGE,
    SLOT_BYTES,
    answers_as_computed,
    ask,
    by_tier,
    hier_args,
    real_prompts,
    settled,
)
from tests.long_form import FACTOR
from tests.scripts import run_script
from tests.unit.test_docs_commands import starts

pytestmark = [pytest.mark.e2e, pytest.mark.newest_release]

ON = ["--model-path", str(TINYLM), "--device", "cpu", "--enable-hier-kv"]
SMALL = ["--hier-kv-host-size", "0.05"]
DUMMY = [
    *("--load-format", "dummy", "--max-total-tokens", "4096", "--dtype", "bfloat16"),
    *("--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
]
EAGLE = ["--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(TINYLM)]
EAGLE += DRAFTS
# What is added to a server with drafts, and what the sentence says is needed.
NO_DRAFTS = {
    "truncation": (["--hier-kv-truncation", "match"], "--hier-kv-truncation off or overflow"),
    "rust": (["--hier-kv-tree-core", "rust"], "--hier-kv-tree-core python"),
    "codec": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-codec", "cachegen-paper"],
        "a --hier-kv-codec that loses nothing, or hier",
    ),
    "fp8 drafts": (
        ["--speculative-draft-kv-cache-dtype", "fp8_e4m3"],
        "no --speculative-draft-kv-cache-dtype",
    ),
    "sessions": (["--enable-streaming-session"], "no --enable-streaming-session"),
}
DRAFTS_WITH = {
    "taken": [],
    "taken: cut prompts": ["--hier-kv-truncation", "overflow"],
    "taken: a codec": ["--hier-kv-disk-dir", "@/disk", "--hier-kv-codec", "lossless"],
    "taken: hier": ["--hier-kv-disk-dir", "@/disk", "--hier-kv-codec", "hier"],
    "taken: trees": ["--attention-backend", "triton", *TREES],
}
# Guesses that branch: SGLang itself has them under some backends alone, and else asks for pages of
# one token.
BRANCHES = {
    "EAGLE": (
        [*EAGLE, *TREES],
        "--attention-backend triton, flashinfer or fa3 (where guesses branch)",
        "got torch_native;",
    ),
    "NGRAM": (
        ["--speculative-algorithm", "NGRAM"],
        "--speculative-eagle-topk 1 (--speculative-ngram-max-bfs-breadth 1)",
        "got 10;",
    ),
}
# A model of latent rows, and of it drafts that are refused: what is added, and the sentence.
LATENT: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
    "v_head_dim": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 64, "n_group": 1, "topk_group": 1, "num_nextn_predict_layers": 1,
}  # fmt: skip
STANDALONE = ["--speculative-algorithm", "STANDALONE", *DRAFTS, "--speculative-draft-model-path"]
OTHER_ROWS = {
    "another kind": (
        "latent",
        EAGLE,
        ["(latent rows in torch.bfloat16)", "got one of K and V of every head in torch.bfloat16"],
    ),
    "another dtype": (
        "half",
        ["--dtype", "auto", *EAGLE],
        ["(K and V of every head in torch.float16)", "in torch.bfloat16; choose another draft"],
    ),
    "states of its own": (
        str(TINYLM),
        [*STANDALONE, "@/states-granite"],
        ["(K and V of every head), got one of layers with a state a sequence;"],
    ),
    "beside states none of its own": (
        "states-qwen3-next",
        EAGLE,
        ["its own draft layer (Qwen3NextForCausalLMMTP)", "got a draft of LlamaForCausalLM;"],
    ),
    "none named, so windows of its own": (  # SGLang loads the model itself once more
        "oss",
        ["--attention-backend", "triton", "--speculative-algorithm", "EAGLE3", *DRAFTS],
        ["(K and V of every head), got one of window layers with a pool of their own;"],
    ),
}
SENTENCE_CHARS = 400
HOOKED = next(symbol for symbol in SYMBOLS if symbol.name == "Scheduler.handle_generate_request")

# What is added to a good command line, and what the sentence must say.
REFUSED_ARGUMENTS = {
    "sessions with data parallel attention": (
        [
            *["--tp-size", "2", "--dp-size", "2", "--enable-dp-attention"],
            "--enable-streaming-session",
        ],
        ["no --enable-streaming-session with data parallel attention"],
    ),
    "a delayer with data parallel attention by its other name": (
        ["--tp-size", "2", "--attn-dp-size", "2", "--enable-prefill-delayer"],
        ["no --enable-prefill-delayer with data parallel attention"],
    ),
    "multiplexed streams": (["--enable-pdmux"], ["on one stream", "--enable-pdmux"]),
    "a store of HiCache alone": (
        ["--hicache-storage-backend", "file"],
        ["HiCache", "--hicache-storage-backend file"],
    ),
    "block scales": (["--kv-cache-dtype", "mxfp8"], ["without block scales", "mxfp8"]),
    "page-major": (
        ["--enable-page-major-kv-layout"],
        ["plain KV pool", "--enable-page-major-kv-layout"],
    ),
    "canary": (["--kv-canary", "raise"], ["no --kv-canary", "--kv-canary raise"]),
    "experts elsewhere": (["--kt-weight-path", "@/"], ["all experts", "--kt-weight-path"]),
    "outputs of stages that come later": (
        ["--pp-size", "2", "--pp-async-batch-depth", "1"],
        ["--pp-async-batch-depth 0 with several pipeline stages", "got 1"],
    ),
    "stages of several servers": (
        ["--pp-size", "2", "--dp-size", "2"],
        ["--dp-size 1 with several pipeline stages", "got 2", "leave --pp-size out"],
    ),
    "context parallel": (
        ["--tp-size", "4", "--attn-cp-size", "2"],
        ["--attn-cp-size 4 (as --tp-size) with context parallel ranks", "got 2"],
    ),
    "decode context parallel": (
        ["--dcp-size", "2"],
        ["--dcp-size 1 (with more a rank's pool has each N-th token", "got --dcp-size 2"],
    ),
    "speculative": (
        ["--speculative-algorithm", "DFLASH"],
        ["by EAGLE", "--speculative-algorithm DFLASH", "leave it out"],
    ),
    "nvfp4": (["--kv-cache-dtype", "nvfp4"], ["8 bits or more", "nvfp4", "choose auto"]),
    "mxfp4": (["--kv-cache-dtype", "fp4_mx_block16"], ["8 bits or more", "fp4_mx_block16"]),
    "sharding": (
        ["--enable-kv-cache-sharding"],
        ["not divided among ranks by pages", "--enable-kv-cache-sharding"],
    ),
    "no kv cache": (["--prefill-only-disable-kv-cache"], ["--prefill-only-disable-kv-cache"]),
    "unified memory": (["--enable-unified-memory"], ["plain KV pool", "--enable-unified-memory"]),
    "disaggregation": (
        ["--disaggregation-mode", "decode"],
        ["--disaggregation-decode-enable-radix-cache with --disaggregation-mode decode"],
    ),
    "no radix cache": (["--disable-radix-cache"], ["radix cache", "--disable-radix-cache"]),
    "hicache": (
        ["--enable-hierarchical-cache"],
        ["HiCache", "--enable-hierarchical-cache", "remove one of the two flags"],
    ),
    "lmcache": (["--enable-lmcache"], ["LMCache", "--enable-lmcache"]),
    "flexkv": (["--enable-flexkv"], ["FlexKV", "--enable-flexkv"]),
    "linker": (
        ["--enable-unified-cache-external-linker"],
        ["no other external linker", "--enable-unified-cache-external-linker"],
    ),
    "ray": (["--use-ray"], ["own process launcher", "--use-ray"]),
    "hisparse": (["--enable-hisparse"], ["plain KV pool", "--enable-hisparse"]),
    "page size 1": (["--page-size", "1"], ["--page-size of at least 2", "got 1", "64"]),
    # The plugin's own flags.
    "host size 0": (["--hier-kv-host-size", "0"], ["--hier-kv-host-size", "greater than 0", "0"]),
    "negative host size": (["--hier-kv-host-size", "-1"], ["greater than 0", "got -1"]),
    "host size nan": (["--hier-kv-host-size", "nan"], ["--hier-kv-host-size", "finite", "nan"]),
    "host size inf": (["--hier-kv-host-size", "inf"], ["--hier-kv-host-size", "finite", "inf"]),
    "host too large": (["--hier-kv-host-size", "1e6"], ["more than", "free", "smaller"]),
    "disk size 0": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-disk-size", "0"],
        ["--hier-kv-disk-size", "greater than 0", "--hier-kv-disk-dir"],
    ),
    "disk size alone": (
        ["--hier-kv-disk-size", "5"],
        ["--hier-kv-disk-size 5", "no effect without --hier-kv-disk-dir"],
    ),
    "disk size inf": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-disk-size", "inf"],
        ["--hier-kv-disk-size", "inf"],
    ),
    "segment size 0": (
        ["--hier-kv-disk-segment-size", "0"],
        ["--hier-kv-disk-segment-size", "greater than 0"],
    ),
    "negative floor": (["--hier-kv-disk-free-floor", "-1"], ["free-floor", "0 or more", "-1"]),
    "folder is a file": (["--hier-kv-disk-dir", "@/file"], ["must be a folder", "is a file"]),
    "folder below a file": (["--hier-kv-disk-dir", "@/file/sub"], ["--hier-kv-disk-dir", "@/file"]),
    "read-only folder": (["--hier-kv-disk-dir", "/proc/hier-kv"], ["writable", "/proc/hier-kv"]),
    "no log folder": (["--hier-kv-event-log", "@/no/log"], ["--hier-kv-event-log", "create"]),
    "sizes past all sense": (["--hier-kv-host-size", "1e308"], ["--hier-kv-host-size", "at most"]),
    "floor past all sense": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-disk-free-floor", "1e308"],
        ["--hier-kv-disk-free-floor", "at most"],
    ),
    "floor above the disk": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-disk-free-floor", "1e8"],
        ["--hier-kv-disk-free-floor", "all of the file system"],
    ),
    "log is a folder": (["--hier-kv-event-log", "@/"], ["--hier-kv-event-log", "is a folder"]),
    "password in the URL": (
        ["--hier-kv-remote-url", "redis://:hunter2@127.0.0.1"],
        ["--hier-kv-remote-url must have no password in it", "password-file=PATH"],
    ),
    "store in the disk folder": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-remote-url", "file://@/disk/x?size=1GB"],
        ["must not lie in each other"],
    ),
    "a store of one byte": (["--hier-kv-remote-url", "file://@/?size=1"], ["at least 64KB"]),
    "a profile for nothing": (
        [
            *("--hier-kv-disk-dir", "@/disk", "--hier-kv-codec", "lossless"),
            *("--hier-kv-profile", "@/file"),
        ],
        ["--hier-kv-profile has no effect with --hier-kv-codec lossless", "leave it out"],
    ),
    "a profile that is none": (
        ["--hier-kv-disk-dir", "@/disk", "--hier-kv-codec", "hier", "--hier-kv-profile", "@/file"],
        ["--hier-kv-profile", "@/file", "cannot be used", "`hier-kv calibrate`"],
    ),
    # What argparse itself refuses.
    "unknown rope": (["--hier-kv-rope", "post"], ["--hier-kv-rope", "'post'", "pre", "delta"]),
    "unknown policy": (["--hier-kv-write-policy", "lazy"], ["--hier-kv-write-policy", "'lazy'"]),
    "unknown prefetch": (["--hier-kv-prefetch-policy", "x"], ["--hier-kv-prefetch-policy", "'x'"]),
    "unknown io": (["--hier-kv-disk-io", "x"], ["--hier-kv-disk-io", "'x'"]),
    "unknown fsync": (["--hier-kv-disk-fsync", "x"], ["--hier-kv-disk-fsync", "'x'"]),
    "unknown tree core": (["--hier-kv-tree-core", "c"], ["--hier-kv-tree-core", "'c'"]),
    "unknown kernels": (["--hier-kv-kernels", "cuda"], ["--hier-kv-kernels", "'cuda'"]),
    "not a number": (["--hier-kv-host-size", "4GB"], ["--hier-kv-host-size", "4GB"]),
    "unknown flag": (["--hier-kv-nonsense", "1"], ["--hier-kv-nonsense"]),
}

WINDOWS: dict[str, Any] = {
    "architectures": ["GraniteSWAForCausalLM"],
    "model_type": "granite_swa",
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4,
}
WINDOW_FLAGS = {
    "in a pool of their own": [],
    "of two ranks": ["--tp-size", "2", "--hier-kv-remote-url", "file://@/windows?size=1GB"],
    "of two groups": [
        *("--tp-size", "2", "--attn-dp-size", "2"),
        *("--hier-kv-remote-url", "file://@/windows?size=1GB"),
    ],
    "of whole schedulers": ["--dp-size", "2"],
    "of prompts that may be cut": ["--hier-kv-truncation", "all"],
    "in one pool": ["--disable-hybrid-swa-memory", "--hier-kv-truncation", "overflow"],
}
# What windows in a pool of their own were not tried with.
NO_WINDOWS = {
    "a codec": (["--hier-kv-codec", "host=hier"], "a --hier-kv-codec that loses nothing"),
    "match by ranks": (
        ["--tp-size", "2", "--hier-kv-truncation", "match"],
        "--hier-kv-truncation overflow or off",
    ),
    "adapters": (["--lora-paths", "tone=@/tone"], "no --enable-lora"),
}

STATES: dict[str, dict[str, Any]] = {
    "granite": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"] * 4,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
        "mamba_n_heads": 8,
        "mamba_d_head": 64,
        "mamba_d_state": 16,
        "mamba_chunk_size": 64,
    },
    "qwen3-next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
}
# What states were not tried with.
NO_STATES = {
    "a codec": (["--hier-kv-codec", "host=hier"], "a --hier-kv-codec that loses nothing"),
    "match": (["--hier-kv-truncation", "match"], "--hier-kv-truncation overflow or off"),
    "adapters": (["--lora-paths", "tone=@/tone"], "no --enable-lora"),
    "lazy states": (
        ["--mamba-radix-cache-strategy", "extra_buffer_lazy"],
        "--mamba-radix-cache-strategy extra_buffer",
    ),
}

OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 4, "num_local_experts": 2,
    "num_experts_per_tok": 2,
}  # fmt: skip

# What SGLang only asserts of them, and what the sentence says of it.
ASSERTED_OF_STATES = {
    "an interval": (["--mamba-track-interval", "4"], "mamba_track_interval % view.page_size"),
    "a backend": (["--linear-attn-backend", "helion"], "no_buffer only supports page_size=1"),
}

TAKEN = [
    *(f"windows: {name}" for name in WINDOW_FLAGS),
    *(f"drafts: {name}" for name in (*DRAFTS_WITH, "taken: its own layer")),
    *(f"states: {name}" for name in STATES),
]
# What the sentence of each has to say. Rows of drafts are looked at before weights load; of what
# SGLang only asserts a sentence is made.
NOT_TRIED: dict[str, list[str]] = {
    f"{kind}: {name}": said
    for kind, cases in {
        "windows": {
            name: [f"{expected} with sliding-window layers", "--disable-hybrid-swa-memory"]
            for name, (_, expected) in NO_WINDOWS.items()
        },
        "drafts": {name: said for name, (_, _, said) in OTHER_ROWS.items()}
        | {
            name: [f"{expected} with --speculative-algorithm EAGLE", "leave --speculative"]
            for name, (_, expected) in NO_DRAFTS.items()
        },
        "states": {
            name: [f"{expected} with layers that have a state", "start this model without"]
            for name, (_, expected) in NO_STATES.items()
        }
        | {name: [asserted, "leave --mamba"] for name, (_, asserted) in ASSERTED_OF_STATES.items()},
    }.items()
    for name, said in cases.items()
}

# The text's part of a configuration with images.
INNER: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096,
    "max_position_embeddings": 1024,
}  # fmt: skip

# Models that are refused by their configuration, before weights load.
REFUSED_MODELS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "convolution": (
        {
            "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2",
            "layer_types": ["conv", "full_attention"] * 4,
        },
        ["states that SGLang's tree keeps behind pages", "keeps with --page-size 1 only"],
    ),
    "sparse attention": (
        {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
            "kv_lora_rank": 64, "q_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 32,
            "v_head_dim": 32, "index_topk": 64, "index_head_dim": 128, "index_n_heads": 4,
            "index_kpool": 4,
        },
        ["an index of one row a token beside latent rows", "sparse attention over another one"],
    ),
    "DeepSeek V4": (
        {
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4",
            "head_dim": 512, "qk_rope_head_dim": 64, "num_key_value_heads": 1, "q_lora_rank": 64,
            "o_lora_rank": 64, "o_groups": 2, "index_head_dim": 128, "index_n_heads": 4,
            "index_topk": 64, "compress_ratios": [0, 4, 128, 4], "sliding_window": 128,
            "num_hidden_layers": 4, "hc_mult": 4,
        },
        ["an index of one row a token beside latent rows", "sparse attention over another one"],
    ),
    "MiniMax M3": (
        {
            "architectures": ["MiniMaxM3SparseForConditionalGeneration"],
            "model_type": "minimax_m3_vl", "vision_config": {},
            "text_config": {**INNER, "architectures": ["MiniMaxM3SparseForCausalLM"],
                            "model_type": "minimax_m3"},
        },
        ["an index of one row a token beside latent rows", "sparse attention over another one"],
    ),
    "Step 3.7": (
        {
            "architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7",
            "vision_config": {},
            "text_config": {**INNER, "architectures": ["Step3p5ForCausalLM"],
                            "model_type": "step3p5", "num_attention_groups": 2,
                            "layer_types": ["full_attention", "sliding_attention"] * 2,
                            "sliding_window": 128},
        },
        ["window layers with K and V of every head beside full layers", "a model with others"],
    ),
    "cross attention": (
        {"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"},
        ["a decoder only", "a model with cross attention to an encoder"],
    ),
}  # fmt: skip

FLAG_ALONE = {
    "size": ["--hier-kv-host-size", "2"],
    "default value": ["--hier-kv-rope", "pre"],
    "folder": ["--hier-kv-disk-dir", "@/disk"],
}

Parsed = dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("refusals")
    (path / "file").write_text("not a folder")
    return path


def make_model(folder: Path, **changes: Any) -> Path:
    """A model folder with tinylm's tokenizer and another config; weights come from a dummy load."""
    folder.mkdir()
    for name in TOKENIZER_FILES:
        (folder / name).symlink_to(TINYLM / name)
    config = json.loads((TINYLM / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.fixture(scope="module")
def parsed(folder: Path) -> Parsed:
    """Every command line of this module, parsed in one process."""
    cases: dict[str, dict[str, Any]] = {}
    for name, (added, _) in REFUSED_ARGUMENTS.items():
        size = [] if "--hier-kv-host-size" in added else SMALL
        cases[name] = {"argv": [*ON, *size, *added]}
    for name, added in FLAG_ALONE.items():
        cases[f"alone: {name}"] = {"argv": [*ON[:-1], *added]}
    broken = SglangCopy(folder / "broken", "0.6.0")
    broken.rename(HOOKED)
    cases["broken"] = {"argv": [*ON, *SMALL], "sglang": str(broken.folder)}
    for number, symbol in enumerate(TWENTY):
        copy = SglangCopy(folder / f"broken-{number}", "0.6.0")
        copy.rename(symbol)
        place = {"sglang": str(copy.folder), "allow_untested": True}
        cases[f"broken: {symbol}"] = {"argv": [*ON, *SMALL], **place}
    cases["broken, off"] = {"argv": ON[:-1], "sglang": str(broken.folder)}
    later = SglangCopy(folder / "later", "0.6.0")
    later.add_statement(HOOKED)
    cases["later"] = {"argv": [*ON, *SMALL], "sglang": str(later.folder)}
    cases["off"] = {"argv": ON[:-1]}
    cases["off again"] = {"argv": ON[:-1]}
    cases["on"] = {"argv": [*ON, *SMALL]}
    cases["own page size"] = {"argv": [*ON, *SMALL, "--page-size", "32"]}
    for name, (changes, _) in REFUSED_MODELS.items():
        model = make_model(folder / name.replace(" ", "-"), **changes)
        given = ["--model-path", str(model), *DUMMY, *ON[2:], *SMALL]
        cases[f"model: {name}"] = {"argv": given, "resolve": True}
    model = make_model(folder / "windows", **WINDOWS)
    refused = {name: added for name, (added, _) in NO_WINDOWS.items()}
    for name, added in (WINDOW_FLAGS | refused).items():
        given = ["--model-path", str(model), *DUMMY, *ON[2:], *SMALL, *added]
        cases[f"windows: {name}"] = {"argv": given, "resolve": True}
    without = {name: added for name, (added, _) in NO_DRAFTS.items()}
    for name, added in (DRAFTS_WITH | without).items():
        given = ["--model-path", str(TINYLM), *DUMMY, *ON[2:], *SMALL, *EAGLE, *added]
        cases[f"drafts: {name}"] = {"argv": given, "resolve": True}
    for name, (added, *_) in BRANCHES.items():
        given = ["--model-path", str(TINYLM), *DUMMY, *ON[2:], *SMALL, *added]
        cases[f"branches: {name}"] = {"argv": given, "resolve": True}
    own = ["--speculative-algorithm", "NEXTN", *DRAFTS]
    for name, (model, added) in {
        "taken: its own layer": (make_model(folder / "latent", **LATENT), own),
        **{name: (folder / of, added) for name, (of, added, _) in OTHER_ROWS.items()},
    }.items():
        given = ["--model-path", str(model), *DUMMY, *ON[2:], *SMALL, *added]
        cases[f"drafts: {name}"] = {"argv": given, "resolve": True}
    make_model(folder / "half", torch_dtype="float16", dtype="float16")
    make_model(folder / "oss", **OSS)
    for name, model in {"K and V": TINYLM, "latent rows": folder / "latent"}.items():
        given = ["--model-path", str(model), *DUMMY, *ON[2:], *SMALL]
        head_by_head = {"SGLANG_USE_HND_KVCACHE": "1"}
        cases[f"head by head: {name}"] = {"argv": given, "resolve": True, "env": head_by_head}
    for name, changes in STATES.items():
        model = make_model(folder / f"states-{name}", **changes)
        given = ["--model-path", str(model), *DUMMY, *ON[2:], *SMALL]
        cases[f"states: {name}"] = {"argv": given, "resolve": True}
        not_states = NO_STATES | ASSERTED_OF_STATES if name == "granite" else {}
        for what, (added, _) in not_states.items():
            cases[f"states: {what}"] = {"argv": [*given, *added], "resolve": True}
    for number, start in enumerate(starts()):
        cases[f"shown: {number}"] = {"argv": as_here(start.words, folder)}
    text = json.dumps(list(cases.values())).replace("@/", f"{folder}/")
    probe = ROOT / "tests" / "e2e" / "start" / "parse_probe.py"
    done = run_script(probe, stdin=text, fork=not FACTOR)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True))


def as_here(words: Sequence[str], folder: Path) -> list[str]:
    """A start that a page shows, with what is here in the place of what it names."""
    for name in ("key", "secret"):
        (folder / name).write_text("x" * 64)
        (folder / name).chmod(0o600)
    (folder / "quotas").write_text("cache_salt:acme=0.3")
    stand_ins = {
        **dict.fromkeys(("M", "/models/llama-8b"), str(TINYLM)),
        **dict.fromkeys(("/nvme/kv", "/kv"), str(folder / "kv")),
        "/etc/hier-kv.key": str(folder / "key"),
        # Not from the root, as what begins with "@/" is a place in `folder`.
        "@/etc/hier-kv.quotas": f"@{os.path.relpath(folder / 'quotas', ROOT)}",
        "P": "pythonic",
        "A:5000": "127.0.0.1:5000",
        "$port": "30000",
    }
    given = [stand_ins.get(word, word) for word in words if word != "&"]
    given = [word.replace("/etc/kv-secret", str(folder / "secret")) for word in given]
    if words[0].startswith("--hier-kv-"):  # flags alone, to be added to others
        given += ["--enable-hier-kv", "--hier-kv-remote-url", "redis://cache:6379"]
    if "--model-path" not in words:
        given += ["--model-path", str(TINYLM)]
    if "--hier-kv-host-size" in given:  # of a larger machine
        given[given.index("--hier-kv-host-size") + 1] = SMALL[-1]
    elif "--enable-hier-kv" in given:
        given += SMALL
    return [*given, "--device", "cpu"]


def assert_one_sentence(text: str, expected: list[str], folder: Path) -> None:
    """The plugin's part of an error output is one sentence with what is expected in it."""
    for words in expected:
        assert words.replace("@", str(folder)) in text, text
    assert "Traceback" not in text
    ours = text[text.find("sglang-hier-kv: ") :] if "sglang-hier-kv: " in text else text
    ours = ours.replace(str(folder), "")
    assert len(ours.strip().splitlines()[-1]) <= SENTENCE_CHARS


def assert_refused(result: dict[str, Any], expected: list[str], folder: Path) -> None:
    """A start ended by the plugin, with that."""
    assert result.get("exit") == 1, result
    assert_one_sentence(result["stderr"], expected, folder)


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_is_refused_with_one_sentence(parsed: Parsed, folder: Path, name: str) -> None:
    result = parsed[name]
    assert result.get("exit") in (1, 2), result
    assert_one_sentence(result["stderr"], REFUSED_ARGUMENTS[name][1], folder)
    assert "hunter2" not in result["stderr"]
    if result["exit"] == 1:  # ours; argparse ends with 2
        sentence = result["stderr"].strip().splitlines()[-1]
        assert sentence.startswith("sglang-hier-kv: "), sentence
        assert sentence.endswith(".")


@pytest.mark.parametrize("number", range(len(starts())))
def test_what_the_documents_show_is_taken(parsed: Parsed, number: int) -> None:
    start, result = starts()[number], parsed[f"shown: {number}"]
    assert "args" in result, (start, result)
    is_plain = "--enable-cache-report" in start.words  # what SGLang has without the plugin
    assert bool(result["hier_kv"]) != is_plain, start


@pytest.mark.parametrize("name", REFUSED_MODELS)
def test_a_model_is_refused_before_its_weights_load(
    parsed: Parsed, folder: Path, name: str
) -> None:
    result = parsed[f"model: {name}"]
    assert_refused(result, REFUSED_MODELS[name][1], folder)
    assert result["stderr"].endswith("start this model without --enable-hier-kv.")


@pytest.mark.parametrize("name", TAKEN)
def test_what_was_tried_is_taken(parsed: Parsed, name: str) -> None:
    assert parsed[name].get("hier_kv"), parsed[name]


@pytest.mark.parametrize("name", NOT_TRIED)
def test_what_was_not_tried_is_refused(parsed: Parsed, folder: Path, name: str) -> None:
    assert_refused(parsed[name], NOT_TRIED[name], folder)


def test_k_and_v_head_by_head_are_refused_where_sglang_keeps_them_so(
    parsed: Parsed, folder: Path
) -> None:
    result = parsed["head by head: K and V"]
    expected = ["side by side (NHD)", "got SGLANG_USE_HND_KVCACHE=1", "unset that variable"]
    assert_refused(result, expected, folder)
    assert parsed["head by head: latent rows"].get("hier_kv")


@pytest.mark.parametrize("name", BRANCHES)
def test_guesses_that_branch_are_refused_in_a_sentence(
    parsed: Parsed, folder: Path, name: str
) -> None:
    _, flag, found = BRANCHES[name]
    expected = [f"{flag} with --speculative-algorithm {name}", found, "leave --speculative"]
    assert_refused(parsed[f"branches: {name}"], expected, folder)


@pytest.mark.parametrize("name", FLAG_ALONE)
def test_a_flag_without_the_switch_is_refused(parsed: Parsed, folder: Path, name: str) -> None:
    result = parsed[f"alone: {name}"]
    expected = [FLAG_ALONE[name][0], "without --enable-hier-kv", "add --enable-hier-kv or remove"]
    assert_refused(result, expected, folder)


def test_another_sglang_is_refused_only_where_it_breaks_what_is_used(
    parsed: Parsed, folder: Path
) -> None:
    result = parsed["broken"]
    expected = ["as in 0.5.23", f"SGLang 0.6.0 {HOOKED} is missing", "install sglang==0.5.23"]
    assert_refused(result, expected, folder)
    assert "args" in parsed["broken, off"]
    assert "args" in parsed["later"]


@pytest.mark.parametrize("symbol", TWENTY, ids=str)
def test_each_of_twenty_names_that_is_gone_ends_the_start_whatever_was_allowed(
    parsed: Parsed, folder: Path, symbol: Symbol
) -> None:
    result = parsed[f"broken: {symbol}"]
    expected = [f"SGLang 0.6.0 {symbol} is missing", "install sglang==0.5.23"]
    assert_refused(result, expected, folder)


def test_the_switch_changes_three_arguments_and_no_switch_changes_none(parsed: Parsed) -> None:
    off, on = parsed["off"]["args"], parsed["on"]["args"]
    random = {name for name in off if off[name] != parsed["off again"]["args"][name]}
    changed = {name for name in off if off[name] != on[name]} - random
    assert changed == {"page_size", "radix_cache_backend", "enable_cache_report"}
    assert parsed["off"]["hier_kv"] is None
    assert on["page_size"] == "64"
    assert parsed["on"]["hier_kv"]["host_size"] == 0.05
    assert parsed["own page size"]["args"]["page_size"] == "32"


# ---- with the real server ------------------------------------------------------------------------


def start_fails(
    args: list[str], log: Path, model: Path | None = TINYLM, env: Mapping[str, str] | None = None
) -> tuple[str, int]:
    """Starts a server that must not start: its log and exit code."""
    return end_of(Server(args, model=model, log_path=log, start_timeout_s=300, env=env).start())


def end_of(server: Server) -> tuple[str, int]:
    """Waits for the end of a server that was started and must not come up: its log, exit code."""
    try:
        with pytest.raises(ServerError, match="ended with") as caught:
            server.wait_ready()
    finally:
        server.kill()
    code = int(str(caught.value).partition("ended with ")[2].split()[0])
    assert not server.tree(), "processes stayed behind"
    return server.log(), code


def sentences(log: str) -> list[str]:
    """Lines of a log that carry an error of the plugin."""
    lines = [line for line in log.splitlines() if "HierKVConfigError: " in line]
    lines = [line.partition("HierKVConfigError: ")[2] for line in lines]
    return lines or [line for line in log.splitlines() if line.startswith("sglang-hier-kv: ")]


def test_a_refused_argument_ends_the_real_command(tmp_path: Path) -> None:
    args = ["--enable-hier-kv", *SMALL, "--disable-radix-cache"]
    log, code = start_fails(args, tmp_path / "server.log")
    assert code == 1
    found = sentences(log)
    assert len(found) == 1
    assert "--disable-radix-cache" in found[0]
    assert "Traceback" not in log


def test_a_sliding_window_model_is_refused_with_a_codec_that_loses_something(
    tmp_path: Path,
) -> None:
    model = make_model(tmp_path / "model", **WINDOWS)
    args = ["--enable-hier-kv", *SMALL, "--load-format", "dummy", "--max-total-tokens", "4096"]
    args += ["--hier-kv-codec", "host=hier"]
    log, code = start_fails(args, tmp_path / "server.log", model)
    assert code != 0
    found = sentences(log)
    assert found, log[-4000:]
    assert "a --hier-kv-codec that loses nothing with sliding-window layers" in found[-1]
    assert "--disable-hybrid-swa-memory" in found[-1]
    assert "Load weight" not in log


def test_heads_that_data_parallel_attention_does_not_spread_are_refused_before_weights_load(
    tmp_path: Path,
) -> None:
    model = make_model(
        tmp_path / "model", architectures=["Starcoder2ForCausalLM"], model_type="starcoder2",
        use_bias=True, norm_epsilon=1e-5, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    args = ["--enable-hier-kv", *SMALL, "--load-format", "dummy", "--max-total-tokens", "4096"]
    args += ["--tp-size", "2", "--attn-dp-size", "2"]
    log, code = start_fails(args, tmp_path / "server.log", model, ENVIRONMENT)
    assert code != 0
    found = sentences(log)
    assert found, log[-4000:]
    assert (
        "SGLang runs data parallel attention with (4 query heads a rank), got one with 2"
        in (found[-1])
    )
    assert "Load weight end" not in log


def test_dram_without_room_for_two_pages_is_refused_before_weights_load(tmp_path: Path) -> None:
    args = ["--enable-hier-kv", "--hier-kv-host-size", "0.0004", "--max-total-tokens", "4096"]
    log, code = start_fails(args, tmp_path / "server.log")
    assert code != 0
    assert sentences(log), log[-4000:]
    assert f"must hold at least 2 pages of {SLOT_BYTES} bytes a rank" in sentences(log)[-1]
    assert "got 0.0004 GiB; give a larger size" in sentences(log)[-1]
    assert "Load weight end" not in log


def test_a_profile_of_another_model_is_refused_before_weights_load(tmp_path: Path) -> None:
    values = np.random.default_rng(5).normal(size=(4, 600, 32)).astype(np.float32)
    options = CalibrationOptions(max_block_channels=16)
    planes = float_to_bits(values, "bf16")
    profile = profile_from_planes([planes], "bf16", head_dim=16, options=options)
    profile.save(tmp_path / "other.hkp")
    args = ["--enable-hier-kv", *SMALL, "--hier-kv-disk-dir", str(tmp_path / "disk")]
    args += ["--hier-kv-codec", "hier", "--hier-kv-profile", str(tmp_path / "other.hkp")]
    log, code = start_fails([*args, "--max-total-tokens", "4096"], tmp_path / "server.log")
    assert code != 0
    assert sentences(log), log[-4000:]
    assert "--hier-kv-codec hier: " in sentences(log)[-1]
    assert "Load weight end" not in log


def test_a_disk_too_small_for_two_segments_is_refused(tmp_path: Path) -> None:
    args = ["--enable-hier-kv", *SMALL, "--hier-kv-disk-dir", str(tmp_path / "disk")]
    log, code = start_fails([*args, "--hier-kv-disk-size", "0.001"], tmp_path / "server.log")
    assert code != 0
    found = sentences(log)
    assert found, log[-4000:]
    assert "at least" in found[-1]
    assert "two segments" in found[-1] or "two small segments" in found[-1]


class Full(NamedTuple):
    """A server whose disk folder lies on a file system below its free-space floor.

    Attributes:
        server: it.
        folder: with the disk's, and logs.
        second: started over the same disk folder; it waits 10 s for the first to end, and ends.
    """

    server: Server
    folder: Path
    second: Server


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Full]:
    """The second server waits while the first one serves."""
    folder = tmp_path_factory.mktemp("floor")
    (folder / "other files").write_bytes(os.urandom(4 << 20))  # or a new file system may be empty
    status = os.statvfs(folder)
    # All of it but less than that, as what is all of it is refused at start.
    floor_gb = (status.f_frsize * status.f_blocks - (2 << 20)) / (1 << 30)
    args = [*hier_args(folder, host_pages=60), "--max-total-tokens", "8192"]
    args += ["--hier-kv-disk-free-floor", f"{floor_gb:.4f}"]
    with Server(args, log_path=folder / "server.log", stop="kill") as server:
        args = ["--enable-hier-kv", *SMALL, "--hier-kv-disk-dir", str(folder / "disk")]
        args += ["--max-total-tokens", "4096"]
        second = Server(args, log_path=folder / "second.log", stop="kill", start_timeout_s=300)
        try:
            yield Full(server, folder, second.start())
        finally:
            second.kill()


def churn(server: Server) -> dict[str, Any]:
    """Serves more pages than DRAM holds, each prompt twice; all must be answered."""
    prompts = list(real_prompts([900] * 12, seed=3))
    for prompt in prompts:
        answer = ask(server, prompt)
        settled(server)  # or the next one's pages might find no room in DRAM
        flush_device(server)
        again = ask(server, prompt)
        assert by_tier(again)["host"] == 896
        assert answers_as_computed(again, answer)
    found = settled(server)
    # The oldest prompt has left DRAM; whether or not the disk has it, the answer is right.
    flush_device(server)
    assert len(ask(server, prompts[0])["output_ids"]) == NUM_TOKENS
    return found


def test_below_the_free_space_floor_it_serves_and_counts(full: Full) -> None:
    found = churn(full.server)
    assert found["disk"]["dropped"]["full"] > 0
    assert found["disk"]["records_written"] == 0
    assert found["host"]["evicted_pages"] > 0, "DRAM must not fill with pages the disk refuses"
    assert found["host"].get("save_dropped_pages", 0) == 0
    assert found["host"]["host_pages"] <= 60
    assert not list((full.folder / "disk").rglob("seg-*"))


def test_a_folder_of_another_live_server_is_refused(full: Full) -> None:
    server = full.server
    log, code = end_of(full.second)
    assert code != 0
    found = sentences(log)
    assert found, log[-4000:]
    assert f"in use by process {server.scheduler_pid}" in found[-1]
    assert "folder of its own" in found[-1]
    assert "Traceback" not in log, "it is seen before the model is loaded"
    assert len(ask(server, [5] * 100)["output_ids"]) == NUM_TOKENS  # the first one goes on


def test_a_full_disk_tier_serves_and_gives_places_to_new_pages(tmp_path: Path) -> None:
    num_pages = 60
    args = hier_args(tmp_path, host_pages=60, disk_gb=num_pages * SLOT_BYTES / (1 << 30))
    args += ["--max-total-tokens", "8192", "--hier-kv-write-policy", "write_through"]
    with Server(args, log_path=tmp_path / "server.log", stop="kill") as server:
        found = churn(server)
        assert found["disk"]["records_written"] > num_pages
        assert found["disk"]["segments_reused"] > 0
        assert found["disk"]["used_bytes"] <= found["disk"]["max_bytes"]
        size = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.hkv"))
        assert size <= num_pages * SLOT_BYTES + PAGE
