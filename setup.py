"""What `pyproject.toml` cannot say: the description on PyPI, where no file of this tree is."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).resolve().parent
# Of a file here: an image or a link, its text, its path.
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|mailto:|#)([^)\s]+)\)")


def description(text: str, repository: str, version: str) -> str:
    """`README.md` with links that lead somewhere from anywhere.

    Args:
        text: of the file.
        repository: its address, in `[project.urls]`; empty while there is none: then of a link its
            text is left, and of an image nothing.
        version: of this release, as tags have it.
    """

    def of_link(found: re.Match[str]) -> str:
        mark, shown, path = found.groups()
        if not repository:
            return "" if mark else shown
        kind = "raw" if mark else "blob"
        return f"{mark}[{shown}]({repository}/{kind}/v{version}/{path})"

    return _LINK.sub(of_link, text)


def published_description() -> str:
    """That of this release."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    package = (ROOT / "sglang_ext" / "__init__.py").read_text(encoding="utf-8")
    [version] = re.findall(r'^__version__ = "([^"]+)"$', package, re.MULTILINE)
    repository = project.get("urls", {}).get("Repository", "").rstrip("/")
    return description((ROOT / "README.md").read_text(encoding="utf-8"), repository, version)


if __name__ == "__main__":
    setup(long_description=published_description(), long_description_content_type="text/markdown")
