"""Compile the Triton rope kernels for GPUs not at hand; run by test_rope_triton.py."""

from __future__ import annotations

import re
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ext.kernels.rope import gpu
from sglang_ext.kernels.rope import gpu_kernels as kernels

HEADS = 8
LOADING = ("load_kernel", "move_kernel", "unpage_kernel", "correct_kernel")

POINTERS = {"cos": "*fp32", "sin": "*fp32", "wrong": "*u8"}
INDICES = (
    "slots",
    "positions",
    "saved",
    "source_rows",
    "out_rows",
    "page_index",
    "page",
    "element",
    "bits",
)
INTEGERS = ("heads", "width", "first_row", "page_size", "first_word", "count", "num_tokens")
# What the server's arguments have: rows, pages and buffers begin at multiples of 16 words.
ALIGNED = ("pages", "pool", "cos", "sin", "page_words", "first_word", "row_stride", "width")
# KIND, RULE, INTERLEAVED
CASES = ((0, 0, False), (0, 1, True), (1, 2, False), (2, 1, False))
SCALARS = {
    "row_stride": "i64",
    "source_stride": "i64",
    "out_stride": "i64",
    "slack": "fp32",
    "page_words": "i64",
}


def compile_kernel(kernel: Any, arch: int, constants: dict[str, Any], num_warps: int = 4) -> str:
    """PTX of a kernel; a cubin must have come out of it too."""
    word = "*i32" if constants.get("KIND") == 2 else "*i16"
    signature = {}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    for name in kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in INDICES:
            signature[name] = "*i64"
        elif name in INTEGERS:
            signature[name] = "i32"
        else:
            signature[name] = POINTERS.get(name) or SCALARS.get(name) or word
    attrs = {
        (at,): [["tt.divisibility", 16]]
        for at, name in enumerate(kernel.arg_names)
        if name in ALIGNED and name not in constants
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"enable_fp_fusion": False, "num_warps": num_warps}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    assert len(built.asm["cubin"]) > 0
    ptx: str = built.asm["ptx"]
    return ptx


def check_wide(name: str, ptx: str) -> None:
    """No access to pages or pool is narrower than 16 bytes."""
    narrow = re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:b|u|s)(?:8|16)\b", ptx)
    wide = re.findall(r"(?:ld|st)\.global[.\w:]*\.v4\.(?:b|u|s)32", ptx)
    assert wide, (name, "no access of 16 bytes")
    assert not narrow, (name, narrow)


def main() -> None:
    for arch, cases in ((80, CASES[:1]), (90, CASES), (100, CASES[1:2])):
        for kind, rule, interleaved in cases:
            constants = {
                "DIM": 128, "FIRST": 0, "HALF": 64, "INTERLEAVED": interleaved, "KIND": kind,
                "RULE": rule, "EXACT": True, "BLOCK": 128,
            }  # fmt: skip
            for name in ("save_kernel", "copy_kernel", *LOADING):
                wide = gpu._wide(HEADS * 64, 4 if kind == 2 else 2) if name in LOADING else {}
                constants["BLOCK"] = wide.get("BLOCK", 128)
                num_warps = wide.get("num_warps", 4)
                ptx = compile_kernel(getattr(kernels, name), arch, constants, num_warps)
                if name in LOADING[:3] and not interleaved:
                    check_wide(name, ptx)
                assert ".ftz" not in ptx, name
                fused = len(re.findall(r"\bfma\.rn\.f32", ptx))
                if rule == 2 and name in ("save_kernel", "load_kernel"):
                    assert fused > 0, name
                else:  # neither `eager` nor `fp32` may be contracted
                    assert fused == 0, (name, rule)
    print("all kernels compiled")


if __name__ == "__main__":
    main()
