"""The one name that SGLang takes from `sgl_kernel.speculative` on a CPU."""

from .draft_trees import reconstruct_indices_from_tree_mask

__all__ = ["reconstruct_indices_from_tree_mask"]
