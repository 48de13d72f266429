"""The attention backend: see `CpuExtendAttnBackend`."""

from __future__ import annotations

import os
from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from .attention import (
    attend,
    attend_in_chunks,
    attend_to_chosen,
    attend_tree,
    attend_with_sinks,
)
from .context import attend_sharded, is_sharded, write_all
from .drafts import masks_of, verified_batch
from .windows import WINDOW_VARIABLE, parse_windows


class CpuExtendAttnBackend(TorchNativeAttnBackend):
    """Causal attention of the new tokens over what is before them.

    ``torch_native`` builds queries for the whole sequence when it extends one, so behind a cached
    prefix it computes the prefix's attention again, and a layer with a sliding window costs it as
    much as full attention. This backend computes the rows of the new tokens and reads the keys that
    they see. Results are equal but for rounding; decoding is ``torch_native``'s own. The benches
    that time cache hits use it; the tests that compare bits stay on ``torch_native``.

    Layers that see a chunk of the sequence (Llama 4), for which ``torch_native`` computes full
    attention, see that chunk here, and heads with a sink (MiMo V2) have one.

    K and V are read with the pool's ``get_key_buffer`` and ``get_value_buffer``, once a layer.
    Where window layers have a pool of their own, ``torch_native`` writes to it and reads at rows of
    the other one; here the rows are translated for reading, too.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self._window, self._every = parse_windows(os.environ.get(WINDOW_VARIABLE, ""))
        self._reads_window_pool = False  # of the layer that is computed
        self._chunk: int | None = None  # of that layer: tokens of a chunk, if it sees no more
        self._chunk_of_layers: int | None = model_runner.attention_chunk_size
        self._tree_masks: torch.Tensor | None = None  # of the drafts that are verified
        self._sinks: torch.Tensor | None = None  # of the layer that is computed, one a head
        self._chosen: torch.Tensor | None = None  # by the index, for each token of the batch

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """SGLang's interface."""
        self._begin_layer(layer, kwargs)
        self._tree_masks = None
        if forward_batch.forward_mode.is_target_verify():
            self._tree_masks = masks_of(forward_batch)
            forward_batch = verified_batch(forward_batch)
        elif is_sharded(forward_batch):
            return self._forward_sharded(q, k, v, layer, forward_batch, *args, **kwargs)
        return super().forward_extend(q, k, v, layer, forward_batch, *args, **kwargs)

    def forward_decode(self, q: Any, k: Any, v: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        """SGLang's interface."""
        self._begin_layer(layer, kwargs)
        return super().forward_decode(q, k, v, layer, *args, **kwargs)

    def _forward_sharded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """The attention of this rank's tokens, behind K and V of all ranks' tokens in its pool."""
        if self._sinks is not None or self._chosen is not None or self._chunk is not None:
            raise NotImplementedError(
                "expected full attention or windows with prefill context parallelism, got sinks, "
                "an index or chunks; start without --enable-prefill-cp"
            )
        if save_kv_cache:
            write_all(k, v, layer, forward_batch, self.swa_out_cache_loc)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        rows_of = self.req_to_token_pool.req_to_token
        size = layer.sliding_window_size
        window = None if size is None or size < 0 else size

        def attend_part(queries: torch.Tensor, request: int, seen: int) -> torch.Tensor:
            found = queries.new_empty(*queries.shape[:2], layer.v_head_dim)
            if len(queries):
                first = 0 if window is None else max(0, seen - len(queries) - window)
                slots = _run_or_list(self._rows(rows_of[request, first:seen]))
                read = queries, keys[slots], values[slots], found
                attend(*read, window=window, scale=layer.scaling)
            return found

        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return attend_sharded(queries, forward_batch, attend_part).flatten(1)

    def lengths_of(self, forward_batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens of each request, new ones included, and how many of them are new.

        What is verified of drafts is not among the lengths that SGLang tells. An idle batch has no
        request, whatever rows it brings for those that run beside it.
        """
        if forward_batch.forward_mode.is_idle():
            return (torch.empty(0, dtype=torch.int64),) * 2
        if forward_batch.forward_mode.is_target_verify():
            forward_batch = verified_batch(forward_batch)
        elif forward_batch.forward_mode.is_decode():
            return forward_batch.seq_lens, torch.ones_like(forward_batch.seq_lens)
        return forward_batch.seq_lens, forward_batch.extend_seq_lens

    def _begin_layer(self, layer: Any, options: dict[str, Any]) -> None:
        """Takes what ``torch_native`` does not know out of SGLang's options."""
        self._sinks = options.pop("sinks", None)
        self._chosen = options.pop("topk_indices", None)
        if self._window and (layer.layer_id + 1) % self._every:
            layer.sliding_window_size = self._window
        self._chunk = self._chunk_of_layers if layer.use_irope else None
        pool = self.token_to_kv_pool
        self._reads_window_pool = (
            self.use_sliding_window_kv_pool and pool.layers_mapping[layer.layer_id][1]
        )

    def _rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Rows of the layer's own pool; row 0, which no token has, for what left the window."""
        if not self._reads_window_pool:
            return slots
        translated: torch.Tensor = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
        return translated

    def _run_sdpa_forward_extend(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        extend_prefix_lens: torch.Tensor,
        extend_seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None = None,
        **options: Any,
    ) -> torch.Tensor:
        if encoder_lens is not None or not options.get("causal"):
            raise NotImplementedError(
                "expected causal self-attention, got cross or bidirectional attention, which "
                "cpu_extend does not compute; start with --attention-backend torch_native"
            )
        window = options.get("sliding_window_size")
        if self._tree_masks is not None and any(
            each is not None for each in (window, self._chunk, self._sinks)
        ):
            raise NotImplementedError("expected drafts that are chains, got trees in a window")
        start = 0
        for at, (request, prefix, num_new) in enumerate(
            zip(
                req_pool_indices.tolist(),
                extend_prefix_lens.tolist(),
                extend_seq_lens.tolist(),
                strict=True,
            )
        ):
            first = 0 if window is None else max(0, prefix - window)
            if self._chunk is not None:
                first = prefix // self._chunk * self._chunk
            slots = _run_or_list(self._rows(req_to_token[request, first : prefix + num_new]))
            rows = slice(start, start + num_new)
            seen = query[rows], k_cache[slots], v_cache[slots], output[rows]
            scale = options.get("scaling")
            if self._chosen is not None:
                attend_to_chosen(*seen, self._chosen[rows], scale=scale)
            elif self._chunk is not None:
                attend_in_chunks(*seen, chunk=self._chunk, scale=scale)
            elif self._sinks is not None:
                attend_with_sinks(*seen, self._sinks, window=window, scale=scale)
            elif self._tree_masks is None:
                attend(*seen, window=window, scale=scale)
            else:
                attend_tree(*seen, self._tree_masks[at], scale=scale)
            start += num_new
        return output

    def _run_sdpa_forward_decode(
        self,
        query: torch.Tensor,
        output: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        req_to_token: torch.Tensor,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        if self._chunk is not None or self._sinks is not None or self._chosen is not None:
            scale, window = options.get("scaling"), options.get("sliding_window_size")
            for at, (request, num) in enumerate(
                zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
            ):
                first = 0 if window is None else max(0, num - 1 - window)
                if self._chunk is not None:
                    first = max(0, num - 1) // self._chunk * self._chunk
                slots = self._rows(req_to_token[request, first:num])
                row = slice(at, at + 1)
                seen = query[row], k_cache[slots], v_cache[slots], output[row]
                if self._chosen is not None:
                    attend_to_chosen(*seen, self._chosen[row], scale=scale)
                elif self._sinks is None:
                    attend(*seen, window=None, scale=scale)
                else:
                    attend_with_sinks(*seen, self._sinks, window=window, scale=scale)
            return output
        if self._reads_window_pool:
            longest = int(seq_lens.max()) if len(seq_lens) else 0
            req_to_token = self._rows(req_to_token[req_pool_indices, :longest])
            req_pool_indices = torch.arange(len(req_pool_indices))
        found: torch.Tensor = super()._run_sdpa_forward_decode(
            query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens,
            *args, **options,
        )  # fmt: skip
        return found


def _run_or_list(slots: torch.Tensor) -> slice | torch.Tensor:
    """Neighbouring slots as a slice, which is read in place; others as they are, to be gathered."""
    first, num = int(slots[0]), len(slots)
    if int(slots[-1]) - first == num - 1 and bool((slots[1:] > slots[:-1]).all()):
        return slice(first, first + num)
    return slots
