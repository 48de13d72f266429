"""What is believed of a layer's rotary embedding, and what is proven before it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.device.pools import DevicePool  # noqa: E402
from sglang_ext.device.rope_discovery import (  # noqa: E402
    LayerRope,
    discover_ropes,
    refresh_spec,
    rope_digest,
)
from sglang_ext.kernels.rope import RopeSpec, naive  # noqa: E402
from sglang_ext.seam import self_check  # noqa: E402
from sglang_ext.seam.self_check import _without_sinks, check_layers  # noqa: E402

HEADS, DIM, TOKENS = 2, 32, 64


def make_pool(layers: int = 1, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> DevicePool:
    k = tuple(torch.zeros(128, HEADS, dim, dtype=dtype) for _ in range(layers))
    return DevicePool("mha", dtype, k, k, 0, 128)


def table(max_pos: int = 512, width: int = DIM, base: float = 10_000.0) -> torch.Tensor:
    freq = base ** (-torch.arange(0, width, 2) / width)
    angles = torch.arange(max_pos)[:, None] * freq[None]
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class Rotary(torch.nn.Module):
    """A rotary embedding as SGLang has it, in eager PyTorch."""

    def __init__(
        self, width: int = DIM, *, neox: bool = True, says_neox: bool | None = None, first: int = 0
    ) -> None:
        super().__init__()
        self.rotary_dim = width
        self.is_neox_style = neox if says_neox is None else says_neox
        self.head_size = DIM
        self._neox, self._first = neox, first
        self.register_buffer("cos_sin_cache", table(width=width), persistent=False)

    def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
        return self._rotate(positions, q), self._rotate(positions, k)

    cos_sin_cache: torch.Tensor

    def _rotate(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        cos, sin = self.cos_sin_cache[positions].to(x.dtype).chunk(2, dim=-1)
        heads = x.reshape(x.shape[0], -1, self.head_size).clone()
        cos, sin = cos[:, None], sin[:, None]
        part = heads[..., self._first : self._first + self.rotary_dim]
        a, b = part.chunk(2, -1) if self._neox else (part[..., ::2], part[..., 1::2])
        both = (a * cos - b * sin, b * cos + a * sin)
        joined = torch.cat(both, -1) if self._neox else torch.stack(both, -1).flatten(-2)
        heads[..., self._first : self._first + self.rotary_dim] = joined
        return heads.reshape(x.shape)


class MRotaryEmbedding(Rotary):
    """A name that says positions are not indexes."""


class RadixAttention(torch.nn.Module):
    def __init__(self, layer_id: int, cross: bool = False) -> None:
        super().__init__()
        self.layer_id, self.is_cross_attention = layer_id, cross


class Attention(torch.nn.Module):
    def __init__(self, layer: int, rotary: Any, name: str = "rotary_emb") -> None:
        super().__init__()
        self.attn = RadixAttention(layer)
        if rotary is not None:
            setattr(self, name, rotary)


def model(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.ModuleList(layers)


@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gpt-j"])
@pytest.mark.parametrize("width", [DIM, DIM // 2], ids=["whole", "partial"])
@pytest.mark.parametrize("name", ["rotary_emb", "rotary_pos_emb"])
def test_it_is_read_from_the_module(neox: bool, width: int, name: str) -> None:
    module = Rotary(width, neox=neox)
    (rope,) = discover_ropes(model(Attention(0, module, name)), make_pool())
    assert rope.movable
    assert rope.spec is not None
    assert (rope.spec.rotary_dim, rope.spec.interleaved, rope.spec.first) == (width, not neox, 0)


@pytest.mark.parametrize("neox", [True, False])
def test_a_wrong_pairing_is_not_believed(neox: bool) -> None:
    (rope,) = discover_ropes(
        model(Attention(0, Rotary(neox=neox, says_neox=not neox))), make_pool()
    )
    assert not rope.movable
    assert rope.spec is None
    assert "no rounding rule reproduces" in rope.reason


def test_a_wrong_first_column_is_not_believed() -> None:
    (rope,) = discover_ropes(model(Attention(0, Rotary(DIM // 2, first=8))), make_pool())
    assert not rope.movable
    assert "no rounding rule reproduces" in rope.reason


def test_a_table_that_is_not_the_one_applied_is_not_believed() -> None:
    class Hidden(Rotary):
        def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            return super().forward(positions + 1, q, k)

    (rope,) = discover_ropes(model(Attention(0, Hidden())), make_pool())
    assert not rope.movable


def test_a_module_that_cannot_be_run_or_says_too_little() -> None:
    class Broken(Rotary):
        def forward(self, *args: Any) -> Any:
            raise RuntimeError("needs a batch")

    bare = torch.nn.Linear(1, 1)
    ropes = discover_ropes(
        model(Attention(0, Broken()), Attention(1, bare), Attention(2, MRotaryEmbedding())),
        make_pool(3),
    )
    assert [rope.movable for rope in ropes] == [False] * 3
    assert "could not be run on its own: needs a batch" in ropes[0].reason
    assert "Linear has no cos_sin_cache" in ropes[1].reason
    assert "not a function of the token's index alone" in ropes[2].reason


def test_layers_without_rotation_and_layers_without_attention() -> None:
    shared = Rotary()
    ropes = discover_ropes(
        model(Attention(0, shared), Attention(1, None), Attention(3, shared)), make_pool(4)
    )
    assert [rope.movable for rope in ropes] == [True, True, False, True]
    assert ropes[1].spec is None
    assert "no attention module" in ropes[2].reason
    assert ropes[0].spec is ropes[3].spec  # one table, one spec


def test_a_model_without_any_rotation_has_its_positions_elsewhere() -> None:
    ropes = discover_ropes(model(Attention(0, None), Attention(1, None)), make_pool(2))
    assert [rope.movable for rope in ropes] == [False, False]
    assert "no layer of the model has a rotary embedding" in ropes[0].reason


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_rotary_part_of_an_mla_row(interleaved: bool) -> None:
    """DeepSeek calls its module with `[T, H, rope]` tensors; only the last columns are rotated."""
    latent, width = 48, 16

    class Latent(Rotary):
        def forward(self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> Any:
            assert q.shape == k.shape == (len(positions), 1, width)
            return super().forward(positions, q, k)

    module = Latent(width, neox=not interleaved)
    module.head_size = width
    rows = torch.zeros(128, 1, latent + width, dtype=torch.bfloat16)
    pool = DevicePool("mla", torch.bfloat16, (rows,), (), latent, 128)
    (rope,) = discover_ropes(model(Attention(0, module)), pool)
    assert rope.movable
    assert rope.spec is not None
    assert (rope.spec.first, rope.spec.rotary_dim) == (latent, width)
    assert rope.spec.interleaved == interleaved
    # And the self-check on what such a layer writes.
    plain = torch.randn(1, 1, latent + width).to(torch.bfloat16).expand(TOKENS, -1, -1)
    rows[:TOKENS] = naive.rotate(plain.contiguous(), np.arange(TOKENS), rope.spec)
    assert check_layers(pool, [rope], np.arange(TOKENS)) == {}
    wrong = RopeSpec(rope.spec.cos, rope.spec.sin, width, 0, interleaved, rope.spec.rule)
    assert list(check_layers(pool, [LayerRope(wrong, movable=True)], np.arange(TOKENS))) == [0]


def test_the_rotation_of_an_fp8_pool_is_not_taken_back() -> None:
    (rope,) = discover_ropes(model(Attention(0, Rotary())), make_pool(dtype=torch.uint8))
    assert not rope.movable
    assert "K in 8 bits" in rope.reason


def test_a_table_that_grows_is_read_again_and_keeps_the_digest() -> None:
    module = Rotary()
    module.cos_sin_cache = table(1024)
    (rope,) = discover_ropes(model(Attention(0, module)), make_pool())
    before = rope_digest([rope], "pre")
    module.cos_sin_cache = table(4096)
    spec = refresh_spec(rope)
    assert spec is not None
    assert spec.max_pos == 4096
    assert rope_digest([rope], "pre") == before


def test_the_digest_tells_tables_pairings_rules_and_modes_apart() -> None:
    def rope(**changes: Any) -> LayerRope:
        cos, sin = table(base=changes.pop("base", 1e4)).chunk(2, -1)
        fields = {"rotary_dim": DIM, "first": 0, "interleaved": False, "rule": "eager", **changes}
        spec = RopeSpec(
            np.ascontiguousarray(cos.numpy()), np.ascontiguousarray(sin.numpy()), **fields
        )
        return LayerRope(spec, movable=True)

    cases = [
        ([rope()], "pre"), ([rope()], "delta"), ([rope(base=5e5)], "pre"),
        ([rope(interleaved=True)], "pre"), ([rope(rule="fp32")], "pre"),
        ([LayerRope(None, movable=True)], "pre"), ([LayerRope(None, movable=False)], "pre"),
        ([rope(), rope()], "pre"), ([rope(), LayerRope(None, movable=True)], "pre"),
    ]  # fmt: skip
    assert len({rope_digest(ropes, mode) for ropes, mode in cases}) == len(cases)
    assert rope_digest([rope()], "pre") == rope_digest([rope()], "pre")


def test_the_digest_of_bound_pages_tells_tables_apart() -> None:
    """Also those of K that nobody takes the rotation from."""

    def digest(base: float, length: int = 2048) -> bytes:
        module = Rotary()
        module.cos_sin_cache = table(length, base=base)
        ropes = discover_ropes(model(Attention(0, module)), make_pool(dtype=torch.uint8))
        assert [rope.movable for rope in ropes] == [False]
        return rope_digest(ropes, "pre")

    assert digest(1e4) == digest(1e4) == digest(1e4, length=4096)
    assert digest(1e4) != digest(5e5)


def test_the_digest_does_not_tell_which_layer_binds_the_pages() -> None:
    """The self-check may bind another one at the next start, and what is stored is the same."""
    rope = LayerRope(spec_of(), movable=True, table=b"rows")
    bound = rope.bound("a")
    first, last = [bound, rope, rope], [rope, rope, bound]
    assert rope_digest(first, "pre") == rope_digest(last, "pre")
    assert rope_digest(first, "pre") == rope_digest([bound] * 3, "pre")
    others = [rope_digest(ropes, "pre") for ropes in ([rope] * 3, [bound])]
    assert rope_digest(first, "pre") not in (*others, rope_digest(first, "delta"))


# ---- the self-check ------------------------------------------------------------------------------


def filled(spec: RopeSpec | None, *, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Any:
    """A pool of one layer with the K of identical tokens, rotated by `spec`."""
    pool = make_pool(dtype=dtype)
    row = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)
    rows = row.expand(TOKENS, -1, -1).contiguous()
    positions = np.arange(TOKENS)
    pool.k[0][32 : 32 + TOKENS] = rows if spec is None else naive.rotate(rows, positions, spec)
    return pool, np.arange(32, 32 + TOKENS)


def spec_of(width: int = DIM, *, interleaved: bool = False, first: int = 0) -> RopeSpec:
    cos, sin = table(width=width).chunk(2, -1)
    return RopeSpec(
        np.ascontiguousarray(cos.numpy()), np.ascontiguousarray(sin.numpy()), width, first,
        interleaved, "eager",
    )  # fmt: skip


TRUE_SPECS = {
    "neox": spec_of(),
    "gpt-j": spec_of(interleaved=True),
    "partial": spec_of(DIM // 2),
    "mla": spec_of(DIM // 2, interleaved=True, first=DIM // 2),
    "nope": None,
}


@pytest.mark.parametrize("true", TRUE_SPECS)
@pytest.mark.parametrize("believed", TRUE_SPECS)
def test_only_the_true_rotation_passes(true: str, believed: str) -> None:
    pool, slots = filled(TRUE_SPECS[true])
    rope = LayerRope(TRUE_SPECS[believed], movable=True)
    failed = check_layers(pool, [rope], slots)
    assert (failed == {}) == (true == believed), failed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_rounding_is_no_failure(dtype: torch.dtype) -> None:
    for seed in range(5):
        pool, slots = filled(spec_of(), seed=seed, dtype=dtype)
        assert check_layers(pool, [LayerRope(spec_of(), movable=True)], slots) == {}


def test_a_layer_that_keeps_its_module_without_using_it_is_found() -> None:
    """Cohere2: the module passes its own test, the K in the pool was never rotated."""
    (rope,) = discover_ropes(model(Attention(0, Rotary())), make_pool())
    assert rope.movable
    pool, slots = filled(None)
    assert list(check_layers(pool, [rope], slots)) == [0]


def test_absolute_positions_are_found() -> None:
    pool, slots = filled(None)
    pool.k[0][32 : 32 + TOKENS] += torch.randn(TOKENS, 1, DIM).to(torch.bfloat16)
    assert list(check_layers(pool, [LayerRope(None, movable=True)], slots)) == [0]


def test_one_head_that_differs_is_found() -> None:
    pool, slots = filled(spec_of())
    pool.k[0][32:96, 1] = pool.k[0][32:96, 1].flip(0)
    assert list(check_layers(pool, [LayerRope(spec_of(), movable=True)], slots)) == [0]


def test_nan_fails_and_bound_layers_are_left_out() -> None:
    pool, slots = filled(spec_of())
    pool.k[0][40] = float("nan")
    assert list(check_layers(pool, [LayerRope(spec_of(), movable=True)], slots)) == [0]
    assert check_layers(pool, [LayerRope(None, movable=False)], slots) == {}
    pool.k[0].zero_()
    assert list(check_layers(pool, [LayerRope(spec_of(), movable=True)], slots)) == [0]


class Sunk(torch.nn.Module):
    """A layer of gpt-oss, as far as its sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.tensor([0.5, -2.0, 3.25]).bfloat16())
        self.weight = torch.nn.Parameter(torch.ones(3))


def test_sinks_are_nothing_meanwhile_and_back_even_behind_an_error() -> None:
    layers = torch.nn.Sequential(Sunk(), Sunk())
    before = {name: value.detach().clone() for name, value in layers.named_parameters()}

    def fail() -> None:
        with _without_sinks(layers):
            for name, value in layers.named_parameters():
                gone = torch.exp(value.float()).sum() == 0
                assert gone == name.endswith(".sinks")
            raise RuntimeError("in between")

    with pytest.raises(RuntimeError, match="in between"):
        fail()
    for name, value in layers.named_parameters():
        assert torch.equal(value, before[name])


def test_the_check_runs_where_forwards_do_and_not_where_a_scheduler_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That is CUDA's default stream, on which some releases of NCCL fail."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    seen: list[str] = []

    @contextmanager
    def in_forward_order() -> Iterator[None]:
        seen.append("begin")
        yield
        seen.append("end")

    kv = SimpleNamespace(req_pool_idx=1)
    batch = SimpleNamespace(reqs=[SimpleNamespace(origin_input_ids=[7, 7, 7], kv=kv)])
    runner = SimpleNamespace(
        device="cpu",
        forward=lambda forward_batch: seen.append("forward"),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(8).reshape(2, 4)),
    )
    scheduler: Any = SimpleNamespace(
        dp_attn_adapter=SimpleNamespace(maybe_prepare_mlp_sync_batch=lambda found: found),
        tp_worker=SimpleNamespace(model_runner=runner),
        pp_group=SimpleNamespace(world_size=1),
        attn_tp_group=None,
    )
    cache: Any = SimpleNamespace(
        identity=SimpleNamespace(on_all_ranks=lambda work: [work()]),
        hier_linker=SimpleNamespace(in_forward_order=in_forward_order),
    )
    monkeypatch.setattr(self_check, "_batch_of_identical", lambda scheduler: batch)
    monkeypatch.setattr(ForwardBatch, "init_new", lambda *args, **kwargs: seen.append("batch"))
    assert self_check._prefill_identical(scheduler, cache).tolist() == [4, 5, 6]
    assert seen == ["begin", "batch", "forward", "end"]
