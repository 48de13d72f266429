"""Stand-in for SGLang's compiled CPU kernels, which need a build of their own.

SGLang imports these names when its CPU engine is on, and calls them for speculative decoding only;
what it calls for models with the gated delta rule is in ``mamba`` and among torch's operators.
Here they are plain torch, a request at a time: right, and fast enough for tests. Other names stay
absent on purpose: SGLang tests for them with ``try: from sgl_kernel import ...``.
"""

import torch

from .cache_rows import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
)
from .delta_rule import fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu
from .draft_trees import build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu
from .gated_attention import (
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_mul_cpu,
)

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]

for _kernel in (
    fused_gdn_gating_cpu,
    fused_qk_gemma_rmsnorm_cpu,
    fused_qk_gemma_rmsnorm_with_gate_cpu,
    fused_qkvzba_split_reshape_cat_contiguous_cpu,
    fused_rmsnorm_gated_cpu,
    fused_sigmoid_gating_delta_rule_update_cpu,
    fused_sigmoid_mul_cpu,
):
    setattr(torch.ops.sgl_kernel, _kernel.__name__, _kernel)
