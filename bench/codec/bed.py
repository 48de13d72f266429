"""What the codec bench stands on: a model, its text, its profile, and KV taken from it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from bench.codec.ablations import ablations, rows_of
from bench.codec.corpus import PREFIX_TOKENS, Corpus, RecallPrompt, bundled_corpus, file_corpus
from bench.codec.hier import stream_parts
from bench.codec.methods import Method
from bench.codec.quality import Prepared, prepare
from bench.core.case import ROOT, CaseFailedError, Options
from sglang_ext.codec.calibration.calibrate import NUM_SINKS, calibrate_model
from sglang_ext.codec.calibration.design import F64
from sglang_ext.codec.calibration.hf_capture import I64, CausalLm, KvCapture
from sglang_ext.codec.calibration.options import CalibrationOptions
from sglang_ext.codec.hier.profile import Profile

BUNDLED_MODEL = ROOT / "tests" / "assets" / "tinylm"
BUNDLED_PROFILE = ROOT / "tests" / "assets" / "tinylm.hkp"
_MAX_HELD_BYTES = 2 << 30  # of each of calibration, test and shifted windows
_OUTLIER_FACTOR = 16.0  # a power of two: the changed model computes the same, bit by bit
_OUTLIER_PAIRS = 2  # of each KV head's K; as many channels of its V


@dataclass(frozen=True)
class Bed:
    """A model with everything prepared that codecs are compared on.

    Attributes:
        lm: the model.
        dtype: of its KV.
        corpus: its text.
        profile: of the product's codec.
        calibration: KV of calibration text, for tables and bases.
        test, shifted: windows with their references.
        recall: prompts with the KV of their prefixes.
        quick: whether the run is a quick one.
    """

    lm: CausalLm
    dtype: str
    corpus: Corpus
    profile: Profile
    calibration: list[KvCapture]
    test: list[Prepared]
    shifted: list[Prepared]
    recall: list[tuple[RecallPrompt, KvCapture]]
    quick: bool

    def ablations(self) -> list[Method]:
        """The product's codec with one idea taken away; see `codec_ablations`."""
        chosen = self.calibration[: 5 if self.quick else 16]
        chunk = chosen[0].planes
        parts = stream_parts(self.profile, self.dtype, chunk, self.profile.default_level, 0)
        return ablations(
            self.profile,
            self.dtype,
            rows_of([capture.planes for capture in chosen], self.dtype, NUM_SINKS),
            rows_of([capture.rotated for capture in chosen], self.dtype, NUM_SINKS),
            rotations(self.lm, PREFIX_TOKENS),
            8 * parts.ideal / chunk.size,
        )


def make_bed(options: Options, num_test: int, num_side: int, num_recall: int) -> Bed:
    """The bundled model on the bundled text, or the model and the text of the command line.

    Raises:
        CaseFailedError: a model was given without text.
    """
    options.progress.stage("codec: model and text")
    if options.model is None and options.text is None:
        lm = CausalLm(str(BUNDLED_MODEL))
        corpus, profile = bundled_corpus(lm), Profile.load(BUNDLED_PROFILE)
    elif options.text is None:
        raise CaseFailedError("--model needs --text: a text file to calibrate and to test on")
    else:
        path = options.model or BUNDLED_MODEL
        lm = CausalLm(str(path))
        corpus = file_corpus(lm, options.text)
        profile = _calibrated(path, corpus, options)
    return _fill(lm, corpus, profile, options, (num_test, num_side, num_recall))


def stressed_bed(bed: Bed, options: Options, num_windows: int) -> Bed | None:
    """The bundled model with outlier channels in K and V that change nothing of what it computes.

    In each KV head two RoPE pairs of K and two channels of V are 16 times as large; the queries and
    the output projection make up for it. Profile, tables and bases are made anew for it, as for any
    model. None for other models.
    """
    if bed.corpus.path is not None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        lm = CausalLm(str(BUNDLED_MODEL))
        add_outliers(lm)
        lm.model.save_pretrained(folder)
        lm.tokenizer.save_pretrained(folder)
        profile = _calibrated(Path(folder), bed.corpus, replace(options, quick=True))
    corpus = replace(bed.corpus, shifted=[], recall=[])
    return _fill(lm, corpus, profile, options, (num_windows, 0, 0))


def add_outliers(lm: CausalLm) -> None:
    """Scales channels of K and V up, and the weights that read them down; see `stressed_bed`."""
    dim, group = lm.head_dim, lm.num_heads // lm.num_kv_heads
    rng = np.random.default_rng(3)
    for layer in lm.model.get_decoder().layers:
        attention = layer.self_attn
        for head in range(lm.num_kv_heads):
            pairs = rng.choice(dim // 2, _OUTLIER_PAIRS, replace=False)
            keys = np.concatenate([pairs, pairs + dim // 2])
            values = rng.choice(dim, _OUTLIER_PAIRS, replace=False)
            queries = head * group + np.arange(group)
            for_keys = (queries[:, None] * dim + keys).reshape(-1)
            for_values = (queries[:, None] * dim + values).reshape(-1)
            with torch.no_grad():
                attention.k_proj.weight[head * dim + keys] *= _OUTLIER_FACTOR
                attention.q_proj.weight[for_keys] /= _OUTLIER_FACTOR
                attention.v_proj.weight[head * dim + values] *= _OUTLIER_FACTOR
                attention.o_proj.weight[:, for_values] /= _OUTLIER_FACTOR


def rotations(lm: CausalLm, num_tokens: int, count: int = 48) -> F64:
    """Matrices [count, C, C] that rotate a row of K at positions spread over a prefix."""
    num_channels = lm.num_kv_heads * lm.head_dim
    rows = torch.eye(num_channels)[:, None]
    places = np.linspace(0, num_tokens - 1, count).round().astype(int)
    turned = [lm.turn(rows, int(place))[:, 0].numpy() for place in places]
    return np.stack(turned).astype(np.float64)


def _calibrated(path: Path, corpus: Corpus, options: Options) -> Profile:
    settings = CalibrationOptions()
    if options.quick:
        settings = replace(settings, num_windows=8, held_out=2, num_draws=2)
    text = [corpus.calibration_text]
    tell = options.progress.update
    return calibrate_model(str(path), text, options=settings, progress=tell)


def _fill(
    lm: CausalLm, corpus: Corpus, profile: Profile, options: Options, counts: tuple[int, int, int]
) -> Bed:
    # Of a large model fewer windows are held at a time.
    window_bytes = 8 * PREFIX_TOKENS * lm.num_layers * lm.num_kv_heads * lm.head_dim
    most = max(2, _MAX_HELD_BYTES // window_bytes)
    num_test, num_side, num_recall = (min(count, most) for count in counts)
    options.progress.update("KV of calibration and test text")
    calibration = _spread(corpus.calibration, min(most, 10 if options.quick else 40))
    return Bed(
        lm=lm,
        dtype=lm.kv_dtype,
        corpus=corpus,
        profile=profile,
        calibration=[lm.prefill(window) for window in calibration],
        test=prepare(lm, _spread(corpus.test, num_test)),
        shifted=prepare(lm, _spread(corpus.shifted, num_side)),
        recall=[(prompt, lm.prefill(prompt.prefix)) for prompt in corpus.recall[:num_recall]],
        quick=options.quick,
    )


def _spread(windows: Sequence[I64], count: int) -> list[I64]:
    """At most `count` of the windows, evenly spread."""
    if count >= len(windows):
        return list(windows)
    return [windows[at * (len(windows) - 1) // max(1, count - 1)] for at in range(count)]
