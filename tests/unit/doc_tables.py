"""Tables of the documents, as the code has them: flags, threads, what is served or refused."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from sglang_ext.assembly.threads import FRONT, SCHEDULER, THREADS
from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.metrics import names as metrics
from sglang_ext.settings.arguments import FREE, LIMITED, flag
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.model_kinds import MODEL_KINDS, SERVED_MODES, may_move
from sglang_ext.settings.refusals import Resolved, check_resolved
from sglang_ext.settings.values import flag_name


def flag_table() -> str:
    """The flags as a Markdown table; docs/configuration.md holds exactly this."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for item in fields(HierKVConfig):
        choices = item.metadata["choices"]
        values = "\\|".join(choices) if choices else item.metadata["metavar"]
        default = "(empty)" if item.default == "" else f"`{item.default}`"
        lines.append(f"| `{flag_name(item.name)} {values}` | {default} | {item.metadata['help']} |")
    return "\n".join(lines)


def model_table() -> str:
    """Kinds of models."""
    lines = [
        "| SGLang keeps | for example | served | what is reused, or why not |",
        "|---|---|---|---|",
    ]
    for kind in MODEL_KINDS.values():
        served = f"yes ({kind.proof})" if kind.is_served else "no"
        lines.append(f"| {kind.name} | {kind.examples} | {served} | {kind.reused} |")
    return "\n".join(lines)


def mode_table() -> str:
    """Modes in which served kinds run."""
    lines = ["| mode | what is reused | shown by |", "|---|---|---|"]
    lines += [f"| {mode.name} | {mode.reused} | {mode.proof} |" for mode in SERVED_MODES]
    return "\n".join(lines)


# What SGLang would have decided, of each mode; beside it what states and windows need.
_MODES: dict[str, dict[str, Any]] = {
    "one scheduler": {},
    "tensor parallel ranks": {"tp_size": 2},
    "the same on several nodes": {"tp_size": 2, "nnodes": 2},
    "pipeline stages": {"pp_size": 2},
    "these on several nodes": {"pp_size": 2, "nnodes": 2},
    "whole schedulers": {"dp_size": 2},
    "context parallel ranks": {"tp_size": 2, "attn_cp_size": 2},
    "data parallel attention": {"tp_size": 2, "attn_dp_size": 2},
    "that on several nodes": {"tp_size": 4, "attn_dp_size": 2, "nnodes": 2},
    "n-grams": {
        "speculative_algorithm": "NGRAM",
        "speculative_eagle_topk": 1,
        "attention_backend": "triton",
    },
    "drafts of a model": {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1},
    "trees of drafts": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 8,
        "attention_backend": "triton",
    },
    "drafts of EAGLE3": {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1},
    "drafts of a model, data parallel attention": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
        "tp_size": 2,
        "attn_dp_size": 2,
    },
    "drafts of EAGLE3, data parallel attention": {
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
        "tp_size": 2,
        "attn_dp_size": 2,
    },
    "adapters": {"enable_lora": True},
    "streaming sessions": {"enable_streaming_session": True},
    "prefill servers": {"disaggregation_mode": "prefill"},
    "decode servers": {
        "disaggregation_mode": "decode",
        "disaggregation_decode_enable_radix_cache": True,
    },
    "prefill servers with drafts of a model": {
        "disaggregation_mode": "prefill",
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 1,
    },
    "prefill servers with drafts of EAGLE3": {
        "disaggregation_mode": "prefill",
        "speculative_algorithm": "EAGLE3",
        "speculative_eagle_topk": 1,
    },
}
_KEPT = {"mamba_radix_cache_strategy": "extra_buffer"}
# Of each kind, by a word of its own, its architectures in the order in which they are named.
_KINDS: dict[str, tuple[str, dict[str, str]]] = {
    "mha": (
        "K and V",
        {
            "Llama": "LlamaForCausalLM",
            "Qwen 3": "Qwen3ForCausalLM",
            "GLM-4.5": "Glm4MoeForCausalLM",
        },
    ),
    "mla": ("latent rows", {"DeepSeek V3": "DeepseekV3ForCausalLM"}),
    "indexed": ("latent rows with an index", {"DeepSeek V3.2": "DeepseekV32ForCausalLM"}),
    "swa": (
        "windows",
        {
            "gpt-oss": "GptOssForCausalLM",
            "Mellum": "MellumForCausalLM",
            "Laguna": "LagunaForCausalLM",
            "Llama 4": "Llama4ForConditionalGeneration",
        },
    ),
    "swa of two shapes": (
        "windows of two shapes",
        {"Gemma 4": "Gemma4ForConditionalGeneration", "MiMo V2": "MiMoV2FlashForCausalLM"},
    ),
    "state": (
        "states",
        {
            "Nemotron-H": "NemotronHForCausalLM",
            "Qwen3.5": "Qwen3_5ForCausalLM",
            "Qwen3-Next": "Qwen3NextForCausalLM",
        },
    ),
    "state beside latent rows": (
        "states beside latent rows",
        {
            "Kimi Linear": "KimiLinearForCausalLM",
            "Kimi K3": "KimiK3ForConditionalGeneration",
        },
    ),
}  # fmt: skip
# Of these the draft is the layer in their checkpoint, by SGLang's name.
_OWN_LAYERS = {"Glm4MoeForCausalLM": "Glm4MoeForCausalLMNextN"}
# What of the plugin's settings a cell tells of, and the letters for it.
_WAYS: dict[str, HierKVConfig] = {
    "E": HierKVConfig(),
    "T": HierKVConfig(truncation="overflow"),
    "M": HierKVConfig(truncation="overflow"),
    "L": HierKVConfig(codec="lossless", disk_dir="/d"),
    "Q": HierKVConfig(codec="hier", disk_dir="/d"),
    "S": HierKVConfig(remote_url="file:///d"),
    "C": HierKVConfig(codec="remote=lossless", remote_url="file:///d"),
}


def matrix_table() -> str:
    """Kinds by modes: what `check_resolved` takes of each, and so what is reused there."""
    heads = [word for word, _ in _KINDS.values()]
    lines = [f"| | {' | '.join(heads)} |", "|---" * (1 + len(heads)) + "|"]
    for mode, values in _MODES.items():
        cells = [_cell(kind, names, values) for kind, (_, names) in _KINDS.items()]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(kind: str, architectures: dict[str, str], values: dict[str, Any]) -> str:
    """The letters of what is taken; of a kind whose models differ, each with its models."""
    taken: dict[str, list[str]] = {}
    for name, architecture in architectures.items():
        letters = "".join(
            letter
            for letter, config in _WAYS.items()
            if _is_taken(kind, architecture, values, config)
            and (letter != "M" or _is_moved(kind, values))
        )
        taken.setdefault(letters or "no", []).append(name)
    if len(taken) == 1:
        return next(iter(taken))
    return "; ".join(f"{letters} ({', '.join(names)})" for letters, names in taken.items())


def _is_moved(kind: str, values: dict[str, Any]) -> bool:
    """A draft's rows stay at the position that they were computed at."""
    return may_move(kind, values.get("tp_size", 1)) and not values.get("speculative_algorithm")


def _is_taken(kind: str, architecture: str, values: dict[str, Any], config: HierKVConfig) -> bool:
    given = {**_KEPT, **values}
    resolved = Resolved(
        given, given, dict.fromkeys(given), kind, "0.5.23", architecture,
        draft=_OWN_LAYERS.get(architecture, ""),
    )  # fmt: skip
    try:
        check_resolved(resolved, config)
    except HierKVConfigError:
        return False
    return True


def limit_table() -> str:
    """Arguments that are refused with other values than these."""
    lines = ["| argument | may be | because otherwise |", "|---|---|---|"]
    for name, limit in LIMITED.items():
        if limit.values == (False,):
            values = "off"
        else:
            values = ", ".join(f"`{value}`" for value in limit.values) or "left out"
        lines.append(f"| `--{flag(name)}` | {values} | {limit.why} |")
    return "\n".join(lines)


def free_table() -> str:
    """Arguments that may have any value."""
    lines = ["| what they are about | arguments |", "|---|---|"]
    for about, names in FREE.items():
        shown = " ".join(f"`{flag(name)}`" for name in names if not name.startswith("_"))
        lines.append(f"| {about} | {shown} |")
    return "\n".join(lines)


def thread_table() -> str:
    """All threads, SGLang's own first; docs/architecture.md holds exactly this."""
    lines = [
        "| thread | runs in | may wait for |",
        "|---|---|---|",
        f"| SGLang's scheduler | `seam/` | {SCHEDULER} |",
    ]
    for each in THREADS:
        names = ", ".join(f"`{name}`" for name in each.names)
        only = f" (with {each.only_with})" if each.only_with else ""
        lines.append(f"| {names}{only} | `{each.runs_in}` | {each.may_wait_for} |")
    return "\n".join([*lines, f"| those of the front process | `seam/hooks/front.py` | {FRONT} |"])


def metric_table() -> str:
    """All metrics with their kinds, labels and values; docs/metrics.md holds exactly this."""
    lines = ["| metric | kind | what | label | its values |", "|---|---|---|---|---|"]
    lines += [
        _metric_row(f"{count.name}_total", "counter", count, _counts_of(count))
        for count in metrics.COUNTS
    ]
    lines += [
        _metric_row(of.name, "histogram", of, _listed(metrics.TIMES[of]))
        for of in metrics.HISTOGRAMS
    ]
    for gauge in metrics.GAUGES:
        values = {name: says for name, metric, says in metrics.values_now() if metric == gauge}
        of = _listed(values) or "see [cost-model.md](cost-model.md#what-can-be-seen-of-it)"
        lines.append(_metric_row(gauge.name, "gauge", gauge, of))
    return "\n".join(lines)


def _metric_row(name: str, kind: str, metric: metrics.Metric, values: str) -> str:
    return f"| `{name}` | {kind} | {metric.help} | `{metric.label}` | {values} |"


def _listed(values: dict[str, str]) -> str:
    return "; ".join(f"`{name}`: {says}" for name, says in values.items())


def _counts_of(count: metrics.Metric) -> str:
    """By their names, which of the counts are a metric's: `metrics.count_of` in words."""
    if count == metrics.BUSY_SECONDS:
        return (
            "counts whose names end in `_us`, without that end, but for `held_...` and `cost_...`"
        )
    if count == metrics.EVENTS:
        return "all other counts"
    ends = [f"`..._{end}`" for end, metric in metrics.UNITS.items() if metric == count]
    families = [f"`{f}...`" for f, metric in metrics.UNIT_OF_FAMILY.items() if metric == count]
    own = [f"`{name}`" for name, metric in metrics.UNIT_OF_NAME.items() if metric == count]
    named = f"counts named {', '.join(ends + families)}" if ends or families else ""
    return "; ".join(filter(None, [named, ", ".join(own)]))


def all_tables() -> dict[str, str]:
    """Each table by the name that the document marks its place with."""
    return {
        "models": model_table(),
        "modes": mode_table(),
        "matrix": matrix_table(),
        "limited": limit_table(),
        "free": free_table(),
    }
