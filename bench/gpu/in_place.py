"""Loads without copies: kernels that read page-locked slots themselves, beside the ring's loads.

No server does it: docs/decisions/README.md, 40. What it takes on a GPU decides whether one should.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.load_pages import IndexMemory, PageSource
from sglang_ext.device.ports import DevicePort


def read_in_place(
    port: DevicePort,
    copier: PageCopier,
    indices: IndexMemory,
    pages: np.ndarray[Any, Any],
    rows: torch.Tensor,
) -> None:
    """Queues a load on the current stream, by the kernels that read the ring's buffers otherwise.

    Page-locked memory has one address for the host and the device, so all that is another is where
    the kernels are told that the pages lie.

    Args:
        port: a device with memory of its own.
        copier: what knows pages and pool.
        indices: room for what kernels read beside pages.
        pages: i64 `[n]`, slots, position-free, of which the first one's first position is 0.
        rows: i64 `[n * P]`, on the device.
    """
    job = copier.prepare_load(pages, port.rows(rows), 0)
    copier.require_positions(job)
    (job,) = indices.place([job])
    source = PageSource(torch.from_numpy(copier.slots), port.upload(pages))
    for layer in range(copier.pool.num_layers):
        copier.load_layer(job, layer, source)
