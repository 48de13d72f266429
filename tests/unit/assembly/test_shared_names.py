"""Which ranks of which servers find each other's states in a store that they share, by their names.

A part of a state says whose it is by its namespace alone: what is not in that, nobody compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import fields

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.server_args import ServerArgs  # noqa: E402

from sglang_ext.assembly.parts.identity import fixed_facts, scaled_by  # noqa: E402
from sglang_ext.device.pools import DevicePool, HybridPools  # noqa: E402
from sglang_ext.device.states.snapshots import Snapshots, StatePool  # noqa: E402
from sglang_ext.identity.namespace import namespace_digest  # noqa: E402
from sglang_ext.ranks.rank import RankPlace  # noqa: E402
from sglang_ext.seam.expected_pages import attention_backends  # noqa: E402
from sglang_ext.settings.arguments import FREE, NUMBER_FORMATS  # noqa: E402

LAYERS, DIM = 2, 32
ALONE = RankPlace()


@dataclass(frozen=True)
class Server:
    """What a rank's pools and its model are, as far as its names say it."""

    page_size: int = 64
    dtype: torch.dtype = torch.bfloat16
    values: torch.dtype | None = None
    conv: torch.dtype = torch.bfloat16
    recurrence: torch.dtype = torch.float32
    num_heads: int = 4
    layers: tuple[int, ...] = (0, 1)
    lower_bound: float | None = -5.0
    rotation: float = 1e4
    positions: int = 1024


class Model(torch.nn.Module):
    """A model as far as its rotary table goes, which may grow while it is served."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.rotary_emb = torch.nn.Module()
        angles = torch.arange(server.positions)[:, None] / server.rotation
        self.attn.rotary_emb.register_buffer("cos_sin_cache", angles.cos(), persistent=False)


def name_of(server: Server, place: RankPlace = ALONE, **arguments: Any) -> bytes:
    """The namespace of a rank, but for its weights; with arguments of SGLang's."""
    own = tuple(torch.zeros(server.page_size, 1, DIM, dtype=server.dtype) for _ in range(LAYERS))
    pool = DevicePool("mha", server.dtype, own, own, 0, server.page_size, server.values)
    pools = HybridPools(pool)
    states = StatePool(
        (
            torch.zeros(len(server.layers), 2, 3, DIM, dtype=server.conv),
            torch.zeros(len(server.layers), 2, server.num_heads, 8, 8, dtype=server.recurrence),
        ),
        server.layers,
    )
    snapshots = Snapshots(states, pools.layout(server.page_size))
    text = {"linear_attn_config": {"gate_lower_bound": server.lower_bound}}
    ctx: Any = SimpleNamespace(
        params=SimpleNamespace(
            page_size=server.page_size,
            token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
        ),
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(model=Model(server))),
        server_args=SimpleNamespace(kv_cache_dtype="auto", **arguments),
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: {"text_config": text})
        ),
    )
    return namespace_digest(fixed_facts(ctx, pools, place, snapshots, alike=False))


def ranks_of(tp_size: int, attn_dp_size: int) -> Iterator[RankPlace]:
    """Of a server with so many ranks, in so many groups."""
    size = tp_size // attn_dp_size
    for rank in range(tp_size):
        group, place = divmod(rank, size)
        if attn_dp_size > 1:
            yield RankPlace(place, size, group, attn_dp_size, shares_steps=True)
        else:
            yield RankPlace(place, size)


def test_groups_share_rank_for_rank_and_servers_of_other_sizes_share_nothing() -> None:
    sizes = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4)]
    known: dict[bytes, tuple[int, int, int]] = {}
    for tp_size, attn_dp_size in sizes:
        own: set[bytes] = set()
        for place in ranks_of(tp_size, attn_dp_size):
            name, whose = name_of(Server(), place), (tp_size, attn_dp_size, place.tp_rank)
            assert known.setdefault(name, whose) == whose
            own.add(name)
        assert len(own) == tp_size // attn_dp_size


def test_context_parallel_ranks_have_names_by_how_they_share_a_prefill() -> None:
    """Products of some of the tokens may round otherwise than one of all of them."""
    ways = [(1, ""), (2, ""), (2, "zigzag"), (2, "interleave")]
    of_two = {name_of(Server(), RankPlace(0, 2, cp_size=n, cp_strategy=way)) for n, way in ways}
    of_four = {name_of(Server(), RankPlace(0, 4, cp_size=n, cp_strategy="")) for n in (1, 2, 4)}
    assert len(of_two | of_four) == len(ways) + 3


@pytest.mark.parametrize(
    "change",
    [
        lambda server: replace(server, conv=torch.float32),
        lambda server: replace(server, recurrence=torch.bfloat16),
        lambda server: replace(server, dtype=torch.float16),
        lambda server: replace(server, num_heads=2),
        lambda server: replace(server, layers=(0, 2)),
        lambda server: replace(server, page_size=128),  # and so the parts are longer
        lambda server: replace(server, lower_bound=-4.0),
        lambda server: replace(server, lower_bound=None),
        lambda server: replace(server, rotation=1e6),
    ],
)
def test_what_a_state_is_made_of_is_in_its_name(change: Callable[[Server], Server]) -> None:
    server = Server()
    assert name_of(server) == name_of(Server()) != name_of(change(server))


def test_the_same_bytes_of_another_fp8_are_another_servers() -> None:
    """One argument and one checkpoint give either, by the maker of the GPU."""
    kinds = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)
    names = {name_of(Server(dtype=torch.uint8, values=values)) for values in kinds}
    assert len(names) == len(kinds)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"attention_backend": "triton"}, []),
        ({"attention_backend": "torch_native"}, ["torch_native"]),
        ({"attention_backend": "fa3", "decode_attention_backend": "flashinfer"}, []),
        (
            {"attention_backend": "fa3", "prefill_attention_backend": "flex_attention"},
            ["flex_attention"],
        ),
        (
            {
                "attention_backend": "triton",
                "speculative_draft_attention_backend": "torch_native",
            },
            ["torch_native"],
        ),
    ],
)
def test_attention_that_may_not_divide_what_it_writes_in_fp8_is_known(
    arguments: dict[str, Any], named: list[str]
) -> None:
    backends = attention_backends(ServerArgs(model_path="none", **arguments))
    rows = (torch.zeros(64, 1, DIM, dtype=torch.uint8),)
    pool = DevicePool("mha", torch.uint8, rows, rows, 0, 64, torch.float8_e4m3fn)
    assert scaled_by(backends, pool) == named
    assert scaled_by(backends, replace(pool, dtype=torch.bfloat16, values=None)) == []
    assert scaled_by(backends, replace(pool, kind="mla")) == sorted(backends)


def test_a_rotary_table_that_has_grown_changes_no_name() -> None:
    assert name_of(Server(positions=4096)) == name_of(Server())


@pytest.mark.parametrize(
    "arguments",
    [
        {"deepep_dispatcher_output_dtype": "nvfp4"},
        {"flashinfer_a2a_dispatch_type": "mxfp8"},
        {"flashinfer_a2a_dispatch_type": "auto"},  # mxfp8 of some models, where none is bf16
        {"flashinfer_mxfp4_moe_precision": "bf16"},
        {"enable_w4a4_mxfp4_megamoe": True},
    ],
)
def test_kv_of_activations_in_few_bits_is_none_of_a_server_that_has_them_in_full(
    arguments: dict[str, Any],
) -> None:
    """Weights and configuration are the same, and what layers behind experts compute is not."""
    assert name_of(Server(), **arguments) != name_of(Server())


@pytest.mark.parametrize(
    "variable",
    ["SGLANG_DEEPEP_BF16_DISPATCH", "SGLANG_MOE_NVFP4_DISPATCH", "SGLANG_NIXL_EP_BF16_DISPATCH"],
)
def test_so_is_kv_of_formats_that_the_environment_chooses(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = name_of(Server())
    monkeypatch.setenv(variable, "1")
    assert name_of(Server()) != without


def test_a_number_format_that_nobody_chose_changes_no_name() -> None:
    """What servers of before have stored is found: these are SGLang's own values."""
    defaults = {field.name: field.default for field in fields(ServerArgs)}
    own = {name: defaults[name] for name in FREE[NUMBER_FORMATS]}
    assert name_of(Server(), **own) == name_of(Server())
