"""`python -m testkit.contract_matrix WHEEL...`: which releases of SGLang keep to the contract.

Reads wheels and runs nothing of them. The exit status is 1 where one that the plugin says it was
tested with is not what was tested.
"""

from __future__ import annotations

import sys
from pathlib import Path

from packaging.version import Version

from sglang_ext.seam.contract.source import SGLangSource
from sglang_ext.seam.contract.verdict import examine, reference_releases


def main() -> int:
    """Prints a line a release, the oldest first; the exit status."""
    verdicts = [examine(SGLangSource(Path(name))) for name in sys.argv[1:]]
    wrong = []
    for verdict in sorted(verdicts, key=lambda verdict: Version(verdict.version)):
        counts = [
            f"{len(found)} {what}"
            for found, what in (
                (verdict.broken, "missing or with other parameters"),
                (verdict.unproven, "followed and written differently"),
                (verdict.changed, "hooked and written differently"),
                (verdict.called, "called and written differently"),
            )
            if found
        ]
        runs = "refused" if verdict.refusal(allow_untested=False) else "runs"
        word = "tested" if verdict.is_tested else f"{runs}, not tested"
        print(f"{verdict.version}: {'; '.join([word, *counts])}")
        if verdict.version in reference_releases() and not verdict.is_tested:
            wrong.append(verdict.version)
    missing = reference_releases().keys() - {verdict.version for verdict in verdicts}
    for version in sorted(missing):
        print(f"{version}: there is no wheel of it here")
    return int(bool(wrong or missing))


if __name__ == "__main__":
    sys.exit(main())
