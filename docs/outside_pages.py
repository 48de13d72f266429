"""Brings the pages that lie outside of docs/ into the site that mkdocs builds, and their links."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent

# From a file of the repository to its place in the site.
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
    "kernels/rope/README.md": "position-free-k.md",
    "examples/README.md": "examples/README.md",
}
_SOURCES = {site: source for source, site in OUTSIDE.items()}
_LINK = re.compile(r"(\]\()([^)#\s:]+)((?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside, and the examples."""
    for source, site in OUTSIDE.items():
        files.append(File.generated(config, site, content=(ROOT / source).read_text()))
    for path in sorted((ROOT / "examples").glob("*.py")):
        files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets the links of a page lead to where their files are in the site."""
    site = page.file.src_uri
    return with_site_links(markdown, _SOURCES.get(site, f"docs/{site}"), site)


def with_site_links(markdown: str, source: str, site: str) -> str:
    """A page's text with links that hold in the site.

    Args:
        markdown: the text.
        source: its file in the repository.
        site: its place in the site.
    """

    def moved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        there = OUTSIDE.get(target, target.removeprefix("docs/"))
        return f"{link[1]}{posixpath.relpath(there, posixpath.dirname(site))}{link[3]}"

    return _LINK.sub(moved, markdown)
