"""What it costs to name the images of a prompt: `python -m bench.serve.image_names`.

No server: the functions that the front process and the scheduler call for each image, over what
processors make of images of a usual size, each in turn with what SGLang does in that place. The
front process takes the digest on a thread of its own; SGLang's hash, which it stands for, is taken
on the scheduler's thread. A request is matched several times while it waits: its pages are named
once, and remembered.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from bench.core.case import CaseFailedError, Report
from bench.core.output import Progress, Table
from bench.core.reporting import run_alone
from bench.core.stats import median
from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.managers.mm_utils import hash_feature  # noqa: E402
from sglang.srt.mem_cache.radix_cache import RadixKey  # noqa: E402

from sglang_ext.identity.media import (  # noqa: E402
    FIRST_PAD,
    Item,
    Media,
    bindings,
    content_digest,
    note_images,
)
from sglang_ext.seam.media.page_digests import install_page_digests, naming  # noqa: E402
from sglang_ext.seam.page_hash import hex_hashes_of  # noqa: E402

_PAGE = 64
_NUM_IMAGES = 4
_numbers = itertools.count()  # of images that nobody has seen
_TEXT = 300  # tokens between images
# What a processor makes of an image: shape and type of its output, and how many tokens it is.
_IMAGES: dict[str, tuple[tuple[int, ...], torch.dtype, int]] = {
    "Qwen2.5-VL, 1,036 x 1,036 pixels": ((5476, 1176), torch.float32, 1369),
    "InternVL, 12 tiles and one of the whole": ((13, 3, 448, 448), torch.bfloat16, 3328),
    "Mistral 3, 1,036 x 1,036 pixels": ((1, 3, 1036, 1036), torch.float32, 1369),
}


def measure_names(repeats: int, progress: Progress) -> dict[str, Any]:
    """Times both processes' part for each kind of image.

    Returns:
        By kind: `bytes`, `tokens`; medians in ms of an image in front, `digest` and `sglang_hash`;
        of a prompt with four of them in the scheduler, `bindings`, `names` (the first time),
        `names_again` and `sglang_names`; `prompt_tokens`; and `samples` of them all.

    Raises:
        CaseFailedError: a page has no name of its images.
    """
    install_page_digests()
    found = {}
    for kind, (shape, dtype, num_tokens) in _IMAGES.items():
        progress.stage(f"names: {kind}")
        feature = torch.randn(shape).to(dtype)
        samples = _in_turns(repeats, {**_in_front(feature), **_in_scheduler(num_tokens)})
        found[kind] = {
            "bytes": feature.nbytes,
            "tokens": num_tokens,
            "prompt_tokens": _length(num_tokens),
            **{name: median(values) for name, values in samples.items()},
            "samples": samples,
        }
    return found


def _in_turns(repeats: int, calls: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    """Milliseconds of each call, all of them in each round."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start_s = time.perf_counter()
            call()
            samples[name].append(1e3 * (time.perf_counter() - start_s))
    return samples


def _in_front(feature: torch.Tensor) -> dict[str, Callable[[], Any]]:
    details = {"image_grid_thw": torch.tensor([[1, 74, 74]])}
    return {
        "digest": lambda: content_digest("IMAGE", feature, details),
        "sglang_hash": lambda: hash_feature(feature),
    }


def _length(num_tokens: int) -> int:
    return (_NUM_IMAGES * (num_tokens + _TEXT)) // _PAGE * _PAGE


def _in_scheduler(num_tokens: int) -> dict[str, Callable[[], Any]]:
    """Calls for a prompt; `names` are of other images each time, and so never remembered."""
    items = []
    tokens = np.arange(_length(num_tokens), dtype=np.int64) % 4096
    for number in range(_NUM_IMAGES):
        first = number * (num_tokens + _TEXT) + _TEXT // 2
        pads = tuple(FIRST_PAD + (1 << 40) + 8 * number + n for n in range(4))
        last = first + num_tokens - 1
        items.append(Item(number.to_bytes(32, "little"), ((first, last),), pads))
        tokens[first : last + 1] = np.resize(np.array(pads), num_tokens)
    key = RadixKey(array("q", tokens.tolist()), None)
    last_names = SimpleNamespace(req=None)

    def names(req: Any) -> list[str]:
        with naming.pages_of(req):
            return hex_hashes_of(key, _PAGE)

    def first_names() -> None:
        last_names.req = req = SimpleNamespace()
        made = next(_numbers).to_bytes(24, "little")
        note_images(req, tuple(Media(item.pads, item.content[:8] + made) for item in items))
        if set(names(req)[num_tokens // _PAGE :]) & set(plain):
            raise CaseFailedError("a page goes by no image's name")

    plain = hex_hashes_of(key, _PAGE)
    return {
        "sglang_names": lambda: hex_hashes_of(key, _PAGE),
        "bindings": lambda: bindings(items, tokens, None, "facts"),
        "names": first_names,
        "names_again": lambda: names(last_names.req),
    }


def table(found: dict[str, Any]) -> Table:
    """What a person reads."""
    rows: list[Sequence[Any]] = []
    for kind, values in found.items():
        rows.append([
            kind, f"{values['bytes'] / 1e6:.1f} MB", values["tokens"],
            *(f"{values[name]:.1f}" for name in ("digest", "sglang_hash")),
            values["prompt_tokens"],
            *(f"{values[n]:.2f}" for n in ("bindings", "names", "names_again", "sglang_names")),
        ])  # fmt: skip
    names = ["image", "of", "tokens", "digest ms", "SGLang's hash ms", "prompt of four, tokens"]
    names += ["bindings ms", "names ms", "again ms", "SGLang's names ms"]
    return Table("naming images, medians", names, rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 0, 1 (check failed) or 2 (usage)."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve.image_names", description=__doc__)
    parser.add_argument("--repeats", type=int, default=15, metavar="N", help="of each call")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write the result")
    args = parser.parse_args(argv)

    def make(progress: Progress) -> Report:
        torch.set_num_threads(1)
        found = measure_names(args.repeats, progress)
        samples = {kind: values.pop("samples") for kind, values in found.items()}
        return Report(found, samples, {"repeats": args.repeats}, [table(found)])

    return run_alone("image_names", make, args.json)


if __name__ == "__main__":
    sys.exit(main())
