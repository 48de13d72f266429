"""Another release of SGLang than the installed one, from its wheel, for servers of a test.

`make contract` downloads the wheels. One is unpacked once, into a folder that goes on the import
path of a server's processes in front of the installed release; nothing is installed.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / "build" / "sglang"


def wheel_of(version: str) -> Path | None:
    """The wheel of a release; None where it was not downloaded."""
    return next(iter(sorted(WHEELS.glob(f"sglang-{version}-*.whl"))), None)


def unpacked(version: str) -> Path:
    """The folder with a release. Any number of processes may ask at the same time.

    Raises:
        FileNotFoundError: its wheel was not downloaded.
    """
    folder, wheel = WHEELS / version, wheel_of(version)
    if folder.is_dir():
        return folder
    if wheel is None:
        raise FileNotFoundError(f"no wheel of SGLang {version} in {WHEELS}: make contract")
    with tempfile.TemporaryDirectory(dir=WHEELS) as scratch:
        made = Path(scratch) / version
        with zipfile.ZipFile(wheel) as content:
            content.extractall(made)
        with suppress(OSError):  # another process was first
            made.rename(folder)
    return folder


if __name__ == "__main__":
    try:
        print(unpacked(sys.argv[1]))
    except FileNotFoundError as error:
        sys.exit(str(error))
