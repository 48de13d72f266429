"""The coded remote tier of a page store: uploads on one side, streams on the other."""

from __future__ import annotations

from collections.abc import Callable

from sglang_ext.coded_remote.lookup import Finder
from sglang_ext.coded_remote.publish import Publisher
from sglang_ext.coded_remote.streams import RemoteStreams
from sglang_ext.tiers.records.page_rules import PageRules
from sglang_ext.tiers.remote.base import Outcome, level_name
from sglang_ext.tiers.remote.remote_store import RemoteStore
from sglang_ext.tiers.store.books.books import Books
from sglang_ext.tiers.store.decoded_pages import DecodedPages
from sglang_ext.tiers.store.remote.coded_remote import Lookup, OpenCoded, RemoteCodec
from sglang_ext.tiers.store.remote.coded_uploads import CodedUploads
from sglang_ext.tiers.store.remote.profiles import RemoteProfiles
from sglang_ext.tiers.store.types import Hashes, KeySpace


class CodedPages:
    """See `CodedRemote`."""

    def __init__(
        self,
        uploads: CodedUploads,
        finder: Finder,
        streams: RemoteStreams,
        codec: RemoteCodec,
    ) -> None:
        self.level = level_name(codec.codec_id, codec.level)
        self._uploads = uploads
        self._finder = finder
        self._streams = streams
        self._codec = codec

    def upload(self, space: KeySpace, hashes: Hashes) -> tuple[Hashes, list[Outcome]]:
        """See `CodedRemote.upload`."""
        return self._uploads.upload(space, hashes)

    def sizes(self, space: KeySpace, hashes: Hashes, max_quality: int) -> list[int]:
        """See `CodedRemote.sizes`."""
        return [page.sizes[-1] for page in self._finder.ask(space, hashes, max_quality)]

    def first(self, space: KeySpace, hashes: Hashes, max_quality: int) -> int | None:
        """See `CodedRemote.first`."""
        return self._finder.first(space, hashes, max_quality)

    def blame(self, space: KeySpace, page_hash: bytes) -> None:
        """See `CodedRemote.blame`."""
        self._finder.blame(space, page_hash)

    def fetch(self, lookup: Lookup, done: Callable[[], None]) -> None:
        """See `CodedRemote.fetch`."""
        self._streams.add(lookup, done)

    def close(self) -> None:
        """See `CodedRemote.close`."""
        self._streams.close()
        self._codec.close()


def coded_pages(
    codec: RemoteCodec,
    prefill_s: Callable[[int, int], float | None],
    slo_s: float | None = None,
) -> OpenCoded:
    """Returns what connects a codec to a page store.

    Args:
        codec: codes and decodes pages.
        prefill_s: seconds to compute tokens behind others; None while it is not known.
        slo_s: time to the first token that fetches aim at; None for as soon as possible.
    """

    def open_coded(
        books: Books, remote: RemoteStore, decoded: DecodedPages, rules: PageRules
    ) -> CodedPages:
        profiles = RemoteProfiles(remote, codec)
        table = books.table
        finder = Finder(remote, codec, profiles, table.counters, table.arena.slot_bytes, rules)
        publisher = Publisher(books, remote, codec, decoded, rules)
        streams = RemoteStreams(books, remote, finder, publisher, prefill_s, slo_s)
        uploads = CodedUploads(table, books.loads, remote, codec, profiles, decoded)
        return CodedPages(uploads, finder, streams, codec)

    return open_coded
