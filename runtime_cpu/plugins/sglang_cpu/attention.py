"""Causal attention of a sequence's last tokens: in full, in windows, in chunks, with sinks."""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

# Query rows computed at a time, which bounds masks and the keys that a window reads in vain.
_BLOCK_ROWS = 128
_MIN_BLOCK_ROWS = 16


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> None:
    """Computes the attention of a sequence's last tokens over the tokens up to each.

    Args:
        query: `[N, Hq, D]`, of the last N tokens.
        keys: `[T, H, D]`, of the last T >= N tokens; Hq is a multiple of H.
        values: `[T, H, Dv]`.
        output: `[N, Hq, Dv]`, written.
        window: how many tokens before itself a token sees; None for all of them.
        scale: factor of the products; `D ** -0.5` when None.
    """
    num_new, before = len(query), len(keys) - len(query)
    if window is None or window >= len(keys):
        # Without a prefix SDPA's own causal mask does, and the future costs nothing.
        rows = _BLOCK_ROWS if before else num_new
        for start in range(0, num_new, rows):
            _attend_block(query, keys, values, output, start, min(start + rows, num_new), scale)
        return
    start = min(max(0, window - before), num_new)
    if start:
        seen = before + start
        attend(query[:start], keys[:seen], values[:seen], output[:start], window=None, scale=scale)
    # Rows with a whole window before them: blocks of them are alike, one call computes them all.
    rows = min(max(_MIN_BLOCK_ROWS, window + 1), _BLOCK_ROWS)
    num_blocks = (num_new - start) // rows
    whole_end = start + num_blocks * rows
    if num_blocks:
        _attend_windows(query, keys, values, output, start, num_blocks, rows, window, scale)
    if whole_end < num_new:
        rest = num_new - whole_end
        _attend_windows(query, keys, values, output, whole_end, 1, rest, window, scale)


def attend_in_chunks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    *,
    chunk: int,
    scale: float | None,
) -> None:
    """As `attend`, of tokens that see nothing before their chunk of the sequence.

    Args:
        query: `[N, Hq, D]`, of the last N tokens.
        keys: `[T, H, D]`, T >= N; the first one begins a chunk.
        values: `[T, H, Dv]`.
        output: `[N, Hq, Dv]`, written.
        chunk: tokens of a chunk.
        scale: factor of the products; `D ** -0.5` when None.
    """
    row, before = 0, len(keys) - len(query)
    while row < len(query):
        begin = (before + row) // chunk * chunk
        rows = slice(row, min(begin + chunk - before, len(query)))
        seen = slice(begin, before + rows.stop)
        attend(query[rows], keys[seen], values[seen], output[rows], window=None, scale=scale)
        row = rows.stop


def attend_tree(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    mask: torch.Tensor,
    *,
    scale: float | None,
) -> None:
    """As `attend`, of tokens that see all before them and of themselves what `mask` says.

    Args:
        query: `[N, Hq, D]`.
        keys: `[T, H, D]`, T >= N.
        values: `[T, H, Dv]`.
        output: `[N, Hq, Dv]`, written.
        mask: bool `[N, N]`.
        scale: factor of the products; `D ** -0.5` when None.
    """
    before = torch.ones(len(query), len(keys) - len(query), dtype=torch.bool)
    output.copy_(_attend_seen(query, keys, values, torch.cat([before, mask], 1), scale))


def attend_to_chosen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    chosen: torch.Tensor,
    *,
    scale: float | None,
) -> None:
    """Computes the attention of tokens over those that an index chose for each, of one K and V.

    Args:
        query: `[N, Hq, D]`.
        keys: `[T, 1, D]`.
        values: `[T, 1, Dv]`.
        output: `[N, Hq, Dv]`, written.
        chosen: i32 `[N, M]`, rows of keys and values; less than 0 where there is none.
        scale: factor of the products; `D ** -0.5` when None.
    """
    rows = chosen.clamp(min=0).long()
    factor = query.shape[2] ** -0.5 if scale is None else scale
    products = torch.einsum("nhd,nmd->nhm", query.float(), keys[rows, 0].float()) * factor
    products.masked_fill_((chosen < 0).unsqueeze(1), -torch.inf)
    shares = products.softmax(-1)
    output.copy_(torch.einsum("nhm,nmd->nhd", shares, values[rows, 0].float()))


def attend_with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    sinks: torch.Tensor,
    *,
    window: int | None,
    scale: float | None,
) -> None:
    """As `attend`, of heads with a sink: a key that every token sees, of no value.

    Args:
        query: `[N, Hq, D]`, of the last N tokens.
        keys: `[T, H, D]`, of the last T >= N tokens; Hq is a multiple of H.
        values: `[T, H, Dv]`.
        output: `[N, Hq, Dv]`, written.
        sinks: `[Hq]`, what a head's products with its sink are.
        window: how many tokens before itself a token sees; None for all of them.
        scale: factor of the products; `D ** -0.5` when None.
    """
    num, total = len(query), len(keys)
    distance = torch.arange(total - num, total).unsqueeze(1) - torch.arange(total)
    unseen = (distance < 0) | (distance > (total if window is None else window))
    mask = torch.zeros(len(sinks), num, total + 1, dtype=query.dtype)
    mask[..., :total].masked_fill_(unseen, -torch.inf)
    mask[..., total] = sinks.to(query.dtype)[:, None]
    keys, values = (pad(x, (0, 0, 0, 0, 0, 1)) for x in (keys, values))  # a row for the sink
    output.copy_(_attend_seen(query, keys, values, mask, scale))


def _attend_block(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    start: int,
    end: int,
    scale: float | None,
) -> None:
    """Rows `start` to `end` over everything before them."""
    before = len(keys) - len(query)
    seen = before + end
    mask = None
    if before + start:
        mask = torch.arange(seen) <= torch.arange(before + start, seen).unsqueeze(1)
    output[start:end] = _attend_seen(query[start:end], keys[:seen], values[:seen], mask, scale)


def _attend_seen(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """Rows `[N, Hq, Dv]` of tokens that see what a mask of SDPA says; None: all up to each."""
    q, k, v = (x.movedim(0, 1).unsqueeze(0) for x in (query, keys, values))
    return _sdpa(q, k, v, mask, scale).squeeze(0).movedim(0, 1)


def _attend_windows(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    start: int,
    count: int,
    rows: int,
    window: int,
    scale: float | None,
) -> None:
    """`count` blocks of `rows` rows from `start` on, each with the `window` keys before it."""
    end, reach = start + count * rows, window + rows
    low = len(keys) - len(query) + start - window
    high = low + window + count * rows
    q = query[start:end].view(count, rows, *query.shape[1:]).movedim(1, 2)
    # [count, H, reach, D]: views that overlap.
    k, v = (x[low:high].unfold(0, reach, rows).movedim(3, 2) for x in (keys, values))
    row, key = torch.arange(rows).unsqueeze(1), torch.arange(reach)
    found = _sdpa(q, k, v, (key >= row) & (key <= row + window), scale)
    output[start:end] = found.movedim(1, 2).flatten(0, 1)


def _sdpa(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    return scaled_dot_product_attention(
        q,
        k.to(q.dtype),
        v.to(q.dtype),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )
