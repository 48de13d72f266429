"""What `hier-kv prune` is to remove, and what it removed."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import dataclass, field
from typing import Any, Self

from sglang_ext.cli.server_stats import amount, number_of
from sglang_ext.cli.stored.verdict import MOST_LINES
from sglang_ext.cli.usage import UsageError
from sglang_ext.tiers.remote.url_options import life_s

_DIGITS = re.compile(r"[0-9a-f]{1,64}")


@dataclass(frozen=True)
class Choice:
    """What is to go; exactly one of its fields says so.

    Attributes:
        namespace: first hex digits of the namespaces that go; "" for another choice.
        is_damaged: whether damaged pages go.
        before_s: what was not used since then goes, seconds since the epoch; 0 for another choice.
        is_all: whether everything goes.
    """

    namespace: str = ""
    is_damaged: bool = False
    before_s: float = 0.0
    is_all: bool = False

    @classmethod
    def of(cls, chosen: argparse.Namespace) -> Self:
        """What the command line says.

        Raises:
            UsageError: nothing, or nothing that can be chosen; one sentence.
        """
        if chosen.namespace is not None:
            if not _DIGITS.fullmatch(chosen.namespace):
                raise UsageError(
                    "--namespace must be the first hex digits of namespaces, as hier-kv inspect"
                    f" shows them, got {chosen.namespace!r}"
                )
            return cls(namespace=chosen.namespace)
        if chosen.older_than is not None:
            try:
                return cls(before_s=time.time() - life_s(chosen.older_than))
            except ValueError as error:
                raise UsageError(
                    f"--older-than must be {error}, got {chosen.older_than!r}"
                ) from error
        if not (chosen.damaged or chosen.all):
            raise UsageError(
                "nothing is chosen to be removed; give one of --namespace PREFIX, --damaged,"
                " --older-than 7d and --all"
            )
        return cls(is_damaged=chosen.damaged, is_all=chosen.all)

    def takes(self, namespace: str, used_s: float) -> bool:
        """Whether what lies in a namespace and was used then goes, damaged or not.

        Args:
            namespace: digest in hex.
            used_s: when it was used last, seconds since the epoch.
        """
        if self.is_damaged:
            return False
        named = bool(self.namespace) and namespace.startswith(self.namespace)
        old = bool(self.before_s) and used_s < self.before_s
        return self.is_all or named or old


@dataclass
class Removed:
    """What was removed, or would be.

    Attributes:
        place: the folder or URL.
        is_dry: whether nothing was touched.
        held_by: who holds the folder, where that is a dry run beside a server; "" for nobody.
        what: each thing, a line.
        brief: the same for people, where a whole name is more than they read.
        pages: of them.
        num_bytes: that they took.
        left: what was chosen, or may be meant, and stayed; a sentence each.
        num_failed: things that could not be removed; `left` has them, too.
    """

    place: str
    is_dry: bool
    held_by: str = ""
    what: list[str] = field(default_factory=list)
    brief: list[str] = field(default_factory=list)
    pages: int = 0
    num_bytes: int = 0
    left: list[str] = field(default_factory=list)
    num_failed: int = 0

    @property
    def status(self) -> int:
        """The exit status: 1 where something could not be removed."""
        return int(self.num_failed > 0)

    def add(self, what: str, pages: int, num_bytes: int, *, brief: str = "") -> None:
        """Counts a thing; `brief` says it to people, where `what` is too long."""
        self.what.append(what)
        self.brief.append(brief or what)
        self.pages += pages
        self.num_bytes += num_bytes

    def fail(self, what: str, error: Exception) -> None:
        """Counts a thing that could not be removed."""
        self.left.append(f"{what}: could not be removed ({error})")
        self.num_failed += 1

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "place": self.place,
            "dry_run": self.is_dry,
            "held_by": self.held_by,
            "pages": self.pages,
            "bytes": self.num_bytes,
            "removed": self.what,
            "left": self.left,
        }

    def lines(self) -> list[str]:
        """For people."""
        verb = "would remove" if self.is_dry else "removed"
        lines = [f"{verb} {what}" for what in self.brief[:MOST_LINES]]
        if len(self.what) > MOST_LINES:
            lines.append(f"... and {len(self.what) - MOST_LINES:,} more (--json has all)")
        lines += [f"left: {text}" for text in self.left]
        total = f"{verb} {number_of(self.pages, 'page')}, {amount(self.num_bytes)} in all"
        if self.held_by:
            lines.append(
                f"these are figures of this moment: {self.held_by} holds the folder and goes on"
                " writing; nothing is removed until it is stopped"
            )
        return [*lines, f"{self.place}: {total if self.what else 'nothing to remove'}"]
