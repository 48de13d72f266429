"""The command `hier-kv warm`, and what it says at the end."""

from __future__ import annotations

import argparse
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import say, say_json
from sglang_ext.cli.progress import Progress
from sglang_ext.cli.server_stats import number_of
from sglang_ext.cli.steer import add_admin_key, admin_key_of
from sglang_ext.cli.usage import INTERRUPTED, UsageError
from sglang_ext.cli.warm.documents import TENANT, Document, read_documents
from sglang_ext.cli.warm.server import Keys, Served, ServerGoneError, WarmedServer, WarmError

_MOST_AT_A_TIME = 64
_MOST_LINES = 20
_MOST_S = 86_400.0


def add_command(
    parser: argparse.ArgumentParser, add_server: Callable[[argparse.ArgumentParser], None]
) -> None:
    """Adds what the command takes.

    Args:
        parser: of the command.
        add_server: adds the server's URL and key.
    """
    describe(
        parser,
        "Has a running server compute and store documents before anybody asks for them "
        "(docs/hints.md).",
        "hier-kv warm http://127.0.0.1:30000 prompts.jsonl handbook.txt --pin-s 3600",
    )
    parser.set_defaults(run=_warm)
    add_server(parser)
    add = parser.add_argument
    add(
        "files",
        nargs="+",
        metavar="FILE",
        help="a .jsonl of objects with text, input_ids or messages, or a text that is a document",
    )
    add_admin_key(parser)
    add("--concurrency", type=int, default=2, metavar="N", help="requests at a time (%(default)s)")
    add("--pin-s", type=float, metavar="SECONDS", help="pin what is stored for so long")
    add("--timeout-s", type=float, default=600.0, metavar="SECONDS", help="of one (%(default)s)")
    add("--cache-salt", metavar="SALT", help="of documents that say none")
    add("--extra-key", metavar="KEY", help="of documents that say none")
    add("--json", action="store_true", help="for programs")


def _warm(chosen: argparse.Namespace) -> int:
    _check(chosen)
    given = {name: getattr(chosen, name) for name in TENANT}
    common = {name: value for name, value in given.items() if value is not None}
    # All lines are looked at before the first is sent.
    num_bytes = sum(document.num_bytes for document in read_documents(chosen.files, common))
    if not num_bytes:
        raise ValueError(f"expected documents, found none in {', '.join(chosen.files)}.")
    server = WarmedServer(chosen.url, Keys(chosen.api_key, admin_key_of(chosen)), chosen.timeout_s)
    before, begin_s = server.counts(), time.monotonic()
    summary = Summary(server.page_size)
    progress = Progress("went through", num_bytes)
    documents = read_documents(chosen.files, common)
    try:
        _warm_all(server, documents, chosen, summary, progress)
    except KeyboardInterrupt:  # what was done until then is said all the same
        summary.is_interrupted = True
    progress.end()
    summary.seconds = time.monotonic() - begin_s
    _look_back(server, before, summary, has_pins=chosen.pin_s is not None)
    if chosen.json:
        say_json(summary.facts())
    else:
        say(*summary.lines())
    return summary.status


def _look_back(
    server: WarmedServer, before: Counter[str], summary: Summary, *, has_pins: bool
) -> None:
    """What the server's counters say of the time since."""
    if summary.is_cut_short or summary.is_interrupted:
        return
    try:
        after = server.counts()
    except ServerGoneError:
        summary.is_cut_short = True
        return
    summary.lost_pages = after["lost_pages"] - before["lost_pages"]
    if has_pins:
        summary.pinned_now_pages = after["pinned_now_pages"]
        summary.pins_refused_pages = after["pins_refused_pages"] - before["pins_refused_pages"]


def _check(chosen: argparse.Namespace) -> None:
    if chosen.files[0].startswith(("http://", "https://")):  # taken for the file that is left out
        raise UsageError(f"a FILE is expected behind {chosen.files[0]}")
    if not 1 <= chosen.concurrency <= _MOST_AT_A_TIME:
        raise UsageError(f"--concurrency must be 1 to {_MOST_AT_A_TIME}, got {chosen.concurrency}")
    for flag, seconds in (("--timeout-s", chosen.timeout_s), ("--pin-s", chosen.pin_s)):
        if seconds is not None and not 0 < seconds <= _MOST_S:
            raise UsageError(f"{flag} must be above 0, at most {_MOST_S:g} s, got {seconds:g}")


@dataclass
class Summary:
    """What became of the documents.

    Attributes:
        page_size: tokens of a page.
        documents: that are stored.
        there_already: of these, those of which all was reused that can be: the last token is
            always computed, and with it the rest of its page.
        too_short: those of less than a page, of which nothing is stored, and their tokens; they
            count nowhere else.
        tokens: of their prompts.
        computed_tokens: of these, those that were not reused.
        reused: the others by tier.
        failures: documents that are not stored, and why.
        is_cut_short: whether the server went away or was about to; documents behind that were not
            tried.
        is_interrupted: whether whoever ran this did not wait for the rest.
        lost_pages: of anybody, that left the last tier meanwhile.
        pinned_now_pages: at the end; None where nothing was to be pinned.
        pins_refused_pages: that found no room in the share for pins.
        seconds: it took.
    """

    page_size: int
    documents: int = 0
    there_already: int = 0
    too_short: list[tuple[str, int]] = field(default_factory=list)
    tokens: int = 0
    computed_tokens: int = 0
    reused: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    is_cut_short: bool = False
    is_interrupted: bool = False
    lost_pages: int = 0
    pinned_now_pages: int | None = None
    pins_refused_pages: int = 0
    seconds: float = 0.0

    @property
    def status(self) -> int:
        """The exit status: 0 where all documents were stored, and the server is still there."""
        if self.is_interrupted:
            return INTERRUPTED
        return int(bool(self.failures) or self.is_cut_short)

    def add(self, where: str, served: Served) -> None:
        """Counts a document that was served.

        Args:
            where: file, and line of one with many.
            served: what the server did with it.
        """
        if served.num_tokens < self.page_size:
            self.too_short.append((where, served.num_tokens))
            return
        num_computed = served.num_tokens - served.num_reused
        self.documents += 1
        self.tokens += served.num_tokens
        self.computed_tokens += num_computed
        self.reused.update({tier: n for tier, n in served.by_tier.items() if n})
        if served.num_reused and num_computed <= self.page_size:
            self.there_already += 1

    def facts(self) -> dict[str, Any]:
        """As JSON has it."""
        failures = [{"where": where, "reason": reason} for where, reason in self.failures]
        too_short = [{"where": where, "tokens": tokens} for where, tokens in self.too_short]
        found = {**vars(self), "failures": failures, "too_short": too_short}
        return {**found, "seconds": round(self.seconds, 3)}

    def lines(self) -> list[str]:
        """For people."""
        shown = _first([f"failed: {where}: {reason}" for where, reason in self.failures])
        shown += _first([self._said_of_short(*each) for each in self.too_short])
        if self.is_cut_short:
            shown.append(
                "the server is gone or about to end; documents behind the last that is counted "
                "were not sent: run this again when it is back"
            )
        if self.is_interrupted:
            shown.append(
                "interrupted; only documents that were stored by then are counted: run this again "
                "for the others, and what is there is not computed anew"
            )
        if self.lost_pages:
            shown.append(
                f"{number_of(self.lost_pages, 'page')} left the last tier meanwhile: DRAM and disk "
                "are too small for all (hier-kv size)"
            )
        if self.pinned_now_pages is not None:
            pinned = f"{number_of(self.pinned_now_pages, 'page')} {_are(self.pinned_now_pages)}"
            refused = f"{self.pins_refused_pages:,} found no room in --hier-kv-pin-share"
            shown.append(f"{pinned} pinned now; {refused}")
        tiers = "".join(f", {tier} {n:,}" for tier, n in self.reused.items())
        stored = f"{number_of(self.documents, 'document')} {_are(self.documents)} stored"
        there = f"{self.there_already:,} of them {'was' if self.there_already == 1 else 'were'}"
        num_short = len(self.too_short)
        too_short = f"{num_short:,} {_are(num_short)} too short; " if num_short else ""
        shown.append(f"{stored}, {there} there already; {too_short}{len(self.failures):,} failed")
        shown.append(
            f"{number_of(self.tokens, 'token')}: {self.computed_tokens:,} computed{tiers}; "
            f"{self.seconds:.1f} s"
        )
        return shown

    def _said_of_short(self, where: str, num_tokens: int) -> str:
        return (
            f"too short: {where}: {number_of(num_tokens, 'token')}, and a page has "
            f"{self.page_size}; nothing of it is stored"
        )


def _first(lines: list[str]) -> list[str]:
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"... and {len(lines) - _MOST_LINES:,} more (--json has all)"]
    return lines


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _warm_all(
    server: WarmedServer,
    documents: Iterator[Document],
    chosen: argparse.Namespace,
    summary: Summary,
    progress: Progress,
) -> None:
    """Warms some documents at a time; no more than these are in memory."""
    under_way: dict[Future[Served], Document] = {}

    def end_some() -> None:
        done, _ = wait(under_way, return_when=FIRST_COMPLETED)
        for future in done:
            document = under_way.pop(future)
            try:
                summary.add(document.where, future.result())
            except WarmError as error:
                summary.failures.append((document.where, str(error)))
                summary.is_cut_short |= isinstance(error, ServerGoneError)
            progress(document.num_bytes)

    for document in documents:
        while len(under_way) >= chosen.concurrency:
            end_some()
        if summary.is_cut_short:
            break
        under_way[_started(server, document, chosen.pin_s)] = document
    while under_way:
        end_some()


def _started(server: WarmedServer, document: Document, pin_s: float | None) -> Future[Served]:
    """Warms a document in a thread of its own, which no end of this process waits for.

    An executor's threads would be waited for, and a request may take as long as `--timeout-s`.
    """
    served: Future[Served] = Future()

    def warm() -> None:
        try:
            served.set_result(server.warm(document, pin_s))
        except BaseException as error:  # is raised again where the result is asked for
            served.set_exception(error)

    threading.Thread(target=warm, name="hier-kv-warm", daemon=True).start()
    return served
