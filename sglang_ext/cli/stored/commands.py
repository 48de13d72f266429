"""`hier-kv inspect`, `verify` and `prune`: a disk folder or a store, without its servers."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.cli.examples import describe
from sglang_ext.cli.printing import complain, say, say_json, tell
from sglang_ext.cli.server_stats import UNITS_SAID
from sglang_ext.cli.usage import FAILED, INTERRUPTED, WRONG_USE, UsageError

if TYPE_CHECKING:
    from sglang_ext.tiers.records.seals import RecordSeals

# In messages of the tiers, which name the flags of a server.
_FLAGS = {
    "--hier-kv-remote-url:": "the URL:",
    "--hier-kv-remote-url": "the URL",
    "--hier-kv-key-file": "--key-file",
}


def add_commands(commands: Any) -> None:
    """Adds the commands to a parser's subcommands."""
    _add_inspect(commands.add_parser("inspect", help="what lies in a disk folder or a store"))
    _add_verify(commands.add_parser("verify", help="whether all that lies there is sound"))
    _add_prune(commands.add_parser("prune", help="removes some or all of it"))


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Says what lies in the folder of --hier-kv-disk-dir or in a store, by namespace. Changes"
        f" nothing, and may run beside servers. {UNITS_SAID}",
        "hier-kv inspect /nvme/kv",
        "hier-kv inspect redis://cache:6379",
    )
    parser.set_defaults(run=_told(_inspect))
    _add_place(parser)


def _add_verify(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Reads every page in the folder of --hier-kv-disk-dir or in a store and proves its"
        " checksum, or with a key file its tag. Changes nothing, and may run beside servers. The"
        " exit status is 0 where all is sound, 1 where something is not or could not be looked at.",
        "hier-kv verify /nvme/kv --key-file /etc/hier-kv.key",
    )
    parser.set_defaults(run=_told(_verify))
    _add_place(parser)


def _add_prune(parser: argparse.ArgumentParser) -> None:
    describe(
        parser,
        "Removes pages from the folder of --hier-kv-disk-dir while no server holds it, or from a"
        " store, and says what it removed. Pages that were not chosen stay. --dry-run may run"
        f" beside a server; its figures are a moment's. {UNITS_SAID}",
        "hier-kv prune /nvme/kv --older-than 7d --dry-run",
        "hier-kv prune /nvme/kv --damaged",
    )
    parser.set_defaults(run=_told(_prune))
    _add_place(parser)
    add = parser.add_mutually_exclusive_group().add_argument
    add("--namespace", metavar="PREFIX", help="namespaces whose digests begin so, in hex")
    add("--damaged", action="store_true", help="pages that hier-kv verify finds damaged")
    add("--older-than", metavar="TIME", help="what was not used for so long (s, m, h, d)")
    add("--all", action="store_true", help="everything")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be removed")


def _add_place(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("place", metavar="FOLDER_OR_URL", help="of --hier-kv-disk-dir or --hier-kv-remote-url")
    add("--key-file", metavar="FILE", help="the server's --hier-kv-key-file, if it has one")
    add("--json", action="store_true", help="for programs")


def _inspect(chosen: argparse.Namespace) -> int:
    if _is_url(chosen):
        from sglang_ext.cli.stored.store_inspect import inspect_store, lines_of_store

        _print(chosen, inspect_store(chosen.place), lines_of_store)
    else:
        from sglang_ext.cli.stored.folder_inspect import inspect_folder, lines_of_folder

        _print(chosen, inspect_folder(Path(chosen.place), _seals(chosen)), lines_of_folder)
    return 0


def _verify(chosen: argparse.Namespace) -> int:
    if _is_url(chosen):
        from sglang_ext.cli.stored.store_verify import verify_store

        verdict = verify_store(chosen.place, _seals(chosen))
    else:
        from sglang_ext.cli.stored.folder_verify import verify_folder

        verdict = verify_folder(Path(chosen.place), _seals(chosen))
    _print(chosen, verdict.facts(), lambda _: verdict.lines())
    return verdict.status


def _prune(chosen: argparse.Namespace) -> int:
    from sglang_ext.cli.stored.choice import Choice

    choice, seals = Choice.of(chosen), _seals(chosen)
    if _is_url(chosen):
        from sglang_ext.cli.stored.store_prune import prune_store

        removed = prune_store(chosen.place, choice, seals, is_dry=chosen.dry_run)
    else:
        from sglang_ext.cli.stored.folder_prune import prune_folder

        removed = prune_folder(Path(chosen.place), choice, seals, is_dry=chosen.dry_run)
    _print(chosen, removed.facts(), lambda _: removed.lines())
    return removed.status


def _is_url(chosen: argparse.Namespace) -> bool:
    return "://" in chosen.place


def _seals(chosen: argparse.Namespace) -> RecordSeals:
    """What proves records; what is written with it hides as much as there is to hide."""
    if not chosen.key_file:
        from sglang_ext.tiers.records.seals import CHECKSUMS

        return CHECKSUMS
    from sglang_ext.tiers.protection import open_protection

    return open_protection(Path(chosen.key_file), "encrypt")[0]


def _print(
    chosen: argparse.Namespace, facts: dict[str, Any], lines_of: Callable[[Any], list[str]]
) -> None:
    if chosen.json:
        say_json(facts)
    else:
        say(*lines_of(facts))


def _told(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Runs a command; what it cannot do is said in a sentence."""

    def run(chosen: argparse.Namespace) -> int:
        from sglang_ext.tiers.errors import TierError

        try:
            if not chosen.place:  # a variable that is not set; `Path` takes it for the folder here
                raise UsageError("a folder or a URL is expected, got an empty text")
            return command(chosen)
        except BrokenPipeError:  # is `main`'s to end
            raise
        except PermissionError as error:
            path = error.filename or chosen.place
            text = f"{path} must be this user's to read, and is not; run it as the server's user"
            complain(text)
            return FAILED
        except (TierError, ValueError, OSError) as error:
            text = str(error)
            for flag, name in _FLAGS.items():
                text = text.replace(flag, name)
            complain(text)
            return WRONG_USE if isinstance(error, UsageError) else FAILED
        except KeyboardInterrupt:
            tell("")
            complain("interrupted")
            return INTERRUPTED

    return run
