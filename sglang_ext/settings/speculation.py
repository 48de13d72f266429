"""Which set-ups of speculative decoding are served, and what they are refused with.

NGRAM has no draft model, and a page is what it is without it. The other algorithms' draft models
have KV of their own, of the same tokens in the same rows, which is stored at a page's end.

Guesses may branch. Then SGLang moves the model's KV of those that are right behind their root, and
computes the draft's anew, before it tells which are right.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.disaggregation import is_disaggregated
from sglang_ext.settings.indexed import KIND as INDEXED
from sglang_ext.settings.lossless import lossy_codec
from sglang_ext.settings.model_kinds import STATE_KINDS
from sglang_ext.settings.untried import (
    NEWEST_RELEASE,
    adapters_and_sessions,
    has_attention_dp,
    older_release,
    on,
    outside,
)
from sglang_ext.settings.values import is_set

NGRAM = "NGRAM"
EAGLE = "EAGLE"  # SGLang's name of NEXTN, too
# Of these the draft layer of their own checkpoint was tried, whose rows are as theirs.
LATENT_KINDS = ("mla", INDEXED)
# Without a second pool or a state: of these drafts were tried with cut prompts.
WHOLE_KINDS = ("mha", *LATENT_KINDS)
# Hybrids with a state a sequence whose draft layer was tried, and SGLang's name of that layer.
DRAFTED_HYBRIDS = {
    "Qwen3NextForCausalLM": "Qwen3NextForCausalLMMTP",
    "Qwen3_5ForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForCausalLM": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5ForCausalLMMTP",
    "NemotronHForCausalLM": "NemotronHForCausalLMMTP",
}
# Of these it was tried with data parallel attention. With Nemotron-H's SGLang 0.5.23 ends where a
# group has no request: its layer of attention passes on there what the next layer does not take.
_DRAFTED_IN_GROUPS = tuple(each for each in DRAFTED_HYBRIDS if each != "NemotronHForCausalLM")
# With it SGLang takes that many guesses for right, whatever they are, and answers other tokens. The
# KV of the guesses would be stored as that of these tokens.
_SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
# Half of the distance of two states of most models, a page's or more.
_MOST_GUESSES = 32
# Of these EAGLE3 was tried, with a draft of full layers alone.
WINDOW_KIND = "swa"
WINDOW_TARGETS = ("GptOssForCausalLM",)
# Those whose draft's KV of a token depends on the next one.
KEYED_BY_PAIRS = (EAGLE, "EAGLE3")
OTHER_DRAFT = (
    "choose another draft model (or a --dtype, where that alone differs) or leave "
    "--speculative-algorithm out"
)
# With it, and no steps, a draft's rows of what is answered are never written.
_UNWRITTEN = "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND"
# With it a verification is prepared on a stream of its own, which was not looked at with trees.
_OTHER_STREAM = "SGLANG_ENABLE_OVERLAP_PLAN_STREAM"
# With it one group may verify while another one computes prompts, which nobody tried.
_MIXED_STEPS = "SGLANG_ENABLE_DP_SPEC_PREFILL_COORDINATION"
# With K and V of every head: models whose draft layer was tried with data parallel attention, and
# SGLang's name of that layer, which it divides as the model's.
_OWN_LAYERS = {"Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN"}
_SPREAD_HEADS = (
    "with K and V of every head EAGLE3 and GLM-4.5's own draft layer have it: of Llama's drafts of "
    "EAGLE SGLang spreads the heads over all groups, and others were never tried"
)
# Each of several layers sees a token further ahead than the one before, which guessed it. SGLang
# keeps the rows of wrong guesses at the end of each verification (docs/decisions).
_ONE_LAYER = (
    "no --enable-multi-layer-eagle (SGLang turns it on for MiMo V2 and Step 3.5; KV of their draft "
    "layers is of guesses, the wrong ones, too)"
)
_NO_BACKEND = "none"
# Which guesses are taken for right; SGLang's POST /set_internal_state changes them.
_THRESHOLDS = ("speculative_accept_threshold_single", "speculative_accept_threshold_acc")
_IN = " in "  # in front of a dtype
WITHOUT_SPECULATION = "change it or leave --speculative-algorithm out"


def outside_speculation(
    read: Callable[[str], Any],
    config: HierKVConfig,
    kind: str,
    architecture: str = "",
    draft: str = "",
    release: str = "",
) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of everything that was not tried with speculation.

    Args:
        read: an argument's value by its name, as SGLang resolved it.
        config: the plugin's settings.
        kind: of the model, a key of ``MODEL_KINDS``.
        architecture: of the model.
        draft: that of its draft model; empty where there is none, or it is not known.
        release: of SGLang; empty where it is not known.
    """
    algorithm = read("speculative_algorithm")
    if algorithm is None:
        return
    found = [
        *adapters_and_sessions(read),
        _of_truncation(algorithm, config, kind),
        ("--hier-kv-tree-core python", config.tree_core),
        *_outside_trees(read, kind, release),
        *_outside_adaptive(read, kind),
        (f"no {_SIMULATED}", _simulated()),
        *_outside_attention_dp(read, kind, release, (architecture, draft)),
    ]
    if kind == STATE_KINDS[0] and algorithm == EAGLE:
        found += _outside_states(read, architecture, draft)
    if algorithm != NGRAM:
        found += [
            (_ONE_LAYER, on(read("enable_multi_layer_eagle"))),
            *_outside_kinds(algorithm, kind, architecture),
            _of_drawn_guesses(read, kind),
            ("no --speculative-draft-kv-cache-dtype", read("speculative_draft_kv_cache_dtype")),
            ("no --speculative-draft-window-size", read("speculative_draft_window_size")),
            # SGLang may leave the draft's rows of what it decodes out then.
            (
                "--speculative-num-steps of at least 1",
                "0" if read("speculative_num_steps") == 0 else "",
            ),
            *_outside_codecs(read, config, kind),
            (f"no {_UNWRITTEN}", on(is_set(_UNWRITTEN))),
        ]
    else:
        if kind not in ("mha", "mla"):
            found.append(("full attention in every layer", "a model with other layers"))
        found += [*_outside_masks(read, kind), _of_overlap(read, release)]
    yield from outside(found, f"with --speculative-algorithm {algorithm}")


def _outside_attention_dp(
    read: Callable[[str], Any], kind: str, release: str, models: tuple[str, str]
) -> Iterator[tuple[str, Any]]:
    """What is expected and what came, where groups of ranks run each forward together.

    SGLang has a group without requests run idle forwards of model and draft. It gives a draft of
    EAGLE3 to each group whole, and divides a draft layer of the model as it does the model. Of
    Llama's layers it spreads the heads over all ranks, and so over groups whose tokens are others.
    """
    if not has_attention_dp(read):
        return
    algorithm = read("speculative_algorithm")
    if algorithm not in KEYED_BY_PAIRS:
        yield "no data parallel attention (SGLang has it with EAGLE and EAGLE3 alone)", "it"
    elif kind == "mha" and algorithm == EAGLE and models not in _OWN_LAYERS.items():
        yield f"no data parallel attention ({_SPREAD_HEADS})", "it"
    with_groups = "(with data parallel attention)"
    # The argument is SGLang 0.5.22's, which then runs a verification beside another group's prompt
    # as if it were a prompt, too.
    yield f"no {_MIXED_STEPS} {with_groups}", on(is_set(_MIXED_STEPS))
    unagreed = on(read("speculative_skip_dp_mlp_sync"))
    yield f"no --speculative-skip-dp-mlp-sync {with_groups}", unagreed
    yield f"--speculative-eagle-topk 1 {with_groups}", read("speculative_eagle_topk") or 1
    if kind in LATENT_KINDS:
        return
    yield f"{NEWEST_RELEASE} {with_groups}", older_release(release)


def _outside_adaptive(read: Callable[[str], Any], kind: str) -> Iterator[tuple[str, str]]:
    """What was not tried of a number of guesses that changes while a server runs."""
    if not read("speculative_adaptive"):
        return
    switch = "no --speculative-adaptive"
    algorithm = read("speculative_algorithm")
    # SGLang turns it off with others, with several branches (whose rows a chain's length does not
    # reckon), and with groups of ranks, each of which would choose for itself.
    others = f"{switch} ({' and '.join(KEYED_BY_PAIRS)} have it)"
    yield others, on(algorithm not in KEYED_BY_PAIRS)
    yield f"{switch} (where guesses branch)", on((read("speculative_eagle_topk") or 1) > 1)
    yield f"{switch} (with data parallel attention)", on(has_attention_dp(read))
    yield f"{switch} (with window layers or states)", on(kind not in WHOLE_KINDS)
    is_split = is_disaggregated(read("disaggregation_mode"))
    yield f"{switch} (with --disaggregation-mode)", on(is_split)


def _simulated() -> str:
    """How many guesses are taken for right whatever they are; empty where they are verified."""
    value = os.environ.get(_SIMULATED, "")
    with contextlib.suppress(ValueError):
        return value if float(value) > 0 else ""
    return value  # SGLang says of it what it makes of it, or ends


def _of_truncation(algorithm: str, config: HierKVConfig, kind: str) -> tuple[str, str]:
    """What is expected and what came of prompts that are cut.

    A draft's rows are at the position that they were computed at, so nothing is found by content.
    """
    if algorithm == NGRAM or kind not in WHOLE_KINDS:
        return "--hier-kv-truncation off", config.truncation
    found = "" if config.truncation == "off" else config.truncation
    return "--hier-kv-truncation off or overflow", found


def _outside_codecs(
    read: Callable[[str], Any], config: HierKVConfig, kind: str
) -> Iterator[tuple[str, Any]]:
    """Codecs, and ways to use them, that were not tried with a draft's layers in a page."""
    codec = "a --hier-kv-codec that loses nothing"
    if has_attention_dp(read):
        yield f"{codec} (with data parallel attention)", lossy_codec(config)
    elif kind == "mha":
        yield f"{codec}, or hier", lossy_codec(config, but="hier")
    else:
        yield codec, lossy_codec(config)
    yield "--hier-kv-slo-ms 0", f"{config.slo_ms:g}"


def outside_branches(read: Callable[[str], Any], kind: str) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of guesses that branch.

    Of `outside_speculation` it is what SGLang may say itself, by asking for pages of one token.

    Args:
        read: an argument's value by its name, as SGLang resolved it.
        kind: of the model, a key of ``MODEL_KINDS``.
    """
    algorithm = read("speculative_algorithm")
    if algorithm is not None:
        # Where SGLang stopped before it chose a backend, that is not what it stopped for.
        found = [row for row in _outside_trees(read, kind) if row[1] != _NO_BACKEND]
        yield from outside(found, f"with --speculative-algorithm {algorithm}")


def _outside_trees(
    read: Callable[[str], Any], kind: str, release: str = ""
) -> Iterator[tuple[str, Any]]:
    """What was not tried of guesses that branch."""
    num_branches = read("speculative_eagle_topk")
    if read("speculative_algorithm") == NGRAM:
        yield "--speculative-eagle-topk 1 (--speculative-ngram-max-bfs-breadth 1)", num_branches
        return
    if (num_branches or 1) == 1:
        return
    one = "--speculative-eagle-topk 1"
    if kind not in _BRANCHING:
        yield f"{one} (more with K and V of every head, or latent rows alone)", num_branches
    if is_disaggregated(read("disaggregation_mode")):
        yield f"{one} (more without --disaggregation-mode)", num_branches
    yield f"{NEWEST_RELEASE} (where guesses branch)", older_release(release)
    backends, words = _BRANCHING.get(kind, _BRANCHING["mha"])
    yield f"--attention-backend {words}", _other_backend(read, backends)
    # SGLang asks the target's alone.
    of_draft = read("speculative_draft_attention_backend") or backends[0]
    yield (
        f"--speculative-draft-attention-backend {words}",
        "" if of_draft in backends else of_draft,
    )
    yield f"no {_OTHER_STREAM} (where guesses branch)", on(is_set(_OTHER_STREAM))


def outside_branched_windows(window: int, read: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """What is expected and what came of layers with a window, where guesses branch.

    SGLang measures it from a guess's number among the guesses. One that has others of its depth
    before it sees less than its window, and its KV in the layers above is not what decoding gives.

    Args:
        window: of the model's layers, in tokens; 0 where all of them see everything.
        read: an argument's value by its name, as SGLang resolved it.
    """
    algorithm = read("speculative_algorithm")
    if not window or algorithm is None:
        return
    expected = f"full attention in every layer with --speculative-algorithm {algorithm}"
    if algorithm == NGRAM:
        yield expected, f"a window of {window} tokens"
    elif (read("speculative_eagle_topk") or 1) > 1:
        yield f"{expected}, or --speculative-eagle-topk 1", f"a window of {window} tokens"


def outside_rows(target: str, draft: str) -> Iterator[tuple[str, str]]:
    """What is expected and what came of a draft model's KV, which lies behind its target's.

    Args:
        target: what is kept of a token by the model, in words; empty where it is not known.
        draft: the same by the draft model.
    """
    # Where one dtype is not known, the rows are compared as far as they are.
    known = min(len(each.split(_IN)) for each in (target, draft))
    expected, found = (_IN.join(each.split(_IN)[:known]) for each in (target, draft))
    if target and draft and expected != found:
        yield f"a draft model with a KV pool as the target model's ({expected})", f"one of {found}"


def _outside_kinds(algorithm: str, kind: str, architecture: str) -> Iterator[tuple[str, str]]:
    """Models whose draft would have rows of another kind than their own, or was not tried."""
    if kind == WINDOW_KIND:
        if algorithm != "EAGLE3":
            yield "full attention in every layer (with window layers EAGLE3)", "a model with others"
        elif architecture not in WINDOW_TARGETS:
            yield f"{' or '.join(WINDOW_TARGETS)}, or full attention in every layer", architecture
    elif kind == STATE_KINDS[0]:
        if algorithm != EAGLE:
            yield f"K and V of every head (with states {EAGLE})", "a model of states"
    elif kind not in WHOLE_KINDS:
        yield "K and V of every head or latent rows in every layer", "a model with other layers"
    elif kind in LATENT_KINDS and algorithm != EAGLE:
        yield f"K and V of every head (with latent rows {EAGLE})", "a model of latent rows"


def _outside_states(
    read: Callable[[str], Any], architecture: str, draft: str
) -> Iterator[tuple[str, Any]]:
    """What was not tried of a model with a state a sequence and its draft layer."""
    is_tried = architecture in DRAFTED_HYBRIDS
    expected = f"of hybrids with states {', '.join(DRAFTED_HYBRIDS)}"
    yield expected, "" if is_tried else architecture or "another"
    in_groups = architecture in _DRAFTED_IN_GROUPS or not has_attention_dp(read)
    yield (
        "no data parallel attention (SGLang ends in a group without requests)",
        "" if in_groups else architecture or "another",
    )
    own_layer = DRAFTED_HYBRIDS.get(architecture, "")
    is_other = draft not in ("", own_layer) and is_tried
    yield f"its own draft layer ({own_layer})", f"a draft of {draft}" if is_other else ""
    # A state would lag behind the tokens that were verified, which lie in a ring.
    yield "no --enable-linear-replayssm-spec", on(read("enable_linear_replayssm_spec"))
    yield from _of_thresholds(read)
    # With more, two verifications in turn may each end behind a place for a state, and with overlap
    # scheduling the second would write its own where the first one's is.
    num_guesses, most = read("speculative_num_draft_tokens") or 1, _most_guesses(read)
    yield (
        f"--speculative-num-draft-tokens of at most {most}",
        str(num_guesses) if num_guesses > most else "",
    )


def _of_thresholds(read: Callable[[str], Any]) -> Iterator[tuple[str, str]]:
    """What was not tried of which guesses are taken for right, of a model with states.

    Keys are of tokens, so a page's last row of the draft may have seen another token than the next
    one. With less a guess may be answered that the model itself would not have said.
    """
    for name in _THRESHOLDS:
        threshold = read(name)
        if threshold is not None:
            yield f"--{name.replace('_', '-')} 1.0", f"{float(threshold)}"


def answers_guesses(read: Callable[[str], Any]) -> bool:
    """Whether draft tokens are answered that the model itself might not have said.

    Args:
        read: an argument's value by its name, as SGLang resolved it.
    """
    return bool(_low_thresholds(read))


def _low_thresholds(read: Callable[[str], Any]) -> list[str]:
    """Which thresholds have guesses answered that the model might not have said, NaN too."""
    if read("speculative_algorithm") is None:
        return []
    return [name for name in _THRESHOLDS if not read(name) >= 1]


def outside_changes(
    read: Callable[[str], Any], kind: str, *, stores_images: bool
) -> Iterator[tuple[str, str]]:
    """What is expected and what came, of what SGLang lets an operator change on a running server.

    Args:
        read: an argument's value by its name, as it would be then.
        kind: of the model, a key of ``MODEL_KINDS``.
        stores_images: the server stores prompts with images, by names that would not tell of it.
    """
    algorithm = read("speculative_algorithm")
    if algorithm is None:
        return
    found: list[tuple[str, str]] = []
    if kind == STATE_KINDS[0] and algorithm == EAGLE:
        found += _of_thresholds(read)
    if stores_images:
        where = "(on a server that stores prompts with images)"
        found += [
            (f"--{name.replace('_', '-')} of at least 1.0 {where}", f"{float(read(name))}")
            for name in _low_thresholds(read)
        ]
    yield from outside(found, f"with --speculative-algorithm {algorithm}")


def _most_guesses(read: Callable[[str], Any]) -> int:
    """Half of the distance of two states, which is a multiple of both of these; 32 at most.

    It is a multiple of the model's chunk, too, which may be less than 64 tokens.
    """
    distance = max(read("page_size") or 0, read("mamba_track_interval") or 0)
    return min(_MOST_GUESSES, distance // 2) if distance else _MOST_GUESSES


def _of_drawn_guesses(read: Callable[[str], Any], kind: str) -> tuple[str, str]:
    """What is expected and what came of guesses that each rank of a hybrid draws for itself.

    What is right is told to all ranks, and what was guessed is not.
    """
    are_several = kind not in WHOLE_KINDS and (read("tp_size") or 1) > 1
    found = on(are_several and read("speculative_use_rejection_sampling"))
    return (
        "no --speculative-use-rejection-sampling (with window layers or states: --tp-size 1)",
        found,
    )


# Attention that leaves out the other branches of a tree of guesses, whatever breadth is named. The
# corpus branches with breadth 1, too: where suffixes of several lengths go on in different ways.
# Others take guesses for one chain then, and what is verified has attended to what was not.
_MASKING = {"mha": ("triton", "flashinfer", "intel_amx", "cpu_extend"), "mla": ("triton",)}
# Attention with which SGLang lets a draft's guesses branch in pages of many tokens, by what is kept
# of a token, and the same in words. Over latent rows a verification's second pass of `fa3`
# takes numbers of rows for numbers of pages, and `flashinfer` has no such masks.
_BRANCHING = {
    "mha": (
        ("triton", "flashinfer", "fa3", "cpu_extend"),
        "triton, flashinfer or fa3 (where guesses branch)",
    ),
    "mla": (
        ("triton", "cpu_extend"),
        "triton (over latent rows it alone masks branches right)",
    ),
}


def _outside_masks(read: Callable[[str], Any], kind: str) -> Iterator[tuple[str, str]]:
    """Attention backends under which accepted guesses may have seen others."""
    backend = _other_backend(read, _MASKING.get(kind, ()))
    yield "--attention-backend triton (it masks branches)", backend


def _of_overlap(read: Callable[[str], Any], release: str) -> tuple[str, str]:
    """What is expected and what came where a move of rows asks which they are when it is late.

    By then the scheduler may have given the place in its table to another request.
    """
    expected = "--disable-overlap-schedule (else KV may be moved to rows of another request)"
    is_late = older_release(release) and not read("disable_overlap_schedule")
    return expected, f"SGLang {release}" if is_late else ""


def _other_backend(read: Callable[[str], Any], backends: tuple[str, ...]) -> str:
    """The first attention backend that is none of these, in words; empty where all are."""
    for name in ("prefill_attention_backend", "decode_attention_backend"):
        backend = read(name) or read("attention_backend") or _NO_BACKEND
        if backend not in backends:
            return f"{backend}"
    return ""
