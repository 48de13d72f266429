"""The layout that installs, imports and layering rest on."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("kernels", "tiers")

# llvmlite is the part of numba that its intrinsics are written with.
KERNEL_IMPORTS = {"llvmlite", "numba", "numpy", "torch", "triton"}
# The clients of remote stores are optional and imported when a store is asked for.
TIER_IMPORTS = {
    "cryptography",
    "llvmlite",
    "mooncake",
    "msgpack",
    "numba",
    "numpy",
    "xxhash",
    "zstandard",
}
# SGLang brings fastapi and pydantic for its answers, prometheus_client, and transformers for
# calibration.
PLUGIN_IMPORTS = {
    *KERNEL_IMPORTS,
    *TIER_IMPORTS,
    *("fastapi", "packaging", "prometheus_client", "pydantic", "transformers"),
}

# The modules of the seam that import sglang; none outside does.
SGLANG_MODULES = {
    "seam/cache",
    "seam/expected_pages",
    "seam/hash_fallback",
    "seam/hooks/admin/changes",
    "seam/hooks/disaggregation",
    "seam/hooks/hooking",
    "seam/hooks/loaded_models",
    "seam/hooks/resolution",
    "seam/hooks/scheduler",
    "seam/hooks/admin/steering_endpoint",
    "seam/kv_events",
    "seam/linker",
    "seam/media/page_digests",
    "seam/media/requests",
    "seam/model_kind",
    "seam/page_hash",
    "seam/radix_tree",
    "seam/self_check",
    "seam/session_turns",
    "seam/start/ranks",
    "seam/taint",
    "seam/wrapper",
}


def _pyproject() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def _folders_with_python() -> set[Path]:
    """Folders of the product, by their real path, relative to the root; the linked ones always."""
    files = [path for top in ("sglang_ext", *LINKED) for path in (ROOT / top).rglob("*.py")]
    return {path.relative_to(ROOT).parent for path in files} | {Path(name) for name in LINKED}


def _package_name(folder: Path) -> str:
    prefix = "" if folder.parts[0] == "sglang_ext" else "sglang_ext."
    return prefix + ".".join(folder.parts)


def _own_modules() -> list[Path]:
    """The plugin's own files, without those seen through the symlinks."""
    links = {ROOT / "sglang_ext" / name for name in LINKED}
    files = (ROOT / "sglang_ext").rglob("*.py")
    return sorted(path for path in files if not links.intersection(path.parents))


def _imports(path: Path) -> list[tuple[int, str]]:
    """(line, absolute dotted module) of every import in a file, function bodies included."""
    package = _package_name(path.parent.relative_to(ROOT))
    return _imports_of(path.read_text(encoding="utf-8"), package)


def _imports_of(source: str, package: str) -> list[tuple[int, str]]:
    parts = package.split(".")
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = parts[: len(parts) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            # `from sglang_ext import tiers` names a module, not a value.
            names = [f"{stem}.{alias.name}" for alias in node.names] if stem == "sglang_ext" else []
            found += [(node.lineno, name) for name in names or [stem]]
    return found


def _foreign(files: list[Path], third_party: set[str], own: tuple[str, ...]) -> list[str]:
    """Imports in `files` that are none of stdlib, `third_party` and modules under `own`."""
    bad = []
    for path in files:
        for line, module in _imports(path):
            top = module.partition(".")[0]
            allowed = top in sys.stdlib_module_names or top in third_party
            if not allowed and not any(
                module == name or module.startswith(name + ".") for name in own
            ):
                bad.append(f"{path.relative_to(ROOT)}:{line} imports {module}")
    return bad


@pytest.mark.parametrize("name", LINKED)
def test_a_linked_folder_is_no_package_at_the_top(name: str) -> None:
    # With an __init__.py it would shadow the package `kernels` that SGLang depends on.
    assert not (ROOT / name / "__init__.py").exists()
    link = ROOT / "sglang_ext" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name


def test_every_folder_below_a_linked_one_is_a_package() -> None:
    missing = [
        str(folder)
        for folder in _folders_with_python()
        if str(folder) not in LINKED and not (ROOT / folder / "__init__.py").exists()
    ]
    assert not missing


def test_the_package_list_names_every_package() -> None:
    listed = set(_pyproject()["tool"]["setuptools"]["packages"])
    assert listed == {_package_name(folder) for folder in _folders_with_python()}


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    tracked = ["pyproject.toml", "setup.py", "README.md", "LICENSE", "sglang_ext", *LINKED]
    source = tmp_path / "source"
    source.mkdir()
    subprocess.run(["cp", "-a", *(str(ROOT / name) for name in tracked), str(source)], check=True)
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        entry_points = [name for name in archive.namelist() if name.endswith("entry_points.txt")]
        assert b"sglang.srt.plugins" in archive.read(entry_points[0])
    expected = {
        f"{_package_name(folder).replace('.', '/')}/{path.name}"
        for folder in _folders_with_python()
        for path in (ROOT / folder).glob("*.py")
    }
    assert {name for name in names if name.endswith(".py")} == expected
    assert {name.partition("/")[0] for name in names} == {"sglang_ext"}


def test_importing_the_package_imports_neither_torch_nor_sglang() -> None:
    code = (
        "import sys, sglang_ext\n"
        "heavy = {'torch', 'sglang', 'numba', 'triton'}.intersection(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_kernels_import_only_their_own_layer() -> None:
    files = sorted((ROOT / "kernels").rglob("*.py"))
    assert files
    assert not _foreign(files, KERNEL_IMPORTS, ("sglang_ext.kernels", "sglang_ext.compiling"))


def test_tiers_import_only_their_own_layer() -> None:
    files = sorted((ROOT / "tiers").rglob("*.py"))
    assert files
    own = ("sglang_ext.tiers", "sglang_ext.registry", "sglang_ext.compiling")
    assert not _foreign(files, TIER_IMPORTS, own)
    assert not _foreign([ROOT / "sglang_ext/registry.py"], set(), ())
    assert not _foreign([ROOT / "sglang_ext/compiling.py"], {"numba"}, ())


def test_only_the_seam_imports_sglang() -> None:
    modules = _own_modules()
    importing = {
        path.relative_to(ROOT / "sglang_ext").with_suffix("").as_posix()
        for path in modules
        if any(name.partition(".")[0] == "sglang" for _, name in _imports(path))
    }
    assert importing == SGLANG_MODULES
    assert not _foreign(modules, PLUGIN_IMPORTS | {"sglang"}, ("sglang_ext",))


def test_the_layering_test_sees_each_form_of_import() -> None:
    source = (
        "import torch.nn\n"
        "from sglang.srt import plugins\n"
        "from sglang_ext import kernels\n"
        "from ..other import name\n"
        "def f():\n"
        "    from . import sibling\n"
    )
    assert [module for _, module in _imports_of(source, "sglang_ext.tiers.disk")] == [
        "torch.nn",
        "sglang.srt",
        "sglang_ext.kernels",
        "sglang_ext.tiers.other",
        "sglang_ext.tiers.disk",
    ]


def test_the_installed_pins_agree_with_the_constraints() -> None:
    constraints = (ROOT / "runtime_cpu" / "constraints.txt").read_text(encoding="utf-8")
    pinned = {line.lower().replace("_", "-") for line in constraints.splitlines() if "==" in line}
    extras = _pyproject()["project"]["optional-dependencies"]
    for pin in (*extras["cpu"], *extras["dev"], *extras["gateway"]):
        assert pin.lower().replace("_", "-") in pinned, f"{pin} differs in constraints.txt"
