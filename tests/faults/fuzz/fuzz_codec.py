"""Bad streams into every decoder: each is a `CodecError` or decodes, and nothing else happens.

    python -m tests.faults.fuzz.fuzz_codec --cases 1000000 --seed 1

It starts itself again with `NUMBA_BOUNDSCHECK=1` and a numba cache of its own (kernels in the usual
one have no checks). Arrays lie against memory that ends the process when touched
(`guarded_arrays`). Checked besides: no other exception, no case over `_HANG_S`, and, in a sample of
the cases, no more memory than `_limit` says.
"""

from __future__ import annotations

import argparse
import faulthandler
import time
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from sglang_ext.codec import Codec, CodecError, create_codec
from sglang_ext.codec.hier.profile import Profile
from sglang_ext.kernels import rans
from tests.faults.codec_mutations import Source
from tests.faults.fuzz.checked_loops import add_flag, run_checked
from tests.faults.guarded_arrays import GuardedPool
from tests.unit.codec.codec_cases import make_planes, make_profile, random_bits, special_planes

_HANG_S = 60
_ARM_EVERY = 200  # cases; so many must end within _HANG_S
_MEMORY_EVERY = 101
_RETURNED = "decoded"


@dataclass
class Target:
    """A decoder, valid streams for it, and what became of the bad ones."""

    name: str
    source: Source
    run: Callable[[Any, GuardedPool | None, Random], None]
    limit_bytes: int
    cases: int = 0
    decoded: int = 0
    peak_bytes: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def _limit(out_bytes: int) -> int:
    """Bytes that decoding may take at its peak, its input aside."""
    return (1 << 18) + 16 * out_bytes


def _codec_target(
    name: str, codec: Codec, form: str, streams: list[bytes], shape: tuple[int, ...]
) -> Target:
    kind = codec.dtype.storage

    def run(data: Any, pool: GuardedPool | None, random: Random) -> None:
        out = (pool.zeros if pool else np.zeros)(shape, kind)
        level = random.choice((*(None,) * 17, 0, 1, 2))
        codec.decode(data, out, level=level)

    return Target(name, Source(streams, form), run, _limit(int(np.prod(shape)) * kind.itemsize))


def _own_targets() -> list[Target]:
    targets = []
    for dtype in ("bf16", "fp8_e4m3"):
        for codec_id in ("none", "zstd", "lossless"):
            planes = special_planes(dtype, (3, 20, 24))
            codec = create_codec(codec_id, dtype=dtype)
            streams = [codec.encode(planes), codec.encode(make_planes(3, 20, 24, dtype))]
            name = f"{codec_id} {dtype}"
            targets.append(_codec_target(name, codec, "HKVC", streams, planes.shape))
    for dtype in ("fp16", "fp32", "fp8_e5m2"):
        planes = special_planes(dtype, (2, 33, 17))
        codec = create_codec("lossless", dtype=dtype)
        name = f"lossless {dtype}"
        targets.append(_codec_target(name, codec, "HKVC", [codec.encode(planes)], planes.shape))
    for dtype, shape, block in (
        ("bf16", (4, 30, 64), 32),
        ("bf16", (2, 5, 48), 24),
        ("fp32", (2, 70, 32), 64),
        ("fp8_e4m3", (3, 9, 16), 16),
    ):
        profile = make_profile(shape[0], shape[2], block, raw_tokens=1)
        codec = create_codec("hier", dtype=dtype, profile=profile)
        planes = make_planes(*shape, dtype)
        planes[1, 3] = random_bits(dtype, (shape[2],))
        streams = [
            codec.encode(planes, level=0, last_level=2, raw_tokens=0),
            codec.encode(make_planes(*shape, dtype, 7), level=0, last_level=2),
            codec.encode(planes, level=1),
            codec.encode(planes * planes.dtype.type(3), level=2),
        ]
        targets.append(_codec_target(f"hier {dtype} {shape}", codec, "HKVC", streams, shape))
    return targets


def _cachegen_targets() -> list[Target]:
    from sglang_ext.codec.cachegen.tables import measure_tables

    targets = []
    for dtype in ("bf16", "fp16"):
        planes = make_planes(4, 25, 12, dtype)
        planes[1, 3] = 0
        planes[2, 5, 1] = 0x7F80 if dtype == "bf16" else 0x7C00
        released = create_codec("cachegen-released", dtype=dtype)
        tables = measure_tables([planes, make_planes(4, 25, 12, dtype, 5)], dtype)
        paper = create_codec("cachegen-paper", dtype=dtype, profile=tables)
        for codec in (released, paper):
            streams = [codec.encode(planes, level=level) for level in range(codec.num_levels)]
            name = f"{codec.codec_id} {dtype}"
            targets.append(_codec_target(name, codec, "<", streams, planes.shape))
    return targets


def _profile_target() -> Target:
    streams = [make_profile(2, 16, 8).to_bytes(), make_profile(1, 12, 12, num_levels=1).to_bytes()]

    def run(data: Any, _: GuardedPool | None, __: Random) -> None:
        Profile.from_bytes(bytes(data))

    return Target("profile", Source(streams, ">"), run, 1 << 22)


def _warm_up(targets: list[Target]) -> None:
    """Compiles every kernel, and fills caches, outside of what is measured."""
    rans.warm_up()
    for target in targets:
        for data in target.source.streams:
            for seed in range(20):
                with suppress(CodecError):  # levels that the stream does not have
                    target.run(memoryview(bytearray(data)), None, Random(seed))


def _run_case(target: Target, pool: GuardedPool, random: Random, measured: bool) -> None:
    data = target.source.mutated(random)
    target.cases += 1
    outcome = _RETURNED
    try:
        if measured:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            target.run(memoryview(bytearray(data)), None, random)
        else:
            with pool.on():
                guarded = pool.copy(np.frombuffer(data, np.uint8))
                target.run(memoryview(guarded), pool, random)
    except CodecError as error:
        outcome = "".join(c for c in str(error)[:34] if not c.isdigit())
    finally:
        if measured:
            peak = tracemalloc.get_traced_memory()[1] - before
            target.peak_bytes = max(target.peak_bytes, peak)
            limit = target.limit_bytes + 8 * len(data)
            assert peak <= limit, f"{target.name}: {peak} bytes taken, {limit} allowed"
    target.decoded += outcome == _RETURNED
    target.reasons[outcome] = target.reasons.get(outcome, 0) + 1


def fuzz(num_cases: int, seed: int, only: str = "", verbose: bool = False) -> list[Target]:
    """Runs the cases, shared evenly by the targets whose name begins with `only`."""
    targets = [*_own_targets(), *_cachegen_targets(), _profile_target()]
    targets = [target for target in targets if target.name.startswith(only)]
    _warm_up(targets)
    pool = GuardedPool()
    started_s = time.monotonic()
    for case in range(num_cases):
        if case % _ARM_EVERY == 0:
            faulthandler.dump_traceback_later(_HANG_S, exit=True)
        random = Random(seed * 1_000_000_007 + case)
        measured = case % _MEMORY_EVERY == 0
        if measured:
            tracemalloc.start()
        try:
            _run_case(targets[case % len(targets)], pool, random, measured)
        except BaseException:
            print(f"case {case} of seed {seed}, {targets[case % len(targets)].name}", flush=True)
            raise
        finally:
            if measured:
                tracemalloc.stop()
        if verbose and case % 50_000 == 49_999:
            print(f"{case + 1} cases, {time.monotonic() - started_s:.0f} s", flush=True)
    faulthandler.cancel_dump_traceback_later()
    print(f"{pool.total} guarded arrays, {pool.beside} beside the pool")
    return targets


def report(targets: list[Target], verbose: bool = False) -> None:
    """Prints a line for each decoder."""
    for target in targets:
        print(
            f"{target.name}: {target.cases} cases, {target.decoded} decoded, "
            f"{len(target.reasons) - 1} kinds of refusal, peak {target.peak_bytes} bytes"
        )
        if verbose:
            for reason, count in sorted(target.reasons.items(), key=lambda item: -item[1])[:24]:
                print(f"    {count:8d} {reason}")
    print(f"all {sum(target.cases for target in targets)} cases passed")


def main() -> None:
    """Runs under the checks, and prints a line for each decoder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="decoders whose name begins so")
    parser.add_argument("--verbose", action="store_true", help="progress, and all reasons")
    add_flag(parser)
    arguments = parser.parse_args()
    run_checked(__spec__.name, unoptimised=arguments.unoptimised)
    targets = fuzz(arguments.cases, arguments.seed, arguments.only, arguments.verbose)
    report(targets, arguments.verbose)


if __name__ == "__main__":
    main()
