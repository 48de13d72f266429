"""What the plugin refuses of server set-ups and models.

Every refusal is one sentence with what was expected, what came and what to do. Three times, each
with more known: ``check_arguments`` as they were given, ``check_resolved`` when SGLang has decided
all of them and read the model's configuration (both in the main process, before weights load), and
``check_ranks``, ``check_model``, ``check_tree`` and
``check_attention`` of what was then built. Which values an argument of SGLang's may have is in
`arguments.py`; a refusal of one is an entry of its ``LIMITED``. What the machine lacks is refused
by ``assembly/preflight.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.settings.arguments import flag, outside_limits, unknown_arguments
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.disaggregation import (
    DECODE,
    WITHOUT_DISAGGREGATION,
    is_disaggregated,
    outside_disaggregation,
)
from sglang_ext.settings.gateway import WITHOUT_GATEWAY, advice_at_gateway, outside_gateway
from sglang_ext.settings.indexed import KIND as INDEXED
from sglang_ext.settings.indexed import outside_index
from sglang_ext.settings.lossless import lossy_codec
from sglang_ext.settings.model_kinds import MODEL_KINDS, STATE_KINDS, WITHOUT
from sglang_ext.settings.ranks.context import (
    WITHOUT_CONTEXT,
    outside_context,
    outside_context_models,
)
from sglang_ext.settings.ranks.stages import STAGED_HYBRIDS, WITHOUT_STAGES, outside_stages
from sglang_ext.settings.speculation import (
    KEYED_BY_PAIRS,
    OTHER_DRAFT,
    WITHOUT_SPECULATION,
    outside_branched_windows,
    outside_branches,
    outside_changes,
    outside_rows,
    outside_speculation,
)
from sglang_ext.settings.untried import (
    NEWEST_RELEASE,
    adapters_and_sessions,
    has_attention_dp,
    of_match,
    older_release,
    on,
    outside,
)
from sglang_ext.settings.values import ALLOW_UNTESTED, is_set

DEFAULT_PAGE_SIZE = 64
# By name, as the classes of other devices and pools are subclasses of these.
_ALLOCATOR = "PagedTokenToKVPoolAllocator"
_REQUEST_POOL = "ReqToTokenPool"
_DECODE_REQUEST_POOL = "DecodeReqToTokenPool"
_WINDOW_ALLOCATOR = "SWATokenToKVPoolAllocator"
_COMPONENT = "FULL"
_WINDOW_COMPONENT = "SWA"
_STATE_COMPONENT = "MAMBA"
_STATE_REQUEST_POOL = "HybridReqToTokenPool"
_STATE_DECODE_REQUEST_POOL = "HybridMambaDecodeReqToTokenPool"
_KEPT_STATES = "extra_buffer"  # the strategy under which SGLang's tree keeps states of pages
# SGLang spreads the heads of their states over all ranks, and in its pool those of a group.
_SPREAD_STATES = ("KimiLinearForCausalLM",)
# Their mixers are in a breakable graph: no eager part of SGLang's is around them.
_WITHOUT_BREAKS = ("FalconH1ForCausalLM", "GraniteMoeHybridForCausalLM")
_WINDOW_ADVICE = (
    "change it, or add --disable-hybrid-swa-memory, which keeps all layers' KV in one pool"
)
# SGLang's other pools do not read it.
_HEAD_BY_HEAD = "SGLANG_USE_HND_KVCACHE"
_LATENT_KINDS = ("mla", INDEXED, STATE_KINDS[1])
_WINDOW_KINDS = ("swa", "swa of two shapes")
# What they have that is not served with the release before.
_NEW_KINDS = {
    **dict.fromkeys(_WINDOW_KINDS, "sliding-window layers"),
    **dict.fromkeys(STATE_KINDS, "layers that have a state"),
    INDEXED: "rows of an index",
}
_STATE_ADVICE = f"change it, or {WITHOUT}"
_WITH_STATES = "with layers that have a state a sequence"
_FROM_LEFT_TO_RIGHT = "decoder"


@dataclass(frozen=True)
class Resolved:
    """SGLang's arguments when it has decided all of them.

    Attributes:
        values: by name.
        given: what the operator gave, or the default.
        defaults: by name.
        model_kind: a key of `MODEL_KINDS`.
        release: of SGLang; empty where it is not known.
        architecture: of the model; empty where there is none.
        stages: of each pipeline stage of a hybrid how many layers have full attention, and how
            many have not; empty where there is one stage.
        rows: what is kept of a token by the model, and by a draft model, in words; both empty
            without one that has KV of its own, or where it is not known.
        draft: architecture of the draft model, by SGLang's name; empty likewise.
    """

    values: Mapping[str, Any]
    given: Mapping[str, Any]
    defaults: Mapping[str, Any]
    model_kind: str
    release: str = ""
    architecture: str = ""
    stages: tuple[tuple[int, int], ...] = ()
    rows: tuple[str, str] = ("", "")
    draft: str = ""


def check_arguments(server_args: Any, config: HierKVConfig) -> None:
    """Refuses server arguments under which the plugin would be wrong or untested.

    Args:
        server_args: SGLang's ``ServerArgs`` before resolution.
        config: the plugin's settings.

    Raises:
        HierKVConfigError: naming the argument, its value and what to do.
    """

    def read(name: str) -> Any:
        # With aux hidden states the algorithm is only the name of a convention; SGLang resets it.
        if name == "speculative_algorithm" and read("enable_return_aux_hidden_states"):
            return None
        return getattr(server_args, name, None)

    _check_disaggregation(read, config)
    _check_gateway(read, config)
    _check_values(read, read, config)
    config.validate()


def check_resolved(resolved: Resolved, config: HierKVConfig) -> list[str]:
    """Refuses what SGLang made of the arguments, and the model, where they cannot work.

    Returns:
        Sentences to warn with.

    Raises:
        HierKVConfigError: naming the argument, its value and what to do.
    """
    _check_disaggregation(resolved.values.get, config, resolved.model_kind, resolved.release)
    _check_gateway(resolved.values.get, config, resolved.release)
    check_kind(resolved.model_kind)  # first: what SGLang chose for such a model is no flag's fault
    if resolved.model_kind in _NEW_KINDS and older_release(resolved.release):
        _refuse(
            f"{NEWEST_RELEASE} with {_NEW_KINDS[resolved.model_kind]}", resolved.release, WITHOUT
        )
    _check_values(resolved.values.get, resolved.given.get, config)
    unknown = unknown_arguments(resolved.defaults.items(), resolved.given.get)
    if unknown and not is_set(ALLOW_UNTESTED):
        name = unknown[0]
        _refuse(
            "arguments that it was tested with",
            f"--{flag(name)} {resolved.given[name]}, which this plugin does not know",
            f"leave it out or set {ALLOW_UNTESTED}=1",
        )
    if resolved.model_kind in _WINDOW_KINDS:
        _check_windows(resolved, config)
    if resolved.model_kind in STATE_KINDS:
        _check_states(resolved, config)
    for num_full, num_others in resolved.stages:
        has_windows = resolved.model_kind in _WINDOW_KINDS
        check_stage(num_full, num_others, "a window" if has_windows else "a state")
    if resolved.model_kind == INDEXED:
        for expected, found in outside_index(resolved.values.get, config):
            _refuse(expected, found, f"change it, or {WITHOUT}")
    kind_of = resolved.model_kind, resolved.architecture, resolved.release
    for expected, found in outside_context_models(resolved.values.get, *kind_of):
        _refuse(expected, found, WITHOUT_CONTEXT)
    model = resolved.model_kind, resolved.architecture, resolved.draft, resolved.release
    for expected, found in outside_speculation(resolved.values.get, config, *model):
        _refuse(expected, found, WITHOUT_SPECULATION)
    for expected, found in outside_rows(*resolved.rows):
        _refuse(expected, found, OTHER_DRAFT)
    _check_layout(resolved.model_kind)
    untested = [f"--{flag(name)} was never tested with --enable-hier-kv" for name in unknown]
    return [*untested, *advice_at_gateway(resolved.values.get, config)]


def _check_disaggregation(
    read: Callable[[str], Any], config: HierKVConfig, kind: str = "mha", release: str = ""
) -> None:
    """Refuses prefill and decode servers that were not tried."""
    for expected, found in outside_disaggregation(read, config, kind, release):
        _refuse(expected, found, WITHOUT_DISAGGREGATION)


def _check_layout(kind: str) -> None:
    """Refuses K and V head by head, which SGLang is told to keep by a variable; not latent rows."""
    if kind not in _LATENT_KINDS and is_set(_HEAD_BY_HEAD):
        _refuse(
            "K and V of a token side by side (NHD)", f"{_HEAD_BY_HEAD}=1", "unset that variable"
        )


def check_kind(name: str) -> None:
    """Refuses a kind of model that is not served.

    Args:
        name: a key of `MODEL_KINDS`.
    """
    kind = MODEL_KINDS[name]
    if not kind.is_served:
        _refuse(kind.expected, kind.found, kind.advice)


def check_changes(read: Callable[[str], Any], kind: str, *, stores_images: bool) -> None:
    """Refuses what SGLang would change on a running server, where a start would not have had it.

    Args:
        read: one of SGLang's arguments by its name, as it would be then.
        kind: of the model, a key of `MODEL_KINDS`.
        stores_images: the server stores prompts with images.
    """
    for expected, found in outside_changes(read, kind, stores_images=stores_images):
        _refuse(expected, found, "leave it as it is, or start a server with it")


def check_branches(read: Callable[[str], Any], kind: str) -> None:
    """Refuses guesses that branch where that is not served.

    Args:
        read: one of SGLang's arguments by its name, as far as SGLang has resolved it.
        kind: of the model, a key of `MODEL_KINDS`.
    """
    for expected, found in outside_branches(read, kind):
        _refuse(expected, found, WITHOUT_SPECULATION)


def _check_windows(resolved: Resolved, config: HierKVConfig) -> None:
    """Refuses what was not tried with window layers that have a pool of their own."""
    read, kind = resolved.values.get, resolved.model_kind
    # In one pool SGLang would have no room for layers of two shapes.
    advice = _WINDOW_ADVICE if kind == _WINDOW_KINDS[0] else _STATE_ADVICE
    codec = ("a --hier-kv-codec that loses nothing", lossy_codec(config))
    if kind != _WINDOW_KINDS[0]:  # whose pages are not of planes of one width
        codec = ("--hier-kv-codec none", config.codec or "none")
    rows = (
        _of_stages(read, resolved.architecture),
        codec,
        # It leaves pages to be computed, and a window is no use without all of its pages.
        ("--hier-kv-slo-ms 0", f"{config.slo_ms:g}"),
        of_match(read, config, kind),
        ("--hier-kv-tree-core python", config.tree_core),
        *adapters_and_sessions(read),
        ("no --swa-prefix-tails", read("swa_prefix_tails") or ""),
        ("no --enable-encoder-swa-bounded-replay", on(read("enable_encoder_swa_bounded_replay"))),
        ("no --enable-decoder-swa-bounded-replay", on(read("enable_decoder_swa_bounded_replay"))),
    )
    for expected, found in outside(rows, "with sliding-window layers"):
        _refuse(expected, found, advice)


def _check_states(resolved: Resolved, config: HierKVConfig) -> None:
    """Refuses what was not tried with layers that have a state a sequence."""
    read, kind = resolved.values.get, resolved.model_kind
    shares_steps = resolved.architecture in _SPREAD_STATES and has_attention_dp(read)
    _check_captured_prefills(read, kind, resolved.architecture)
    rows = (
        ("no data parallel attention", on(shares_steps)),
        (f"--mamba-radix-cache-strategy {_KEPT_STATES}", read("mamba_radix_cache_strategy")),
        _of_stages(read, resolved.architecture),
        ("a --hier-kv-codec that loses nothing", lossy_codec(config)),
        # It leaves pages to be computed, and a state is no use without all pages before it.
        ("--hier-kv-slo-ms 0", f"{config.slo_ms:g}"),
        of_match(read, config, kind),
        ("--hier-kv-tree-core python", config.tree_core),
        *adapters_and_sessions(read),
    )
    for expected, found in outside(rows, _WITH_STATES):
        _refuse(expected, found, _STATE_ADVICE)


def _check_captured_prefills(read: Callable[[str], Any], kind: str, architecture: str) -> None:
    """Refuses prefills that replay a graph and do not wait for what is loaded.

    SGLang captures KDA in a breakable one, layers and all, and a replay does not wait at them for
    the states that are loaded. By reading, so it does with some models' Mamba2. At others' states
    it breaks off, and of a full one it waits in front.
    """
    graphs = getattr(read("cuda_graph_config"), "prefill", None)
    has_no_breaks = kind != STATE_KINDS[0] or architecture in _WITHOUT_BREAKS
    if has_no_breaks and getattr(graphs, "backend", "") == "breakable":
        is_given = read("cuda_graph_backend_prefill") == "breakable"
        _refuse(
            f"no --cuda-graph-backend-prefill breakable {_WITH_STATES}",
            "it" if is_given else "it, SGLang's default on a GPU",
            f"add --cuda-graph-backend-prefill disabled, or {WITHOUT}",
        )


def _of_stages(read: Callable[[str], Any], architecture: str) -> tuple[str, Any]:
    """What is expected, and what was found, of stages of a hybrid."""
    return "--pp-size 1", 1 if architecture in STAGED_HYBRIDS else read("pp_size") or 1


def _check_gateway(read: Callable[[str], Any], config: HierKVConfig, release: str = "") -> None:
    """Refuses what was not tried behind SGLang's gateway."""
    for expected, found in outside_gateway(read, config, release):
        _refuse(expected, found, WITHOUT_GATEWAY)


def _has_plain_fp8_pools(read: Callable[[str], Any]) -> bool:
    """Whether a server on a CPU has a GPU's pools, as the runtime of the tests has."""
    return bool(read("attention_backend") == "cpu_extend")


def _check_values(
    read: Callable[[str], Any], given: Callable[[str], Any], config: HierKVConfig
) -> None:
    for name, value, limit in outside_limits(read):
        found = f"--{flag(name)}" if value is True else f"--{flag(name)} {value}"
        if given(name) == value:
            _refuse(limit.expected, found, limit.advice)
        found += ", which SGLang chose for this model and these arguments"
        _refuse(limit.expected, found, f"change them or {WITHOUT}")
    dtype = str(read("kv_cache_dtype"))
    if read("device") == "cpu" and dtype.startswith("fp8") and not _has_plain_fp8_pools(read):
        _refuse(
            "--kv-cache-dtype auto on a CPU, where SGLang's pools of fp8 have scales or are none",
            dtype,
            "leave the flag out",
        )
    workers = read("tokenizer_worker_num") or 1
    if workers > 1 and config.truncation != "off":
        # They are processes of their own, which check lengths before a prompt can be cut.
        _refuse(
            "--tokenizer-worker-num 1",
            f"{workers}",
            "leave it out or add --hier-kv-truncation off",
        )
    for expected, found in outside_stages(read, config):
        _refuse(expected, found, WITHOUT_STAGES)
    for expected, found in outside_context(read, config):
        _refuse(expected, found, WITHOUT_CONTEXT)
    if has_attention_dp(read):
        _check_attention_dp(read, config)
    _check_page_size(read("page_size"), given("page_size"))


def _check_page_size(page_size: int | None, given: int | None) -> None:
    """Refuses pages of one token, whoever chose them."""
    if page_size is None or page_size >= 2:
        return
    found = f"{page_size}"
    advice = f"leave the flag out (default {DEFAULT_PAGE_SIZE}) or give 16, 32 or 64"
    if given != page_size:
        # As of Qwen3-Next on a Blackwell GPU, where nobody named a backend and guesses may branch.
        found += ", which SGLang chose with the attention backend for this model"
        advice = "give --attention-backend, with which it leaves pages as they are"
    _refuse("--page-size of at least 2", found, advice)


def _check_attention_dp(read: Callable[[str], Any], config: HierKVConfig) -> None:
    """Refuses what was not tried with data parallel attention."""
    if config.truncation in ("match", "all"):
        _refuse(
            "--hier-kv-truncation overflow or off with data parallel attention",
            config.truncation,
            "leave the flag out",
        )
    for name in (
        "enable_lora",
        "lora_paths",
        "enable_streaming_session",
        "enable_session_radix_cache",
        "enable_prefill_delayer",
    ):
        if read(name):
            _refuse(
                f"no --{flag(name)} with data parallel attention",
                "it",
                "remove one of the two or use --dp-size alone",
            )


def check_model(ctx: Any) -> None:
    """Refuses models whose cache is more than one page table of full attention.

    The second line behind ``check_resolved``: by what SGLang built, not what it was asked for.

    Args:
        ctx: SGLang's ``TreeCacheBuildContext``.
    """
    for fact, name in (
        ("disable_radix_cache", "no tree"),
        ("is_hybrid_swa", "swa"),
        ("is_hybrid_ssm", "state of another kind" if ctx.is_hybrid_swa else "state"),
        ("is_dsa", "sparse" if ctx.is_hybrid_swa or ctx.is_hybrid_ssm else INDEXED),
    ):
        if getattr(ctx, fact):
            check_kind(name)
    params = ctx.params
    allocator = params.token_to_kv_pool_allocator
    gates = getattr(params, "swa_gates_prefix_match", None)
    mode = ctx.server_args.disaggregation_mode
    is_new = ctx.is_hybrid_swa or ctx.is_hybrid_ssm or ctx.is_dsa or is_disaggregated(mode)
    if is_new and gates is None:  # an older one, whatever it is called
        _refuse(NEWEST_RELEASE, "one without CacheInitParams.swa_gates_prefix_match", WITHOUT)
    if ctx.is_hybrid_swa:
        if not gates:
            _refuse("a tree that keeps windows", "a model that recomputes them", WITHOUT)
        _check_chunks(ctx.model_config.attention_chunk_size, params.sliding_window_size)
    pools = _REQUEST_POOL, _DECODE_REQUEST_POOL
    if ctx.is_hybrid_ssm:
        pools = _STATE_REQUEST_POOL, _STATE_DECODE_REQUEST_POOL
    for expected, found in (
        (_WINDOW_ALLOCATOR if ctx.is_hybrid_swa else _ALLOCATOR, type(allocator).__name__),
        (pools[mode == DECODE], type(params.req_to_token_pool).__name__),
        (f"pages of {params.page_size} tokens", f"pages of {allocator.page_size} tokens"),
    ):
        if found != expected:
            _refuse(expected, found, WITHOUT)


def _check_chunks(chunk: int | None, window: int) -> None:
    """Refuses a tree that keeps less of a prefix than the chunk that a token may see."""
    if chunk is not None and window < chunk:
        _refuse(f"a tree that keeps chunks of {chunk} tokens", f"one of {window}", WITHOUT)


def check_tree(
    components: list[str], *, has_windows: bool = False, has_states: bool = False
) -> None:
    """Refuses a tree that keeps more of a prefix than the pages that are stored.

    Args:
        components: names of the tree's components.
        has_windows: whether window layers have a pool of their own.
        has_states: whether layers have a state a sequence.
    """
    if has_states and not has_windows and components == [_COMPONENT, _STATE_COMPONENT]:
        return
    if has_windows and not has_states and components == [_COMPONENT, _WINDOW_COMPONENT]:
        return
    if has_windows or has_states or components != [_COMPONENT]:
        _refuse("a radix tree of full attention only", f"one of {', '.join(components)}", WITHOUT)


def check_keys(algorithm: str | None, *, are_pairs: bool, has_states: bool = False) -> None:
    """Refuses a tree whose keys are not those that the plugin names pages by.

    Args:
        algorithm: of speculative decoding, as SGLang resolved it.
        are_pairs: whether the tree's keys are of pairs of tokens.
        has_states: whether layers have a state a sequence, of which SGLang keys by tokens.
    """
    expected, found = (
        "keys of token pairs" if is_pairs else "keys of tokens"
        for is_pairs in (algorithm in KEYED_BY_PAIRS and not has_states, are_pairs)
    )
    if expected != found:
        _refuse(f"{expected} with --speculative-algorithm {algorithm}", found, WITHOUT)


def check_attention(attention_types: set[str]) -> None:
    """Refuses a model in which a token's KV depends on tokens behind it.

    Args:
        attention_types: SGLang's, of all attention layers; empty of what is none.
    """
    for found in sorted(attention_types - {"", _FROM_LEFT_TO_RIGHT}):
        _refuse("attention from left to right", f"layers of another kind ({found})", WITHOUT)


def check_branched_windows(window: int, read: Callable[[str], Any]) -> None:
    """Refuses windows where guesses branch, though all layers' KV is in one pool.

    Args:
        window: of the model's layers, in tokens; 0 where all of them see everything.
        read: one of SGLang's arguments by its name, as SGLang resolved it.
    """
    for expected, found in outside_branched_windows(window, read):
        _refuse(expected, found, WITHOUT_SPECULATION)


def check_heads(attention_heads: set[int], expected: int) -> None:
    """Refuses an architecture whose attention is not data parallel where it should be.

    SGLang starts with it, and ends with the first request.

    Args:
        attention_heads: query heads of a rank, of all attention layers.
        expected: those of a rank that shares a request's attention.
    """
    if attention_heads - {expected}:
        _refuse(
            f"an architecture that SGLang runs data parallel attention with ({expected} query "
            "heads a rank)",
            f"one with {max(attention_heads - {expected})}",
            "leave --attn-dp-size and --enable-dp-attention out",
        )


def check_stage(num_full: int, num_others: int, kind: str = "a state") -> None:
    """Refuses a pipeline stage of a hybrid that has layers of one kind alone.

    Args:
        num_full: its layers with full attention.
        num_others: its other layers.
        kind: what these have.
    """
    if not num_full or not num_others:
        _refuse(
            f"layers with full attention and layers with {kind} in each pipeline stage",
            f"a stage with {num_full} of the former and {num_others} of the latter",
            "change SGLANG_PP_LAYER_PARTITION or --pp-size",
        )


def check_ranks(sizes: Mapping[str, int]) -> None:
    """Refuses groups of ranks that do not agree on what is stored.

    Args:
        sizes: of the groups other than tensor and data parallel, by name.
    """
    for name, size in sizes.items():
        if size > 1:
            _refuse(f"one rank of {name}", f"{size}", "spread the model with --tp-size")


def _refuse(expected: str, found: str, advice: str) -> None:
    raise HierKVConfigError(f"--enable-hier-kv needs {expected}, got {found}; {advice}.")
