"""The random faults that need no server: ``python -m bench.faults [--quick] [--seed N]``."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
from pathlib import Path

from bench.faults import FULL, QUICK, storm
from bench.faults.store.damage import damage_store
from bench.faults.tally import Tallies


def main() -> int:
    """Prints what was injected and what came of it, as JSON; 1 when any fault did harm."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer of each")
    parser.add_argument("--seed", type=int, help="of what is injected; a new one unless given")
    args = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    size, tallies = QUICK if args.quick else FULL, Tallies()
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        storm(Path(folder) / "storm", size, seed, tallies)
        damage_store(Path(folder) / "store", size.damage_rounds, tallies)
    found = {
        "seed": seed,
        "num_injected": tallies.num_injected,
        "by_kind": tallies.to_dict(),
    }
    print(json.dumps(found, indent=1))
    return 0 if all(tally.harmless for tally in tallies.by_kind.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
