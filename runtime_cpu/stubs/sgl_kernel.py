"""Stand-in for SGLang's compiled CPU kernels, which need a build of their own.

SGLang imports these names when its CPU engine is on, and calls them only for speculative decoding.
A call is refused, so that nothing can run on a kernel that is not there. Other names stay absent on
purpose: SGLang tests for them with ``try: from sgl_kernel import ...``.
"""

from collections.abc import Callable
from typing import NoReturn


def _refusing(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} was called, but this CPU runtime has no compiled kernels: "
            "turn the feature off that needs it (speculative decoding), or use a GPU machine"
        )

    kernel.__name__ = name
    return kernel


assign_draft_cache_locs_contiguous_cpu = _refusing("assign_draft_cache_locs_contiguous_cpu")
assign_extend_cache_locs_cpu = _refusing("assign_extend_cache_locs_cpu")
assign_req_to_token_pool_cpu = _refusing("assign_req_to_token_pool_cpu")
build_tree_kernel_efficient_cpu = _refusing("build_tree_kernel_efficient_cpu")
copy_all_layer_kv_cache_cpu = _refusing("copy_all_layer_kv_cache_cpu")
fill_accept_out_cache_loc_cpu = _refusing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _refusing("fill_bonus_tokens_cpu")
rotate_input_ids_cpu = _refusing("rotate_input_ids_cpu")
verify_tree_greedy_cpu = _refusing("verify_tree_greedy_cpu")
