"""Rotary embedding at the copy boundary between the device pool and host pages.

`save_k` takes the rotation out of K while it copies rows to pages, such that `load_k` at the same
positions gives the pool's bits back, and at others what the model's rotation makes of the same x.
The derivation and the measured shares are in README.md; `naive.py` is the plain statement of it.

Pools are torch tensors `[S, H, D]` of bf16, fp16 or fp32, dense in the last two dimensions, with
any row stride (a half of a fused K/V buffer).  All functions free the GIL while they copy and may
run on several threads as long as their pages and rows do not overlap.
"""

from __future__ import annotations

from .api import (
    copy_pages_to_rows,
    copy_rows_to_pages,
    load_k,
    load_v,
    move_k,
    save_k,
    save_v,
    warm_up,
)
from .detect import detect_rule
from .spec import RULES, Corrections, Listing, PagedView, RopeSpec
from .tail_lists import begin_tails, clear, save_to_pages

__all__ = [
    "RULES",
    "Corrections",
    "Listing",
    "PagedView",
    "RopeSpec",
    "begin_tails",
    "clear",
    "copy_pages_to_rows",
    "copy_rows_to_pages",
    "detect_rule",
    "load_k",
    "load_v",
    "move_k",
    "save_k",
    "save_to_pages",
    "save_v",
    "warm_up",
]
