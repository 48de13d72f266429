"""Compile the Triton rANS kernels for GPUs not at hand; run by test_rans_triton.py.

What makes them fast is read from the machine code: few registers, no shared memory and no barrier.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sglang_ext.kernels.rans import gpu, gpu_kernels
from tests.long_form import either

ARCHS = either((90,), (80, 90, 100))
# Up to 40, 48 warps find room in a multiprocessor.
MAX_REGISTERS = 40
POINTERS = {
    "words": "*u16", "offsets": "*u32", "states": "*u32", "classes": "*u16", "context": "*u8",
    "out": "*u8", "symbols": "*u8", "status": "*i32", "scratch": "*u16", "counts": "*i32",
}  # fmt: skip


def compile_kernel(name: str, arch: int, constants: dict[str, Any]) -> Any:
    """A kernel for compute capability `arch`, with arguments of the types that gpu.py passes."""
    kernel = getattr(gpu_kernels, name)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    types = {**POINTERS, "lut": "*u32" if name == "decode_kernel" else "*u64"}
    if name == "pack_kernel":
        types["offsets"] = "*i64"
    signature = {
        arg: "constexpr" if arg in constants else types.get(arg, "i32") for arg in kernel.arg_names
    }
    # As the launcher tells of tensors: they begin at multiples of 16 bytes.
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, arg in enumerate(kernel.arg_names)
        if signature[arg].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = {"num_warps": gpu.ROWS, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def tool(path: str, *arguments: str) -> str:
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout


def step_of(sass: str) -> list[str]:
    """Instructions of the longest loop without a loop in it: a step of 32 symbols."""
    labels: dict[str, int] = {}
    loops: list[tuple[int, int]] = []
    code: list[str] = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label[1]] = len(code)
        elif re.match(r"\s*/\*[0-9a-f]{4}\*/", line):
            code.append(line)
            target = re.search(r"BRA.*`\((\.L_\w+)\)", line)
            if target and target[1] in labels:
                loops.append((labels[target[1]], len(code)))
    inner = [
        code[start:end]
        for start, end in loops
        if not any(start <= s and e <= end and (s, e) != (start, end) for s, e in loops)
    ]
    return max(inner, default=[], key=len)


def check(name: str, arch: int, with_context: bool) -> str:
    constants = {"HAS_CONTEXT": with_context, "ROWS": gpu.ROWS, "BLOCK": 1024}
    built = compile_kernel(name, arch, constants)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder, "kernel.cubin")
        cubin.write_bytes(built.asm["cubin"])
        usage = tool(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin))
        sass = tool(knobs.nvidia.nvdisasm.path, "-c", str(cubin))
    found = re.search(rf"Function {name}:\s*REG:(\d+) ", usage)
    assert found is not None, usage
    registers, step = int(found[1]), step_of(sass)
    what = f"{name:14} sm_{arch:<4} {'context' if with_context else '':8}"
    told = f"{what} {registers} registers, {len(step)} instructions a loop"
    assert registers <= MAX_REGISTERS, told
    assert len(step) > 30, told  # else it is not the loop
    # Nothing of the loop lies in memory for want of registers.
    assert not re.search(r"\b(LDL|STL)\b", "\n".join(step)), told
    if name != "pack_kernel":
        assert len(step) < 80, told
        assert built.metadata.shared == 0, told
        assert not re.search(r"\bBAR\.|\b(LDS|STS|LDSM|STSM|ATOMS)\b", sass), told
        assert "SHFL" in sass, told
    return told


def main() -> None:
    for arch in ARCHS:
        for name in ("decode_kernel", "encode_kernel"):
            for with_context in (False, True):
                print(check(name, arch, with_context))
        print(check("pack_kernel", arch, False))
    print("all kernels compiled")


if __name__ == "__main__":
    main()
