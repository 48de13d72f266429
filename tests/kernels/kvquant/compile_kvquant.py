"""Compile the Triton kvquant kernels for GPUs not at hand; run by test_kvquant_triton.py."""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ext.kernels.kvquant import gpu_kernels as kernels
from tests.long_form import either

WORDS = {0: "*i16", 1: "*i16", 2: "*i32", 3: "*u8", 4: "*u8"}
POINTERS = {
    "scale": "*fp32", "mean": "*i32", "forward": "*i32", "inverse": "*i32", "inv_step": "*fp64",
    "rounding": "*fp64", "clamp": "*i32", "raw_from": "*i32", "starts": "*i64", "tiles": "*i16",
    "flags": "*u8", "shift": "*u8",
}  # fmt: skip
CASES = either(((90, (0, 2, 3)),), ((80, (0,)), (90, (0, 1, 2, 3, 4)), (100, (0, 3))))


def compile_kernel(name: str, arch: int, kind: int) -> Any:
    """The compiled kernel."""
    kernel = getattr(kernels, name)
    constants = {"KIND": kind, "TOKENS": 32, "TERMS": 32, "COLUMNS": 32}
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument == "words":
            signature[argument] = WORDS[kind]
        elif argument == "mean" and name == "dequantise_kernel":
            signature[argument] = "*fp32"
        else:
            signature[argument] = POINTERS.get(argument, "i32")
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def main() -> None:
    for arch, kinds in CASES:
        for kind in kinds:
            for name in ("quantise_kernel", "dequantise_kernel", "clear_kernel"):
                built = compile_kernel(name, arch, kind)
                ptx = built.asm["ptx"]
                assert len(built.asm["cubin"]) > 0
                assert ".ftz" not in ptx, name
                assert "fma.rn.f32" not in ptx, name
                # The dot products are matrix instructions, exact anyway; nothing else is fused.
                assert "fma.rn.f64" not in ptx, name
                if name != "clear_kernel":
                    assert "mma.sync" in ptx, name
    print("all kernels compiled")


if __name__ == "__main__":
    main()
