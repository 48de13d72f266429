"""`cachegen-paper`: the codec that CacheGen's paper describes (section 5.2 and C.2), as a baseline.

- Tokens in groups of ten. The first of a group is its anchor, quantised to 8 bits by the largest
  size in its row (vector-wise); the others are deltas to the *decoded* anchor.
- Deltas are quantised in steps of bin * deviation: bins 0.5, 1 and 1.5 over the three thirds of the
  layers, times the level's factor, times the standard deviation of the plane's deltas.
- An arithmetic coder (`kernels/ac`) with a stream for each (plane, channel), under tables measured
  offline on other text (`tables.py`): one for anchors, one for deltas.

Side information in the stream: an anchor's size in the KV dtype, for each group and plane; the
length of each stream, 16 bits or 32 where a stream needs it. Where the paper is silent: quotients
beyond +-126 are escapes, kept aside as (place u32, quotient i32); a row with NaN or infinity is
kept as it is (as an anchor it counts as zeros); an all-zero anchor has size 0. A last group may be
short, and a chunk of one token is one anchor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_ext.codec.base import CodecError, KVDtype, LearnedKind, PlaneArray
from sglang_ext.codec.cachegen.stream import (
    CachegenCodec,
    check_places,
    finite_plane,
    pack_rows,
    read_array,
    unpack_rows,
)
from sglang_ext.codec.cachegen.tables import (
    ANCHOR_MAX,
    DELTA_RADIUS,
    ESCAPE,
    FACTORS,
    GROUP_TOKENS,
    PaperTables,
    anchor_values,
    deltas_of,
    max_file_bytes,
    measure_tables,
    quantise_anchors,
    quantise_deltas,
    symbols_of,
)
from sglang_ext.codec.float_bits import from_float32, to_float32
from sglang_ext.kernels import ac

_ESCAPED = np.dtype([("place", "<u4"), ("quotient", "<i4")])


class CachegenPaperCodec(CachegenCodec):
    """CacheGen as published; see the module.

    Args:
        dtype: the KV dtype.
        profile: `PaperTables`, or the path of a file with them.
        engine: `numba` or `naive`.

    Raises:
        CodecError: no tables.
    """

    codec_id = "cachegen-paper"
    level_names = ("x1.0", "x0.5", "x0.25")
    magic = b"HKCP"
    num_sections = 5  # sizes of anchors, lengths, escapes, rows kept, streams

    @classmethod
    def learned_kind(cls) -> LearnedKind:
        """`PaperTables`."""
        return LearnedKind(
            ".hkct",
            PaperTables.load,
            PaperTables.from_bytes,
            max_file_bytes,
            lambda tables: int(tables.digest).to_bytes(8, "little"),
            len(FACTORS),
            lambda chunks, dtype, _head_dim, _source: measure_tables(chunks, dtype),
        )

    def __init__(self, dtype: KVDtype, *, profile: Any = None, engine: str = "numba") -> None:
        if isinstance(profile, (str, Path)):
            profile = PaperTables.load(Path(profile))
        if not isinstance(profile, PaperTables):
            raise CodecError(
                "cachegen-paper needs tables of the model (measure_tables), or a file with them"
            )
        super().__init__(dtype, engine=engine, planes_per_layer=profile.planes_per_layer)
        self._tables = profile
        self._digest = profile.digest
        self._cdfs = [profile.cdfs(level) for level in range(self.num_levels)]

    @property
    def table_bytes(self) -> int:
        """See `Codec.table_bytes`."""
        return sum(cdfs.nbytes for cdfs in self._cdfs)

    def tables_id(self) -> int:
        """The digest of the tables."""
        return self._digest

    def check_shape(self, axes: tuple[int, int, int]) -> None:
        """As the base class, and the chunk is of the tables' model."""
        known = self._tables.anchor_freqs.shape[:2]
        if (axes[0], axes[2]) != known:
            raise CodecError(f"tables are for {known} planes and channels, the chunk is {axes}")
        if axes[0] * axes[1] * axes[2] >= 1 << 32:
            raise CodecError(f"places of escapes have 32 bits, the chunk is {axes}")

    def encode_sections(self, planes: PlaneArray, level: int) -> list[bytes]:
        """Quantises and codes."""
        quotients, sizes, bad = self.quantise(planes, level)
        anchors = np.arange(planes.shape[1]) % GROUP_TOKENS == 0
        symbols = symbols_of(quotients)
        symbols[:, :, anchors] = quotients[:, :, anchors] + ANCHOR_MAX
        beyond = (symbols == ESCAPE) & ~anchors
        escapes = np.empty(int(beyond.sum()), _ESCAPED)
        escapes["place"], escapes["quotient"] = np.flatnonzero(beyond), quotients[beyond]
        coded = ac.encode(
            symbols.reshape(-1, symbols.shape[2]),
            self._cdfs[level],
            _table_numbers(planes),
            _rules(planes),
            engine=self.engine,
        )
        width = "<u2" if int(coded.lengths.max()) < 1 << 16 else "<u4"
        return [
            sizes.tobytes(),
            coded.lengths.astype(width).tobytes(),
            escapes.tobytes(),
            pack_rows(planes, bad),
            coded.data.tobytes(),
        ]

    def decode_sections(self, sections: list[memoryview], out: PlaneArray, level: int) -> None:
        """Decodes the streams and adds deltas to anchors."""
        num_planes, num_tokens, num_channels = out.shape
        num_streams = num_planes * num_channels
        num_groups = -(-num_tokens // GROUP_TOKENS)
        sizes = read_array(sections[0], self.dtype.storage, (num_planes, num_groups))
        width = "<u2" if len(sections[1]) == 2 * num_streams else "<u4"
        lengths = read_array(sections[1], width, (num_streams,)).astype(np.uint32)
        symbols = np.empty((num_streams, num_tokens), np.uint8)
        try:
            ac.decode(
                ac.Coded(lengths, np.frombuffer(sections[4], np.uint8)),
                self._cdfs[level],
                _table_numbers(out),
                symbols,
                _rules(out),
                engine=self.engine,
            )
        except ac.ACError as error:
            raise CodecError(str(error)) from error
        shape = (num_planes, num_channels, num_tokens)
        quotients = _quotients(symbols.reshape(shape), sections[2])
        self.dequantise(quotients, sizes, level, out)
        unpack_rows(sections[3], out)

    def quantise(
        self, planes: PlaneArray, level: int
    ) -> tuple[NDArray[np.int32], PlaneArray, NDArray[np.bool_]]:
        """Quotients i32 [S, C, T], sizes of anchors as bits [S, G], rows [S, T] not finite."""
        num_planes, num_tokens, num_channels = planes.shape
        quotients = np.empty((num_planes, num_channels, num_tokens), np.int32)
        sizes = np.empty((num_planes, -(-num_tokens // GROUP_TOKENS)), self.dtype.storage)
        bad = np.empty((num_planes, num_tokens), np.bool_)
        for plane, step in enumerate(self._tables.steps(level).tolist()):
            values, bad[plane] = finite_plane(planes[plane], self.dtype)
            anchors, largest = quantise_anchors(values[::GROUP_TOKENS])
            sizes[plane] = from_float32(largest, self.dtype.name)
            deltas = deltas_of(values, anchor_values(anchors, largest))
            deltas[bad[plane]] = 0
            rows = quantise_deltas(deltas, step)
            rows[::GROUP_TOKENS] = anchors
            quotients[plane] = rows.T
        return quotients, sizes, bad

    def dequantise(
        self, quotients: NDArray[np.int32], sizes: PlaneArray, level: int, out: PlaneArray
    ) -> None:
        """The values that quotients i32 [S, C, T] and anchors' sizes stand for, into `out`.

        Raises:
            CodecError: a size that is negative or not finite.
        """
        for plane, step in enumerate(self._tables.steps(level)):
            largest = to_float32(sizes[plane], self.dtype.name)
            if not np.all(np.isfinite(largest) & (largest >= 0)):
                raise CodecError("an anchor's size is negative or not finite")
            rows = np.ascontiguousarray(quotients[plane].T)
            anchors = anchor_values(rows[::GROUP_TOKENS], largest)
            with np.errstate(over="ignore"):
                values = rows.astype(np.float32) * step
                values[::GROUP_TOKENS] = 0
                values += np.repeat(anchors, GROUP_TOKENS, axis=0)[: len(values)]
            out[plane] = from_float32(values, self.dtype.name)


def _quotients(symbols: NDArray[np.uint8], section: memoryview) -> NDArray[np.int32]:
    """Quotients of decoded symbols u8 [S, C, T], escapes put in."""
    if len(section) % _ESCAPED.itemsize:
        raise CodecError(f"{len(section)} bytes are no whole escapes")
    escapes = np.frombuffer(section, _ESCAPED)
    anchors = np.arange(symbols.shape[2]) % GROUP_TOKENS == 0
    beyond = (symbols == ESCAPE) & ~anchors
    places = escapes["place"].astype(np.int64)
    check_places(places, symbols.size)
    if not np.array_equal(places, np.flatnonzero(beyond)):
        raise CodecError("escapes do not lie where the streams say")
    if np.any(symbols[:, :, anchors] > 2 * ANCHOR_MAX) or np.any(symbols[:, :, ~anchors] > ESCAPE):
        raise CodecError("a symbol lies beyond its alphabet")
    quotients = symbols.astype(np.int32)
    quotients -= np.where(anchors, ANCHOR_MAX, DELTA_RADIUS).astype(np.int32)
    quotients.reshape(-1)[places] = escapes["quotient"]
    return quotients


def _rules(planes: PlaneArray) -> NDArray[np.uint8]:
    """Table 0 for anchors, 1 for deltas."""
    return np.asarray(np.arange(planes.shape[1]) % GROUP_TOKENS != 0, np.uint8)


def _table_numbers(planes: PlaneArray) -> NDArray[np.int32]:
    num_streams = planes.shape[0] * planes.shape[2]
    return np.arange(2 * num_streams, dtype=np.int32).reshape(num_streams, 2)
