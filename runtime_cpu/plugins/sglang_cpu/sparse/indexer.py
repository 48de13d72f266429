"""SGLang's indexer on a CPU, and what lets SGLang start such a model there."""

from __future__ import annotations

import sys
from typing import Any

import torch

from . import kernels

_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_HANDLERS = "sglang.srt.models.deepseek_common.attention_backend_handler"


def allow_sparse_models() -> None:
    """Lets SGLang decide the dtype of such a model's KV, for which it asks what a GPU can do.

    And lets a draft layer of DeepSeek's take the model's embeddings, behind which it waits for one.
    """
    if not torch.cuda.is_available():
        setattr(torch.cuda, "get_device_capability", lambda device=None: (0, 0))  # noqa: B010
        setattr(torch.cuda, "synchronize", lambda device=None: None)  # noqa: B010


def bind_indexer(name: str) -> None:
    """Puts plain torch in the place of SGLang's kernels, if a model of DeepSeek's is loaded.

    Args:
        name: of the attention backend, for which up-projections of latent rows are absorbed.
    """
    handlers, module = sys.modules.get(_HANDLERS), sys.modules.get(_INDEXER)
    if handlers is None or module is None:
        return
    registry = handlers.AttentionBackendRegistry
    registry.register(name, lambda attention, batch: handlers.AttnForwardMethod.MLA)
    try:
        from sglang.kernels.ops.kvcache import dsa_index_k_cache as rows
    except ImportError:  # before 0.5.23, with which nothing with an index is served
        return
    setattr(module.Indexer, "forward_native", _choose_tokens)  # noqa: B010
    setattr(rows.SetKAndS, "execute", staticmethod(kernels.store))  # noqa: B010
    setattr(rows.GetKAndS, "execute", staticmethod(kernels.gather))  # noqa: B010


def _choose_tokens(
    indexer: Any,
    x: torch.Tensor,
    q_lora: torch.Tensor,
    positions: torch.Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> torch.Tensor | None:
    """Stores the index rows of new tokens; returns what each attends to, as `kernels.choose`."""
    from sglang.srt.model_executor.forward_context import get_attn_backend, get_token_to_kv_pool

    query, key = _project(indexer, x, q_lora, positions)
    query_fp8, query_scale = kernels.act_quant(query, indexer.block_size, indexer.scale_fmt)
    indexer._store_index_k_cache(
        forward_batch=forward_batch, layer_id=layer_id, key=key, act_quant=kernels.act_quant
    )
    if not return_indices:
        return None
    weights = indexer._get_logits_head_gate(x, query_scale)
    backend, pool = get_attn_backend(), get_token_to_kv_pool()
    req_to_token, size = backend.req_to_token_pool.req_to_token, pool.index_page_size
    chosen, start = [], 0
    lengths, news = (each.tolist() for each in backend.lengths_of(forward_batch))
    requests = forward_batch.req_pool_indices[: len(lengths)].tolist()
    for request, length, num_new in zip(requests, lengths, news, strict=True):
        pages = req_to_token[request, :length:size] // size
        keys, scales = pool.get_index_k_scale_buffer(
            layer_id, forward_batch.seq_lens[:1], pages, length, length
        )
        rows = slice(start, start + num_new)
        chosen.append(
            kernels.choose(query_fp8[rows], weights[rows], keys, scales, indexer.index_topk)
        )
        start += num_new
    # Rows of nobody, where this rank's batch is padded to that of another one.
    chosen.append(torch.full((len(x) - start, indexer.index_topk), -1, dtype=torch.int32))
    return torch.cat(chosen)


def _project(
    indexer: Any, x: torch.Tensor, q_lora: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries `[T, H, D]` and keys `[T, D]` of the index, rotated at their positions.

    As SGLang does it, but for axes: its rotation in torch needs that of a single head, and gives
    one more back where it rotates halves and not pairs.
    """
    query = indexer.wq_b(q_lora)[0].unflatten(-1, (-1, indexer.head_dim))
    key = indexer.k_norm(indexer.wk(x)[0]).unsqueeze(1)
    width = indexer.rope_head_dim
    rotated = indexer.rotary_emb(positions, query[..., :width], key[..., :width])
    query, key = (
        kernels.rotate_activation(
            torch.cat((turned.reshape(whole[..., :width].shape), whole[..., width:]), -1)
        )
        for turned, whole in zip(rotated, (query, key), strict=True)
    )
    return query, key.squeeze(1)
