"""The wheels of a kit: SGLang without what a server of a dense model does not need, and its needs.

They are for CPython 3.12 on x86-64 Linux, in the versions that are installed here, so that the kit
runs what the tests ran. What machines with a CUDA device have of their own (torch, triton,
transformers, numba and what those need) is not packed; `kit_run` says what of it is missing.
"""

from __future__ import annotations

import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

PYTHON = "3.12"
# Of SGLang's distribution: models that make images, its tests; servers and a tree in Rust.
_CUT_FOLDERS = ("sglang/multimodal_gen/", "sglang/test/")
# And of zstandard's what is for interpreters other than CPython.
_CUT_LIBRARIES = (
    *("sglang/srt/rust_extensions/", "sglang/srt/mem_cache/rust_tree_core/"),
    "zstandard/_cffi.",
)
_PLATFORMS = (
    *("1_x86_64", "2010_x86_64", "2014_x86_64"),
    *(f"_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34)),
)
# By what needs them: SGLang's front, its scheduler, the plugin.
_NAMES = (
    *("fastapi", "starlette", "uvicorn", "python-multipart", "pydantic", "pydantic-core"),
    *("annotated-types", "typing-inspection", "openai", "jiter", "distro", "sniffio"),
    *("openai-harmony", "partial-json-parser", "pybase64", "soundfile", "cffi", "pycparser"),
    *("jsonschema", "jsonschema-specifications", "referencing", "rpds-py"),
    "opentelemetry-api",
    *(
        "orjson",
        "msgspec",
        "pyzmq",
        "setproctitle",
        "apache-tvm-ffi",
        "compressed-tensors",
        "loguru",
    ),
    *("xgrammar", "gguf", "dill", "einops"),
    *("cryptography", "msgpack", "xxhash", "zstandard"),
)


def collect(folder: Path, tree: Path) -> None:
    """Puts the wheels into a new folder, that of the plugin among them.

    Args:
        folder: for the wheels.
        tree: a copy of the plugin's tree; a build writes into it.

    Raises:
        subprocess.CalledProcessError: one cannot be had.
    """
    folder.mkdir()
    wanted = [f"{name}=={metadata.version(name)}" for name in ("sglang", *_NAMES)]
    platforms = [each for tag in _PLATFORMS for each in ("--platform", f"manylinux{tag}")]
    pip = [sys.executable, "-m", "pip", "--quiet", "--no-input", "--disable-pip-version-check"]
    subprocess.run(
        [
            *(*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"),
            *("--python-version", PYTHON, *platforms, "-d", str(folder), *wanted),
        ],
        check=True,
    )
    subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(tree)], check=True)
    for name in ("sglang", "zstandard"):
        [wheel] = folder.glob(f"{name}-*.whl")
        cut(wheel)


def cut(wheel: Path) -> None:
    """Takes out of a wheel what is named above, and packs the rest as tightly as can be."""
    whole = wheel.with_suffix(".whole")
    wheel.rename(whole)
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(wheel, "w") as new:
        for entry in old.infolist():
            name = entry.filename
            is_library = name.startswith(_CUT_LIBRARIES) and name.endswith(".so")
            if not name.startswith(_CUT_FOLDERS) and not is_library:
                new.writestr(entry, old.read(entry), zipfile.ZIP_DEFLATED, 9)
    whole.unlink()
