"""What `--help` of a command says: what it does, and examples that can be pasted."""

from __future__ import annotations

import argparse

_TITLE = "example"


class _Help(argparse.HelpFormatter):
    """Wraps paragraphs, and leaves examples as they are: one that is wrapped is no command."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(_TITLE) else super()._fill_text(text, width, indent)


def describe(parser: argparse.ArgumentParser, text: str, *examples: str, more: str = "") -> None:
    """Says what a command does.

    Args:
        parser: of the command.
        text: a paragraph.
        examples: command lines.
        more: what stands behind them, in lines of its own.
    """
    title = f"{_TITLE}:" if len(examples) == 1 else f"{_TITLE}s:"
    parser.formatter_class = _Help
    parser.description = text
    parser.epilog = "\n".join([title, *(f"  {each}" for each in examples), more]).rstrip() + "\n"
