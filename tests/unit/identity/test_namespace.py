"""The namespace digest: any single value of any tensor, and nothing else, changes it."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity import namespace
from sglang_ext.identity.namespace import (
    digest_lora_adapter,
    digest_model,
    digest_tensors,
    namespace_digest,
)

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8, torch.uint8,
    torch.int64, torch.bool, torch.float8_e4m3fn,
]  # fmt: skip


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(where=st.integers(0, 10_000), bit=st.integers(0, 7))
@settings(max_examples=15)
def test_one_bit_of_one_value_changes_it(dtype: torch.dtype, where: int, bit: int) -> None:
    generator = torch.Generator().manual_seed(3)
    tensor = torch.randint(0, 2, (7, 33), generator=generator).to(dtype)
    before = digest_tensors([("w", tensor)])
    assert digest_tensors([("w", tensor.clone())]) == before
    raw = bits(tensor)
    raw[where % raw.numel()] ^= 1 << (0 if dtype == torch.bool else bit)
    assert digest_tensors([("w", tensor)]) != before


def test_a_value_in_any_chunk_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespace, "_CHUNK_VALUES", 64)
    tensor = torch.randn(1000)
    before = digest_tensors([("w", tensor)])
    for place in (0, 63, 64, 500, 999):
        changed = tensor.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(9.0))
        assert digest_tensors([("w", changed)]) != before


@given(st.integers(0, 199_999), st.integers(0, 199_999))
@settings(max_examples=20)
def test_a_swap_of_two_values_changes_it(first: int, second: int) -> None:
    tensor = torch.arange(200_000, dtype=torch.int32)
    before = digest_tensors([("w", tensor)])
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert (digest_tensors([("w", swapped)]) == before) == (first == second)


def test_a_swap_at_a_prime_distance_changes_it() -> None:
    """Weights by place must not repeat within a chunk."""
    tensor = torch.zeros(200_000, dtype=torch.int32)
    tensor[5] = 1
    moved = torch.zeros_like(tensor)
    moved[5 + 65_521] = 1
    assert digest_tensors([("w", tensor)]) != digest_tensors([("w", moved)])


def test_names_shapes_dtypes_and_order() -> None:
    a, b = torch.zeros(4, 6), torch.ones(4, 6)
    base = digest_tensors([("a", a), ("b", b)])
    assert digest_tensors([("b", b), ("a", a)]) == base
    assert digest_tensors([("a", b), ("b", a)]) != base
    assert digest_tensors([("a", a.view(6, 4)), ("b", b)]) != base
    assert digest_tensors([("a", a.to(torch.bfloat16)), ("b", b)]) != base
    assert digest_tensors([("a", a)]) != base
    assert digest_tensors([("a", torch.zeros(0)), ("b", b)]) != base


def test_a_view_with_strides_is_its_values() -> None:
    whole = torch.randn(8, 8)
    assert digest_tensors([("w", whole.t())]) == digest_tensors([("w", whole.t().clone())])


class Attention(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, 3))
        self.register_buffer("bias_table", torch.zeros(3))
        self.register_buffer("cos_sin_cache", torch.zeros(3), persistent=False)
        self.k_scale: float | torch.Tensor | None = None


@pytest.mark.parametrize("name", ["w_kc", "w_vc", "w_scale", "weight_swiglu_interleaved"])
def test_what_was_computed_counts_where_the_parameter_is_given_up(name: str) -> None:
    model: Any = torch.nn.Sequential(Attention(), Attention())
    before = digest_model(model)
    setattr(model[0], name, torch.ones(2, 3, 4).transpose(1, 2))
    absorbed = digest_model(model)
    getattr(model[0], name)[1, 3, 2] += 1
    assert len({before, absorbed, digest_model(model)}) == 3


@dataclass(slots=True)
class Storage:
    """As triton_kernels' tensors have it; without a `__dict__`."""

    data: torch.Tensor
    layout: str


def experts_of_a_method(values: torch.Tensor) -> Any:
    """As SGLang keeps experts in MXFP4: in what computes with them, as a tensor of another kind."""
    module = torch.nn.Module()
    wrapped = SimpleNamespace(storage=Storage(values, "swizzled"), shape=[2])
    object.__setattr__(
        module, "quant_method", SimpleNamespace(w13_weight_triton_tensor=wrapped, num_experts=2)
    )
    return module


def scales_of_a_parameter(values: torch.Tensor) -> Any:
    """As SGLang keeps the scales of blocks in bitsandbytes' formats: on the packed weight."""
    module: Any = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)
    nested = SimpleNamespace(absmax=values, code=torch.ones(16))
    module.weight.bnb_quant_state = {0: SimpleNamespace(absmax=torch.ones(2), state2=nested)}
    return module


@pytest.mark.parametrize("keep", [experts_of_a_method, scales_of_a_parameter])
def test_values_that_are_kept_beside_modules_count(keep: Any) -> None:
    model = torch.nn.Sequential(Attention(), keep(torch.arange(6.0)))
    before = digest_model(model)
    same = torch.nn.Sequential(Attention(), keep(torch.arange(6.0)))
    other = torch.nn.Sequential(Attention(), keep(torch.tensor([0.0, 1, 2, 3, 4, 6])))
    assert digest_model(same) == before
    assert digest_model(other) != before


def test_a_model_whose_kept_values_are_not_to_be_found_has_no_digest() -> None:
    model: Any = torch.nn.Sequential(experts_of_a_method(torch.ones(2)))
    model[0].quant_method.w2_weight_triton_tensor = object()
    with pytest.raises(HierKVConfigError, match="w2_weight_triton_tensor must hold tensors"):
        digest_model(model)


def test_a_model_is_its_parameters_buffers_and_kv_scales() -> None:
    model: Any = torch.nn.Sequential(Attention(), Attention())
    before = digest_model(model)
    model[0].cos_sin_cache = torch.zeros(9)  # tables grow while serving
    assert digest_model(model) == before
    model[0].k_scale = 0.5
    scaled = digest_model(model)
    model[0].k_scale = torch.tensor(0.25)
    assert len({before, scaled, digest_model(model)}) == 3
    model[0].k_scale = None
    with torch.no_grad():
        model[1].weight[2, 2] += 1
    assert digest_model(model) != before
    with torch.no_grad():
        model[1].weight[2, 2] -= 1
    assert digest_model(model) == before
    model[1].bias_table[0] = 1
    assert digest_model(model) != before


def test_tables_that_do_not_grow_count() -> None:
    """Of LongRoPE nothing else says what they are: no rotary digest reads them."""
    model: Any = torch.nn.Sequential(Attention())
    for name in ("short_cos_sin_cache", "long_cos_sin_cache", "long_short_cos_sin_cache"):
        model[0].register_buffer(name, torch.zeros(3), persistent=False)
        before = digest_model(model)
        getattr(model[0], name)[1] = 0.5
        assert digest_model(model) != before


def lora() -> SimpleNamespace:
    layer = SimpleNamespace(weights={"q.lora_A": torch.ones(2, 2), "q.lora_B": torch.ones(2, 2)})
    return SimpleNamespace(
        layers=[layer, SimpleNamespace(weights={})],
        embedding_layers={"embed": torch.zeros(2)},
        added_tokens_embeddings={},
        scaling=2.0,
    )


def test_an_adapter_is_its_weights_and_scaling() -> None:
    before = digest_lora_adapter(lora())
    assert digest_lora_adapter(lora()) == before
    digests = {before}
    changed = lora()
    changed.layers[0].weights["q.lora_B"][1, 1] = 1.5
    digests.add(digest_lora_adapter(changed))
    changed = lora()
    changed.layers.reverse()
    digests.add(digest_lora_adapter(changed))
    changed = lora()
    changed.scaling = 2.5
    digests.add(digest_lora_adapter(changed))
    changed = lora()
    changed.embedding_layers["embed"][0] = 1
    digests.add(digest_lora_adapter(changed))
    changed = lora()
    changed.added_tokens_embeddings = {"extra": torch.zeros(1)}
    digests.add(digest_lora_adapter(changed))
    assert len(digests) == 6


def test_every_part_counts() -> None:
    parts = {"page_size": 64, "weights": b"\x01" * 32, "pool": "mha", "tp": [0, 1]}
    base = namespace_digest(parts)
    assert len(base) == 32
    assert namespace_digest(dict(reversed(parts.items()))) == base
    for name, value in {
        "page_size": 32,
        "weights": b"\x02" * 32,
        "pool": "mla",
        "tp": [1, 2],
    }.items():
        assert namespace_digest({**parts, name: value}) != base


def test_what_is_kept_elsewhere_has_the_names_that_sglang_gives_it() -> None:
    """A release that renames one would take its values out of the digest without a word."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent / "srt"
    names = {
        "layers/quantization/mxfp4.py": namespace._OF_METHODS,
        "layers/quantization/modelopt_quant.py": namespace._COMPUTED[-2:],
        "model_loader/loader.py": namespace._OF_PARAMETERS,
    }
    for path, wanted in names.items():
        text = (root / path).read_text()
        assert all(name in text for name in wanted), path
