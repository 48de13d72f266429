"""Compile the Triton rope kernels for GPUs not at hand; run by test_rope_triton.py."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ext.kernels.rope import gpu
from sglang_ext.kernels.rope import gpu_kernels as kernels
from tests.kernels.rope.rope_cases import make_spec
from tests.long_form import either

HEADS = 8
# Of these, what is in a row moves 16 bytes a thread.
WIDE = ("load_kernel", "move_kernel", "unpage_kernel", "page_kernel")
KERNELS = (*WIDE, "save_kernel", "list_kernel", "correct_kernel")

POINTERS = {
    "cos": "*fp32", "sin": "*fp32", "wrong": "*u8", "misses": "*i32", "tails": "*i32",
}  # fmt: skip
INDICES = (
    "slots",
    "positions",
    "saved",
    "page_index",
    "page",
    "element",
    "bits",
)
INTEGERS = (
    *("heads", "width", "first_row", "page_size", "first_word", "count", "num_tokens"),
    *("layer", "num_layers", "capacity"),
)
# What the server's arguments have: rows, pages and buffers begin at multiples of 16 words.
ALIGNED = (
    *("pages", "pool", "cos", "sin", "page_words", "first_word", "row_stride", "width", "wrong"),
    *("misses", "tails", "tail_words"),
)
# KIND, RULE, INTERLEAVED. A default run has the first, for each generation: bf16, `fma_a` and the
# two halves of a head, as SGLang's CUDA path has most models. What another rule and neighbouring
# pairs change is in the first of SHAPES, too.
CASES: tuple[tuple[int, int, bool], ...] = (
    (0, 2, False),
    (0, 0, False),
    (0, 1, True),
    (1, 2, False),
    (2, 1, False),
)
# Heads, columns, first rotated column, rotated columns, whether pairs are neighbours: latent rows,
# and half of a head.
SHAPES = ((1, 576, 512, 64, True), (8, 128, 0, 64, False))
SCALARS = {
    "row_stride": "i64",
    "tail_words": "i64",
    "slack": "fp32",
    "page_words": "i64",
}


def compile_kernel(
    kernel: Any, arch: int, constants: dict[str, Any], num_warps: int = 4
) -> tuple[str, dict[str, int]]:
    """PTX of a kernel, and what its machine code uses: `registers` and `spills`."""
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
    return built.asm["ptx"], resources(built.asm["cubin"])


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of the one kernel in it, and how many of its instructions access the stack.

    The size of the stack alone says little: a division's slow path may reserve 8 bytes unused.
    """
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        used = _look("cuobjdump", "-res-usage", file.name)
        code = _look("nvdisasm", "-c", file.name)
    registers = re.findall(r"\bREG:(\d+)", used)
    assert len(registers) == 1, used
    assert "EXIT" in code, code
    return {
        "registers": int(registers[0]),
        "spills": len(re.findall(r"\b(?:LDL|STL)\b", code)),
    }


def _look(tool: str, *args: str) -> str:
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / tool
    return subprocess.run([path, *args], capture_output=True, check=True, text=True).stdout


def check_wide(name: str, ptx: str) -> None:
    """No access to pages or pool is narrower than 16 bytes."""
    narrow = re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:b|u|s)(?:8|16)\b", ptx)
    wide = re.findall(r"(?:ld|st)\.global[.\w:]*\.v4\.(?:b|u|s)32", ptx)
    assert wide, (name, "no access of 16 bytes")
    assert not narrow, (name, narrow)


def check_saves_wide(ptx: str, interleaved: bool) -> None:
    """The row is read and laid out 16 bytes at a time; only pairs that are searched for are not.

    Neighbours are one access, other pairs two.

    These are taken out of both loads of a row, both stores and four accesses to their marks.
    """
    loads = re.findall(r"ld\.global[.\w:]*\.v4\.(?:b|u|s)32", ptx)
    stores = re.findall(r"st\.global[.\w:]*\.v4\.(?:b|u|s)32", ptx)
    words = re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:b|u|s)16\b", ptx)
    marks = re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:b|u|s)8\b", ptx)
    assert len(loads) >= 2, len(loads)
    assert len(stores) >= (1 if interleaved else 2), len(stores)
    assert len(words) <= 4 + interleaved, words  # both marks of a pair may be one of them
    assert len(marks) <= 4, marks


def check_listed(name: str, ptx: str) -> None:
    """Marks are read four at a time; only a value that is listed is an access of two bytes.

    Listed values are few and far between.
    """
    narrow = re.findall(r"(?:ld|st)\.global[.\w:]*\.(?:b|u|s)8\b", ptx)
    loads = re.findall(r"ld\.global[.\w:]*\.(?:b|u|s)16\b", ptx)
    stores = re.findall(r"st\.global[.\w:]*\.(?:b|u|s)16\b", ptx)
    assert not narrow, (name, narrow)
    assert len(loads) <= (4 if name == "list_kernel" else 0), (name, loads)
    assert len(stores) <= (1 if name == "correct_kernel" else 0), (name, stores)


def check_arithmetic(name: str, ptx: str, rule: int) -> None:
    """Nothing is flushed to zero, and neither `eager` nor `fp32` is contracted."""
    assert ".ftz" not in ptx, name
    fused = len(re.findall(r"\bfma\.rn\.f32", ptx))
    if rule == 2 and name in ("save_kernel", "load_kernel"):
        assert fused > 0, name
    else:
        assert fused == 0, (name, rule)


def compile_case(arch: int, kind: int, rule: int, interleaved: bool) -> None:
    item = 4 if kind == 2 else 2
    for name in KERNELS:
        options = gpu._wide(HEADS * 64, item)
        constants = {
            "DIM": 128, "FIRST": 0, "HALF": 64, "INTERLEAVED": interleaved, "KIND": kind,
            "RULE": rule, "EXACT": True, "BLOCK": options["BLOCK"],
            "REST": gpu._wide(HEADS * 128, item)["BLOCK"],
        }  # fmt: skip
        if name == "save_kernel":
            options = _search_options(item, interleaved)
            constants |= {name: options[name] for name in ("BLOCK", "WIDE")}
        elif name in ("list_kernel", "correct_kernel"):
            options = {"num_warps": 4}
            listed = {"list_kernel": gpu._LISTED_A_STEP, "correct_kernel": 128}
            constants["BLOCK"] = listed[name]
        kernel = getattr(kernels, name)
        ptx, used = compile_kernel(kernel, arch, constants, options["num_warps"])
        assert used["spills"] == 0, (name, arch, used)
        if name in WIDE:
            check_wide(name, ptx)
        if name == "save_kernel" and kind != 2:
            check_saves_wide(ptx, interleaved)
        if name in ("list_kernel", "correct_kernel"):
            check_listed(name, ptx)
        check_arithmetic(name, ptx, rule)
        print(f"sm_{arch} kind {kind} rule {rule} {name}: {used['registers']} registers, no spills")


def compile_shape(arch: int, heads: int, dim: int, first: int, rotary: int, near: bool) -> None:
    """What rotates rows of another shape, in bf16, moves them 16 bytes at a time, too."""
    pool = torch.empty(1, heads, dim, dtype=torch.bfloat16)
    spec = make_spec(rotary, "fp32", first=first, interleaved=near)
    for name in ("load_kernel", "move_kernel", "save_kernel"):
        options = gpu._wide(heads * rotary // 2, pool.element_size())
        if name == "save_kernel":
            options = gpu._search_options(pool, spec)
        launch = {key: value for key, value in options.items() if key in ("BLOCK", "WIDE")}
        constants = {**gpu._geometry(pool, spec), "RULE": 1, "EXACT": True, **launch}
        kernel = getattr(kernels, name)
        ptx, used = compile_kernel(kernel, arch, constants, options["num_warps"])
        assert used["spills"] == 0, (name, arch, used)
        check_arithmetic(name, ptx, 1)
        if name != "save_kernel":
            check_wide(name, ptx)
        else:
            check_saves_wide(ptx, near)


def _search_options(item_bytes: int, interleaved: bool) -> dict[str, Any]:
    pool = torch.empty(1, HEADS, 128, dtype={2: torch.bfloat16, 4: torch.float32}[item_bytes])
    spec = make_spec(128, "fp32", interleaved=interleaved)
    return gpu._search_options(pool, spec)


def main() -> None:
    served = [(arch, CASES[:1]) for arch in (80, 90, 100)]
    every = [(80, CASES[:2]), (90, CASES), (100, CASES[:3])]
    for arch, cases in either(served, every):
        for kind, rule, interleaved in cases:
            compile_case(arch, kind, rule, interleaved)
        for shape in either(SHAPES[:1], SHAPES):
            compile_shape(arch, *shape)
    print("all kernels compiled")


if __name__ == "__main__":
    main()
