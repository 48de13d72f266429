"""AES-256-GCM under keys that are derived for one process, namespace and purpose.

A nonce must never be used twice under a key. So every process that writes draws 16 random bytes,
its salt, which enter the derivation, and counts: its keys are its own, and the counter is the
nonce. Salt and counter lie beside what they protect. Two processes draw the same salt with a chance
of 2^-64 after 2^32 of them; the counter has 64 bits.
"""

from __future__ import annotations

import enum
import itertools
import os
import struct
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sglang_ext.tiers.records.record import ByteArray

TAG_BYTES = 16
ORIGIN_BYTES = 40
NOTHING: ByteArray = np.zeros(0, np.uint8)

_ORIGIN = struct.Struct("<BB6s8s16sQ")
_NONCE = struct.Struct(">IQ")
_SALT_BYTES = 16
_INFO = b"hier-kv 1 "  # part of every derivation; a change makes all that is stored unreadable
_MAX_DERIVED = 256
_MAX_PIECE_BYTES = (1 << 31) - 1


class Mode(enum.IntEnum):
    """What is done to bytes. Stored; never renumber."""

    TAG = 1  # they are as they were, and a tag says whose they are
    ENCRYPT = 2


class Origin(NamedTuple):
    """Who protected something, and with what; 40 bytes that lie beside it.

    Attributes:
        mode: what was done to the bytes.
        kind: a number that tells the caller what was protected.
        key_id: which key of the deployment, 8 bytes.
        salt: of the process, 16 bytes.
        counter: number of the origin among those of the process.
    """

    mode: Mode
    kind: int
    key_id: bytes
    salt: bytes
    counter: int

    def pack(self) -> bytes:
        """As it is stored."""
        return _ORIGIN.pack(self.mode, self.kind, bytes(6), self.key_id, self.salt, self.counter)

    @classmethod
    def unpack(cls, data: bytes) -> Origin | None:
        """What 40 bytes say; None where they are none of this release's."""
        mode, kind, zeros, key_id, salt, counter = _ORIGIN.unpack(data)
        if mode not in (Mode.TAG, Mode.ENCRYPT) or zeros != bytes(6):
            return None
        return cls(Mode(mode), kind, key_id, salt, counter)


class SealKey:
    """One derived key. Thread-safe; large pieces are worked on with the GIL free."""

    def __init__(self, mode: Mode, key: bytes) -> None:
        self._mode = mode
        self._aead = AESGCM(key)
        self._algorithm = algorithms.AES(key)

    def seal(
        self, origin: Origin, part: int, known: bytes, data: ByteArray, out: ByteArray
    ) -> bytes:
        """Protects one of the parts of what has this origin; each part once.

        Args:
            origin: where the nonce is from.
            part: number of the part.
            known: is covered too and stays as it is; of a length that its reader knows.
            data: u8 [n], contiguous.
            out: takes the ciphertext, u8 [n], may be `data`; not touched where nothing is
                encrypted.

        Returns:
            The tag, 16 bytes.
        """
        nonce = _NONCE.pack(part, origin.counter)
        if self._mode is Mode.TAG:
            return self._aead.encrypt(nonce, b"", _joined(known, data))
        encryptor = Cipher(self._algorithm, modes.GCM(nonce)).encryptor()
        encryptor.authenticate_additional_data(known)
        for at in range(0, data.size, _MAX_PIECE_BYTES):
            end = at + _MAX_PIECE_BYTES
            encryptor.update_into(data[at:end].data, out[at:end].data)
        encryptor.finalize()
        return encryptor.tag

    def open(self, origin: Origin, part: int, known: bytes, data: ByteArray, tag: bytes) -> bool:
        """Whether this is what `seal` made; then `data` is what it was before, in place.

        Where it is not, `data` means nothing any more.
        """
        nonce = _NONCE.pack(part, origin.counter)
        try:
            if self._mode is Mode.TAG:
                self._aead.decrypt(nonce, tag, _joined(known, data))
                return True
            decryptor = Cipher(self._algorithm, modes.GCM(nonce, tag)).decryptor()
            decryptor.authenticate_additional_data(known)
            for at in range(0, data.size, _MAX_PIECE_BYTES):
                view = data[at : at + _MAX_PIECE_BYTES].data
                decryptor.update_into(view, view)
            decryptor.finalize()
        except InvalidTag:
            return False
        return True


class Protection:
    """The keys of a deployment. Thread-safe.

    Args:
        keys: of at least 32 bytes each; the first writes, all read.
        mode: what is written.

    Attributes:
        name_keys: for names that say nothing, one of each key.
        file_keys: for what proves small files beside the records, one of each key.
    """

    def __init__(self, keys: Sequence[bytes], mode: Mode) -> None:
        self.mode = mode
        self._roots = {_derive(key, b"", b"key id", 8): key for key in keys}
        self._key_id = next(iter(self._roots))
        self.name_keys = tuple(_derive(key, b"", b"names") for key in keys)
        self.file_keys = tuple(_derive(key, b"", b"files") for key in keys)
        self._lock = threading.Lock()
        self._derived: OrderedDict[tuple[bytes, ...], SealKey] = OrderedDict()  # guarded by _lock
        self._salt = b""  # guarded by _lock, as is the next
        self._counter = itertools.count()
        _with_salts.add(self)

    def begin(self, kind: int) -> Origin:
        """An origin that was never used."""
        with self._lock:
            if not self._salt:  # the first time, and in a child that was forked
                self._salt, self._counter = os.urandom(_SALT_BYTES), itertools.count()
            return Origin(self.mode, kind, self._key_id, self._salt, next(self._counter))

    def forget_salt(self) -> None:
        """Begins with a new salt; for a child that was just forked, which has one thread.

        Process ids say nothing here: two processes of two namespaces may have the same.
        """
        self._lock = threading.Lock()  # another thread of the parent may have held it
        self._salt = b""

    def key_of(self, origin: Origin, purpose: bytes, namespace: bytes) -> SealKey | None:
        """The derived key of an origin; None when the deployment's key is not here."""
        root = self._roots.get(origin.key_id)
        if root is None:
            return None
        which = (origin.key_id, bytes([origin.mode]), origin.salt, purpose, namespace)
        with self._lock:
            found = self._derived.get(which)
            if found is not None:
                self._derived.move_to_end(which)
                return found
        info = b"%s|%c|%s" % (purpose, origin.mode, namespace)
        made = SealKey(origin.mode, _derive(root, origin.salt, info))
        with self._lock:
            self._derived[which] = made
            while len(self._derived) > _MAX_DERIVED:
                self._derived.popitem(last=False)
        return made


_with_salts: weakref.WeakSet[Protection] = weakref.WeakSet()


def _forget_salts() -> None:
    for protection in list(_with_salts):
        protection.forget_salt()


os.register_at_fork(after_in_child=_forget_salts)


def _derive(key: bytes, salt: bytes, info: bytes, length: int = 32) -> bytes:
    return HKDF(hashes.SHA256(), length, salt, _INFO + info).derive(key)


def _joined(known: bytes, data: ByteArray) -> bytes | memoryview:
    """Both as one input of the tag; without a copy where the data is large."""
    if not known:
        return data.data
    return known + data.tobytes()
