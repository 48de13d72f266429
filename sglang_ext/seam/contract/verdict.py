"""Compares an SGLang release with those that the plugin was tested with, and says what follows."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from sglang_ext.errors import HierKVConfigError
from sglang_ext.seam.contract.source import ContractError, SGLangSource, Shape, at_most
from sglang_ext.seam.contract.symbols import SYMBOLS, Symbol, Use
from sglang_ext.settings.values import ALLOW_UNTESTED, is_set

logger = logging.getLogger(__name__)

TESTED_FILE = Path(__file__).with_name("tested.json")
_NAMED_AT_MOST = 3  # in a sentence; `hier-kv doctor` lists all
_BY_DOCTOR = "`hier-kv doctor` lists them"


@dataclass(frozen=True)
class Finding:
    """A name that is not as it was tested, and what about it."""

    symbol: Symbol
    what: str

    def __str__(self) -> str:
        return f"{self.symbol} {self.what}"


@dataclass
class ContractReport:
    """What an SGLang release is like.

    Attributes:
        version: of the release.
        reference: the tested release that it was compared with.
        broken: names that are missing or take other parameters: nothing can run.
        unproven: names of `Use.FOLLOWED` whose body differs: it may mean something else now.
        changed: names of `Use.HOOKED` whose body differs.
        called: names of `Use.CALLED` whose body differs.
    """

    version: str
    reference: str
    broken: list[Finding] = field(default_factory=list)
    unproven: list[Finding] = field(default_factory=list)
    changed: list[Finding] = field(default_factory=list)
    called: list[Finding] = field(default_factory=list)

    @property
    def is_tested(self) -> bool:
        """The release was tested, and this is it."""
        differs = self.broken or self.unproven or self.changed or self.called
        return self.version == self.reference and not differs

    def refusal(self, *, allow_untested: bool, others: str = _BY_DOCTOR) -> str:
        """Why the plugin does not run with it, a sentence; empty where it does.

        Args:
            allow_untested: whether the operator runs what was not tested.
            others: where names are found that the sentence has no room for.
        """
        if self.broken:
            return (
                f"--enable-hier-kv needs SGLang as in {self.reference}; of SGLang {self.version} "
                f"{_listed(self.broken, others)}; install sglang=={self.reference}."
            )
        if self.unproven and not allow_untested:
            return (
                f"--enable-hier-kv rests on code of SGLang {self.reference}; of SGLang "
                f"{self.version} {_names(self.unproven, others)} differ; install "
                f"sglang=={self.reference}, or set {ALLOW_UNTESTED}=1 to run untested."
            )
        return ""

    def warning(self, *, others: str = _BY_DOCTOR) -> str:
        """What an operator should know who runs it all the same; empty where nothing.

        Args:
            others: as of `refusal`.
        """
        if self.is_tested:
            return ""
        differs = [*self.unproven, *self.changed, *self.called]
        found = (
            f"{_names(differs, others)} differ"
            if differs
            else f"all {len(SYMBOLS)} names are as tested"
        )
        return (
            f"SGLang {self.version} was not tested with this plugin; compared with "
            f"{self.reference}, {found}"
        )


def examine(source: SGLangSource, symbols: Iterable[Symbol] = SYMBOLS) -> ContractReport:
    """Compares a release with the tested one that it is, or that it comes after."""
    releases = reference_releases()
    reference = _reference_of(source.version, list(releases))
    files, names = releases[reference]["files"], releases[reference]["names"]
    verdict = ContractReport(source.version, reference)
    same: dict[str, bool] = {}
    for symbol in symbols:
        path = symbol.path
        if path not in same:
            same[path] = source.digest(path) == files[path]
        if not same[path]:
            expected = Shape(*names[str(symbol)])
            _compare(verdict, symbol, expected, source.shape(path, symbol.name))
    return verdict


def _reference_of(version: str, tested: Sequence[str]) -> str:
    """The newest tested release that is not newer than a version; the newest of all for others."""
    try:
        found = [one for one in tested if Version(one) <= Version(version)]
    except InvalidVersion:
        found = []
    return found[-1] if found else tested[-1]


def _compare(verdict: ContractReport, symbol: Symbol, expected: Shape, found: Shape | None) -> None:
    if found is None:
        verdict.broken.append(Finding(symbol, "is missing"))
    elif symbol.use is Use.NAMED:
        return
    elif found.signature != expected.signature:
        verdict.broken.append(Finding(symbol, found.against(expected)))
    elif found.body != expected.body:
        groups = {Use.FOLLOWED: verdict.unproven, Use.CALLED: verdict.called}
        groups.get(symbol.use, verdict.changed).append(Finding(symbol, "is written differently"))


def reference_releases() -> Mapping[str, Mapping[str, Any]]:
    """By release, the oldest first: digests of `files`, and the shapes of `names`."""
    found: dict[str, Any] = json.loads(TESTED_FILE.read_text())
    return found


def record(sources: Iterable[SGLangSource]) -> dict[str, Any]:
    """What `reference_releases` holds, of releases that are tested, the oldest first.

    Raises:
        ContractError: a name is missing: the list is wrong, or the release cannot be supported.
    """
    releases = {}
    for source in sources:
        shapes = {str(symbol): source.shape(symbol.path, symbol.name) for symbol in SYMBOLS}
        missing = [name for name, shape in shapes.items() if shape is None]
        if missing:
            raise ContractError(f"SGLang {source.version} lacks {', '.join(missing)}.")
        paths = sorted({symbol.path for symbol in SYMBOLS})
        releases[source.version] = {
            "files": {path: source.digest(path) for path in paths},
            "names": {name: list(shape) for name, shape in shapes.items() if shape is not None},
        }
    return releases


def installed() -> SGLangSource:
    """The SGLang that this Python would import.

    Raises:
        ContractError: there is none.
    """
    spec = find_spec("sglang")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    if not places:
        raise ContractError("SGLang is not installed; pip install 'sglang-hier-kv[sglang]'.")
    return SGLangSource(Path(places[0]))


def check_contract() -> None:
    """Refuses an SGLang that the plugin cannot run with; in the main process, before the model.

    Reads source only: where files are as they were tested, their digests and no more.

    Raises:
        HierKVConfigError: naming what is missing or different; or there is nothing to compare.
    """
    try:
        verdict = examine(installed())
    except ContractError as error:
        raise HierKVConfigError(f"--enable-hier-kv reads SGLang's source: {error}") from error
    refusal = verdict.refusal(allow_untested=is_set(ALLOW_UNTESTED))
    if refusal:
        raise HierKVConfigError(refusal)
    if not verdict.is_tested:
        logger.warning("hier-kv: %s", verdict.warning())


def _listed(findings: Sequence[object], others: str) -> str:
    shown = at_most([str(finding) for finding in findings], _NAMED_AT_MOST)
    return f"{shown} ({others})" if len(findings) > _NAMED_AT_MOST else shown


def _names(findings: Sequence[Finding], others: str) -> str:
    return _listed([finding.symbol for finding in findings], others)
