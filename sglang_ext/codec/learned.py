"""What codecs learn about a model, kept in files under its digest.

A profile (`hier`) or tables (`cachegen-paper`) name themselves by a digest, records carry that
digest, and a folder keeps those that were used here, so that what was coded under an older one can
still be decoded. What other servers learned comes from a store, is only ever used to decode the
records that name it, and stays in memory. All of it is bounded, and the least recent leave first.
"""

from __future__ import annotations

import hmac
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_ext.codec.base import CodecError, LearnedKind, LearnedShape
from sglang_ext.codec.memo import Memo
from sglang_ext.codec.registry import kind_of
from sglang_ext.tiers.access import make_folder, read_own, tighten, write_private

logger = logging.getLogger(__name__)

MAX_DIGEST_BYTES = 64
# Bounds in memory and in a folder. What left memory is read again if it lies in the folder.
MAX_KNOWN, MAX_KNOWN_BYTES = 32, 1 << 30
MAX_FILES, MAX_FILE_BYTES = 64, 4 << 30
_MAX_POINTER_BYTES = 4 * MAX_DIGEST_BYTES
# The codecs of several tiers share a folder, and may learn the same at the same time.
_writing = threading.Lock()


class LearnedFolder:
    """Files of one folder by digest, and what came from elsewhere. Thread-safe.

    Args:
        folder: made when something is stored; None keeps everything in memory. Whoever can write to
            it is believed no more than a store.
        shape: of the model that everything here is of.
        keys: of the deployment, to prove that what `latest` finds was named by one of its servers;
            the first writes, all read. Without any, files of the folder are believed.
    """

    def __init__(
        self, folder: Path | None, shape: LearnedShape, keys: Sequence[bytes] = ()
    ) -> None:
        self._folder = folder
        self._shape = shape
        self._keys = tuple(keys)
        self._lock = threading.Lock()
        # By codec and digest; None: not to be had. Guarded by _lock.
        self._known: Memo[Any] = Memo(MAX_KNOWN, MAX_KNOWN_BYTES)
        self._own: dict[str, tuple[bytes, Any]] = {}  # learned last, by codec; guarded by _lock

    def find(self, codec_id: str, digest: bytes) -> Any | None:
        """What has this digest, or None. A missing or damaged file is reported once."""
        key = (codec_id, digest)
        with self._lock:
            own = self._own.get(codec_id)
            if own is not None and own[0] == digest:
                return own[1]
            if key not in self._known:
                found = self._read(codec_id, digest)
                self._known.put(key, found, found.nbytes if found is not None else 0)
            return self._known.get(key)

    def has(self, codec_id: str, digest: bytes) -> bool:
        """Whether `find` would look at something, in memory or in a file."""
        with self._lock:
            own = self._own.get(codec_id)
            if own is not None and own[0] == digest:
                return True
            if self._known.get((codec_id, digest)) is not None:
                return True
        kind = kind_of(codec_id)
        if kind is None or self._folder is None or not 0 < len(digest) <= MAX_DIGEST_BYTES:
            return False
        return (self._folder / f"{digest.hex()}{kind.suffix}").exists()

    def latest(self, codec_id: str, owner: str) -> Any | None:
        """What `store` kept last for this owner, in any process; None when there is nothing."""
        if self._folder is None or not tighten(self._folder):
            return None
        try:
            data = read_own(self._pointer(codec_id, owner), _MAX_POINTER_BYTES)
            name, _, proof = data.decode("ascii").partition(" ")
            digest = bytes.fromhex(name)
        except (OSError, ValueError):
            return None
        proofs = [_proof(key, codec_id, owner, digest) for key in self._keys]
        if proofs and not any(hmac.compare_digest(proof, each) for each in proofs):
            return None
        return self.find(codec_id, digest)

    def remember(self, codec_id: str, learned: Any) -> None:
        """Keeps what another server learned, in memory and as long as there is room."""
        kind = kind_of(codec_id)
        if kind is not None:
            with self._lock:
                self._known.put((codec_id, kind.digest(learned)), learned, learned.nbytes)

    def store(self, codec_id: str, learned: Any, owner: str = "") -> Any:
        """Keeps what was learned here and writes its file, atomically; returns it.

        Args:
            codec_id: whose knowledge it is.
            learned: the knowledge.
            owner: a name, usable in a file name, for which `latest` finds it again; "" for none.
        """
        kind = kind_of(codec_id)
        if kind is None:
            raise ValueError(f"{codec_id} learns nothing")
        digest = kind.digest(learned)
        with self._lock:
            self._own[codec_id] = digest, learned
        if self._folder is None:
            return learned
        make_folder(self._folder)
        if not tighten(self._folder):  # somebody else's, or a link: of no use to keep files in
            return learned
        path = self._folder / f"{digest.hex()}{kind.suffix}"
        with _writing:
            if not path.exists():
                _publish(path, learned.save)
            if owner:
                text = digest.hex()
                if self._keys:
                    text += f" {_proof(self._keys[0], codec_id, owner, digest)}"
                _publish(self._pointer(codec_id, owner), lambda temp: _write_text(temp, text))
            self._trim(kind, keep=path)
        return learned

    def _trim(self, kind: LearnedKind, keep: Path) -> None:
        """Removes the files that were used longest ago; a page that needs one is a miss."""
        try:
            files = [(path.stat(), path) for path in Path(self._folder or "").iterdir()]
        except OSError:  # another server is at it
            return
        files = [(status, path) for status, path in files if path.suffix == kind.suffix]
        files.sort(key=lambda item: (item[1] == keep, item[0].st_mtime), reverse=True)
        num_bytes = 0
        for at, (status, path) in enumerate(files):
            num_bytes += status.st_size
            if path != keep and (at >= MAX_FILES or num_bytes > MAX_FILE_BYTES):
                path.unlink(missing_ok=True)

    def _pointer(self, codec_id: str, owner: str) -> Path:
        return Path(self._folder or "") / f"{owner}.{codec_id}"

    def _read(self, codec_id: str, digest: bytes) -> Any | None:
        kind = kind_of(codec_id)
        if kind is None or self._folder is None or not 0 < len(digest) <= MAX_DIGEST_BYTES:
            return None
        found = self._read_file(kind, self._folder / f"{digest.hex()}{kind.suffix}")
        return found if found is not None and kind.digest(found) == digest else None

    def _read_file(self, kind: LearnedKind, path: Path) -> Any | None:
        most = kind.max_file_bytes(self._shape)
        try:
            data = read_own(path, most + 1)
            if len(data) > most:
                raise CodecError(f"longer than the {most} bytes of any file for this model")
            found = kind.read(data, self._shape)
            with suppress(OSError):
                os.utime(path)  # the least recent files leave first
            return found
        except (CodecError, OSError) as error:
            logger.warning("hier-kv: %s cannot be used: %s", path, error)
            return None


def _proof(key: bytes, codec_id: str, owner: str, digest: bytes) -> str:
    """What only a holder of the key can write behind a digest."""
    return hmac.digest(key, f"{codec_id}|{owner}|{digest.hex()}".encode(), "sha256").hex()


def _publish(path: Path, write: Callable[[Path], Any]) -> None:
    temp = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    write(temp)
    temp.replace(path)


def _write_text(path: Path, text: str) -> None:
    write_private(path, text.encode("ascii"))
