"""Things that can be plugged in, by id: those built in, and those that other packages bring.

A package brings one by an entry point, for example in its pyproject.toml::

    [project.entry-points."hier_kv.codecs"]
    my-codec = "my_package.my_codec:MyCodec"

Entry points are found in every process of a server, so nothing has to be registered by hand. A
module is imported only when what it holds is asked for.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

logger = logging.getLogger(__name__)


class Registry:
    """Ids of one kind of thing, and where each is to be found. Thread-safe.

    Args:
        kind: what one of them is called in messages, such as "codec".
        group: of the entry points, such as "hier_kv.codecs".
        builtin: targets by id: "module:name", or "module" for a whole module.
        is_id: whether a text can be an id.
        id_rule: the same in words.
        error: raised for ids that nobody has, and for things that cannot be imported.
    """

    def __init__(
        self,
        kind: str,
        group: str,
        builtin: Mapping[str, str],
        *,
        is_id: Callable[[str], bool],
        id_rule: str,
        error: type[Exception],
    ) -> None:
        self._kind = kind
        self._group = group
        self._is_id = is_id
        self._id_rule = id_rule
        self._error = error
        self._lock = threading.Lock()
        self._targets = dict(builtin)  # guarded by _lock
        self._has_entry_points = False  # whether these were looked for; guarded by _lock

    def register(self, ident: str, target: str) -> None:
        """Adds a thing to this process; an entry point does so in all of them.

        Raises:
            ValueError: the id is taken or is not one.
        """
        with self._lock:
            self._add(ident, target)

    def ids(self) -> tuple[str, ...]:
        """The known ids, sorted."""
        with self._lock:
            self._add_entry_points()
            return tuple(sorted(self._targets))

    def load(self, ident: str) -> Any:
        """Imports what has an id.

        Raises:
            Exception: the registry's error: nothing has this id, or its import failed.
        """
        with self._lock:
            if ident not in self._targets:
                self._add_entry_points()
            target = self._targets.get(ident)
        if target is None:
            raise self._error(
                f"no {self._kind} is called {ident!r}; known are {', '.join(self.ids())}"
            )
        module, _, name = target.partition(":")
        try:
            found = importlib.import_module(module)
            return getattr(found, name) if name else found
        except (ImportError, AttributeError) as error:
            raise self._error(
                f"the {self._kind} {ident!r} cannot be imported from {target}: {error}"
            ) from error

    def _add(self, ident: str, target: str) -> None:
        if ident in self._targets:
            raise ValueError(
                f"{self._kind} {ident!r} is already registered as {self._targets[ident]!r}"
            )
        if not self._is_id(ident):
            raise ValueError(f"{self._id_rule}, got {ident!r}")
        self._targets[ident] = target

    def _add_entry_points(self) -> None:
        """What is built in wins over what a package brings under the same id."""
        if self._has_entry_points:
            return
        self._has_entry_points = True
        for point in entry_points(group=self._group):
            try:
                self._add(point.name, point.value)
            except ValueError as error:
                owner = point.dist.name if point.dist is not None else "a package"
                logger.warning("hier-kv: %s of %s is left out: %s", point.name, owner, error)
