"""Tables of the documents, as the code has them: flags, threads, what is served or refused."""

from __future__ import annotations

from dataclasses import fields

from sglang_ext.assembly.threads import FRONT, SCHEDULER, THREADS
from sglang_ext.settings.arguments import FREE, LIMITED, flag
from sglang_ext.settings.config import HierKVConfig
from sglang_ext.settings.model_kinds import MODEL_KINDS, SERVED_MODES
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


def all_tables() -> dict[str, str]:
    """Each table by the name that the document marks its place with."""
    return {
        "models": model_table(),
        "modes": mode_table(),
        "limited": limit_table(),
        "free": free_table(),
    }
