"""Names of quantised formats' kernels."""

from sgl_kernel import absent

for _name in (
    "ggml_dequantize",
    "ggml_moe_a8",
    "ggml_moe_a8_vec",
    "ggml_moe_get_block_size",
    "ggml_mul_mat_a8",
    "ggml_mul_mat_vec_a8",
):
    globals()[_name] = absent(_name)
