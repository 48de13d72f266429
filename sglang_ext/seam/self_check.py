"""Start-up self-check: does every layer apply the rotary embedding that was found on it?

One prefill of identical tokens, with the cache bypassed. Token and position apart, every row is the
same computation: attention over identical values is the same value whatever the weights are. So
before rotary embedding all K rows of a layer are equal, and after it they are not. Taking the
rotation out of what the model wrote must make the rows equal again, in every layer; where it does
not (a layer that keeps a rotary module without using it, a norm after the rotation, absolute
positions), that layer is stored position-bound, and no page can be moved.
"""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sglang_ext.device.copier import PageCopier
from sglang_ext.device.pools import DevicePool
from sglang_ext.device.rope_discovery import LayerRope
from sglang_ext.ranks.lockstep import Lockstep
from sglang_ext.seam.cache import HierKVRadixCache
from sglang_ext.seam.hooks.loaded_models import draft_runners
from sglang_ext.seam.linker import HierKVLinker
from sglang_ext.settings.lossless import lossy_codec

logger = logging.getLogger(__name__)

_NUM_TOKENS = 64
# Rows may differ by the rounding of one K value and of the layers before; a wrong rotation moves
# them by about their own size.
_TOLERANCE = 0.05
# What SGLang's models call the weights that stand for a token without K and V (gpt-oss, MiMo V2).
_SINKS = (".sinks", ".attention_sink_bias")
# As a logit in any dtype: its share of the attention is nothing.
_NO_SINK = -1e4


def run_self_check(scheduler: Any, cache: HierKVRadixCache) -> None:
    """Checks all layers once and binds those that fail. Never raises.

    Args:
        scheduler: SGLang's scheduler, before its first step.
        cache: its cache.
    """
    copier, copiers = cache.hier_linker.copier, cache.hier_linker.copiers
    runner = scheduler.tp_worker.model_runner
    is_hybrid = cache.hier_linker.is_hybrid
    is_bound = bool(draft_runners(runner)) and not lossy_codec(cache.hier_config)
    if copier.pool.has_index or is_bound or not _may_move(cache.hier_linker):
        return  # every layer is bound already

    def release() -> None:
        """Frees what the prefill took, at whatever point it ended."""
        runner.req_to_token_pool.clear()
        runner.token_to_kv_pool_allocator.clear()

    try:
        with _without_sinks(runner.model):
            slots = _prefill_identical(scheduler, cache)
    except Exception as error:
        logger.warning(
            "hier-kv: the self-check could not run (%s); K is stored position-bound", error
        )
        for each in copiers:
            each.bind_all(f"the self-check could not run: {error}")
        release()
        _bind_what_others_bound(cache, range(copier.pool.num_layers))
        return
    try:
        failed = check_layers(copier.pool, copier.ropes, slots)
        failed_windows = _check_windows(runner, copiers[1:], slots)
    finally:
        release()
    if is_hybrid and (failed or failed_windows):
        _bind_hybrid(copiers, len(failed) + failed_windows)
    else:
        for layer, spread in failed.items():
            copier.bind(layer, f"rows differ by {spread:.2f} after the rotation was taken out")
    _bind_what_others_bound(cache, failed)
    num_layers, num_movable = _count_layers(cache.hier_linker)
    logger.info(
        "hier-kv: self-check: the rotation of %d of %d layers is understood",
        num_movable,
        num_layers,
    )
    cache.metrics_reporter_hier.set_info(self_check_failed_layers=sorted(failed))


def _may_move(linker: HierKVLinker) -> bool:
    """Whether anything is to be checked; of a hybrid all layers are bound, or none is."""
    return linker.movable or not linker.is_hybrid


def _count_layers(linker: HierKVLinker) -> tuple[int, int]:
    """The model's layers, and those of them whose K can be moved; a group may repeat some."""
    if linker.windows is None:
        return linker.copier.pool.num_layers, sum(rope.movable for rope in linker.copier.ropes)
    layers = {layer for part in linker.windows.model_layers for layer in part}
    return len(layers), len(layers) if linker.movable else 0


def _check_windows(
    runner: Any,
    copiers: Sequence[PageCopier],
    slots: np.ndarray[Any, np.dtype[np.int64]],
) -> int:
    """How many window layers fail; see `check_layers`. A layer may be in two groups."""
    if not copiers:
        return 0
    pool = copiers[0].pool
    full = torch.as_tensor(slots, device=pool.device)
    rows = runner.token_to_kv_pool_allocator.translate_loc_from_full_to_swa(full)
    at = rows.to(torch.int64).cpu().numpy()
    return sum(len(check_layers(each.pool, each.ropes, at)) for each in copiers)


def _bind_hybrid(copiers: Sequence[PageCopier], num_failed: int) -> None:
    """Of a hybrid all layers go to another position, or none does."""
    for each in copiers:
        each.bind_all("some layers failed the self-check")
    logger.warning(
        "hier-kv: self-check: the rotation of %d layers is not understood, so no page of this "
        "hybrid can be moved",
        num_failed,
    )


@contextmanager
def _without_sinks(model: torch.nn.Module) -> Iterator[None]:
    """Takes the sinks of attention out of a model, which is put back as it was.

    A sink takes a share of the attention that shrinks with the number of tokens, so with it rows of
    identical tokens are not the same.
    """
    sinks = [value for name, value in model.named_parameters() if name.endswith(_SINKS)]
    kept = [value.detach().clone() for value in sinks]
    try:
        for value in sinks:
            value.data.fill_(_NO_SINK)
        yield
    finally:
        for value, before in zip(sinks, kept, strict=True):
            value.data.copy_(before)


def _bind_what_others_bound(cache: HierKVRadixCache, failed: Iterable[int]) -> None:
    """A layer that fails on one rank is bound on all, so that all can move a page or none can."""
    admission = cache.admission
    if not isinstance(admission, Lockstep):
        return
    for content in admission.gather(json.dumps(sorted(failed)).encode()):
        for layer in json.loads(content):
            cache.hier_linker.copier.bind(layer, "it failed the self-check on some rank")


def check_layers(
    pool: DevicePool, ropes: list[LayerRope], slots: np.ndarray[Any, np.dtype[np.int64]]
) -> dict[int, float]:
    """Layers whose rows are not equal before rotary embedding, with their relative spread.

    Args:
        pool: the device pool; rows `slots` hold the K of identical tokens at positions 0, 1, ...
        ropes: one a layer; layers that are bound already are left out.
        slots: i64 `[T]`.
    """
    failed: dict[int, float] = {}
    index = torch.as_tensor(slots, device=pool.device)
    for layer, rope in enumerate(ropes):
        if not rope.movable:
            continue
        rows = pool.k[layer][index].detach().to("cpu", torch.float64)
        if rope.spec is not None:
            rows = _unrotate(rows, rope)
        spread = float((rows - rows[:1]).abs().max() / rows.abs().max())
        if not spread <= _TOLERANCE:  # NaN fails too, and so do zeros, which prove nothing
            failed[layer] = spread
    return failed


def _unrotate(rows: torch.Tensor, rope: LayerRope) -> torch.Tensor:
    spec = rope.spec
    assert spec is not None
    cos = torch.from_numpy(spec.cos[: len(rows)]).double()[:, None]
    sin = torch.from_numpy(spec.sin[: len(rows)]).double()[:, None]
    part = rows[..., spec.first : spec.first + spec.rotary_dim]
    if spec.interleaved:
        first, second = part[..., ::2], part[..., 1::2]
    else:
        first, second = part.chunk(2, dim=-1)
    scale = cos * cos + sin * sin
    x1, x2 = (first * cos + second * sin) / scale, (second * cos - first * sin) / scale
    both = torch.stack((x1, x2), -1).flatten(-2) if spec.interleaved else torch.cat((x1, x2), -1)
    out = rows.clone()
    out[..., spec.first : spec.first + spec.rotary_dim] = both
    return out


@torch.no_grad()
def _prefill_identical(
    scheduler: Any, cache: HierKVRadixCache
) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Prefills `_NUM_TOKENS` equal tokens and returns their pool rows, i64 `[T]`.

    A forward is of all ranks, also of those that serve other requests: each runs it, with as many
    tokens, and none begins it unless all have come so far.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    batch: Any = None

    def prepare() -> bytes:
        nonlocal batch
        batch = _batch_of_identical(scheduler)
        return b"prepared"

    cache.identity.on_all_ranks(prepare)
    # Ranks that run in step tell each other how many tokens they bring.
    batch = scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
    runner = scheduler.tp_worker.model_runner
    # Not on the stream that a scheduler is built on, which is CUDA's default one: there NCCL 2.29
    # may fail with --enable-symm-mem, and cuBLAS would keep memory for it, too.
    with cache.hier_linker.in_forward_order():
        forward_batch = ForwardBatch.init_new(batch, runner, return_hidden_states_before_norm=False)
        _forward(scheduler, runner, forward_batch)
    if runner.device != "cpu":
        torch.get_device_module(runner.device).synchronize()
    req = batch.reqs[0]
    length = len(req.origin_input_ids)
    rows = runner.req_to_token_pool.req_to_token[req.kv.req_pool_idx, :length]
    slots: np.ndarray[Any, np.dtype[np.int64]] = rows.to(torch.int64).cpu().numpy()
    return slots


def _forward(scheduler: Any, runner: Any, forward_batch: Any) -> None:
    """The forward, through all pipeline stages where there are several."""
    from sglang.srt.model_executor.forward_batch_info import PPProxyTensors

    stages = scheduler.pp_group
    if stages.world_size == 1:
        runner.forward(forward_batch)
        return
    heads = scheduler.attn_tp_group
    before = None
    if not stages.is_first_rank:
        before = PPProxyTensors(stages.recv_tensor_dict(all_gather_group=heads))
    result = runner.forward(forward_batch, pp_proxy_tensors=before).logits_output
    if not stages.is_last_rank:
        stages.send_tensor_dict(result.tensors, all_gather_group=heads)


def _batch_of_identical(scheduler: Any) -> Any:
    """A batch of one request of `_NUM_TOKENS` equal tokens, ready for the forward."""
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    runner = scheduler.tp_worker.model_runner
    length = min(_NUM_TOKENS, scheduler.max_req_input_len)
    token = min(7, runner.model_config.vocab_size - 1)
    req = Req(
        rid="hier-kv-self-check",
        origin_input_text="",
        origin_input_ids=array("q", [token] * length),
        sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
    )
    req.full_untruncated_fill_ids = req.origin_input_ids
    req.logprob_start_len = -1
    req.extend_end = length
    batch = ScheduleBatch.init_new(
        reqs=[req],
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=_no_cache(runner, scheduler.page_size),
        model_config=runner.model_config,
        enable_overlap=False,
        spec_algorithm=SpeculativeAlgorithm.NONE,
    )
    batch.prepare_for_extend()
    if batch.input_ids is None:
        batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
        batch.prefill_input_ids_cpu = None
    return batch


def _no_cache(runner: Any, page_size: int) -> Any:
    """Stands in for the tree: nothing is matched, nothing is kept."""
    return SimpleNamespace(
        page_size=page_size,
        device=runner.device,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        supports_swa=lambda: False,
        supports_mamba=lambda: False,
        supports_prefix_sharing=lambda: True,
        evict=lambda params: None,
        maybe_hand_to_session=lambda req: None,
    )
