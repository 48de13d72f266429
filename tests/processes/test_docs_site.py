"""The documents as a site: every page is in it, and every link of theirs leads somewhere."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from docs.outside_pages import OUTSIDE

ROOT = Path(__file__).resolve().parents[2]


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds a repository's documents; a warning is an error, as in `make docs`."""
    command = ["-m", "mkdocs", "build", "--strict", "-f", str(root / "mkdocs.yml"), "-d", str(site)]
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def linked_copy(folder: Path) -> None:
    """Makes a folder whose documents are links to those of the repository."""
    (folder / "docs").mkdir(parents=True)
    for source in (*OUTSIDE, "mkdocs.yml"):
        (folder / source).parent.mkdir(parents=True, exist_ok=True)
        (folder / source).symlink_to(ROOT / source)
    for path in (ROOT / "docs").iterdir():
        if path.name != "outside_pages.py":  # which looks for the repository from where it is
            (folder / "docs" / path.name).symlink_to(path)
    for path in (ROOT / "examples").glob("*.py"):
        (folder / "examples" / path.name).symlink_to(path)
    code = (ROOT / "docs" / "outside_pages.py").read_text()
    (folder / "docs" / "outside_pages.py").write_text(code)


def test_every_page_is_in_the_site_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = build(ROOT, tmp_path)
    assert done.returncode == 0, done.stderr
    pages = [*(path.stem for path in (ROOT / "docs").glob("*.md")), "index", "examples/index"]
    for page in pages:
        text = (tmp_path / f"{page}.html").read_text()
        assert "<h1 id=" in text, f"{page} has no heading"
        # It is read where there is no internet, too.
        assert 'src="http' not in text
        assert "fonts.googleapis" not in text


def test_a_link_that_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    linked_copy(tmp_path / "repository")
    page = tmp_path / "repository" / "docs" / "quotas.md"
    page.unlink()
    for link in ("[somewhere](hints.md#no-such-heading)", "[somewhere](no-such-page.md)"):
        page.write_text(f"# Quotas\n\n{link}\n")
        done = build(tmp_path / "repository", tmp_path / "site")
        assert done.returncode != 0
        assert "no-such" in done.stderr
