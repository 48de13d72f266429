"""Records that only holders of a key can write: formats, forgeries, keys."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from sglang_ext.cli import main
from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.protection.aead import Mode, Protection
from sglang_ext.tiers.protection.keys import read_key_file, write_key_file
from sglang_ext.tiers.records.checks import RecordKey, seal
from sglang_ext.tiers.records.record import (
    HEADER_BYTES,
    ByteArray,
    RecordError,
    RecordMeta,
    VerifyResult,
    parse_header,
    write_meta,
)
from sglang_ext.tiers.records.seals import CHECKSUMS, RecordSeals
from sglang_ext.tiers.remote.staged import START_BYTES, read_stages, stage, unstage
from tests.tiers import protection_golden
from tests.tiers.disk import golden_segments as plain_golden
from tests.tiers.protection_cases import KEY, OTHER_KEY, seals

OK, UNAUTHENTIC = VerifyResult.OK, VerifyResult.UNAUTHENTIC
NAMESPACE, OTHER_NAMESPACE = b"n" * 32, b"o" * 32
PAYLOAD_BYTES = 5000
MODES = ("tag", "encrypt")
META = RecordMeta(b"k" * 32, NAMESPACE, b"", 640, 64, "pre")
RECORD_KEY = RecordKey(META.page_hash, META.namespace, META.lora)


def make_plain(meta: RecordMeta = META, payload_bytes: int = PAYLOAD_BYTES) -> ByteArray:
    slot = np.full(8192, 0xAB, np.uint8)
    write_meta(slot, meta, payload_bytes)
    slot[HEADER_BYTES : HEADER_BYTES + payload_bytes] = np.arange(payload_bytes) % 253
    return slot


def sealed(by: RecordSeals, slot: ByteArray, namespace: bytes = NAMESPACE) -> ByteArray:
    (found,) = by.seal([slot], namespace)
    assert not isinstance(found, RecordError)
    if found.fill is None:
        return np.concatenate(found.pieces)
    out = np.full(slot.size, 0xCD, np.uint8)
    found.fill(out)
    return out


def opened(by: RecordSeals, record: ByteArray, key: RecordKey = RECORD_KEY) -> VerifyResult:
    (result,) = by.open([record.copy()], [key])
    return result


@pytest.mark.parametrize("mode", MODES)
def test_golden_records_are_reproduced_and_read(mode: str) -> None:
    for name, data in protection_golden.golden(mode).items():
        assert (plain_golden.GOLDEN / name).read_bytes() == data
    slots = np.frombuffer((plain_golden.GOLDEN / f"record-v2-{mode}.bin").read_bytes(), np.uint8)
    for index, slot in enumerate(slots.reshape(-1, plain_golden.SLOT_BYTES).copy()):
        meta, want = plain_golden.METAS[index], plain_golden.record(index)
        key = RecordKey(meta.page_hash, meta.namespace, meta.lora)
        assert seals(mode).open([slot], [key]) == [OK]
        want[16:24] = 0  # the checksum, which a protected record has none of
        end = HEADER_BYTES + plain_golden.PAYLOAD_BYTES
        assert slot[:end].tobytes() == want[:end].tobytes()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("payload_bytes", [0, 1, 3583, 3584, 3585, 8192 - HEADER_BYTES])
def test_a_record_comes_back_and_the_slot_stays_as_it_is(mode: str, payload_bytes: int) -> None:
    slot = make_plain(payload_bytes=payload_bytes)
    before = slot.copy()
    record = sealed(seals(mode), slot)
    assert (slot == before).all()
    assert record.size == slot.size
    assert seals(mode).open([record], [RECORD_KEY]) == [OK]
    end = HEADER_BYTES + payload_bytes
    assert (record[:end] == before[:end]).all()


@pytest.mark.parametrize("mode", MODES)
def test_every_flipped_bit_is_a_miss(mode: str) -> None:
    by = seals(mode)
    record = sealed(by, make_plain(payload_bytes=700))
    for at in range(HEADER_BYTES + 700):
        for bit in (1, 0x80):
            record[at] ^= bit
            assert opened(by, record) is not OK, at
            record[at] ^= bit
    assert opened(by, record) is OK


@pytest.mark.parametrize("mode", MODES)
def test_a_forged_record_with_a_right_checksum_is_a_miss(mode: str) -> None:
    forged = make_plain()
    seal(forged)
    assert opened(CHECKSUMS, forged) is OK
    assert opened(seals(mode), forged) is VerifyResult.UNPROTECTED


@pytest.mark.parametrize("mode", MODES)
def test_other_keys_namespaces_modes_and_no_key_are_misses(mode: str) -> None:
    record = sealed(seals(mode), make_plain())
    assert opened(seals(mode, OTHER_KEY), record) is VerifyResult.UNKNOWN_KEY
    assert opened(CHECKSUMS, record) is VerifyResult.PROTECTED
    elsewhere = RECORD_KEY._replace(namespace=OTHER_NAMESPACE)
    assert opened(seals(mode), record, elsewhere) is UNAUTHENTIC
    other_page = RECORD_KEY._replace(page_hash=b"x" * 32)
    assert opened(seals(mode), record, other_page) is VerifyResult.FOREIGN
    assert opened(seals(mode), record, RECORD_KEY._replace(lora=b"l" * 32)) is VerifyResult.FOREIGN
    record[432] = 3 - record[432]  # it says that it is of the other mode
    assert opened(seals(mode), record) is UNAUTHENTIC


@pytest.mark.parametrize("mode", MODES)
def test_header_and_payload_of_two_records_do_not_go_together(mode: str) -> None:
    by = seals(mode)
    one, two = sealed(by, make_plain()), sealed(by, make_plain())
    mixed = one.copy()
    mixed[HEADER_BYTES:] = two[HEADER_BYTES:]
    assert opened(by, one) is opened(by, two) is OK
    # Tagged bytes that are the same are the same; a tag of another record is not.
    assert opened(by, mixed) is (OK if mode == "tag" else UNAUTHENTIC)
    one[480:496] = two[480:496]
    assert opened(by, one) is UNAUTHENTIC


@pytest.mark.parametrize("mode", MODES)
def test_the_first_key_writes_and_all_read(mode: str) -> None:
    old = sealed(seals(mode, KEY), make_plain())
    rotated = seals(mode, OTHER_KEY, KEY)
    new = sealed(rotated, make_plain())
    assert opened(rotated, old) is opened(rotated, new) is OK
    assert opened(seals(mode, KEY), new) is VerifyResult.UNKNOWN_KEY
    assert opened(seals(mode, KEY, OTHER_KEY), new) is OK
    assert opened(seals(mode, OTHER_KEY), old) is VerifyResult.UNKNOWN_KEY


def test_what_was_tagged_is_read_where_new_records_are_encrypted() -> None:
    assert opened(seals("encrypt"), sealed(seals("tag"), make_plain())) is OK


def test_nothing_plain_is_left_in_an_encrypted_record() -> None:
    slot = make_plain()
    record = sealed(seals("encrypt"), slot).tobytes()
    assert META.page_hash not in record
    assert NAMESPACE not in record
    assert slot[HEADER_BYTES : HEADER_BYTES + 16].tobytes() not in record
    assert b"\xab" * 16 not in record  # what else the slot holds


def test_no_nonce_is_used_twice_by_threads_and_forked_processes() -> None:
    protection = Protection([KEY], Mode.TAG)
    found: list[tuple[bytes, int]] = []

    def draw() -> None:
        found.extend((o.salt, o.counter) for o in (protection.begin(1) for _ in range(2000)))

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 8000
    read_end, write_end = os.pipe()
    if os.fork() == 0:
        os.write(write_end, protection.begin(1).salt)
        os._exit(0)
    os.wait()
    assert os.read(read_end, 16) != protection.begin(1).salt
    os.close(read_end)
    os.close(write_end)


def test_a_forked_process_of_the_same_number_has_another_salt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a container of its own, where both may be process 1."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    protection = Protection([KEY], Mode.TAG)
    protection.begin(1)
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write_end, protection.begin(1).salt)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read_end, 16) != protection.begin(1).salt
    os.close(read_end)
    os.close(write_end)


# ---- stages ----


def staged_plain() -> ByteArray:
    meta = RecordMeta(META.page_hash, NAMESPACE, b"", 640, 64, "pre", "hier", 3, 1, b"p" * 32)
    record = make_plain(meta, 3000)
    return stage(record, 1, (700, 1500, 3512))


def sent(by: RecordSeals, record: ByteArray) -> ByteArray:
    return np.concatenate(by.seal_to_send(record))


@pytest.mark.parametrize("mode", MODES)
def test_leading_stages_are_proved_and_read_without_the_rest(mode: str) -> None:
    plain, by = staged_plain(), seals(mode)
    record = sent(by, plain)
    assert record.size == plain.size
    want = read_stages(plain, plain.size)
    start, opener = seals(mode).open_start(record[:START_BYTES], NAMESPACE)
    found = read_stages(start, plain.size)
    assert (found.meta, found.first_level, found.ends) == (want.meta, 1, want.ends)
    assert opener is not None
    data = record[START_BYTES : found.ends[1]].copy()
    first = found.ends[0] - START_BYTES
    assert opener(0, data[:first])
    assert opener(1, data[first:])
    coded = unstage(found, 1, data)
    assert coded[HEADER_BYTES:].tobytes() == plain[START_BYTES : found.ends[1]].tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_a_staged_record_is_read_whole_too(mode: str) -> None:
    plain = staged_plain()
    record = sent(seals(mode), plain)
    key = RecordKey(META.page_hash, NAMESPACE, b"")
    assert seals(mode).open([record], [key]) == [OK]
    seal(plain)
    seal(record)
    assert (record == plain).all()


@pytest.mark.parametrize("mode", MODES)
def test_stages_that_are_damaged_swapped_or_of_another_record_are_refused(mode: str) -> None:
    by = seals(mode)
    record, other = sent(by, staged_plain()), sent(by, staged_plain())
    key = RecordKey(META.page_hash, NAMESPACE, b"")
    for at in [*range(START_BYTES), *range(START_BYTES, record.size, 97)]:
        record[at] ^= 1
        if at < START_BYTES:
            with pytest.raises(RecordError):
                by.open_start(record[:START_BYTES], NAMESPACE)
        assert by.open([record.copy()], [key])[0] is not OK
        record[at] ^= 1
    start, opener = by.open_start(record, NAMESPACE)
    ends = read_stages(start, record.size).ends
    assert opener is not None
    assert not opener(1, record[START_BYTES : ends[0]].copy())
    is_same = mode == "tag"  # the bytes are the same, and so is what they say
    assert opener(0, other[START_BYTES : ends[0]].copy()) is False or is_same
    mixed = record.copy()
    mixed[HEADER_BYTES:START_BYTES] = other[HEADER_BYTES:START_BYTES]  # its table
    with pytest.raises(RecordError):
        by.open_start(mixed, NAMESPACE)


@pytest.mark.parametrize("mode", MODES)
def test_a_start_that_is_cut_or_not_staged_is_refused(mode: str) -> None:
    by = seals(mode)
    record = sent(by, staged_plain())
    for start in (record[:100], record[:HEADER_BYTES], record[: START_BYTES - 1]):
        with pytest.raises(RecordError):
            by.open_start(start, NAMESPACE)
    whole = sent(by, make_plain())
    with pytest.raises(RecordError):
        by.open_start(whole[:START_BYTES], NAMESPACE)
    assert parse_header(by.plain_header(whole, NAMESPACE), 8192)[0] == META


# ---- key files ----


def test_keygen_makes_a_file_that_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "key"
    assert main(["keygen", str(path)]) == 0
    (key,) = read_key_file(path)
    assert len(key) == 32
    assert path.stat().st_mode & 0o777 == 0o600
    assert main(["keygen", str(path)]) == 1  # never over a key
    assert read_key_file(path) == (key,)
    out = capsys.readouterr()
    assert key.hex() not in out.out + out.err


def test_several_keys_in_hex_and_base64_with_remarks(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(f"# new\n{KEY.hex()}\n\n  /u7c7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7f7=  \n")
    path.chmod(0o600)
    first, second = read_key_file(path)
    assert first == KEY
    assert len(second) == 32


@pytest.mark.parametrize(
    ("text", "mode", "expected"),
    [
        ("", 0o600, "from 1 to 16 keys"),
        ("# nothing\n", 0o600, "from 1 to 16 keys"),
        ("abcd\n", 0o600, "line 1"),
        (f"{'00' * 31}\n", 0o600, "line 1"),
        (f"{'00' * 32}\nnot a key!\n", 0o600, "line 2"),
        (f"{'00' * 32}\n{'00' * 32}\n", 0o600, "twice"),
        (f"{'00' * 32}\n", 0o640, "chmod"),
        (f"{'00' * 32}\n", 0o604, "chmod"),
    ],
)
def test_a_key_file_that_cannot_be_used_is_refused_in_one_sentence(
    tmp_path: Path, text: str, mode: int, expected: str
) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(TierConfigError, match=expected) as error:
        read_key_file(path)
    assert "\n" not in str(error.value)
    assert "00000000" not in str(error.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path / "absent", tmp_path, tmp_path / "pipe"):
        with pytest.raises(TierConfigError):
            read_key_file(path)
    with pytest.raises(FileExistsError):
        write_key_file(tmp_path / "pipe")
