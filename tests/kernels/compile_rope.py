"""Compile the Triton rope kernels for GPUs not at hand; run by test_rope_triton.py."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ext.kernels.rope import gpu_kernels as kernels

POINTERS = {"cos": "*fp32", "sin": "*fp32", "wrong": "*u8"}
INDICES = ("slots", "positions", "saved", "source_rows", "out_rows")
# KIND, RULE, INTERLEAVED
CASES = ((0, 0, False), (0, 1, True), (1, 2, False), (2, 1, False))
SCALARS = {"row_stride": "i64", "source_stride": "i64", "out_stride": "i64", "slack": "fp32"}


def compile_kernel(kernel: Any, arch: int, constants: dict[str, Any]) -> str:
    """PTX of a kernel; a cubin must have come out of it too."""
    word = "*i32" if constants.get("KIND") == 2 else "*i16"
    signature = {}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INDICES:
            signature[name] = "*i64"
        elif name in ("heads", "width"):
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name) or SCALARS.get(name) or word
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    options = {"enable_fp_fusion": False, "num_warps": 4}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert len(built.asm["cubin"]) > 0
    ptx: str = built.asm["ptx"]
    return ptx


def main() -> None:
    for arch, cases in ((80, CASES[:1]), (90, CASES), (100, CASES[1:2])):
        for kind, rule, interleaved in cases:
            constants = {
                "DIM": 128, "FIRST": 0, "HALF": 64, "INTERLEAVED": interleaved, "KIND": kind,
                "RULE": rule, "EXACT": True, "BLOCK": 128,
            }  # fmt: skip
            for name in ("save_kernel", "load_kernel", "move_kernel", "copy_kernel"):
                ptx = compile_kernel(getattr(kernels, name), arch, constants)
                assert ".ftz" not in ptx, name
                fused = len(re.findall(r"\bfma\.rn\.f32", ptx))
                if rule == 2 and name in ("save_kernel", "load_kernel"):
                    assert fused > 0, name
                else:  # neither `eager` nor `fp32` may be contracted
                    assert fused == 0, (name, rule)
    print("all kernels compiled")


if __name__ == "__main__":
    main()
