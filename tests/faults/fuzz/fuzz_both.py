"""`fuzz_store` and `fuzz_codec`, one after the other in one process: ``--cases`` of each.

Of a few cases nearly all of the time goes into imports and into loops with bounds checks, and both
need most of the same ones.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.faults.fuzz import fuzz_codec, fuzz_store
from tests.faults.fuzz.checked_loops import add_flag, run_checked


def main() -> None:
    """Runs, under the checks if so, and prints the name of each fuzzer before its lines."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    add_flag(parser)
    parser.add_argument("--as-shipped", action="store_true", help="loops without bounds checks")
    arguments = parser.parse_args()
    if not arguments.as_shipped:
        run_checked(__spec__.name, unoptimised=arguments.unoptimised)
    print("[fuzz_store]", flush=True)
    with tempfile.TemporaryDirectory(prefix="hier-kv-fuzz-") as folder:
        fuzz_store.report(
            fuzz_store.fuzz(arguments.cases, arguments.seed, "", "numba", Path(folder))
        )
    print("[fuzz_codec]", flush=True)
    fuzz_codec.report(fuzz_codec.fuzz(arguments.cases, arguments.seed))


if __name__ == "__main__":
    main()
