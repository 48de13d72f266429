"""A store, a folder and a disk whose writer forges any field: each record is a page, or a miss.

    python -m tests.faults.fuzz.fuzz_store --cases 1000000 --seed 1
    python -m tests.faults.fuzz.fuzz_store --cases 2000 --kernels triton

Records, tails, tables of stages, containers, profiles and segments are changed with their format in
hand, and every checksum is made right again (`record_mutations`, `codec_mutations`). What is not
refused is loaded into a pool. It starts itself again with numba's bounds checks on; arena and pool
lie against memory that ends the process when touched (`guarded_arrays`). Every case runs twice,
beside slots that hold one tenant's bytes, and then another's: what comes of it is the same, or it
has read what is not its own. In a sample of the cases memory is counted.
"""

from __future__ import annotations

import argparse
import faulthandler
import tempfile
import time
import tracemalloc
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.faults.fuzz.checked_loops import add_flag, run_checked
from tests.faults.hostile_pages import clear_device
from tests.faults.hostile_targets import Target, all_targets

_HANG_S = 120
_ARM_EVERY = 100  # cases; so many must end within _HANG_S
_MEMORY_EVERY = 97
_CANARIES = (0xC5, 0x3A)  # bytes of two other tenants


@dataclass
class Tally:
    """What became of a target's cases."""

    cases: int = 0
    served: int = 0
    peak_bytes: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)


def run_case(target: Target, random: Random, tally: Tally, *, measured: bool) -> None:
    """One forgery, beside two tenants' bytes.

    Raises:
        AssertionError: it showed some of them, or took too much memory.
    """
    record = target.forge(random)
    tally.cases += 1
    found: list[Any] = []
    for canary in _CANARIES:
        target.device.slots[:] = canary
        clear_device(target.device)
        before = tracemalloc.get_traced_memory()[0] if measured else 0
        if measured:
            tracemalloc.reset_peak()
        found.append(target.use(record))
        if measured:
            peak = tracemalloc.get_traced_memory()[1] - before
            tally.peak_bytes = max(tally.peak_bytes, peak)
            assert peak <= target.limit_bytes, f"{target.name}: {peak} bytes were taken"
    assert found[0] == found[1], f"{target.name}: another slot's bytes are seen"
    tally.served += found[0] is not None


def fuzz(num_cases: int, seed: int, only: str, kernels: str, folder: Path) -> dict[str, Tally]:
    """Runs the cases, shared by the targets whose name begins with `only` by their weights."""
    targets = [each for each in all_targets(kernels, folder) if each.name.startswith(only)]
    tallies = {target.name: Tally() for target in targets}
    weights = [target.weight for target in targets]
    for target in targets:  # imports, compiles, fills caches
        for number in range(20):
            target.use(target.forge(Random(number)))
    try:
        for case in range(num_cases):
            if case % _ARM_EVERY == 0:
                faulthandler.dump_traceback_later(_HANG_S, exit=True)
            random = Random(seed * 1_000_000_007 + case)
            (target,) = random.choices(targets, weights)
            measured = case % _MEMORY_EVERY == 0
            if measured:
                tracemalloc.start()
            try:
                run_case(target, random, tallies[target.name], measured=measured)
            except BaseException:
                print(f"case {case} of seed {seed}, {target.name}", flush=True)
                raise
            finally:
                if measured:
                    tracemalloc.stop()
            if case % 50_000 == 49_999:
                print(f"{case + 1} cases", flush=True)
    finally:
        faulthandler.cancel_dump_traceback_later()
        for target in targets:
            target.close()
    return tallies


def report(tallies: dict[str, Tally]) -> None:
    """Prints a line for each target."""
    for name, tally in tallies.items():
        print(f"{name}: {tally.cases} cases, {tally.served} served, peak {tally.peak_bytes} bytes")
    print(f"all {sum(tally.cases for tally in tallies.values())} cases passed")


def main() -> None:
    """Runs under the checks, and prints a line for each target."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="targets whose name begins so")
    parser.add_argument("--kernels", choices=("numba", "triton"), default="numba")
    add_flag(parser)
    arguments = parser.parse_args()
    more = {"TRITON_INTERPRET": "1"} if arguments.kernels == "triton" else {}
    run_checked(__spec__.name, unoptimised=arguments.unoptimised, **more)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hier-kv-fuzz-") as folder:
        tallies = fuzz(
            arguments.cases, arguments.seed, arguments.only, arguments.kernels, Path(folder)
        )
    report(tallies)
    print(f"in {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
