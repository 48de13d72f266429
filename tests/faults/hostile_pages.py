"""Honest pages of a small model, its rules and codecs, and the server's way from record to pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch

from sglang_ext.codec.coded_shape import CodedShape
from sglang_ext.coded_remote.remote_codec import RemotePageCodec
from sglang_ext.device.copier import PageCopier
from sglang_ext.device.layout import HEADER_BYTES, ROPE_NAMES, ROPE_PRE, U8, PageLayout, write_tail
from sglang_ext.device.local_pages import LocalPages
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.kernels import rope as cpu_kernels
from sglang_ext.kernels.rope import RopeSpec
from sglang_ext.tiers.records.record import RecordMeta, parse_header, write_meta
from sglang_ext.tiers.store.types import Epoch, KeySpace
from tests.faults.guarded_arrays import GuardedPool
from tests.unit.codec.codec_cases import make_profile

LAYERS, DIM, PAGE, MAX_POSITION = 2, 32, 8, 512
LAYOUT = PageLayout(PAGE, (2 * DIM,) * LAYERS, (2 * DIM,) * LAYERS, 2)
SHAPE = CodedShape.of(LAYOUT, "bf16", DIM)
SPACE = KeySpace(0, bytes(range(32)), b"", Epoch())
CODECS = ("zstd", "lossless", "hier")


def ropes() -> list[LayerRope]:
    """Of each layer; tables end with the model's last position."""
    angles = np.arange(MAX_POSITION)[:, None] * 100.0 ** -np.arange(0, 1, 2 / DIM)[None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    return [LayerRope(RopeSpec(cos, sin, DIM, 0, False, "eager"), movable=True)] * LAYERS


def page_hash(number: int) -> bytes:
    """The hash of page `number` of the honest writer's prompt."""
    return number.to_bytes(32, "big")


def page(number: int, num_corrections: int = 3) -> U8:
    """A slot with a page as the honest writer made it, unsealed."""
    rng = np.random.default_rng(number)
    slot = np.zeros(LAYOUT.slot_bytes, np.uint8)
    values = rng.normal(size=LAYOUT.kv_bytes // 2).astype(np.float32)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    slot[HEADER_BYTES : LAYOUT.tail_offset] = bits.view(np.uint8)
    entries = rng.integers(0, PAGE * DIM, (num_corrections, 2)).astype(np.uint32)
    payload_bytes = write_tail(
        slot,
        LAYOUT,
        rope_state=ROPE_PRE,
        position=number * PAGE,
        counts=[num_corrections, 0],
        entries=entries,
    )
    described = RecordMeta(
        page_hash(number), SPACE.digest, b"", number * PAGE, PAGE, ROPE_NAMES[ROPE_PRE]
    )
    write_meta(slot, described, payload_bytes)
    return slot


def forge_header(slot: U8, payload_bytes: int | None = None, **fields: Any) -> None:
    """Says something else in a record's header."""
    meta, known_bytes = parse_header(slot)
    write_meta(
        slot, replace(meta, **fields), known_bytes if payload_bytes is None else payload_bytes
    )


@cache
def profile() -> Any:
    """What codec `hier` knows of the model."""
    return make_profile(2 * LAYERS, DIM, DIM, raw_tokens=1)


def codec_of(codec_id: str, *, learned: bool = True) -> RemotePageCodec:
    """A codec that knows the model, if it is to."""
    known = profile() if learned and codec_id == "hier" else None
    return RemotePageCodec(SHAPE, codec_id, None, learned=known)


class Device:
    """A pool, and what loads pages from slots into it.

    Args:
        slots: u8 `[n, slot_bytes]`, the arena.
        kernels: module with the rope kernels.
    """

    num_pages = 4

    def __init__(
        self,
        slots: U8,
        kernels: Any = cpu_kernels,
        mode: str = "pre",
        empty: Callable[..., Any] = np.empty,
    ) -> None:
        shape = (self.num_pages * PAGE, 1, DIM)
        rows = [torch.from_numpy(empty(shape, np.int16)) for _ in range(2 * LAYERS)]
        self.k = [each.view(torch.bfloat16) for each in rows[:LAYERS]]
        self.v = [each.view(torch.bfloat16) for each in rows[LAYERS:]]
        self.slots = slots
        pool = DevicePool(
            "mha", torch.bfloat16, tuple(self.k), tuple(self.v), 0, self.num_pages * PAGE
        )
        assert pool.layout(PAGE) == LAYOUT
        self.copier = PageCopier(pool, LAYOUT, ropes(), slots, mode=mode, kernels=kernels)

    @classmethod
    def guarded(cls, num_slots: int, kernels: str = "numba", mode: str = "pre") -> Device:
        """One whose arena and pool lie between memory that nobody can touch."""
        pool = GuardedPool(1 + 2 * LAYERS, 1 << 16)
        module: Any = cpu_kernels
        if kernels == "triton":
            from sglang_ext.kernels.rope import gpu as module
        slots = pool.empty((num_slots, LAYOUT.slot_bytes), np.uint8)
        return cls(slots, module, mode, pool.empty)

    def load(self, page_slots: list[int], position: int) -> bytes | None:
        """As the server loads: pages that cannot be used are dropped, the others are loaded.

        Returns:
            The rows that were written; None when a page was dropped.
        """
        rows = self.rows(page_slots, position)
        return None if rows is None else b"".join(rows)

    def rows(self, page_slots: list[int], position: int) -> list[bytes] | None:
        """As `load`; the rows that were written for each page."""
        where = np.array(page_slots, np.int64)
        if len(self.copier.unusable(where, position)):
            return None
        rows = np.arange(len(where) * PAGE, dtype=np.int64)
        job = self.copier.prepare_load(where, rows, position)
        for layer in range(LAYERS):
            self.copier.load_layer(job, layer)
        tensors = [t[: len(rows)].view(torch.int16).numpy() for t in (*self.k, *self.v)]
        pages = [[t[at * PAGE :][:PAGE].tobytes() for t in tensors] for at in range(len(where))]
        return [b"".join(page_of_tensors) for page_of_tensors in pages]


def clear_device(device: Device) -> None:
    """Nothing was loaded yet."""
    for tensor in (*device.k, *device.v):
        tensor.zero_()


def rules(mode: str = "pre") -> LocalPages:
    """What a page must be here."""
    return LocalPages(LAYOUT, ropes(), mode)
