"""Models that are more than the ones of the neighbouring tests, on the real server.

Each has one server with the plugin, which is also the reference: nothing of the plugin acts on a
device hit. Another one is started on the disk, or the store, that the first left when it was
killed.

By default those run that no other file has, one in fp8, and gpt-oss; the long form has all of
`KINDS`, on two ranks, too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from testkit.hybrids.chunk_model import (
    CHUNK,
    NUM_FULL_LAYERS,
    open_chunk_model,
    write_chunk_model,
)
from testkit.hybrids.gemma_model import HEAD_DIM as GEMMA_HEAD_DIM
from testkit.hybrids.gemma_model import KV_HEADS as GEMMA_KV_HEADS
from testkit.hybrids.gemma_model import NUM_LAYERS as NUM_GEMMA_LAYERS
from testkit.hybrids.gemma_model import open_gemma_model, write_gemma_model
from testkit.hybrids.image_model import IMAGE_MODEL, write_image_model
from testkit.hybrids.oss_model import ARCHITECTURE as OSS
from testkit.hybrids.oss_model import HEAD_DIM as OSS_HEAD_DIM
from testkit.hybrids.oss_model import KV_HEADS as OSS_KV_HEADS
from testkit.hybrids.oss_model import NUM_FULL_LAYERS as NUM_FULL_OSS_LAYERS
from testkit.hybrids.oss_model import open_oss_model, write_oss_model
from testkit.hybrids.shaped_models import SHAPED_MODELS, write_shaped_model
from testkit.hybrids.state_model import STATE_MODELS, write_state_model
from testkit.hybrids.step_model import (
    HEAD_DIM,
    KV_HEADS,
    OpenStepModel,
    write_step_model,
)
from testkit.hybrids.step_model import NUM_FULL_LAYERS as NUM_FULL_STEP_LAYERS
from testkit.rank_requests import ENVIRONMENT, JITTER_MS
from testkit.server import Server
from testkit.slow import ENV_JITTER
from tests.e2e.hier_server import GIB, connected, real_prompts, settled, tokens_and_logprobs
from tests.e2e.models.hybrid_answers import (
    Computed,
    answers,
    cached,
    check_hits,
    drop_device,
    talk,
    two_chats,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PAGE, HEADER_BYTES = 64, 4096
LENGTHS = [40, 130, 320, 702, 1000]  # the answer to one fills its page
ANSWER = 3
BASE = ["--page-size", str(PAGE), "--attention-backend", "cpu_extend"]
BASE += ["--chunked-prefill-size", "256", "--max-running-requests", "6"]
BASE += ["--enable-hier-kv", "--hier-kv-prefetch-policy", "timeout"]
BASE += ["--hier-kv-prefetch-timeout-ms", "60000"]


@dataclass(frozen=True)
class Kind:
    """A model.

    Attributes:
        write: writes it into a new folder.
        open: the same weights without SGLang.
        page_bytes: K and V of a page, on each rank.
        tolerance: how far rounding takes a log-probability; another KV takes it to 1 and more.
        log: what SGLang says of it; without, the test is of something else.
        args: of its servers.
        env: of its servers.
        num_ranks: tensor parallel ones.
        tier: below DRAM: `disk`, or `remote` in its place.
    """

    write: Callable[[Path], Path]
    open: Callable[[Path], Any]
    page_bytes: int
    tolerance: float
    log: str
    args: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    num_ranks: int = 1
    tier: str = "disk"


def _of_two_shapes(name: str, tolerance: float, *args: str) -> Kind:
    """Window layers with K and V of another shape than the full layers', in float32."""
    model = SHAPED_MODELS[name]
    return Kind(
        partial(write_shaped_model, name=name), model.open, model.full_values * PAGE * 4, tolerance,
        f"architectures=['{model.class_name}']", ["--dtype", "float32", *args],
    )  # fmt: skip


def _with_states(name: str, tier: str, *args: str) -> Kind:
    """Layers with a state a sequence."""
    model = STATE_MODELS[name]
    return Kind(
        partial(write_state_model, name=name), model.open, model.page_bytes, 5e-4,
        model.class_name,
        ["--dtype", model.dtype_name, "--max-mamba-cache-size", "100", *model.server_args, *args],
        {"SGLANG_MAMBA_CONV_DTYPE": model.dtype_name}, tier=tier,
    )  # fmt: skip


KINDS = {
    "gpt-oss": Kind(
        write_oss_model, open_oss_model,
        NUM_FULL_OSS_LAYERS * 2 * PAGE * OSS_KV_HEADS * OSS_HEAD_DIM * 2, 0.2,
        f"architectures=['{OSS}']",
    ),
    "windows-in-one-pool": Kind(
        write_gemma_model, open_gemma_model,
        NUM_GEMMA_LAYERS * 2 * PAGE * GEMMA_KV_HEADS * GEMMA_HEAD_DIM * 2, 0.25,
        f"the rotation of {NUM_GEMMA_LAYERS} of {NUM_GEMMA_LAYERS} layers is understood",
    ),
    "chunks": Kind(
        write_chunk_model, open_chunk_model, NUM_FULL_LAYERS * 2 * PAGE * 2 * 32 * 2, 0.25,
        f"Setting sliding_window_size to be attention_chunk_size: {CHUNK}",
    ),
    "more-query-heads": Kind(
        write_step_model, OpenStepModel,
        NUM_FULL_STEP_LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 4, 5e-4,
        "architectures=['Step3p5ForCausalLM']", ["--dtype", "float32", "--trust-remote-code"],
    ),
    "states-with-images": Kind(
        write_image_model, IMAGE_MODEL.open, IMAGE_MODEL.page_bytes, 5e-4,
        "type=Qwen3_5MoeForConditionalGeneration",
        ["--dtype", IMAGE_MODEL.dtype_name, "--max-mamba-cache-size", "100"],
        {"SGLANG_MAMBA_CONV_DTYPE": IMAGE_MODEL.dtype_name},
    ),
    "states-in-a-store": _with_states("qwen3_next", "remote"),
    "states-in-a-coded-store": _with_states(
        "qwen3_next", "remote", "--hier-kv-codec", "remote=lossless"
    ),
    "states-beside-latent-rows-in-a-store": _with_states("kimi_linear", "remote"),
    "two-shapes-gemma": _of_two_shapes("gemma", 5e-3),
    "two-shapes-mimo": _of_two_shapes("mimo", 5e-4, "--trust-remote-code"),
}  # fmt: skip


def _on_two_ranks(kind: Kind, tier: str) -> Kind:
    """With stores that are late, each by its own chance, and SGLang checking what ranks decide."""
    args = [*kind.args, "--tp-size", "2"]
    env = {**kind.env, **ENVIRONMENT, ENV_JITTER: str(JITTER_MS)}
    page_bytes = kind.page_bytes // 2
    return replace(kind, args=args, env=env, page_bytes=page_bytes, num_ranks=2, tier=tier)


def _in_fp8(kind: Kind, tolerance: float, dtype: str = "fp8_e4m3") -> Kind:
    """With pools of one byte a value, of which the model without SGLang knows nothing."""
    value_bytes = 4 if "float32" in kind.args else 2
    args = [*kind.args, "--kv-cache-dtype", dtype]
    return replace(kind, args=args, page_bytes=kind.page_bytes // value_bytes, tolerance=tolerance)


KINDS |= {
    "full-in-fp8": replace(
        _in_fp8(KINDS["windows-in-one-pool"], 1.5),
        log="K in 8 bits was rounded behind its rotation",
    ),
    "windows-and-sinks-in-fp8": _in_fp8(KINDS["gpt-oss"], 0.8),
    "states-in-fp8-in-a-coded-store": _in_fp8(KINDS["states-in-a-coded-store"], 0.5),
    "states-beside-latent-rows-in-fp8": _in_fp8(_with_states("kimi_linear", "disk"), 0.5),
    "two-shapes-in-fp8": _in_fp8(KINDS["two-shapes-mimo"], 0.5),
    # Of two bits of mantissa.
    "windows-and-sinks-in-e5m2": _in_fp8(KINDS["gpt-oss"], 1.5, "fp8_e5m2"),
    "states-beside-latent-rows-in-e5m2": _in_fp8(
        _with_states("kimi_linear", "disk"), 1.0, "fp8_e5m2"
    ),
}
KINDS |= {
    f"{name}-in-a-store": replace(KINDS[name], tier="remote")
    for name in ("gpt-oss", "chunks", "windows-in-one-pool")
}
KINDS |= {
    f"{name}-on-two-ranks": _on_two_ranks(KINDS[name], "disk")
    for name in ("full-in-fp8", "windows-and-sinks-in-fp8", "two-shapes-in-fp8")
}
KINDS["gpt-oss-on-two-ranks"] = _on_two_ranks(KINDS["gpt-oss"], "disk")
KINDS |= {
    f"two-shapes-{name}-on-two-ranks": _on_two_ranks(KINDS[f"two-shapes-{name}"], tier)
    for name, tier in (("gemma", "disk"), ("mimo", "remote"))
}


def server_of(kind: Kind, model: Path, folder: Path, *, host_pages: int) -> Server:
    """A server with DRAM for that many pages a rank, and a disk or a store."""
    slot_bytes = kind.page_bytes + HEADER_BYTES
    host_gib = kind.num_ranks * (host_pages + 0.5) * slot_bytes / GIB
    args = [*BASE, *kind.args, "--max-total-tokens", "8192"]
    args += ["--hier-kv-host-size", f"{host_gib:.9f}"]
    if kind.tier == "disk":
        args += ["--hier-kv-disk-dir", str(folder / "disk"), "--hier-kv-disk-size", "0.5"]
        args += ["--hier-kv-disk-segment-size", "0.01"]
    else:
        (folder / "shared").mkdir(exist_ok=True)
        args += ["--hier-kv-remote-url", f"file://{folder / 'shared'}?size=1GB"]
    log = folder / "server.log"
    return Server(args, model=model, log_path=log, env=kind.env, stop="kill", start_timeout_s=300)


@pytest.mark.sampled("gpt-oss", "chunks", "two-shapes-mimo", "states-beside-latent-rows-in-fp8")
@pytest.mark.parametrize("name", KINDS)
def test_a_hit_from_every_tier_is_what_the_device_would_have_given(
    name: str, tmp_path: Path
) -> None:
    kind = KINDS[name]
    model = kind.write(tmp_path / "model")
    prompts = list(real_prompts(LENGTHS, seed=3))
    with server_of(kind, model, tmp_path, host_pages=600) as server:
        assert kind.log in server.log()
        connected(server)
        first, repeat = answers(server, prompts), answers(server, prompts)
        assert cached(first) == [0] * len(LENGTHS)
        drop_device(server)
        check_hits(answers(server, prompts), repeat, "host", above=30 * PAGE)
        # The first answers fill a page, with a token that is not the last one.
        chats = two_chats(3 * PAGE + 20, 171)
        on_device = talk(server, chats, lambda: None, ANSWER, cache_salt="device")
        restored = talk(server, chats, lambda: drop_device(server), ANSWER, cache_salt="tiers")
        settled(server)
    ours, theirs = sum(cached(restored)), sum(cached(on_device))
    assert ours >= 0.95 * theirs, (cached(restored), cached(on_device))
    for a, b in zip(restored, on_device, strict=True):
        assert a["output_ids"] == b["output_ids"]
        assert cached([a]) != cached([b]) or tokens_and_logprobs(a) == tokens_and_logprobs(b)
    # After a kill -9, with little room.
    with server_of(kind, model, tmp_path, host_pages=120) as server:
        connected(server)
        check_hits(answers(server, prompts), repeat, kind.tier, above=30 * PAGE)
    opened = kind.open(model)
    by_transformers = Computed(lambda tokens: opened(input_ids=tokens).logits[0])
    assert by_transformers.furthest([*prompts, *prompts], [*first, *repeat]) < kind.tolerance
