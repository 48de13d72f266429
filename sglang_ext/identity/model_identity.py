"""Whose KV this is: the namespace of the loaded model, adapters, and changes of weights.

Weights may change while the server runs. From the moment an update begins nothing is saved or
loaded until two things hold: the digest of the new weights is known, and the device holds no KV of
the old ones (SGLang's flush emptied it, or it was empty). Only then the namespace of the new
weights opens. A flush that SGLang refuses, or that the caller did not ask for, leaves the tiers
off until the next flush: KV computed on an old prefix must never be kept as new.

The digest may fail, here or on another rank, for want of memory, say. It is tried again, less and
less often, in a scheduler step that the ranks agree on. KV that the device computes until then is
of weights that have no name yet. It is theirs as soon as they have one. If weights change before,
nothing is saved or loaded until a flush.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from sglang_ext.errors import HierKVConfigError
from sglang_ext.identity.namespace import (
    digest_lora_adapter,
    digest_model,
    digest_scales,
    has_scales,
    namespace_digest,
)
from sglang_ext.ranks.rank import Exchange
from sglang_ext.tiers.store import KeySpace, PageStore

logger = logging.getLogger(__name__)

_MIXED = b"mixed"  # the device holds KV of more than one set of weights
_UNNAMED = b"unnamed"  # of the live weights alone, whose digest could not be taken yet

_FIRST_RETRY_S, _MOST_RETRY_S = 5.0, 600.0
_RETRY_TIMES = 100  # a try that took long is made again after so many times as long, at least
_LOOK_STEPS = 32  # ranks ask the first one's clock in one of so many steps, while they wait
# Adapters that were unloaded and are remembered until a flush. SGLang's ids are random, so that one
# comes back under another; with many adapters they come and go all the time.
_MOST_UNLOADED = 4096


class ModelIdentity:
    """Namespace digest of the live model and of its adapters. Scheduler thread only.

    Args:
        model: the live model.
        fixed: parts of the namespace that do not change while the server runs.
        label: what the namespace is, for people.
        lora_adapters: returns SGLang's adapters by id; empty without LoRA.
        exchange: sends bytes to all ranks that serve the same requests and returns what each sent.
            What a rank computes depends on the weights of all of them, so all enter the namespace.
        serves_alike: whether these ranks serve the same requests. If not, a request must not begin
            an exchange, and a namespace is opened as soon as the weights have changed.
        ranks_share: whether these ranks put the same KV into a remote store once.
        needs_one_name: whether these ranks keep one copy of a page for all of them, so that their
            namespaces have to be one.
        is_final: whether the namespace can be opened once only, as the server starts. Pipeline
            stages are in different steps later, where none may wait for the digests of the others.
        scaled_by: attention backends that may not use the scales of a layer's K and V as others
            do. They are named where the live weights have any.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        model: Any,
        fixed: dict[str, Any],
        label: dict[str, Any],
        lora_adapters: Callable[[], dict[str, Any]],
        exchange: Exchange = lambda content: [content],
        *,
        serves_alike: bool = True,
        ranks_share: bool = False,
        needs_one_name: bool = False,
        is_final: bool = False,
        scaled_by: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._model = model
        self._fixed = fixed
        self._label = label
        self._lora_adapters = lora_adapters
        self._exchange = exchange
        self._serves_alike = serves_alike
        self._ranks_share = ranks_share
        self._needs_one_name = needs_one_name
        self._is_final = is_final
        self._scaled_by = list(scaled_by)
        # The adapter that each digest was taken of, and the digest; empty: could not be taken.
        self._lora_digests: dict[str, tuple[Any, bytes]] = {}
        self._lora_lacking: set[str] = set()  # adapters that some rank has and another one has not
        # Digests under which the device may still hold KV; an adapter reloaded with other
        # weights is off until the next flush.
        self._lora_on_device: dict[str, bytes] = {}
        self._updating = 0
        self._incomplete = False  # an update session is open, or the weights are released
        self._unusable = False  # the live weights could not be digested
        # Of what is unusable: when to try again, how long to wait behind that, steps since the try.
        self._retry_at_s, self._retry_s, self._num_steps = 0.0, _FIRST_RETRY_S, 0
        self._digest: bytes | None = None  # of the live weights; None when they may have changed
        # Of the weights that computed what the device holds; None when it holds nothing.
        self._device_digest: bytes | None = None

    def space_of(self, req: Any, store: PageStore) -> KeySpace | None:
        """Key space of a request, or None while nothing may be saved or loaded for it.

        Never raises.
        """
        digest = self._digest_now(store)
        if digest is None:
            self._note_unnamed(getattr(req, "lora_id", None))
            return None
        if self._device_digest is None:
            self._device_digest = digest
        elif self._device_digest != digest:
            if self._device_digest != _MIXED:
                logger.warning(
                    "hier-kv: weights changed without a flush of the device cache; nothing is "
                    "saved or loaded until /flush_cache"
                )
            self._device_digest = _MIXED
            return None
        lora_id = getattr(req, "lora_id", None)
        if lora_id is None:
            return store.space(digest)
        lora = self._lora_digest(lora_id, store)
        return None if lora is None else store.space(digest, lora)

    def space_now(self, store: PageStore) -> KeySpace | None:
        """Key space of the model without adapters; None while nothing may be loaded.

        For what is not computed: unlike `space_of` it notes nothing.
        """
        digest = self._digest_now(store)
        if digest is None or self._device_digest not in (None, digest):
            return None
        return store.space(digest)

    def _note_unnamed(self, lora_id: str | None) -> None:
        """The device computes with weights of which no digest is known."""
        if not self._may_retry or self._device_digest not in (None, _UNNAMED):
            self._device_digest = _MIXED
            return
        self._device_digest = _UNNAMED
        if lora_id is not None:  # nobody looked at what the adapter is
            self._lora_on_device[lora_id] = _MIXED

    @property
    def _may_retry(self) -> bool:
        """Whether the live weights have no digest, and stay as they are until another call."""
        changing = self._updating or self._incomplete or self._is_final
        return self._unusable and self._serves_alike and not changing

    def step(self, store: PageStore) -> None:
        """Once a scheduler step, on all ranks at the same point: tries again what failed.

        Where ranks serve different requests they have no such point, and wait for the next change.
        """
        if not self._may_retry:
            return
        self._num_steps += 1
        if self._num_steps % _LOOK_STEPS:
            return
        is_due = b"y" if self._clock() >= self._retry_at_s else b"n"
        if self._exchange(is_due)[0] == b"y":
            self._unusable = False
            if self._try_open(store) is not None:
                logger.info("hier-kv: pages of the live weights are saved and loaded from now on")

    def _digest_now(self, store: PageStore) -> bytes | None:
        digest = self._digest
        if self._serves_alike:
            digest = None if self._updating or self._incomplete else self._try_open(store)
        return digest

    def _try_open(self, store: PageStore) -> bytes | None:
        if self._unusable:
            return None
        began_s = self._clock()
        try:
            digest = self.open(store, waits=False)
        except Exception as error:
            self._note_failed(error, self._clock() - began_s, store)
            return None
        self._retry_s = _FIRST_RETRY_S
        if self._device_digest == _UNNAMED:
            self._device_digest = digest
        return digest

    def _note_failed(self, error: Exception, took_s: float, store: PageStore) -> None:
        """The namespace of the live weights could not be opened, here or on another rank."""
        self._unusable, self._num_steps = True, 0
        store.counters.add("weight_digest_failures")
        if self._retry_s == _FIRST_RETRY_S:
            until = "that works, which is tried again" if self._may_retry else "they change"
            logger.error(
                "hier-kv: the namespace of the live weights could not be opened; nothing is saved "
                "or loaded until %s",
                until,
                exc_info=error,
            )
        self._retry_at_s = self._clock() + max(self._retry_s, _RETRY_TIMES * took_s)
        self._retry_s = min(2 * self._retry_s, _MOST_RETRY_S)

    def open(self, store: PageStore, *, waits: bool = True) -> bytes:
        """Opens the namespace of the live weights, if it is not open, and returns its digest.

        With several ranks all of them open theirs, or none does: each calls it at the same point.

        Args:
            store: of this rank.
            waits: whether the disk opens it before this returns, as a server starts. Otherwise it
                does so soon, and a disk that fails or hangs holds nobody up.

        Raises:
            RuntimeError: another rank failed.
            HierKVConfigError: on every rank, if they keep KV in different ways and must not.
        """
        if self._digest is not None:
            return self._digest
        scales, is_scaled = b"", False

        def look() -> bytes:
            nonlocal scales, is_scaled
            is_scaled = bool(self._scaled_by) and has_scales(self._model)
            if self._ranks_share:
                scales = digest_scales(self._model)
            return digest_model(self._model)

        weights = self.on_all_ranks(look)
        weights_of_all = weights[0] if len(weights) == 1 else namespace_digest({"all": weights})
        parts = {**self._fixed, "weights": weights_of_all}
        if self._ranks_share:
            # KV cache scales may be given rank by rank; bytes mean nothing under another one.
            parts["scales"] = scales
        if is_scaled:
            parts["scaled_by"] = self._scaled_by
        digest = namespace_digest(parts)
        label = {**self._label, "weights": weights_of_all.hex()[:16]}
        found = 0

        def open_own() -> bytes:
            nonlocal found
            if waits:
                found = store.open_namespace(digest, label)
            else:
                store.open_soon(digest, label)
            return digest

        opened = self.on_all_ranks(open_own)
        if self._ranks_share:
            _check_alike(opened, needs_one_name=self._needs_one_name)
        self._digest = digest
        name = digest.hex()[:16]
        if waits:
            logger.info("hier-kv: namespace %s opened, %d pages found on disk", name, found)
        else:
            logger.info("hier-kv: namespace %s opened; the disk opens it next", name)
        return digest

    def on_all_ranks(self, work: Callable[[], bytes]) -> list[bytes]:
        """What each rank's work gave, by rank; raises on all of them when it failed on one.

        Args:
            work: gives at least one byte.

        Raises:
            RuntimeError: another rank failed.
        """
        result, failure = b"", None
        try:
            result = work()
        except Exception as error:
            failure = error
        results = self._exchange(result)
        if failure is not None:
            raise failure
        if not all(results):
            raise RuntimeError(f"rank {results.index(b'')} failed; see its log")
        return results

    def add_rope(self, digest: bytes) -> None:
        """Adds how K is stored, which is known after the start-up checks; before the first `open`.

        A page is decoded by how its layers are stored in *this* process. If a check passed in the
        run that wrote it and failed here, position-free K would be read as the engine's K.

        Args:
            digest: of `rope_digest`, 32 bytes.

        Raises:
            RuntimeError: a namespace is open already.
        """
        if self._digest is not None:
            raise RuntimeError("how K is stored must be known before a namespace is opened")
        self._fixed["rope"] = digest

    # ---- weights ----

    @property
    def is_updating(self) -> bool:
        """Whether a call that changes weights is under way."""
        return self._updating > 0

    def begin_update(self, *, device_is_empty: bool) -> None:
        """The weights are about to change; pending saves must be drained before.

        All KV since the last call belongs to the weights of now. Their digest is known when any
        request asked for its key space since; otherwise what the device holds counts as mixed.

        Args:
            device_is_empty: the device holds no KV and no request runs.
        """
        self._updating += 1
        if device_is_empty:
            self._device_digest = None
        elif self._digest is None or self._device_digest not in (None, self._digest):
            self._device_digest = _MIXED
        else:
            self._device_digest = self._digest

    def end_update(self, *, device_is_empty: bool, incomplete: bool = False) -> None:
        """The weights may have changed; their digest is taken when it is next needed.

        Args:
            device_is_empty: the device holds no KV and no request runs.
            incomplete: the weights may go on changing without a further call (an open session into
                which a peer writes, released memory); nothing is kept until a call ends that.
        """
        self._updating -= 1
        self._incomplete = incomplete
        self._unusable, self._retry_s = self._is_final, _FIRST_RETRY_S
        self._digest = None
        if self._is_final:
            logger.warning(
                "hier-kv: weights may have changed, and with several pipeline stages they are only "
                "looked at when the server starts; nothing is saved or loaded until it is restarted"
            )
        if device_is_empty:
            self._device_digest = None

    def open_at_once(self, store: PageStore) -> None:
        """Opens the namespace of weights that have changed, where no request may do it.

        Behind `end_update`, on all ranks in the same step. Never raises.
        """
        if not (self._serves_alike or self._updating or self._incomplete):
            self._try_open(store)

    def device_was_reset(self) -> None:
        """The device holds no KV any more."""
        self._device_digest = None
        self._lora_on_device.clear()

    # ---- adapters ----

    def adapters_changed(self, store: PageStore) -> None:
        """An adapter was loaded or unloaded; a new one's digest is taken at its next use.

        One that replaced another under its id is compared at once: what runs now computes with it,
        whether or not anything asks for a key space before the first one comes back.

        All ranks call it at the same point. SGLang loads and unloads on each rank by itself, which
        may fail on one of them. A rank enters an exchange of digests only of what it has, and the
        others would wait there for ever; so an adapter that one rank lacks is off on all.
        """
        adapters = self._lora_adapters()
        kept = {
            lora_id: (adapter, digest)
            for lora_id, (adapter, digest) in self._lora_digests.items()
            if digest and adapters.get(lora_id) is adapter
        }
        own = {lora_id: lora_id in kept for lora_id in adapters}
        told = [json.loads(each) for each in self._exchange(json.dumps(own).encode())]
        known = set[str]().union(*told)
        self._lora_lacking = {one for one in known if not all(one in each for each in told)}
        self._lora_digests = {
            lora_id: taken
            for lora_id, taken in kept.items()
            if all(each.get(lora_id) for each in told)
        }
        unloaded = [lora_id for lora_id in self._lora_on_device if lora_id not in known]
        for lora_id in unloaded[:-_MOST_UNLOADED]:
            del self._lora_on_device[lora_id]
        for lora_id in list(self._lora_on_device):
            if lora_id in known:
                self._lora_digest(lora_id, store)

    def _lora_digest(self, lora_id: str, store: PageStore) -> bytes | None:
        """Digest of an adapter, or None while what the device holds of it may be another's."""
        taken_of, digest = self._lora_digests.get(lora_id, (None, b""))
        if taken_of is None:
            adapter = self._lora_adapters().get(lora_id)
            if adapter is not None and lora_id not in self._lora_lacking:
                digest = self._digest_adapter(lora_id, adapter, store)
                self._lora_digests[lora_id] = adapter, digest
        if digest and self._lora_on_device.setdefault(lora_id, digest) == digest:
            return digest
        self._lora_on_device[lora_id] = _MIXED  # until a flush, even if the first one comes back
        return None

    def _digest_adapter(self, lora_id: str, adapter: Any, store: PageStore) -> bytes:
        """Digest of an adapter's weights, 32 bytes; empty where a rank cannot read its own.

        All ranks call it at the same point, as they do `open`: were one of them to keep an
        adapter's KV that another one does not, their trees would differ from then on.
        """
        own = b""
        try:
            own = digest_lora_adapter(adapter)
        except Exception:
            store.counters.add("adapter_digest_failures")
            logger.exception(
                "hier-kv: the weights of adapter %s could not be digested; nothing is saved or "
                "loaded for it until an adapter is loaded or unloaded and the device is flushed",
                lora_id,
            )
        of_all = self._exchange(own)
        if not all(of_all):
            return b""
        return own if len(of_all) == 1 else namespace_digest({"adapter": of_all})


def _check_alike(digests: list[bytes], *, needs_one_name: bool) -> None:
    """Says, or raises, that ranks which share pages have opened different namespaces."""
    if len(set(digests)) == 1:
        return
    if needs_one_name:
        raise HierKVConfigError(
            "with MLA one rank keeps the pages of all, which needs ranks that keep KV in one way, "
            "and start-up proofs or KV cache scales of these differ; start them on devices of one "
            "kind, with one KV cache scale for all ranks."
        )
    logger.warning(
        "hier-kv: the ranks of this server keep KV in different ways, so none of them finds what "
        "another one puts into the remote store; start them on machines of one kind, with one KV "
        "cache scale for all ranks"
    )
