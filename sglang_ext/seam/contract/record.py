"""`python -m sglang_ext.seam.contract.record [PLACE...]`: writes what releases are tested with.

Places are folders or wheels, the oldest release first; the installed one where none is given. To be
run for a release that is tested next (docs/upgrading.md), and when the list of names changes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from sglang_ext.seam.contract.source import ContractError, SGLangSource
from sglang_ext.seam.contract.verdict import TESTED_FILE, installed, record


def main() -> None:
    """Writes the file."""
    try:
        sources = [SGLangSource(Path(place)) for place in sys.argv[1:]] or [installed()]
        TESTED_FILE.write_text(json.dumps(record(sources), indent=1) + "\n")
    except ContractError as error:
        sys.exit(f"{error}\nNothing was written.")


if __name__ == "__main__":
    main()
